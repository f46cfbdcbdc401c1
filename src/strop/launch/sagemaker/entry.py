"""One start of a training container: from /opt/ml to one exit code for all hosts.

Reads the platform's files, brings the newest whole state back, waits for the other hosts, runs this node's
agent, and keeps state and record on their way out. `node` starts this, after it has a handler for SIGTERM.

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
from pathlib import Path
from traceback import print_exception
from types import TracebackType
from typing import Any

from strop.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    CheckRefused,
    StoreError,
    StropError,
    explain_refusal,
)
from strop.io.atomic import MANIFEST_NAME, write_bytes_atomically
from strop.launch.attempts import write_verdict
from strop.launch.node.agent import run_node
from strop.launch.node.task import NodeTask
from strop.launch.sagemaker import places
from strop.launch.sagemaker.bring_state import bring_state
from strop.launch.sagemaker.control import END_LIMIT_S, PORT, Control, find_address, join_hosts
from strop.launch.sagemaker.failure import describe_failure, write_failure
from strop.launch.sagemaker.job_files import (
    SecretReader,
    fetch_secret,
    find_job,
    make_job_folder,
    read_sent_plan,
)
from strop.launch.sagemaker.link_proof import read_key
from strop.launch.sagemaker.node import StopFlag
from strop.launch.sagemaker.opt_ml import Hosts, OptMl
from strop.launch.sagemaker.places import STOP_WINDOW_S
from strop.launch.sagemaker.record_sender import DirectorySink, LogEcho, RecordSender, Sink, StoreSink
from strop.launch.sagemaker.state_keeper import StateKeeper, count_start
from strop.launch.secrets import remove_secrets
from strop.record.meeting import ROLES_FOLDER, meeting_path
from strop.store.policy import URI_VARIABLE

JOIN_LIMIT_S = 900.0
RESERVE_S = 20.0
"""Of the window, for what comes after the roles: the last state, the record, the verdict."""
_BLOCK_END = "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
_EFA_DEVICES = Path("/dev/infiniband")
_BLOCK_RESERVE_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EntrySettings:
    """What the contract runner scales down; on the platform all are the defaults."""

    root: Path = Path(places.OPT_ML)
    scratch: Path = Path(places.SCRATCH)
    port: int = PORT
    join_limit_s: float = JOIN_LIMIT_S
    stop_window_s: float = STOP_WINDOW_S


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """One start of this host."""

    tree: OptMl
    hosts: Hosts
    plan: Mapping[str, Any]
    job: Mapping[str, Any]
    home: Path
    job_name: str
    number: int

    @property
    def attempt(self) -> str:
        """Its name."""
        return f"{self.job_name}-{self.number}"

    @property
    def attempt_path(self) -> Path:
        """Its folder."""
        return self.home / "attempts" / self.attempt


def run_entry(settings: EntrySettings, stop: StopFlag, *, read_secret: SecretReader = fetch_secret) -> int:
    """Live one start of this host; return the exit code of the container."""
    tree = OptMl(root=settings.root)
    with _FailureFile(tree, stop) as told:
        hosts = tree.read_hosts()
        told.host = hosts.current
        told.exit_code = _live(_read_start(tree, hosts, settings), settings, stop, read_secret)
    return told.exit_code


class _FailureFile:
    """What goes wrong in the entry itself stands in its failure file, which is all that anybody sees."""

    def __init__(self, tree: OptMl, stop: StopFlag) -> None:
        self.host = "this host"
        self.exit_code = EXIT_FAILED
        self._tree = tree
        self._stop = stop

    def __enter__(self) -> _FailureFile:
        """Begin."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Write an error down; it goes no further."""
        if error is None or not isinstance(error, Exception):
            return False
        cause = str(error)
        if isinstance(error, StropError):
            # Told to stop before anything began: what was saved before is the state.
            self.exit_code = EXIT_INTERRUPTED if self._stop.is_asked else error.exit_code
        else:
            print_exception(error)
            cause = f"the entry failed: {type(error).__name__}: {error}"
        text = describe_failure(self.exit_code, host=self.host, cause=cause)
        sys.stderr.write(f"{text}\n")
        write_failure(self._tree.failure_path, text)
        return True


def _read_start(tree: OptMl, hosts: Hosts, settings: EntrySettings) -> _Start:
    plan = read_sent_plan(tree)
    job = find_job(plan, tree.read_parameters())
    name = os.environ.get("TRAINING_JOB_NAME") or job["name"]
    # The same path on every host: roles of several hosts tell each other paths, each of its own disk.
    home = settings.scratch / name
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    number = int(plan.get("num_past", 0)) + count_start(tree.checkpoint_path, hosts.current, name)
    return _Start(tree=tree, hosts=hosts, plan=plan, job=job, home=home, job_name=name, number=number)


