"""The mirror of a run directory in the run's store, made while the run trains, and its restoration.

    <store>/checkpoints/<run dir name>/     the run's files, under the names that they have on the disk, and
      latest.json                           the attempt that may write here, and its newest checkpoint
      checkpoints/step-000012-3/            a record, COMPLETE last; -3: of the attempt that claimed third
      final/                                a record: the model alone, once every step is trained

A thread of the trainer looks every 30 s, and after each checkpoint. It sends rollouts, then the logs that
mention them, then the newest checkpoint, and points latest.json to it; so a run can be resumed from every
remote state, whatever was killed.

Every change of latest.json is conditional on its last version: the attempt that claims the mirror last owns
it, and the one before ends. No clock is used, and no attempt writes into another one's checkpoints. Not
covered: an attempt that is suspended within one request and wakes up after a newer one has sent the same log
or rollouts; the newer one sends a log again when it grows.
"""

from __future__ import annotations

import json
import queue
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from strop.errors import (
    CheckRefused,
    CorruptRecord,
    MirrorFenced,
    RemoteMissing,
    RemoteUnreachable,
    StoreError,
)
from strop.io.atomic import (
    MANIFEST_NAME,
    explain_write_failure,
    hash_files,
    is_inner_name,
    make_directory,
    write_bytes_atomically,
)
from strop.io.leftovers import LEFTOVER_PATTERN
from strop.io.lock import FileLock
from strop.record.files import CHECKPOINTS, rank_folders
from strop.record.prediction import PREDICTION_NAME
from strop.record.run_dir import (
    DISCARDED,
    LOCK_NAME,
    STATE_NAME,
    TIMELINE_NAME,
    TOKENIZER_NAME,
    RunDir,
    RunState,
    parse_state,
)
from strop.store.opening import open_store
from strop.store.record_store import RecordStore, side_by_side
from strop.store.s3_client import S3Settings
from strop.store.uris import join_uri, normalize_uri

