"""Asking Slurm about many jobs at once. No answer is an error, and never a state.

First `squeue --json` of this user; where that is unknown, or is no JSON, the same by plain fields. What the
controller has forgotten is asked of `sacct`, which says nothing on a cluster without a database.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from strop.errors import StoreError, explain_refusal
from strop.launch.contract import Answer
from strop.launch.slurm.clients import Said, ask_client
from strop.launch.slurm.outputs import (
    ACCOUNTING_FIELDS,
    PLAIN_FORMAT,
    SeenJob,
    add_restarts,
    read_accounting,
    read_json,
    read_plain,
    read_restarts,
    tasks_by_number,
)
from strop.launch.slurm.states import read_state

Client = Callable[[Sequence[str]], Said]


def list_jobs(*, client: Client = ask_client, now: float | None = None) -> list[SeenJob]:
    """Return all jobs of this user that the controller remembers, finished ones too.

    Raises: StoreError if it does not answer, or in a form that nobody can read.
    """
    now = time.time() if now is None else now
    # Up to 22.05 --json prints every job there is, whatever else is asked; later versions keep to --me.
    said = client(("squeue", "--json", "--me", "--states=all"))
    jobs = read_json(said.output, now=now) if said.code == 0 else None
    return _list_plainly(client) if jobs is None else jobs


def answer_for(
    base_ids: Iterable[str], *, client: Client = ask_client, now: float | None = None
) -> Mapping[tuple[str, int], Answer]:
    """Return what Slurm says of these jobs, by base id and array task; what it forgot is missing.

    One query however many jobs; a second, of `sacct`, if there are some that the first does not know.
    Raises: StoreError if the controller does not answer.
    """
    wanted = set(base_ids)
    jobs = [job for job in list_jobs(client=client, now=now) if job.base_id in wanted]
    answers = _answers_of(jobs)
    forgotten = sorted(wanted - {job.base_id for job in jobs}, key=int)
    if forgotten:
        remembered = _answers_of(_ask_accounting(forgotten, client))
        # A job that only the database thinks alive was lost without a trace: that is no answer.
        answers |= {key: answer for key, answer in remembered.items() if answer.state.is_terminal}
    return answers


def _list_plainly(client: Client) -> list[SeenJob]:
    said = client(("squeue", "-h", "-r", "--me", "--states=all", "-o", PLAIN_FORMAT))
    if said.code:
        raise StoreError(
            explain_refusal(
                f"squeue failed with {said.code}: {said.errors.strip() or said.output.strip()}",
                allowed="an answer as JSON or as fields, as Slurm 20.11 to 24.11 give it",
                next_step="run squeue by hand, and read what it says",
            )
        )
    jobs = read_plain(said.output)
    if not jobs:
        return []
    told = client(("scontrol", "show", "job", "-o"))
    return add_restarts(jobs, read_restarts(told.output)) if told.code == 0 else jobs


def _ask_accounting(base_ids: Sequence[str], client: Client) -> list[SeenJob]:
    argv = ("sacct", "-X", "-n", "-P", "-j", ",".join(base_ids), "-o", ",".join(ACCOUNTING_FIELDS))
    try:
        said = client(argv)
    except StoreError:
        # The controller has answered; a database that is not there or silent only means that nobody knows.
        return []
    return read_accounting(said.output) if said.code == 0 else []


def _answers_of(jobs: Sequence[SeenJob]) -> dict[tuple[str, int], Answer]:
    """Return one answer per base id and task; of a heterogeneous job the first component speaks for all."""
    answers: dict[tuple[str, int], Answer] = {}
    nodes: dict[tuple[str, int], list[str]] = {}
    for key, job in sorted(tasks_by_number(list(jobs)), key=lambda pair: -pair[1].component):
        nodes.setdefault(key, []).insert(0, job.state.nodes)
        state, reason = read_state(job.state)
        answers[key] = Answer(
            state=state,
            raw=job.state.raw,
            reason=reason,
            num_restarts=job.state.num_restarts,
            nodes=",".join(filter(None, nodes[key])),
            since=job.since,
        )
    return answers