def _live(start: _Start, settings: EntrySettings, stop: StopFlag, read_secret: SecretReader) -> int:
    job_path, hidden = make_job_folder(start.tree, dict(start.plan), start.home, read_secret)
    _bring_state(start)
    # With a store the run's own mirror sends the run's files: of one object there is one writer.
    has_run = start.hosts.is_head and not _reaches_store(start)
    sender = RecordSender(_choose_sink(start), start.home, start.attempt, has_run=has_run)
    started_at = time.time()
    control = join_hosts(
        start.hosts,
        start.attempt_path,
        key=read_key(start.tree) if len(start.hosts.names) > 1 else "",
        limit_s=settings.join_limit_s,
        port=settings.port,
        is_stopped=lambda: stop.is_asked,
    )
    control.start(
        meeting_path=meeting_path(start.home / ROLES_FOLDER, start.attempt),
        dispensable=_find_dispensable(start),
    )
    try:
        own_code, told = _run_agent(start, settings, stop, control, job_path, sender, hidden)
        cause = _read_cause(start)
        code = control.finish(own_code, cause)
        _tell_end(start, control, code, own_code=own_code, cause=cause, hidden=hidden)
        if start.hosts.is_head:
            write_verdict(
                start.attempt_path,
                number=start.number,
                exit_code=code,
                signal=told,
                started_at=started_at,
                ended_at=time.time(),
                nodes=start.hosts.names,
            )
    finally:
        control.close()
        sender.stop()
        remove_secrets(job_path)
    return code


def _run_agent(
    start: _Start,
    settings: EntrySettings,
    stop: StopFlag,
    control: Control,
    job_path: Path,
    sender: RecordSender,
    hidden: tuple[str, ...],
) -> tuple[int, str]:
    """Run the agent with all that goes on beside it; return its code, and the signal that ended it."""
    if stop.is_asked:
        return EXIT_INTERRUPTED, "SIGTERM"
    _set_network(start.hosts)
    task = NodeTask(
        job_path=job_path,
        member_path=start.home,
        attempt=start.attempt,
        number=start.number,
        node=start.hosts.node,
        num_nodes=len(start.hosts.names),
        part="cpu" if start.hosts.current in start.hosts.cpu else "main",
        grace_s=settings.stop_window_s,
        term_grace_s=max(1.0, settings.stop_window_s - RESERVE_S * settings.stop_window_s / STOP_WINDOW_S),
        address=_head_address(start.hosts),
    )
    keeper = _open_keeper(start)
    echo = LogEcho(task.log_path, hide=hidden)
    threads = (keeper, sender, echo)
    for thread in threads:
        thread.start()
    _arm_block_end()
    released = threading.Event()
    threading.Thread(target=_end_after_head, args=(control, released), daemon=True).start()
    threading.Thread(target=_repeat_early_stop, args=(stop, released), daemon=True).start()
    try:
        code = run_node(task)
    finally:
        released.set()
        step = keeper.stop()
        echo.stop()
    sys.stderr.write(f"newest state that is kept: {'none' if step is None else f'step {step}'}\n")
    return code, _read_signal(start)


def _find_dispensable(start: _Start) -> set[int]:
    """Return the hosts whose roles may all be lost; one without a role lends its devices to another's."""
    roles, hosts = start.plan["roles"], start.hosts
    found = set()
    for node, name in enumerate(hosts.names):
        places = {"cpu"} if name in hosts.cpu else {"all", "others" if node else "first"}
        here = [role for role in roles if role["nodes"] in places]
        if here and all(role.get("may_be_lost") for role in here):
            found.add(node)
    return found


def _end_after_head(control: Control, released: threading.Event) -> None:
    """End this host's roles where the first host has ended and they go on regardless."""
    if control.is_head:
        return
    while not released.wait(0.2):
        if 0 in control.codes or control.verdict is not None:
            if not released.wait(END_LIMIT_S * 0.5):
                os.kill(os.getpid(), signal.SIGTERM)
            return


def _repeat_early_stop(stop: StopFlag, released: threading.Event) -> None:
    """Send a stop again that came before the agent had put up its own handlers, once they are up."""
    while stop.is_installed and not released.wait(0.1):
        pass
    if stop.is_asked and not released.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _bring_state(start: _Start) -> None:
    """Restore on the first host, and write what was chosen and why."""
    start.attempt_path.mkdir(parents=True)
    if not start.hosts.is_head:
        return
    is_only = len(start.plan["members"]) == 1
    found = bring_state(
        start.tree.checkpoint_path,
        start.home,
        start.job_name,
        reaches_store=_reaches_store(start),
        # Of a sweep it names the first member's job.
        parent=str(start.plan.get("follows", "")) if is_only else "",
    )
    sys.stderr.write(f"state: {found.reason}\n")
    content = json.dumps({"step": found.step, "reason": found.reason, "platform": dict(start.hosts.others)})
    write_bytes_atomically(start.attempt_path / "resume.json", content.encode())


