"""The mirror of a run in a store: test the store, begin and end the mirror, resume from one.

`strop.record.mirror` sends the files in a thread. Training never waits for it: what it has to say is taken
between steps, and becomes events. Only after training there is a wait, with a limit.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from strop.errors import CheckRefused, Interrupted, NoCredentials, RemoteDenied, StoreError
from strop.record import Event, EventKind, RunDir
from strop.record.fence import GRACE_VARIABLE
from strop.record.mirror import (
    UPLOAD_SETTINGS,
    Mirror,
    RemoteRun,
    find_remote_run,
    identify,
    mirror_uri,
    restore_run,
)
from strop.spec import ResolvedSpec, StoreSpec, spec_digest
from strop.store.opening import open_store
from strop.store.policy import find_mirror_root, follow_store
from strop.store.record_store import RecordStore
from strop.store.uris import join_uri, normalize_uri

if TYPE_CHECKING:
    from strop.train.observer import EvalSummary, Observer

FLUSH_LIMIT_S = 600.0
"""Longest wait for the mirror after training has ended."""
STOP_FLUSH_LIMIT_S = 60.0
"""The same after a signal; the newest checkpoint goes first."""
_POLL_S = 0.1


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
    """An observer that forwards every call, and wakes and hears the run's mirror between them.

    Use it in `with`: leaving the block waits for the rest of the upload, within the limits.
    """

    def __init__(self, root: str | None, spec: StoreSpec, run_dir: RunDir, observer: Observer) -> None:
        """`root` is what `probe_mirror` returned."""
        self._run_dir, self._observer = run_dir, observer
        self.uri = None if root is None else mirror_uri(root, spec.mirror_as or run_dir.path.name)
        """Of the mirror; None: the run has none."""
        self._keep_last = spec.keep_last
        self._mirror: Mirror | None = None
        self._step = 0

    def __enter__(self) -> Mirroring:
        """Start nothing yet: `begin` needs the attempt."""
        return self

    def begin(self) -> None:
        """Claim the mirror for this attempt and start to send. Call it after the attempt has begun.

        Raises: CheckRefused if another run is mirrored there; for a run without a checkpoint also if the
            store does not answer.
        """
        if self.uri is None:
            return
        store = open_store(self.uri, UPLOAD_SETTINGS)
        mirror = Mirror(self._run_dir, store, self.uri, keep_last=self._keep_last)
        try:
            mirror.claim()
        except StoreError as error:
            if self._run_dir.latest_checkpoint() is None:
                raise CheckRefused(
                    f"the run cannot be mirrored to {self.uri} ({error})",
                    allowed="a store that answers when a run begins",
                    next_step="start again when it does, or train without a mirror: store.mirror=false",
                ) from error
            # A run with checkpoints goes on without its mirror; the thread tries to claim it again.
            self._announce("upload_failed", f"{self.uri} could not be claimed: {error}", is_alarm=True)
        mirror.thread.start()
        self._mirror = mirror
        self._announce("mirror", f"the run is mirrored to {self.uri}", is_alarm=False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait until the rest is sent or another attempt has taken the mirror, up to the limit."""
        mirror = self._mirror
        if mirror is None:
            return
        is_hurried = isinstance(error, Interrupted) or (
            error is not None and not isinstance(error, Exception)
        )
        limit_s = limit_after_signal() if is_hurried else FLUSH_LIMIT_S
        deadline = time.monotonic() + limit_s
        mirror.wake(is_ending=True)
        while mirror.thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
            mirror.thread.join(min(_POLL_S, left_s))
            self._announce_notes(mirror)
        self._announce_notes(mirror)
        if not mirror.is_done and mirror.fenced is None:
            detail = (
                f"not all of the run could be mirrored to {self.uri} within {limit_s:g} s of its end;"
                f" it is whole in {self._run_dir.path}"
            )
            self._announce("upload_incomplete", detail, is_alarm=True)

    def on_start(self, *, run: str, first_step: int, num_steps: int) -> None:
        """Pass on."""
        self._step = first_step
        self._observer.on_start(run=run, first_step=first_step, num_steps=num_steps)

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Pass on, and announce what the mirror has to say; does not block.

        Raises: MirrorFenced if another attempt has claimed the mirror.
        """
        self._step = int(metrics["step"])
        self._observer.on_step(metrics)
        if self._mirror is not None:
            self._announce_notes(self._mirror)
            if self._mirror.fenced is not None:
                raise self._mirror.fenced

    def on_event(self, event: Event) -> None:
        """Pass on; a checkpoint is sent at once."""
        self._observer.on_event(event)
        if self._mirror is not None and event.kind is EventKind.CHECKPOINT:
            self._mirror.wake()

    def on_eval(self, summary: EvalSummary) -> None:
        """Pass on."""
        self._observer.on_eval(summary)

    def on_end(self, *, cause: str) -> None:
        """Pass on."""
        self._observer.on_end(cause=cause)

    def _announce_notes(self, mirror: Mirror) -> None:
        while not mirror.notes.empty():
            cause, detail, is_alarm = mirror.notes.get()
            self._announce(cause, detail, is_alarm=is_alarm)

    def _announce(self, cause: str, detail: str, *, is_alarm: bool) -> None:
        kind = EventKind.TRIPWIRE if is_alarm else EventKind.NOTICE
        event = Event(kind=kind, step=self._step, cause=cause, detail=detail)
        self._run_dir.events.append(event)
        self._observer.on_event(event)


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
    digest, remote_digest = spec_digest(resolved.spec), remote.latest.run["spec_digest"]
    if digest != remote_digest:
        raise CheckRefused(
            f"{uri} is a run of spec {remote_digest[:12]}, and this run file is {digest[:12]}",
            allowed="the run file and overrides that the run was begun with",
            next_step=f"compare with {uri}/spec.toml, which is the run's own",
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
    if remote.latest.run == identify(run.state) and step >= (remote.step or 0):
        return f"{target} is here already, at step {step}, and goes on"
    raise CheckRefused(
        f"{target} is here at step {step}, and {remote.uri} is at step {remote.step}",
        allowed="a directory of the same run that is as far, or none",
        next_step=f"move {target} away, and give the same command again",
    )
