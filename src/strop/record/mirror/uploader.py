"""The process that mirrors one run while it trains.

A look at the run directory sends the changed logs and rollouts, then the newest complete checkpoint, and
removes records that are no longer kept. When the trainer has ended, the checkpoint is sent first, and the
model last. Each part fails independently and is retried with growing pauses; notices tell the trainer, which
never waits.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from strop.errors import (
    CorruptRecord,
    MirrorFenced,
    RemoteUnreachable,
    StoreError,
    StropError,
)
from strop.io.atomic import Manifest
from strop.record.events import EventKind
from strop.record.mirror.claim import Latest, RunIdentity, claim_mirror, point_to, require_claim
from strop.record.mirror.layout import MirrorOrder, RecordName, flush_path, notes_path
from strop.record.mirror.outbox import PinnedCheckpoint, TraceSender, pin_checkpoint, unpin
from strop.record.run_dir import RunDir
from strop.store.record_store import RecordStore
from strop.store.s3_client import S3Settings
from strop.store.uris import join_uri

LOOK_EVERY_S = 0.5
EXIT_FENCED = 3
EXIT_ORPHAN = 4
TRACES_TURN_S = 10.0
"""Longest time for sending logs and rollouts while a checkpoint waits."""
MAX_PAUSE_S = 60.0
"""Longest pause before a failed part is retried."""
MAX_FLUSH_PAUSE_S = 2.0
"""The same while the trainer waits for the flush."""


UPLOAD_SETTINGS = S3Settings(part_bytes=8 << 20, num_connections=4, num_attempts=4)
"""Few parts at once, and few retries, since the outer loop retries."""


class _ClaimFailed(Exception):
    """Raised when an uploader could not begin; see its cause."""


@dataclass
class _Part:
    """One part of a look."""

    name: str
    """The subject of '... could not be mirrored'."""
    action: Callable[[bool], bool]
    """Called with whether the trainer has ended; returns whether nothing is left to do."""
    num_failures: int = 0
    """Consecutive failures."""
    failed_at: float = 0.0
    pause_s: float = 0.0
    cause: str = ""


class Uploader:
    """Mirrors one run. It can be restarted at any moment, without any state of its own."""

    def __init__(
        self,
        order: MirrorOrder,
        store: RecordStore,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._order = order
        self._store = store
        self._clock = clock
        self._sleep = sleep
        self._run = RunDir.open(Path(order.run_path))
        self._identity = RunIdentity.of(self._run.state)
        self._traces = TraceSender(self._run.path, store, order.uri)
        self._traces_at = -float("inf")
        self._latest: Latest | None = None
        self._seen_step: int | None = None
        """The newest local checkpoint at the beginning of the look."""
        self._sent_step: int | None = None
        """The newest local checkpoint that was sent or skipped."""
        self._is_retention_due = True
        self._whole = _Part("the run", lambda _: True)
        """Counts the failures of a store that does not answer."""
        self._checkpoint_part = _Part("the newest checkpoint", self._send_checkpoint)
        traces = _Part("what was recorded", self._send_traces)
        retention = _Part("the removal of older checkpoints", self._remove_old)
        # While training goes on, logs and rollouts are sent before the checkpoint that follows them.
        self._parts = (traces, self._checkpoint_part, retention)
        self._last_parts = (self._checkpoint_part, traces, _Part("the model", self._send_final), retention)

    def run(self, is_orphan: Callable[[], bool] = lambda: False) -> int:
        """Mirror until the trainer has ended and everything is sent; return the exit code."""
        unpin(self._run.path)
        while not is_orphan():
            # Checked before the look, which then sees all that the trainer wrote.
            is_flush = flush_path(self._run.path).exists()
            try:
                is_done = self.look(is_flush=is_flush)
            except MirrorFenced as error:
                self._note("mirror_fenced", str(error), is_alarm=True)
                return EXIT_FENCED
            if is_flush and is_done:
                return 0
            self._sleep(LOOK_EVERY_S)
        return EXIT_ORPHAN

    def look(self, *, is_flush: bool) -> bool:
        """Do all parts that are due once; return whether nothing is left.

        Raises: MirrorFenced if another attempt has claimed the mirror.
        """
        if self._is_pausing(self._whole, is_flush=is_flush):
            return False
        # An uploader that starts in a long run must first compare all files that an earlier one sent.
        is_checkpoint_first = is_flush or self._traces.has_much_to_compare
        parts = self._last_parts if is_checkpoint_first else self._parts
        # A later checkpoint is left to the next look: this one may not send its rollouts.
        self._seen_step = self._newest_step()
        try:
            self._begin()
            are_done = [self._do(part, is_flush=is_flush) for part in parts]
        except MirrorFenced:
            raise
        except (RemoteUnreachable, _ClaimFailed) as error:
            # The other parts would only wait for the same timeout, one after the other.
            self._note_failure(self._whole, error.__cause__ or error)
            return False
        self._note_success(self._whole)
        return all(are_done)

    def _do(self, part: _Part, *, is_flush: bool) -> bool:
        if self._is_pausing(part, is_flush=is_flush):
            return False
        try:
            is_done = part.action(is_flush)
        except (MirrorFenced, RemoteUnreachable):
            raise
        except (StropError, OSError) as error:
            self._note_failure(part, error)
            return False
        self._note_success(part)
        return is_done

    def _is_pausing(self, part: _Part, *, is_flush: bool) -> bool:
        longest_s = MAX_FLUSH_PAUSE_S if is_flush else MAX_PAUSE_S
        return part.num_failures > 0 and self._clock() - part.failed_at < min(part.pause_s, longest_s)

    def _begin(self) -> None:
        """Claim the mirror at the first look; after a failure, check that the store answers again."""
        order = self._order
        if self._latest is not None and not self._whole.num_failures:
            return
        try:
            if self._latest is not None or not order.may_claim:
                self._latest, _ = require_claim(self._store, order.uri, order.owner)
            else:
                self._latest = claim_mirror(
                    self._store,
                    order.uri,
                    self._identity,
                    owner=order.owner,
                    attempt=order.attempt,
                    is_late=True,
                )
            # The previous owner may not write any more.
            self._store.objects.give_up_uploads(order.uri)
        except MirrorFenced:
            raise
        except StropError as error:
            raise _ClaimFailed from error
        self._log(f"may write to {order.uri} with fence {self._latest.fence}")

    def _newest_step(self) -> int | None:
        steps = self._run.checkpoint_steps()
        return steps[-1] if steps else None

    def _has_news(self) -> bool:
        return self._newest_step() not in {None, self._sent_step}

    def _is_urgent(self) -> bool:
        # A checkpoint that cannot be sent must not block everything else.
        return self._has_news() and self._checkpoint_part.num_failures == 0

    def _send_checkpoint(self, is_flush: bool) -> bool:
        """Send the newest complete checkpoint, if it is not there."""
        step = self._seen_step
        if step is None or step == self._sent_step:
            return not self._has_news()
        latest, _ = require_claim(self._store, self._order.uri, self._order.owner)
        if latest.step is not None and latest.step > step:
            # An earlier attempt had got further than this one's checkpoint.
            self._sent_step = step
            return True
        pinned = pin_checkpoint(self._run, step)
        if pinned is None and (newest := self._newest_step()) is not None:
            # Pruned meanwhile. Take the newest at once: if every look took so long, none would ever be sent.
            step, pinned = newest, pin_checkpoint(self._run, newest)
        if pinned is None:
            return False
        try:
            self._send_pinned(pinned)
        finally:
            unpin(self._run.path)
        # Before the first one of this process, the mirror knows what an earlier attempt sent.
        sent_step = latest.step if self._sent_step is None else self._sent_step
        skipped = [
            event.step
            for event in self._run.events.read()
            if event.kind is EventKind.CHECKPOINT
            and event.cause == "written"
            and (sent_step is None or sent_step < event.step)
            and event.step < step
        ]
        if skipped:  # Complete but never sent, because sending is slower than saving.
            steps = ", ".join(map(str, sorted(set(skipped))))
            self._note("upload_skipped", f"checkpoints not sent, as step {step} was newer: {steps}")
        self._sent_step = step
        self._is_retention_due = True
        return not self._has_news()

    def _send_pinned(self, pinned: PinnedCheckpoint) -> None:
        assert self._latest is not None
        order, began_at = self._order, self._clock()
        name = RecordName(step=pinned.step)
        found = self._find(name)
        if found is not None and not _holds(found, pinned.manifest):
            # A complete record stays; this content gets another name.
            name = RecordName(step=pinned.step, fence=self._latest.fence)
            found = self._find(name)
            if found is not None and not _holds(found, pinned.manifest):
                found = None
        uri = name.uri(order.uri, self._run.state.name)
        if found is None:
            facts = {
                "run": self._run.path.name,
                "step": pinned.step,
                "fence": self._latest.fence,
                "attempt": order.attempt,
            }
            manifest = pinned.describe(facts)
            moved = self._store.put_described(
                pinned.paths, uri, manifest, before_complete=self._require_claim
            ).moved_bytes
            found = self._store.find_manifest(uri)
            if found is None or found.digest != manifest.digest:
                raise _not_seen(uri)
            took_s = self._clock() - began_at
            self._log(f"sent {uri}: {moved / 1e6:.1f} MB in {took_s:.1f} s")
        point_to(self._store, order.uri, order.owner, step=pinned.step, record_uri=uri, digest=found.digest)

    def _require_claim(self) -> None:
        require_claim(self._store, self._order.uri, self._order.owner)

    def _find(self, name: RecordName) -> Manifest | None:
        return self._store.find_manifest(name.uri(self._order.uri, self._run.state.name))

    def _remove_old(self, is_flush: bool) -> bool:
        """Remove checkpoints that are not kept, if the newest one is complete."""
        if not self._is_retention_due:
            return True
        order, run = self._order, self._run.state.name
        latest, _ = require_claim(self._store, order.uri, order.owner)
        if latest.uri is None or latest.step is None:
            return True
        newest = self._store.find_manifest(latest.uri)
        if newest is None or newest.digest != latest.digest:
            raise _not_seen(latest.uri)
        folders = self._store.objects.list_folders(order.uri)
        found = [name for name in (RecordName.parse(folder, run) for folder in folders) if name is not None]
        whole = sorted(name for name in found if self._find(name) is not None)
        kept = set(whole[-order.keep_last :])
        for name in sorted(found):
            uri = name.uri(order.uri, run)
            # Later or incomplete records are of another look, or of a dead attempt that may be resumed.
            if name not in kept and name.step <= latest.step and uri != latest.uri:
                self._store.remove_record(uri)
                self._log(f"removed {uri}")
        self._is_retention_due = False
        return True

    def _send_traces(self, is_flush: bool) -> bool:
        """Send logs and rollouts: every `every_s`, and before each checkpoint."""
        is_due = self._is_urgent() or self._clock() - self._traces_at >= self._order.every_s
        if not (is_flush or is_due):
            return True
        self._require_claim()
        until = time.monotonic() + TRACES_TURN_S
        is_done = self._traces.send(
            is_whole=is_flush, should_yield=lambda: time.monotonic() > until and self._is_urgent()
        )
        if is_done:
            self._traces_at = self._clock()
        return is_done

    def _send_final(self, is_flush: bool) -> bool:
        """Send the model of a finished run."""
        if not is_flush or not RunDir.open(self._run.path).is_finished:
            return True
        step = self._newest_step()
        pinned = None if step is None else pin_checkpoint(self._run, step)
        if pinned is None:
            return True
        try:
            self._require_claim()
            paths, files = pinned.model()
            uri = join_uri(self._order.uri, f"{self._run.state.name}_final")
            manifest = Manifest(files=files, facts={"run": self._run.path.name, "step": pinned.step})
            moved = self._store.put_described(paths, uri, manifest, before_complete=self._require_claim)
            self._log(f"sent {uri}: {moved.moved_bytes / 1e6:.1f} MB")
        finally:
            unpin(self._run.path)
        return True

    def _note_success(self, part: _Part) -> None:
        if part.num_failures:
            self._note("upload_recovered", f"{part.name} was mirrored after {part.num_failures} failures")
        part.num_failures = 0

    def _note_failure(self, part: _Part, error: BaseException) -> None:
        part.failed_at, part.pause_s = self._clock(), min(2.0**part.num_failures, MAX_PAUSE_S)
        part.num_failures += 1
        self._log(f"{part.name} failed ({part.num_failures}): {error}")
        cause = type(error).__name__
        is_power_of_two = part.num_failures & (part.num_failures - 1) == 0
        if is_power_of_two or cause != part.cause:
            detail = (
                f"{part.name} could not be mirrored to {self._order.uri} ({part.num_failures} in a row);"
                f" training goes on, and it is tried again: {error}"
            )
            self._note("upload_failed", detail, is_alarm=True)
        part.cause = cause

    def _note(self, cause: str, detail: str, *, is_alarm: bool = False) -> None:
        self._log(f"{cause}: {detail}")
        path = notes_path(self._run.path)
        path.parent.mkdir(exist_ok=True)
        line = json.dumps({"cause": cause, "detail": detail, "is_alarm": is_alarm})
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _log(self, text: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
        os.write(1, f"{now} {' '.join(text.split())}\n".encode())


def _holds(found: Manifest, checkpoint: Manifest) -> bool:
    """Whether a record has exactly this checkpoint's files, besides the run's."""
    digests = found.sha256_by_name
    return all(digests.get(name) == sha256 for name, sha256 in checkpoint.sha256_by_name.items())


def _not_seen(uri: str) -> StoreError:
    return CorruptRecord(
        f"{uri} was sent, and the store does not show it with the digest that was sent",
        allowed="a store that shows what it accepted",
        next_step="see whether another tool writes there; nothing older is removed meanwhile",
    )
