"""Run Slurm's programs, and query many jobs at once. Silence is an error, never a state.

The first query is `squeue --json` for this user; without JSON support, plain `squeue`. `sacct` is queried for
jobs that the controller has forgotten; on a cluster without a database it knows none.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from strop.errors import StoreError
from strop.launch.contract import SchedulerStatus
from strop.launch.environment import clean_inherited
from strop.launch.slurm.states import (
    ACCOUNTING_FIELDS,
    PLAIN_FORMAT,
    ReportedJob,
    add_restarts,
    read_accounting,
    read_json,
    read_plain,
    read_restarts,
    read_state,
    tasks_by_number,
)

# Left out in addition to `clean_inherited`: sbatch would take SBATCH_* as options, overriding the script's;
# the others are devices of a job that surrounds the submission.
_LEFT_OUT = (
    "SBATCH_",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""The address of the cluster, and the credentials for it."""
_ANSWER_LIMIT_S = 60.0
"""A client gives up on a silent controller after 9 to 18 s (Slurm 22.05)."""
_SILENCE = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Could not establish a configuration source",
    "Zero Bytes were transmitted or received",
    "Protocol authentication error",
    "Slurm backup controller in standby mode",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientReply:
    """The output of a Slurm program, and its exit code."""

    code: int
    output: str
    errors: str

    @property
    def message(self) -> str:
        """Slurm's message, from standard error if it has any."""
        return self.errors.strip() or self.output.strip() or "no word"


def clean_environment(environ: Mapping[str, str], *, secrets: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment for a submission, without variables of another job and without secrets."""
    cleaned = clean_inherited(environ, secrets=secrets)
    kept = {name: value for name, value in cleaned.items() if not name.startswith(_LEFT_OUT)}
    return kept | {name: environ[name] for name in _KEPT if name in environ}


def ask_client(
    argv: Sequence[str], *, environ: Mapping[str, str] | None = None, stdin: str = ""
) -> ClientReply:
    """Run a Slurm program to its end.

    Raises: StoreError if it is missing, or the controller does not answer.
    """
    environ = clean_environment(os.environ) if environ is None else environ
    try:
        done = subprocess.run(
            list(argv),
            env=dict(environ),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_LIMIT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise StoreError(
            f"{argv[0]} is not on PATH",
            allowed="a login node of the cluster, where Slurm's programs are installed",
            next_step="log in there, or load the module that brings them",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise _silent(argv[0], f"no answer in {_ANSWER_LIMIT_S:g} s") from error
    reply = ClientReply(code=done.returncode, output=done.stdout, errors=done.stderr)
    if reply.code and any(words in reply.errors for words in _SILENCE):
        raise _silent(argv[0], reply.errors.strip())
    return reply


def _silent(program: str, words: str) -> StoreError:
    return StoreError(
        f"the cluster does not answer {program}: {words}",
        allowed="a controller that answers; jobs go on without it",
        next_step="ask again later, and nothing is lost in between",
    )


Client = Callable[[Sequence[str]], ClientReply]


def list_jobs(*, client: Client = ask_client, now: float | None = None) -> list[ReportedJob]:
    """Return all jobs of this user that the controller remembers, including finished ones.

    Raises: StoreError if it does not answer in a known form.
    """
    now = time.time() if now is None else now
    # Up to 22.05 --json prints all jobs, whatever the other options; later versions observe --me.
    reply = client(("squeue", "--json", "--me", "--states=all"))
    jobs = read_json(reply.output, now=now) if reply.code == 0 else None
    if jobs is not None:
        return jobs
    reply = client(("squeue", "-h", "-r", "--me", "--states=all", "-o", PLAIN_FORMAT))
    if reply.code:
        raise StoreError(
            f"squeue failed with {reply.code}: {reply.message}",
            allowed="an answer as JSON or as fields, as Slurm 20.11 to 24.11 give it",
            next_step="run squeue by hand, and read what it says",
        )
    jobs = read_plain(reply.output)
    if not jobs:
        return []
    details = client(("scontrol", "show", "job", "-o"))
    return add_restarts(jobs, read_restarts(details.output)) if details.code == 0 else jobs


def answer_for(
    base_ids: Iterable[str], *, client: Client = ask_client, now: float | None = None
) -> Mapping[tuple[str, int], SchedulerStatus]:
    """Return the status of these jobs by base id and array task; forgotten jobs are missing.

    One query covers all jobs; a second one, of `sacct`, those that the first does not know.
    Raises: StoreError if the controller does not answer.
    """
    ids = set(base_ids)
    jobs = [job for job in list_jobs(client=client, now=now) if job.base_id in ids]
    answers = _answers_of(jobs)
    forgotten = sorted(ids - {job.base_id for job in jobs}, key=int)
    if forgotten:
        fields = ",".join(ACCOUNTING_FIELDS)
        try:
            reply = client(("sacct", "-X", "-n", "-P", "-j", ",".join(forgotten), "-o", fields))
        except StoreError:
            # The controller answered; without the database these jobs stay unknown.
            return answers
        remembered = _answers_of(read_accounting(reply.output) if reply.code == 0 else [])
        # A job that runs only according to the database was lost: its state is unknown.
        answers |= {key: answer for key, answer in remembered.items() if answer.state.is_terminal}
    return answers


def _answers_of(jobs: Sequence[ReportedJob]) -> dict[tuple[str, int], SchedulerStatus]:
    """Return one status per base id and task; for a heterogeneous job that of its first component."""
    answers: dict[tuple[str, int], SchedulerStatus] = {}
    nodes: dict[tuple[str, int], list[str]] = {}
    for key, job in sorted(tasks_by_number(list(jobs)), key=lambda pair: -pair[1].component):
        nodes.setdefault(key, []).insert(0, job.state.nodes)
        state, reason = read_state(job.state)
        answers[key] = SchedulerStatus(
            state=state,
            raw=job.state.raw,
            reason=reason,
            num_restarts=job.state.num_restarts,
            nodes=",".join(filter(None, nodes[key])),
            since=job.since,
        )
    return answers
