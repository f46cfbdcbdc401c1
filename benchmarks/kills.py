"""kill -9, again and again, of everything that one training consists of; then its curve is compared.

One run is trained undisturbed. The same run is then submitted as a job of this machine, with its engine in a
process of its own and a mirror in an S3 server, and its processes are killed at random: trainer, engine,
uploader, the node's agent, the job's supervisor, the submitting command, the connection to the store. What
does not live again by itself is submitted again. Victims and moments follow from a seed; the machine decides
what they hit.

Goals: every recorded step equals the undisturbed run's, bit for bit; the last weights too; no process, lease
or temporary directory is left. A small random model, so that 50 lives take minutes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Measured
from benchmarks.store import run_server
from strop.io.atomic import read_manifest
from strop.launch.job_dir import job_path_of, read_plan, read_ref
from strop.launch.launcher import Launcher
from strop.launch.local.backend import LocalBackend
from strop.launch.local.supervisor_files import read_identity
from strop.record import RunDir
from tests.fixtures.drill import compare_metrics

BUCKET = "kills"
MARKER = "STROP_KILLS"
"""In the environment of every process of the disturbed run: what is left in the end is found by this."""
VICTIMS = {
    "trainer": 8,
    "engine": 5,
    "uploader": 4,
    "agent": 5,
    "supervisor": 4,
    "submitter": 3,
    "store": 4,
}
"""How often each is chosen, relative to the others."""
LIFE_S = (0.2, 6.0)
"""From the start of a life to its kill: from its first imports until well into its steps."""
WHOLE_LIMIT_S = 3600.0
_RUN = """
name = "kills"
seed = 5
[model]
uri = "{model}"
dtype = "float32"
[task]
name = "reverse-text"
partial_marks = "any-order"
num_train = 24
num_held_out = 4
max_words = 1
max_reply_tokens = 12
[optimizer]
lr = 1e-3
[train]
steps = {steps}
prompts_per_step = 3
group_size = 4
checkpoint_every = 5
accept = "weights: a random model; audit: a task for machinery"
[eval]
every = 50
num_examples = 2
num_samples = 2
[placement]
kind = "process"
threads = 1
[job]
max_requeue = 1000
preflight = "quick"
[tripwires]
on_alarm = "warn"
"""


@dataclass(slots=True)
class _Stage:
    """Where everything is."""

    folder: Path
    variables: dict[str, str]
    stream: random.Random
    server_port: int
    door_port: int
    door: subprocess.Popen[bytes]
    killed: Counter[str] = field(default_factory=Counter)
    resumed: int = 0

    @property
    def home(self) -> Path:
        """The job's home; the folder of runs has one."""
        return next(path.parent.parent for path in (self.folder / "runs").glob("kills-*/job/plan.json"))


def measure_kills(*, is_quick: bool, num_kills: int = 50, steps: int = 2500) -> Measured:
    """Kill 50 times, or once for a try, and compare."""
    if is_quick:
        num_kills, steps = 1, 60
    with tempfile.TemporaryDirectory() as name, stage_for(Path(name)) as stage:
        begun_at = time.monotonic()
        write_inputs(stage.folder, steps)
        train_undisturbed(stage)
        undisturbed_s = time.monotonic() - begun_at
        disturb(stage, num_kills)
        finish(stage)
        whole_s = time.monotonic() - begun_at - undisturbed_s
        return judge(stage, num_kills, {"undisturbed_s": undisturbed_s, "disturbed_s": whole_s})


@contextmanager
def stage_for(folder: Path) -> Iterator[_Stage]:
    """Yield a place with a store behind a door, and clear it up."""
    with run_server(folder / "server.log") as address:
        server_port = int(address.rpartition(":")[2])
        with socket.create_server(("127.0.0.1", 0)) as chosen:
            door_port = chosen.getsockname()[1]
        variables = {
            **os.environ,
            MARKER: folder.name,
            "STROP_RUNTIME_DIR": str(folder / "runtime"),
            "STROP_CACHE": str(folder / "cache"),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "TMPDIR": str(folder / "tmp"),
            "HF_HUB_OFFLINE": "1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{door_port}",
        }
        (folder / "tmp").mkdir()
        _make_bucket(address)
        stage = _Stage(
            folder=folder,
            variables=variables,
            stream=random.Random(0),
            server_port=server_port,
            door_port=door_port,
            door=_open_door(door_port, server_port),
        )
        try:
            yield stage
        finally:
            _end_all(stage)


