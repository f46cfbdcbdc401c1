"""One start of a training container: from the files in /opt/ml to its exit code.

It reads the platform's files, restores the newest intact state, runs this node's agent, and uploads state and
record. `node` installs a handler for SIGTERM, then starts it. The hosts of a job are nodes of one Ray
cluster, whose head is the first host, and nothing else connects them: the exit code of the first host is the
job's, and the others end with its Ray.

Covered: several hosts, restarts by the platform, stops at any moment, secrets by ARN, jobs without network.
Not covered: elastic hosts; a host that comes back within one start.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import print_exception
from typing import TYPE_CHECKING, Any

from strop.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    CheckRefused,
    StoreError,
    StropError,
)
from strop.io.atomic import MANIFEST_NAME, write_bytes_atomically
from strop.launch.attempts import write_verdict
from strop.launch.evaluating import EVALUATION
from strop.launch.node.agent import run_node
from strop.launch.node.environment import RAY_PORT, NodeTask
from strop.launch.sagemaker import places
from strop.launch.sagemaker.checkpoint_sync import (
    CheckpointSync,
    LogEcho,
    RecordUploader,
    Send,
    copy_into,
    count_start,
    restore_newest,
    send_to_store,
)
from strop.launch.sagemaker.evaluation_files import restore_evaluation
from strop.launch.sagemaker.opt_ml import (
    Hosts,
    OptMl,
    describe_failure,
    find_job,
    make_job_folder,
    read_sent_plan,
    write_failure,
)
from strop.launch.sagemaker.places import STOP_WINDOW_S
from strop.launch.secrets import remove_secrets
from strop.store.policy import URI_VARIABLE

if TYPE_CHECKING:
    from strop.launch.sagemaker.node import StopFlag

RESERVE_S = 20.0
"""The part of the stop window after the roles' end: for the last state, the record, the verdict."""
_BLOCK_END = "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
_EFA_DEVICES = Path("/dev/infiniband")
_BLOCK_RESERVE_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EntrySettings:
    """The settings of a start; the emulator changes them, the platform uses the defaults."""

    root: Path = Path(places.OPT_ML)
    scratch: Path = Path(places.SCRATCH)
    ray_port: int = RAY_PORT
    stop_window_s: float = STOP_WINDOW_S


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """The facts of one start of this host."""

    tree: OptMl
    hosts: Hosts
    plan: Mapping[str, Any]
    job: Mapping[str, Any]
    home: Path
    job_name: str
    number: int

    @property
    def attempt(self) -> str:
        """The name of the attempt."""
        return f"{self.job_name}-{self.number}"

    @property
    def attempt_path(self) -> Path:
        """The folder of the attempt."""
        return self.home / "attempts" / self.attempt


def run_entry(settings: EntrySettings, stop: StopFlag) -> int:
    """Run one container start; return the exit code of the container."""
    tree = OptMl(root=settings.root)
    with _FailureFile(tree, stop) as failure:
        hosts = tree.read_hosts()
        failure.host = hosts.current
        plan = read_sent_plan(tree)
        job = find_job(plan, tree.read_parameters())
        name = os.environ.get("TRAINING_JOB_NAME") or job["name"]
        # The path is the same on every host, because roles exchange paths, each on its own disk.
        home = settings.scratch / name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        number = int(plan.get("num_past", 0)) + count_start(tree.checkpoint_path, hosts.current, name)
        failure.exit_code = _run_start(
            _Start(tree=tree, hosts=hosts, plan=plan, job=job, home=home, job_name=name, number=number),
            settings,
            stop,
        )
    return failure.exit_code


class _FailureFile:
    """Writes an error of the entry itself to the failure file, the only place where users see it."""

    def __init__(self, tree: OptMl, stop: StopFlag) -> None:
        self.host = "this host"
        self.exit_code = EXIT_FAILED
        self._tree = tree
        self._stop = stop

    def __enter__(self) -> _FailureFile:
        """Return self, which holds host and exit code."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Write the error to the failure file, and swallow it."""
        if error is None or not isinstance(error, Exception):
            return False
        cause = str(error)
        if isinstance(error, StropError):
            # Stopped before anything began: the state is the last saved one.
            self.exit_code = EXIT_INTERRUPTED if self._stop.is_asked else error.exit_code
        else:
            print_exception(error)
            cause = f"the entry failed: {type(error).__name__}: {error}"
        text = describe_failure(self.exit_code, host=self.host, cause=cause)
        sys.stderr.write(f"{text}\n")
        write_failure(self._tree.failure_path, text)
        return True


def _run_start(start: _Start, settings: EntrySettings, stop: StopFlag) -> int:
    job_path, hidden = make_job_folder(start.tree, dict(start.plan), start.home)
    _restore_state(start)
    # With a store the run's own mirror sends the run's files, so that each object has one writer.
    has_run = start.hosts.is_head and not _reaches_store(start)
    evaluation_path = None
    if start.plan["command"] == EVALUATION:
        restore_evaluation(start.tree.checkpoint_path / EVALUATION, start.home)
        evaluation_path = start.tree.checkpoint_path / EVALUATION
    uploader = RecordUploader(
        _choose_sender(start), start.home, start.attempt, has_run=has_run, evaluation_path=evaluation_path
    )
    started_at = time.time()
    try:
        code, signal_name = _run_agent(start, settings, stop, job_path, uploader, hidden)
        if code != EXIT_DONE:
            cause = str(_read_end(start).get("cause", ""))
            if not cause and code == EXIT_INTERRUPTED:
                cause = "stopped, and the newest state is kept"
            text = describe_failure(code, host=start.hosts.current, cause=cause, secrets=hidden)
            write_failure(start.tree.failure_path, text)
        if start.hosts.is_head:
            write_verdict(
                start.attempt_path,
                number=start.number,
                exit_code=code,
                signal=signal_name,
                started_at=started_at,
                ended_at=time.time(),
                nodes=start.hosts.names,
            )
    finally:
        uploader.stop()
        remove_secrets(job_path)
    return code


