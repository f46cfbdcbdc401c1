"""The mirror of a run in a store: test the store, start and supervise the uploader, resume from a mirror.

The uploader is a separate process (`strop.record.mirror`) with the lowest priority and its own log; it dies
with this process. Training never waits for it: its notes are read between steps, in microseconds, and become
events. Only after training there is a wait, with a limit.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING

from strop.errors import CheckRefused, Interrupted, NoCredentials, RemoteDenied, StoreError
from strop.hardware import ChildProcess, spawn, terminate
from strop.hardware.process import MAX_NICENESS, step_back
from strop.record import Event, EventKind, RunDir
from strop.record.fence import GRACE_VARIABLE
from strop.record.mirror.claim import RunIdentity, claim_mirror
from strop.record.mirror.layout import MirrorOrder, flush_path, mirror_uri, notes_path
from strop.record.mirror.restore import RemoteRun, find_remote_run, restore_run
from strop.record.mirror.uploader import EXIT_FENCED, UPLOAD_SETTINGS
from strop.spec import ResolvedSpec, StoreSpec, spec_digest
from strop.store.opening import open_store
from strop.store.policy import find_mirror_root, follow_store
from strop.store.record_store import RecordStore
from strop.store.uris import join_uri, normalize_uri

if TYPE_CHECKING:
    from strop.train.observer import EvalSummary, Observer

RESPAWN_AFTER_S = 30.0
"""Shortest time between two starts of an uploader that died."""
FLUSH_LIMIT_S = 600.0
"""Longest wait for the mirror after training has ended."""
STOP_FLUSH_LIMIT_S = 60.0
"""The same after a signal; the newest checkpoint goes first."""
_POLL_S = 0.1
LOG_NAME = "mirror.log"


def probe_store(root: str, store: RecordStore | None = None) -> None:
    """Test each right that a mirror needs below the root of a store.

    Raises: NoCredentials; CheckRefused naming the missing permission, or if the store does not answer.
    """
    store = store or open_store(root, UPLOAD_SETTINGS)
    folder = join_uri(root, "checkpoints")
    # A random name: two runs that start at once must not remove each other's object.
    place, content = join_uri(folder, f".probe-{secrets.token_hex(8)}"), b"strop"
    steps = (
        # Without it, S3 answers 403 also for what is not there.
        ("list", "s3:ListBucket", lambda: next(iter(store.objects.list_folders(folder)), None)),
        ("read", "s3:GetObject", lambda: store.objects.find(place)),
        ("write", "s3:PutObject", lambda: store.objects.write(place, content)),
        ("read", "s3:GetObject", lambda: store.objects.read_versioned(place)),
        ("remove", "s3:DeleteObject", lambda: store.objects.remove(place)),
        ("write", "s3:PutObject", lambda: store.objects.begin_upload(f"{place}/parts")),
        (
            "find and abort uploads of",
            "s3:ListBucketMultipartUploads and s3:AbortMultipartUpload",
            lambda: store.objects.give_up_uploads(place),
        ),
    )
    for verb, right, action in steps:
        try:
            action()
        except NoCredentials:
            raise
        except RemoteDenied as error:
            raise CheckRefused(
                f"runs cannot be mirrored to {folder}: the right to {verb} objects is missing ({error})",
                allowed=f"credentials that may write, read, list and remove there; missing here: {right}",
                next_step=f"have {right} granted, or train without a mirror: store.mirror=false",
            ) from error
        except StoreError as error:
            raise CheckRefused(
                f"runs cannot be mirrored to {folder}: it did not pass a test to {verb} ({error})",
                allowed="a store that answers when a run begins",
                next_step="start again when it does, or train without a mirror: store.mirror=false",
            ) from error


def probe_mirror(spec: StoreSpec) -> str | None:
    """Return the root of the store that a run will be mirrored to, after a test; None without a mirror.

    Raises: CheckRefused like `probe_store`.
    """
    root = find_mirror_root(spec)
    if root is not None:
        probe_store(root)
    return root


class Mirroring:
    """An observer that forwards every call, and supervises the uploader between them.

    Use it in `with`: leaving the block waits for the rest of the upload, within the limits.
    """

    def __init__(self, root: str | None, spec: StoreSpec, run_dir: RunDir, observer: Observer) -> None:
        """`root` is what `probe_mirror` returned."""
        self._spec = spec
        self._run_dir = run_dir
        self._observer = observer
        self.uri = None if root is None else mirror_uri(root, spec.mirror_as or run_dir.path.name)
        """Of the mirror; None: the run has none."""
        self._owner = secrets.token_hex(16)
        self._child: ChildProcess | None = None
        self._spawned_at = 0.0
        self._num_read_bytes = 0
        self._is_fenced = False
        self._has_claimed = True
        self._step = 0

    def __enter__(self) -> Mirroring:
        """Start nothing yet: `begin` needs the attempt."""
        return self

    def begin(self) -> None:
        """Claim the mirror for this attempt and start the uploader. Call it after the attempt has begun.

        Raises: CheckRefused if another run is mirrored there; for a run without a checkpoint also if the
            store does not answer.
        """
        if self.uri is None:
            return
        state, notes = self._run_dir.state, notes_path(self._run_dir.path)
        flush_path(self._run_dir.path).unlink(missing_ok=True)
        self._num_read_bytes = notes.stat().st_size if notes.exists() else 0
        store = open_store(self.uri, UPLOAD_SETTINGS)
        try:
            claim_mirror(
                store, self.uri, RunIdentity.of(state), owner=self._owner, attempt=state.num_attempts
            )
        except StoreError as error:
            if self._run_dir.latest_checkpoint() is None:
                raise CheckRefused(
                    f"the run cannot be mirrored to {self.uri} ({error})",
                    allowed="a store that answers when a run begins",
                    next_step="start again when it does, or train without a mirror: store.mirror=false",
                ) from error
            # A run with checkpoints goes on without its mirror; the uploader tries to claim it again.
            self._announce("upload_failed", f"{self.uri} could not be claimed: {error}", is_alarm=True)
            self._has_claimed = False
        self._spawn()
        self._announce("mirror", f"the run is mirrored to {self.uri}", is_alarm=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait until the uploader has sent the rest, up to the limit; then end it."""
        if self._child is None:
            return
        is_hurried = isinstance(error, Interrupted) or (
            error is not None and not isinstance(error, Exception)
        )
        limit_s = limit_after_signal() if is_hurried else FLUSH_LIMIT_S
        try:
            self._flush(limit_s)
        finally:
            terminate(self._child, 0.0)
            flush_path(self._run_dir.path).unlink(missing_ok=True)

    def poll(self) -> None:
        """Announce the uploader's notes, and start it again if it died. Does not block."""
        if self._child is None:
            return
        self._read_notes()
        exit_code = self._child.poll()
        if exit_code is None or self._is_fenced:
            return
        if exit_code == EXIT_FENCED:
            self._is_fenced = True
        elif exit_code != 0 and time.monotonic() - self._spawned_at >= RESPAWN_AFTER_S:
            last = self._child.tail(1)
            detail = f"the uploader ended with {exit_code} and is started again; its last line: {last}"
            self._announce("uploader_died", detail, is_alarm=True)
            self._spawn()

    def on_start(self, *, run: str, first_step: int, num_steps: int) -> None:
        """Pass on."""
        self._step = first_step
        self._observer.on_start(run=run, first_step=first_step, num_steps=num_steps)

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Pass on, and poll the uploader."""
        self._step = int(metrics["step"])
        self._observer.on_step(metrics)
        self.poll()

    def on_event(self, event: Event) -> None:
        """Pass on."""
        self._observer.on_event(event)

    def on_eval(self, summary: EvalSummary) -> None:
        """Pass on."""
        self._observer.on_eval(summary)

    def on_end(self, *, cause: str) -> None:
        """Pass on."""
        self._observer.on_end(cause=cause)

    def _spawn(self) -> None:
        assert self.uri is not None
        order = MirrorOrder(
            run_path=str(self._run_dir.path.absolute()),
            uri=self.uri,
            owner=self._owner,
            attempt=self._run_dir.state.num_attempts,
            may_claim=not self._has_claimed,
            keep_last=self._spec.keep_last,
        )
        self._child = start_uploader(order, (self._run_dir.path / "latest").resolve() / LOG_NAME)
        self._spawned_at = time.monotonic()

    def _flush(self, limit_s: float) -> None:
        """Wait until all is sent, another attempt has taken the mirror, or the time is over."""
        path, began_at = flush_path(self._run_dir.path), time.monotonic()
        path.parent.mkdir(exist_ok=True)
        path.touch()
        while (waited_s := time.monotonic() - began_at) < limit_s:
            self.poll()
            assert self._child is not None
            exit_code = self._child.poll()
            if exit_code == 0 or self._is_fenced:
                self._read_notes()
                return
            time.sleep(min(_POLL_S, limit_s - waited_s))
        self._read_notes()
        detail = (
            f"not all of the run could be mirrored to {self.uri} within {limit_s:g} s of its end; it is whole"
            f" in {self._run_dir.path}, and the last lines of {LOG_NAME} there say what is missing"
        )
        self._announce("upload_incomplete", detail, is_alarm=True)

    def _read_notes(self) -> None:
        path = notes_path(self._run_dir.path)
        if not path.exists() or path.stat().st_size <= self._num_read_bytes:
            return
        with path.open("rb") as file:
            file.seek(self._num_read_bytes)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._num_read_bytes += len(whole)
        for line in whole.splitlines():
            note = json.loads(line)
            self._announce(note["cause"], note["detail"], is_alarm=note["is_alarm"])

    def _announce(self, cause: str, detail: str, *, is_alarm: bool) -> None:
        kind = EventKind.TRIPWIRE if is_alarm else EventKind.NOTICE
        event = Event(kind=kind, step=self._step, cause=cause, detail=detail)
        self._run_dir.events.append(event)
        self._observer.on_event(event)


def start_uploader(
    order: MirrorOrder, log_path: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> ChildProcess:
    """Start an uploader that yields the processors to the trainer; `variables` are set for it only."""
    # One thread for numeric libraries, if one is imported.
    env = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    child = spawn([sys.executable, "-m", "strop.record.mirror", order.to_json()], log_path, env)
    # A training on two cores lost 9 % of its time to an uploader of niceness 10 (16 MB/s), and 2 % to this
    # one (7 MB/s). On an idle core it sends at full speed.
    step_back(child.pid, by=MAX_NICENESS)
    with suppress(AttributeError, OSError):  # On Linux: it does not preempt the trainer when it wakes up.
        os.sched_setscheduler(child.pid, os.SCHED_BATCH, os.sched_param(0))
    return child


def limit_after_signal() -> float:
    """Return how long the mirror may take after a signal: at most half of the launcher's grace period.

    The checkpoint is on the disk already. If the launcher killed the process during the wait, the run would
    count as failed.
    """
    grace_s = os.environ.get(GRACE_VARIABLE)
    return STOP_FLUSH_LIMIT_S if grace_s is None else min(STOP_FLUSH_LIMIT_S, float(grace_s) / 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """A run that is resumed from its mirror."""

    resolved: ResolvedSpec
    """With `output.dir` set to the restored directory."""
    run_path: Path
    detail: str
    """A message for the user: restored, or found here."""


def continue_from(uri: str, resolved: ResolvedSpec) -> Continuation:
    """Restore a run from its mirror, unless its directory is here, and return the spec that resumes it.

    Raises: CheckRefused if no run is mirrored there, the mirror is of another spec, or the directory here is
        behind the mirror; StoreErrors.
    """
    remote = find_remote_run(uri, settings=UPLOAD_SETTINGS)
    if remote is None or remote.step is None:
        raise CheckRefused(
            f"nothing can be gone on with at {uri}: "
            + ("no run is mirrored there" if remote is None else "the run has no complete checkpoint yet"),
            allowed="the mirror of a run, as s3://bucket/prefix/checkpoints/NAME",
            next_step="correct the URI, or leave --from out to begin anew",
        )
    digest, remote_digest = spec_digest(resolved.spec), remote.latest.run.spec_digest
    if digest != remote_digest:
        raise CheckRefused(
            f"{uri} is a run of spec {remote_digest[:12]}, and this run file is {digest[:12]}",
            allowed="the run file and overrides that the run was begun with",
            next_step=f"compare with {uri}/traces/spec.toml, which is the run's own",
        )
    output = resolved.spec.output
    target = Path(output.dir) if output.dir else Path(output.root) / uri.rstrip("/").rpartition("/")[2]
    if target.exists():
        detail = _compare_here(target, remote)
    else:
        restore_run(uri, target.parent, name=target.name, settings=UPLOAD_SETTINGS)
        detail = f"restored {target} from {uri}"
    changes = {
        "output": output.model_copy(update={"dir": str(target)}),
        "store": _mirror_there(resolved.spec.store, uri),
    }
    spec = resolved.spec.model_copy(update=changes)
    moved = ResolvedSpec(spec=spec, origins=resolved.origins, notices=resolved.notices)
    return Continuation(resolved=moved, run_path=target, detail=detail)


def _mirror_there(spec: StoreSpec, uri: str) -> StoreSpec:
    """Keep the name of the mirror if it is in the run's store: the directory here may have another name."""
    with follow_store(spec) as policy:
        prefix = None if policy.root is None else normalize_uri(mirror_uri(policy.root, ""))
    place = normalize_uri(uri)
    if prefix is None or spec.mirror_as is not None or not place.startswith(f"{prefix}/"):
        return spec
    return spec.model_copy(update={"mirror_as": place.removeprefix(f"{prefix}/")})


def _compare_here(target: Path, remote: RemoteRun) -> str:
    """Return the message that the run is resumed from the directory here.

    Raises: CheckRefused if the mirror is ahead of it.
    """
    run = RunDir.open(target)
    latest = run.latest_checkpoint()
    step = 0 if latest is None else latest[0]
    if RunIdentity.of(run.state) == remote.latest.run and step >= (remote.step or 0):
        return f"{target} is here already, at step {step}, and goes on"
    raise CheckRefused(
        f"{target} is here at step {step}, and {remote.uri} is at step {remote.step}",
        allowed="a directory of the same run that is as far, or none",
        next_step=f"move {target} away, and give the same command again",
    )