def write_inputs(folder: Path, steps: int) -> None:
    """Write the model and the run file."""
    from tests.fixtures.tiny_model import tiny_model

    project = folder / "project"
    project.mkdir()
    text = _RUN.format(model=tiny_model(folder / "model"), steps=steps)
    (project / "run.toml").write_text(text)


def train_undisturbed(stage: _Stage) -> None:
    """Train the run once, without a job and without a mirror."""
    # With a folder for temporary files of its own: what torch keeps there is nobody's leftover.
    (stage.folder / "other-tmp").mkdir()
    variables = stage.variables | {"TMPDIR": str(stage.folder / "other-tmp")}
    command = [sys.executable, "-m", "strop.cli", "train", "run.toml"]
    command.append(f"output.dir={stage.folder / 'undisturbed'}")
    with (stage.folder / "train.log").open("ab") as log:
        subprocess.run(
            command, cwd=stage.folder / "project", env=variables, stdout=log, stderr=log, check=True
        )


def disturb(stage: _Stage, num_kills: int) -> None:
    """Submit, and kill until enough has been killed or the run has ended."""
    deadline = time.monotonic() + WHOLE_LIMIT_S
    _submit(stage)
    while sum(stage.killed.values()) < num_kills and time.monotonic() < deadline:
        if _is_finished(stage):
            return
        time.sleep(stage.stream.uniform(*LIFE_S))
        victim = stage.stream.choices(list(VICTIMS), weights=list(VICTIMS.values()))[0]
        if _kill(stage, victim):
            stage.killed[victim] += 1
        _revive(stage)


def finish(stage: _Stage) -> None:
    """Let the run end undisturbed from here on."""
    deadline = time.monotonic() + WHOLE_LIMIT_S
    while not _is_finished(stage) and time.monotonic() < deadline:
        _revive(stage)
        time.sleep(0.5)
    settled = time.monotonic() + 60.0
    while _living(stage) and time.monotonic() < settled:
        time.sleep(0.2)


def judge(stage: _Stage, num_kills: int, times: Mapping[str, float]) -> Measured:
    """Compare the two runs, and look for what is left."""
    mine, theirs = (_read_metrics(path) for path in (stage.home, stage.folder / "undisturbed"))
    difference = compare_metrics(mine, theirs)
    has_all = mine.keys() == theirs.keys()
    digests = [_read_digest(path) for path in (stage.home, stage.folder / "undisturbed")]
    left = _living(stage) + [str(path) for path in _leftover_files(stage)]
    num_equal = sum(compare_metrics({step: mine[step]}, theirs) is None for step in mine)
    figures = [
        Figure(
            name="kills",
            unit="of one run",
            value=sum(stage.killed.values()),
            measured=tuple(stage.killed.values()),
            at_least=num_kills,
        ),
        Figure(
            name="steps equal to the undisturbed run",
            unit="share",
            value=num_equal / len(theirs) if has_all else 0.0,
            measured=(num_equal, len(theirs)),
            at_least=1.0,
        ),
        Figure(
            name="last checkpoint equal, byte by byte",
            unit="1 is yes",
            value=float(digests[0] == digests[1]),
            measured=(float(digests[0] == digests[1]),),
            at_least=1.0,
        ),
        Figure(
            name="processes, leases and folders left",
            unit="count",
            value=len(left),
            measured=(len(left),),
            at_most=0,
        ),
    ]
    details: dict[str, Any] = {
        "killed": dict(stage.killed),
        "submitted_again": stage.resumed,
        "attempts": len(list((stage.home / "attempts").glob("*/agent-0.json"))),
        "first_difference": difference,
        "left": left,
        **times,
    }
    return Measured(figures=figures, details=details)