def _run_agent(
    start: _Start,
    settings: EntrySettings,
    stop: StopFlag,
    job_path: Path,
    uploader: RecordUploader,
    hidden: tuple[str, ...],
) -> tuple[int, str]:
    """Run the agent and the threads around it; return its code and the signal that ended it."""
    if stop.is_asked:
        return EXIT_INTERRUPTED, "SIGTERM"
    _set_network(start.hosts)
    task = NodeTask(
        job_path=job_path,
        trial_path=start.home,
        attempt=start.attempt,
        number=start.number,
        node=start.hosts.node,
        num_nodes=len(start.hosts.names),
        part="cpu" if start.hosts.current in start.hosts.cpu else "main",
        grace_s=settings.stop_window_s,
        term_grace_s=max(1.0, settings.stop_window_s - RESERVE_S * settings.stop_window_s / STOP_WINDOW_S),
        address=start.hosts.head,
        ray_port=settings.ray_port,
        has_shared_disk=False,
    )
    # Next to the checkpoint directory, so that files can be renamed into it.
    staging = start.tree.checkpoint_path.parent / f".strop-{start.hosts.current}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    host, place = start.hosts.current, f"{start.job['state_uri']}/{start.hosts.current}"
    is_safe = _arrival_check(place) if _reaches_store(start) else lambda _name: True
    sync = CheckpointSync(start.home, start.tree.checkpoint_path, host, staging, is_safe=is_safe)
    echo = LogEcho(task.log_path, hide=hidden)
    for thread in (sync, uploader, echo):
        thread.start()
    _arm_block_end()
    released = threading.Event()
    threading.Thread(target=_repeat_early_stop, args=(stop, released), daemon=True).start()
    try:
        code = run_node(task)
    finally:
        released.set()
        step = sync.stop()
        echo.stop()
    sys.stderr.write(f"newest state that is kept: {'none' if step is None else f'step {step}'}\n")
    return code, str(_read_end(start).get("signal", ""))


def _repeat_early_stop(stop: StopFlag, released: threading.Event) -> None:
    """Repeat an early stop once the agent has installed its own handlers."""
    while stop.is_installed and not released.wait(0.1):
        pass
    if stop.is_asked and not released.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _restore_state(start: _Start) -> None:
    """Restore the state on the first host, and record the choice and its reason."""
    start.attempt_path.mkdir(parents=True)
    if not start.hosts.is_head:
        return
    is_only = len(start.plan["trials"]) == 1
    restored = restore_newest(
        start.tree.checkpoint_path,
        start.home,
        start.job_name,
        reaches_store=_reaches_store(start),
        # In a sweep `follows` names the first trial's job.
        parent=str(start.plan.get("follows", "")) if is_only else "",
    )
    sys.stderr.write(f"state: {restored.reason}\n")
    content = json.dumps(
        {"step": restored.step, "reason": restored.reason, "platform": dict(start.hosts.others)}
    )
    write_bytes_atomically(start.attempt_path / "resume.json", content.encode())


def _reaches_store(start: _Start) -> bool:
    """Whether this job can access S3 itself."""
    return os.environ.get(URI_VARIABLE, "").startswith("s3://")


def _arrival_check(place: str) -> Callable[[str], bool]:
    """Return a function that checks whether the platform has copied a state to S3."""
    from strop.store.s3_objects import S3Objects

    objects = S3Objects()

    def has_arrived(name: str) -> bool:
        try:
            return objects.find(f"{place}/{name}/{MANIFEST_NAME}") is not None
        except StoreError:
            # Unknown: an extra older state costs space, a missing one costs the run.
            return False

    return has_arrived


def _choose_sender(start: _Start) -> Send:
    """Return the function that sends files of the record."""
    if not _reaches_store(start):
        return partial(copy_into, start.tree.checkpoint_path / "record")
    from strop.store.s3_objects import S3Objects

    store = os.environ[URI_VARIABLE].rstrip("/")
    return partial(send_to_store, S3Objects(), f"{store}/checkpoints/{start.job_name}")


def _set_network(hosts: Hosts, device_path: Path = _EFA_DEVICES) -> None:
    """Set the platform's network interface, and EFA if this host has its devices.

    Raises: CheckRefused if the interface does not exist.
    """
    if len(hosts.names) == 1:
        return
    if hosts.interface is not None:
        interfaces = sorted(path.name for path in Path("/sys/class/net").iterdir())
        if hosts.interface not in interfaces:
            names = ", ".join(interfaces)
            raise CheckRefused(f"network interface {hosts.interface} is not on {hosts.current}: {names}")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", hosts.interface)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", hosts.interface)
    if any(device_path.glob("uverbs*")):
        # Not by a list of instance types: a missing entry once meant a silent fall-back to sockets.
        os.environ.setdefault("FI_PROVIDER", "efa")
        os.environ.setdefault("FI_EFA_USE_DEVICE_RDMA", "1")


def _arm_block_end() -> None:
    """Arm a timer that stops the job before its capacity block ends."""
    text = os.environ.get(_BLOCK_END, "")
    if not text.isdigit():
        return
    left_s = int(text) - time.time() - _BLOCK_RESERVE_S
    timer = threading.Timer(max(0.0, left_s), os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()


def _read_end(start: _Start) -> Mapping[str, Any]:
    """Return the agent's end record; {} without one."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads((start.attempt_path / f"end-{start.hosts.node}.json").read_bytes())
        if isinstance(content, dict):
            return content
    return {}