def _open_keeper(start: _Start) -> StateKeeper:
    # Beside the checkpoint directory, where a rename reaches it, and not in it.
    staging = start.tree.checkpoint_path.parent / f".strop-{start.hosts.current}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    host, place = start.hosts.current, f"{start.job['state_uri']}/{start.hosts.current}"
    is_safe = _arrival_check(place) if _reaches_store(start) else None
    return StateKeeper(
        start.home, start.tree.checkpoint_path, host, staging, is_safe=is_safe or (lambda name: True)
    )


def _reaches_store(start: _Start) -> bool:
    """Whether this job may talk to S3 itself."""
    is_isolated = bool(start.job["request"].get("EnableNetworkIsolation"))
    return os.environ.get(URI_VARIABLE, "").startswith("s3://") and not is_isolated


def _arrival_check(place: str) -> Callable[[str], bool]:
    """Return a question: has the platform copied a state to S3?"""
    from strop.store.s3_objects import S3Objects

    objects = S3Objects()

    def has_arrived(name: str) -> bool:
        try:
            return objects.find(f"{place}/{name}/{MANIFEST_NAME}") is not None
        except StoreError:
            # Nobody knows: an older state more costs room, one too few costs the run.
            return False

    return has_arrived


def _choose_sink(start: _Start) -> Sink:
    if not _reaches_store(start):
        return DirectorySink(start.tree.checkpoint_path / "record")
    from strop.store.s3_objects import S3Objects

    store = os.environ[URI_VARIABLE].rstrip("/")
    return StoreSink(S3Objects(), f"{store}/checkpoints/{start.job_name}")


def _set_network(hosts: Hosts, device_path: Path = _EFA_DEVICES) -> None:
    """Name the interface that the platform names, and EFA where its devices are.

    Raises: CheckRefused if there is no such interface.
    """
    if len(hosts.names) == 1:
        return
    if hosts.interface is not None:
        known = sorted(path.name for path in Path("/sys/class/net").iterdir())
        if hosts.interface not in known:
            raise CheckRefused(
                explain_refusal(
                    f"network interface {hosts.interface} is not on {hosts.current}",
                    allowed=f"one of this host's: {', '.join(known)}",
                    next_step="report it with this host's resourceconfig.json",
                )
            )
        os.environ.setdefault("NCCL_SOCKET_IFNAME", hosts.interface)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", hosts.interface)
    if any(device_path.glob("uverbs*")):
        # By the devices, not by a list of instance types: a missing entry once meant silent sockets.
        os.environ.setdefault("FI_PROVIDER", "efa")
        os.environ.setdefault("FI_EFA_USE_DEVICE_RDMA", "1")


def _head_address(hosts: Hosts) -> str:
    return "127.0.0.1" if len(hosts.names) == 1 else find_address(hosts.head, JOIN_LIMIT_S)


def _arm_block_end() -> None:
    """Stop in good order before a capacity block ends."""
    text = os.environ.get(_BLOCK_END, "")
    if not text.isdigit():
        return
    left_s = int(text) - time.time() - _BLOCK_RESERVE_S
    timer = threading.Timer(max(0.0, left_s), os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()


def _read_cause(start: _Start) -> str:
    return str(_read_end(start).get("cause", ""))


def _read_signal(start: _Start) -> str:
    return str(_read_end(start).get("signal", ""))


def _read_end(start: _Start) -> Mapping[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads((start.attempt_path / f"end-{start.hosts.node}.json").read_bytes())
        if isinstance(content, dict):
            return content
    return {}


def _tell_end(
    start: _Start, control: Control, code: int, *, own_code: int, cause: str, hidden: tuple[str, ...]
) -> None:
    """Write the failure file of an end that is no success: the first cause, and the host that it is from."""
    if code == EXIT_DONE:
        return
    decisive = [(node, text) for node, text in control.causes if control.codes.get(node) == code]
    node, first = next(iter(decisive or control.causes), (start.hosts.node, cause))
    if not first and code == EXIT_INTERRUPTED:
        first = "told to stop, and the newest state is kept"
    text = describe_failure(code, host=start.hosts.names[node], cause=first, secrets=hidden)
    write_failure(start.tree.failure_path, text)
    if node != start.hosts.node and cause:
        write_failure(
            start.tree.failure_path,
            describe_failure(own_code, host=start.hosts.current, cause=cause, secrets=hidden),
        )