def _submit(stage: _Stage, *words: str, is_killed: bool = False) -> None:
    """Submit, as a person would; `is_killed`: the command is killed on its way, and given again."""
    command = [
        sys.executable,
        "-m",
        "strop.cli",
        "submit",
        "run.toml",
        f"output.root={stage.folder / 'runs'}",
    ]
    command += [f"store.uri=s3://{BUCKET}/store", "store.mirror_every_s=1.0", *words]
    log = (stage.folder / "submit.log").open("ab")
    with log:
        if is_killed:
            process = subprocess.Popen(
                command, cwd=stage.folder / "project", env=stage.variables, stderr=log, stdout=log
            )
            time.sleep(stage.stream.uniform(0.1, 1.5))
            process.kill()
            process.wait()
        subprocess.run(
            command, cwd=stage.folder / "project", env=stage.variables, stderr=log, stdout=log, check=False
        )


def _kill(stage: _Stage, victim: str) -> bool:
    """Kill one process; return whether it was there."""
    if victim == "store":
        stage.door.kill()
        stage.door.wait()
        time.sleep(stage.stream.uniform(0.0, 3.0))
        stage.door = _open_door(stage.door_port, stage.server_port)
        return True
    if victim == "submitter":
        if not _kill(stage, "supervisor"):
            return False
        _wait_for_end(stage)
        stage.resumed += 1
        _submit(stage, "--resume", str(stage.home), is_killed=True)
        return True
    pid = _find(stage, victim)
    if pid is None:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _find(stage: _Stage, victim: str) -> int | None:
    """Return the process that plays a part now, None if none does."""
    supervisor = read_identity(job_path_of(stage.home))
    if supervisor is None or not supervisor.process.is_alive():
        return None
    if victim == "supervisor":
        return supervisor.process.pid
    words = {
        "agent": "strop.launch.node",
        "trainer": "strop.cli train",
        "engine": "strop.engine",
        "uploader": "strop.record.mirror",
    }[victim]
    for pid in _marked(stage):
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            # Not the stub that a child is for a moment before it becomes its program.
            if words in line and "-I -S -c" not in line:
                return pid
    return None


def _revive(stage: _Stage) -> None:
    """Submit the job again where it has ended without success."""
    supervisor = read_identity(job_path_of(stage.home))
    if supervisor is not None and supervisor.process.is_alive():
        return
    if not _is_finished(stage):
        _wait_for_end(stage)
        stage.resumed += 1
        _submit(stage, "--resume", str(stage.home))


def _wait_for_end(stage: _Stage) -> None:
    """Wait until a killed job is known to have ended."""
    ref = read_ref(job_path_of(stage.home))
    deadline = time.monotonic() + 30.0
    launcher = Launcher(LocalBackend(), environ=stage.variables)
    while time.monotonic() < deadline and not all(one.state.is_terminal for one in launcher.status([ref])):
        time.sleep(0.1)


def _is_finished(stage: _Stage) -> bool:
    path = Path(read_plan(job_path_of(stage.home)).trials[0].path)
    if not (path / "run.json").is_file():
        return False
    supervisor = read_identity(job_path_of(stage.home))
    return RunDir.open(path).is_finished and (supervisor is None or not supervisor.process.is_alive())


def _marked(stage: _Stage) -> list[int]:
    """Return the processes that carry the mark, without this one's own children that it needs."""
    mark = f"{MARKER}={stage.folder.name}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _living(stage: _Stage) -> list[str]:
    found = []
    for pid in _marked(stage):
        with suppress(OSError):
            found.append(
                Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
            )
    return found


def _leftover_files(stage: _Stage) -> list[Path]:
    return [
        *(stage.folder / "runtime" / "leases").glob("*.json"),
        *(stage.folder / "tmp").iterdir(),
        *stage.home.glob("checkpoints/*.partial-*"),
        *stage.home.glob("job/secrets.json"),
    ]


def _read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {int(line["step"]): line for line in lines}


def _read_digest(path: Path) -> str:
    latest = RunDir.open(path).latest_checkpoint()
    assert latest is not None
    return read_manifest(latest[1]).digest


def _make_bucket(address: str) -> None:
    import boto3

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=address, **keys).create_bucket(Bucket=BUCKET)


def _open_door(port: int, server_port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.door", str(port), str(server_port)]
    door = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    assert door.stdout is not None
    door.stdout.readline()
    door.stdout.close()
    return door


def _end_all(stage: _Stage) -> None:
    """End what this benchmark started."""
    stage.door.kill()
    stage.door.wait()
    for pid in _marked(stage):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(stage.folder / "runtime", ignore_errors=True)