LATEST_NAME = "latest.json"
FINAL_NAME = "final"
UPLOAD_SETTINGS = S3Settings(part_bytes=8 << 20, num_connections=4, num_attempts=2, silence_limit_s=15.0)
"""Few parts at once, and few retries, since each look is one; a run's end waits for what is under way."""
EVERY_S = 30.0
MAX_PAUSE_S = 60.0
"""Longest pause after a look that failed."""
MAX_LAST_PAUSE_S = 2.0
"""The same while the run's end waits."""
GROWTH_FRAC = 0.05
"""A large log is sent again when it has grown by this fraction, so in all it is sent about twenty times."""
EAGER_BYTES = 1 << 20
"""A file below this size is sent at every change."""
_LOGS = (TIMELINE_NAME, "events.jsonl", "metrics.jsonl")
_RECORD = (
    *("rollouts/*.parquet", f"{DISCARDED}/*.parquet", "eval/*.json", "eval/*/*.parquet"),
    *(STATE_NAME, "spec.toml", "env.txt", PREDICTION_NAME, "audit.json", TOKENIZER_NAME),
)
_REST = ("attempts/*/**/*", "trackers/**/*", "report.html", "notes.md")
_LOG_SUFFIXES = frozenset({".jsonl", ".log", ".out", ".txt"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Latest:
    """The content of latest.json."""

    run: Mapping[str, Any]
    """What tells runs of one name apart, as `identify` returns it."""
    fence: int
    """Larger with every claim, and never smaller than the owner's attempt number."""
    owner: str
    """Random id of one attempt of one process."""
    checkpoint: str | None = None
    """Folder of the newest checkpoint that was sent completely; None: none yet."""


def identify(state: RunState) -> dict[str, Any]:
    """Return what tells a run from others of its name."""
    return {"name": state.name, "spec_digest": state.spec_digest, "created_at": state.created_at}


def mirror_uri(store_uri: str, name: str) -> str:
    """Return the URI of a run's mirror; `name` is its directory's name, or `store.mirror_as`."""
    return join_uri(store_uri, "checkpoints", name)


def read_latest(store: RecordStore, uri: str) -> tuple[Latest, str] | None:
    """Return a mirror's latest.json with its version; None: nothing was ever mirrored there.

    Raises: CorruptRecord if it cannot be read.
    """
    found = store.objects.read_versioned(place := join_uri(uri, LATEST_NAME))
    try:
        return found and (Latest(**json.loads(found[0])), found[1])
    except (ValueError, TypeError) as error:
        raise CorruptRecord(
            f"{place} cannot be read ({error})",
            allowed="the JSON that strop wrote",
            next_step="remove it if no run is mirrored there any more, or choose another store.mirror_as",
        ) from error


def _write_latest(store: RecordStore, uri: str, latest: Latest, version: str | None) -> bool:
    data = json.dumps(asdict(latest), indent=1).encode()
    return store.objects.write_if(join_uri(uri, LATEST_NAME), data, version)


def claim_mirror(
    store: RecordStore, uri: str, state: RunState, owner: str, *, is_late: bool = False
) -> Latest:
    """Make an attempt of a run the owner of its mirror.

    `is_late`: the attempt began a while ago, so it does not replace an owner with its number or a later one.
    Raises: CheckRefused if another run is mirrored there; MirrorFenced; StoreErrors.
    """
    while True:
        latest, version = read_latest(store, uri) or (None, None)
        mine = Latest(run=identify(state), fence=state.num_attempts, owner=owner)
        if latest is not None:
            if latest.run != mine.run:
                raise CheckRefused(
                    f"{uri} is the mirror of another run: {latest.run}",
                    allowed="a place of its own for each run",
                    next_step="set store.mirror_as to another name, or store.mirror=false",
                )
            if latest.owner == owner:
                return latest
            if is_late and latest.fence >= mine.fence:
                raise _fenced(uri, latest)
            mine = replace(latest, owner=owner, fence=max(mine.fence, latest.fence + 1))
        if _write_latest(store, uri, mine, version):
            return mine


def _fenced(uri: str, latest: Latest | None) -> MirrorFenced:
    return MirrorFenced(
        f"{uri} " + (f"was claimed by attempt {latest.fence}" if latest else "has no owner any more"),
        allowed="one attempt of a run: the one that started last",
        next_step="nothing, if the newer one is meant to live: this one ends",
    )


class Mirror:
    """Sends one run to its store in a thread. What it has to say is in `notes`."""

    def __init__(self, run: RunDir, store: RecordStore, uri: str, *, keep_last: int = 2) -> None:
        self.notes: queue.SimpleQueue[tuple[str, str, bool]] = queue.SimpleQueue()
        """Cause, detail, and whether it is an alarm."""
        self.fenced: MirrorFenced | None = None
        """Set when another attempt owns the mirror; then the thread has ended."""
        self.is_done = False
        """Whether the run has ended, and everything was sent."""
        self._run, self._store, self._uri, self._keep_last = run, store, uri, keep_last
        self._owner = secrets.token_hex(16)
        self._latest: Latest | None = None
        self._sent: dict[str, tuple[int, int]] = {}
        """Size and modification time of each file when it was sent."""
        self._sent_step: int | None = None
        self._num_failures = 0
        self._is_ending, self._wake = threading.Event(), threading.Event()
        # A daemon: the process ends although a store hangs.
        self.thread = threading.Thread(target=self._work, name="strop-mirror", daemon=True)

    def claim(self, *, is_late: bool = False) -> None:
        """Claim the mirror for this attempt. Raises: like `claim_mirror`."""
        self._latest = claim_mirror(self._store, self._uri, self._run.state, self._owner, is_late=is_late)
        sent, local = rank_folders([self._latest.checkpoint or ""]), self._run.latest_checkpoint()
        if local is not None and local[0] <= max(sent.values(), default=-1):
            # It is there already: this attempt goes on from it.
            self._sent_step = local[0]
        for stored in self._store.list(normalize_uri(self._uri)):
            name = stored.uri.removeprefix(f"{normalize_uri(self._uri)}/")
            path = self._run.path / name
            # Written once: those of steps that are trained anew are written anew.
            if path.suffix == ".parquet" and path.is_file() and path.stat().st_size == stored.size_bytes:
                self._sent[name] = _mark(path)
        # The attempt before may not write any more.
        self._store.objects.give_up_uploads(self._uri)

    def wake(self, *, is_ending: bool = False) -> None:
        """Have the thread look at once. `is_ending`: then it sends the rest, and ends."""
        if is_ending:
            self._is_ending.set()
        self._wake.set()

    def look(self, *, is_last: bool = False) -> None:
        """Send all that is new. `is_last`: even logs that have grown little, and the model of a finished run.

        Raises: MirrorFenced if another attempt has claimed the mirror; the first other error, after the rest
            was tried.
        """
        if self._latest is None:
            self.claim(is_late=True)
        self._require_claim()
        failures: list[Exception] = []
        # What is written meanwhile is left to the next look: its rollouts may not be sent by this one.
        with self._run.hold_latest() as newest:
            actions: list[Callable[[], None]] = [partial(self._send_record, is_last)]
            if newest is not None:
                actions.append(partial(self._send_checkpoint, *newest))
            actions.append(partial(self._send_files, _REST, is_last))
            if newest is not None and is_last and self._run.is_finished:
                actions.append(partial(self._send_model, *newest))
            for action in actions:
                try:
                    action()
                except (MirrorFenced, RemoteUnreachable):
                    raise
                except (StoreError, OSError) as error:
                    failures.append(error)
        if failures:
            raise failures[0]

    def _work(self) -> None:
        while not self.is_done:
            is_last = self._is_ending.is_set()
            try:
                self.look(is_last=is_last)
            except MirrorFenced as error:
                self.fenced = error
                self.notes.put(("mirror_fenced", str(error), True))
                return
            except Exception as error:
                pause_s = self._note_failure(error)
            else:
                if self._num_failures:
                    detail = f"{self._uri} has everything again after {self._num_failures} failures"
                    self.notes.put(("upload_recovered", detail, False))
                self._num_failures, self.is_done, pause_s = 0, is_last, 0.0 if is_last else EVERY_S
            self._wake.wait(min(pause_s, MAX_LAST_PAUSE_S) if self._is_ending.is_set() else pause_s)
            self._wake.clear()

    def _note_failure(self, error: Exception) -> float:
        """Tell the 1st, 2nd, 4th, 8th ... failure in a row; return how long to wait."""
        pause_s = min(2.0**self._num_failures, MAX_PAUSE_S)
        self._num_failures += 1
        if self._num_failures & (self._num_failures - 1) == 0:
            detail = f"failure {self._num_failures} in a row to mirror the run to {self._uri}"
            self.notes.put(
                ("upload_failed", f"{detail}; training goes on, and it is tried again: {error}", True)
            )
        return pause_s

    def _require_claim(self) -> tuple[Latest, str]:
        found = read_latest(self._store, self._uri)
        if found is None or found[0].owner != self._owner:
            raise _fenced(self._uri, found and found[0])
        return found

    def _send_record(self, is_last: bool) -> None:
        """Send rollouts, results and logs, so that a reader finds the rollouts of every line."""
        logs = [path for path in (self._run.path / name for name in _LOGS) if path.is_file()]
        # Read before the rollouts are listed.
        read = [(one, _mark(one), one.read_bytes()) for one in logs if _mark(one) != self._sent.get(one.name)]
        self._send_files(_RECORD, is_last)
        for path, mark, data in read:
            self._send(path, mark, is_last, data)

    def _send_files(self, patterns: tuple[str, ...], is_last: bool) -> None:
        for path in (path for pattern in patterns for path in sorted(self._run.path.glob(pattern))):
            if path.is_file() and not path.is_symlink() and not LEFTOVER_PATTERN.search(path.name):
                # A resumed run removes files that it writes again.
                with suppress(FileNotFoundError):
                    self._send(path, _mark(path), is_last)

    def _send(self, path: Path, mark: tuple[int, int], is_last: bool, data: bytes | None = None) -> None:
        """Send a file that has changed, a log up to its last complete line."""
        name, is_log = path.relative_to(self._run.path).as_posix(), path.suffix in _LOG_SUFFIXES
        before = self._sent.get(name, (-1, 0))
        has_grown_little = before[0] <= mark[0] <= (1.0 + GROWTH_FRAC) * before[0] and mark[0] > EAGER_BYTES
        if mark == before or (is_log and has_grown_little and not is_last):
            return
        self._require_claim()
        place, objects = join_uri(self._uri, name), self._store.objects
        if path.suffix == ".parquet":
            objects.upload(path, place, hash_files(path.parent, [path.name])[path.name])
        else:
            data = path.read_bytes() if data is None else data
            objects.write(place, data[: data.rfind(b"\n") + 1] if is_log else data)
        self._sent[name] = mark

    def _send_checkpoint(self, step: int, path: Path) -> None:
        """Send a checkpoint, point to it, and remove older ones."""
        assert self._latest is not None
        if step == self._sent_step:
            return
        self._require_claim()
        folder = f"{CHECKPOINTS}{path.name}" + (f"-{self._latest.fence}" if self._latest.fence > 1 else "")
        self._store.sync(path, join_uri(self._uri, folder))
        if self._store.find_manifest(join_uri(self._uri, folder)) is None:
            raise CorruptRecord(f"{self._uri}/{folder} was sent, and the store does not show it")
        latest, version = self._require_claim()
        if not _write_latest(self._store, self._uri, replace(latest, checkpoint=folder), version):
            # Its own write, whose answer was lost, or that of another attempt.
            latest, _ = self._require_claim()
            if latest.checkpoint != folder:
                raise StoreError(f"{self._uri}/{LATEST_NAME} changed while it was written")
        names = _list_names(self._store, join_uri(self._uri, CHECKPOINTS.rstrip("/")), CHECKPOINTS)
        ranked = [one for one, known in rank_folders(names).items() if known <= step]
        for one in ranked[: -self._keep_last]:
            self._store.remove_record(join_uri(self._uri, one))
        self._sent_step = step

    def _send_model(self, step: int, path: Path) -> None:
        self._require_claim()
        facts = {"run": self._run.path.name, "step": step}
        self._store.sync(path / "model", join_uri(self._uri, FINAL_NAME), facts=facts)


def _mark(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _list_names(store: RecordStore, uri: str, prefix: str = "") -> set[str]:
    root = normalize_uri(uri)
    names = (stored.uri.removeprefix(f"{root}/") for stored in store.list(root))
    # Others may write to the store: a name may lead out of a directory.
    return {f"{prefix}{name}" for name in names if is_inner_name(name)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteRun:
    """The content of a mirror."""

    uri: str
    latest: Latest
    names: frozenset[str]
    """Of all files."""
    checkpoints: dict[str, int]
    """Folders of complete checkpoints with their steps, the one to resume from first."""

    @property
    def step(self) -> int | None:
        """The step from which a restored run resumes; None: it has no checkpoint yet."""
        return next(iter(self.checkpoints.values()), None)


def find_remote_run(uri: str, *, settings: S3Settings | None = None) -> RemoteRun | None:
    """Return a run's mirror; None: nothing was ever mirrored there.

    Raises: CorruptRecord if its latest.json cannot be read; StoreErrors.
    """
    store = open_store(uri, settings)
    if (found := read_latest(store, uri)) is None:
        return None
    names = _list_names(store, uri)
    ranked = [item for item in rank_folders(names).items() if f"{item[0]}/{MANIFEST_NAME}" in names]
    # The one that latest.json names comes first: another attempt may have left a later step.
    ranked.sort(key=lambda item: item[0] == found[0].checkpoint)
    return RemoteRun(uri=uri, latest=found[0], names=frozenset(names), checkpoints=dict(reversed(ranked)))


def restore_run(uri: str, root: Path, *, name: str | None = None, settings: S3Settings | None = None) -> Path:
    """Make a run directory from a run's mirror, so that the run's command resumes from the newest checkpoint.

    The directory gets the mirror's name, or `name`. A checkpoint that is incomplete, damaged, or later than
    the logs is passed over for the one before. Everything is checked by digests; the directory appears when
    it is complete, and the same call resumes an interrupted one. The mirror is only read.
    Raises: CheckRefused if the directory exists; RemoteMissing if the mirror has no checkpoint; StoreErrors.
    """
    uri = normalize_uri(uri)
    target = root / (name or uri.rpartition("/")[2])
    if target.exists():
        raise CheckRefused(
            f"{target} is there already, and {uri} would be restored to it",
            allowed="a directory that does not exist yet",
            next_step="give the same command without --from to go on with it, or remove it",
        )
    make_directory(incoming := target.with_name(f"{target.name}.incoming"))
    run = RunDir(incoming, RunState(name="", spec_digest="", created_at=0.0), FileLock(incoming / LOCK_NAME))
    run.lock_once()
    try:
        _fill(run, uri, settings)
        incoming.rename(target)
    except OSError as error:
        raise explain_write_failure(error, target) from error
    finally:
        run.release()
    return target


def _fill(run: RunDir, uri: str, settings: S3Settings | None) -> None:
    incoming = run.path
    store, remote = open_store(uri, settings), find_remote_run(uri, settings=settings)
    if remote is None or not remote.checkpoints or STATE_NAME not in remote.names:
        raise RemoteMissing(
            f"{uri} has {f'no {LATEST_NAME}' if remote is None else 'no complete checkpoint'}",
            allowed="where a run with store.mirror is mirrored to, once it has sent a checkpoint",
            next_step="check the URI: it ends in checkpoints/ and the name of the run's directory",
        )

    def fetch(name: str) -> None:
        make_directory((incoming / name).parent)
        store.get(join_uri(uri, name), incoming / name)

    side_by_side(fetch, {STATE_NAME, *_LOGS} & remote.names)
    state = parse_state((incoming / STATE_NAME).read_bytes(), join_uri(uri, STATE_NAME))
    last = max((int(line["step"]) for line in run.metrics.read()), default=0)
    step = _fetch_checkpoint(store, remote, incoming / CHECKPOINTS, last)
    own = {*_LOGS, LATEST_NAME, STATE_NAME, LOCK_NAME}
    apart = (CHECKPOINTS, f"{FINAL_NAME}/")
    side_by_side(fetch, [name for name in remote.names - own if not name.startswith(apart)])
    run.truncate_after(step)
    final = store.find_manifest(join_uri(uri, FINAL_NAME))
    is_finished = final is not None and final.facts.get("step") == step
    state = replace(
        state,
        # Of all attempts: those that sent no checkpoint left logs all the same.
        num_attempts=max(state.num_attempts, remote.latest.fence),
        finished_at=state.finished_at if is_finished else None,
    )
    write_bytes_atomically(incoming / STATE_NAME, json.dumps(asdict(state), indent=1).encode())


def _fetch_checkpoint(store: RecordStore, remote: RemoteRun, folder: Path, last: int) -> int:
    """Fetch the best undamaged checkpoint of at most the step `last`, and return its step."""
    failures = []
    for name, step in remote.checkpoints.items():
        path = folder / f"step-{step:06d}"
        try:
            if step > last:
                raise CorruptRecord(f"the logs end at step {last}, before {name}")
            store.get(join_uri(remote.uri, name), path)
        except (CorruptRecord, RemoteMissing) as error:
            failures.append(str(error))
            continue
        for other in set(folder.iterdir()) - {path}:
            other.unlink() if other.is_file() else shutil.rmtree(other)
        return step
    raise CorruptRecord(
        f"none of {len(failures)} checkpoints at {remote.uri} is sound: {failures[0]}",
        allowed="a checkpoint whose files are those that its manifest promises, and logs up to its step",
        next_step="see who else writes there",
    )
