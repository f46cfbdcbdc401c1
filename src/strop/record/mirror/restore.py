"""Restore a run directory from its mirror, on any machine.

The mirror is only read. An unfinished copy is called `NAME.incoming`; the same call resumes it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, CorruptRecord, RemoteMissing, StoreError
from strop.io.atomic import (
    explain_write_failure,
    is_inner_name,
    seal_directory,
    verify_directory,
    write_bytes_atomically,
)
from strop.io.lock import FileLock
from strop.record.mirror.claim import LATEST_NAME, Latest, read_latest
from strop.record.mirror.layout import RUN_FOLDER, TRACES, RecordName
from strop.record.run_dir import LOCK_NAME, STATE_NAME, TIMELINE_NAME, step_of
from strop.store.opening import open_store
from strop.store.record_store import INCOMING_SUFFIX, RecordStore, side_by_side
from strop.store.s3_client import S3Settings
from strop.store.uris import join_uri, normalize_uri

NUM_OBJECT_ATTEMPTS = 3
"""Attempts to fetch an object that its writer replaces meanwhile."""
_CURVE_FILES = frozenset({"metrics.jsonl", "events.jsonl", TIMELINE_NAME, STATE_NAME, "spec.toml", "env.txt"})


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteRun:
    """The content of a mirror."""

    uri: str
    latest: Latest
    records: tuple[RecordName, ...]
    """Complete checkpoints, the one to resume from first."""

    @property
    def step(self) -> int | None:
        """The step from which a restored run resumes; None: it has no checkpoint yet."""
        return self.records[0].step if self.records else None

    def record_uri(self, name: RecordName) -> str:
        """Return the URI of a checkpoint's record."""
        return name.uri(self.uri, self.latest.run.name)


def find_remote_run(uri: str, *, settings: S3Settings | None = None) -> RemoteRun | None:
    """Return a run's mirror; None: nothing was ever mirrored there.

    Raises: CorruptRecord if its latest.json cannot be read; StoreErrors.
    """
    return _find_run(open_store(uri, settings), uri)


def restore_run(uri: str, root: Path, *, name: str | None = None, settings: S3Settings | None = None) -> Path:
    """Make a run directory from a run's mirror, so that the run's command resumes from the newest checkpoint.

    The directory gets the mirror's name, or `name`. An incomplete or damaged checkpoint is skipped for the
    one before. Everything is checked by digests; the directory appears when it is complete.
    Raises: CheckRefused if the directory exists; RemoteMissing if the mirror has no checkpoint; StoreErrors.
    """
    uri = normalize_uri(uri)
    store = open_store(uri, settings)
    target = root / (name or uri.rpartition("/")[2])
    if target.exists():
        raise CheckRefused(
            f"{target} is there already, and {uri} would be restored to it",
            allowed="a directory that does not exist yet",
            next_step="give the same command without --from to go on with it, or remove it",
        )
    incoming = target.with_name(target.name + INCOMING_SUFFIX)
    try:
        with _working_in(incoming):
            found = _find_run(store, uri)
            if found is None or not found.records:
                raise RemoteMissing(
                    f"{uri} has {f'no {LATEST_NAME}' if found is None else 'no complete checkpoint'}",
                    allowed="where a run with store.mirror is mirrored to, once it has sent a checkpoint",
                    next_step="check the URI: it ends in checkpoints/ and the name of the run's directory",
                )
            run_path = _restore_record(store, found, incoming)
            _restore_traces(store, uri, run_path)
            run_path.rename(target)
            # Under the lock: a process that waits for it then finds the target.
            shutil.rmtree(incoming, ignore_errors=True)
    except OSError as error:
        raise explain_write_failure(error, target) from error
    return target


def _find_run(store: RecordStore, uri: str) -> RemoteRun | None:
    found = read_latest(store, uri)
    if found is None:
        return None
    latest = found[0]
    names = [RecordName.parse(folder, latest.run.name) for folder in store.objects.list_folders(uri)]
    remote = RemoteRun(uri=uri, latest=latest, records=())
    whole = []
    for name in filter(None, names):
        with suppress(CorruptRecord):
            if store.find_manifest(remote.record_uri(name)) is not None:
                whole.append(name)
    # The record that latest.json names comes first: another attempt may have left a later step.
    whole.sort(key=lambda name: (remote.record_uri(name) == latest.uri, name), reverse=True)
    return RemoteRun(uri=uri, latest=latest, records=tuple(whole))


def _restore_record(store: RecordStore, found: RemoteRun, incoming: Path) -> Path:
    """Fetch the newest undamaged checkpoint, and build the run directory around it."""
    failures = []
    for name in found.records:
        record_path = incoming / "record" / f"step-{name.step:06d}"
        try:
            store.get(found.record_uri(name), record_path)
        except (CorruptRecord, RemoteMissing) as error:
            failures.append(str(error))
            continue
        # Set if the run finished with this checkpoint and all of it was sent.
        finished_at: float | None = None
        final = store.find_manifest(join_uri(found.uri, f"{found.latest.run.name}_final"))
        state = store.objects.read_versioned(join_uri(found.uri, TRACES, STATE_NAME))
        if final is not None and state is not None and final.facts.get("step") == name.step:
            finished_at = json.loads(state[0])["finished_at"]
        return _build_run(found, name, record_path, incoming / "directory", finished_at)
    raise CorruptRecord(
        f"none of {len(failures)} checkpoints at {found.uri} is sound: {failures[0]}",
        allowed="a checkpoint whose files are those that its manifest promises",
        next_step="see who else writes there",
    )


def _build_run(
    found: RemoteRun, name: RecordName, record_path: Path, run_path: Path, finished_at: float | None
) -> Path:
    shutil.rmtree(run_path, ignore_errors=True)
    for folder in ("attempts", "rollouts", "eval", "checkpoints"):
        (run_path / folder).mkdir(parents=True)
    manifest = verify_directory(record_path, can_trust_mtime=True)
    checkpoint_path = run_path / "checkpoints" / f"step-{name.step:06d}"
    inside = f"{RUN_FOLDER}/"
    for file in manifest.files:
        place = run_path / file.removeprefix(inside) if file.startswith(inside) else checkpoint_path / file
        place.parent.mkdir(parents=True, exist_ok=True)
        # Moved, not copied: after a kill here, the next call fetches the record again.
        (record_path / file).rename(place)
    facts = {key: value for key, value in manifest.facts.items() if key != "mirror"}
    known = {file: sha for file, sha in manifest.sha256_by_name.items() if not file.startswith(inside)}
    seal_directory(checkpoint_path, facts=facts, known_sha256=known)
    state: dict[str, Any] = json.loads((run_path / STATE_NAME).read_bytes())
    # Count all attempts that ever began: their logs are here.
    state["num_attempts"] = max(int(state["num_attempts"]), found.latest.attempt)
    state["finished_at"] = finished_at
    write_bytes_atomically(run_path / STATE_NAME, json.dumps(state, indent=1).encode())
    return run_path


def _restore_traces(store: RecordStore, uri: str, run_path: Path) -> None:
    """Fetch rollouts and logs. The record's copies of the run's files stay: they end at its step."""
    (checkpoint_path,) = (run_path / "checkpoints").iterdir()
    step = step_of(checkpoint_path) or 0

    def is_wanted(name: str) -> bool:
        # The step is in the file's name, or in that of its folder: an evaluation's replies.
        steps = [step_of(Path(part)) or 0 for part in Path(name).parts]
        return name not in _CURVE_FILES and max(steps, default=0) <= step

    def fetch(name: str) -> bool:
        path = run_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for num_left in reversed(range(NUM_OBJECT_ATTEMPTS)):
            try:
                return store.get_object(uris[name], path)
            except RemoteMissing:
                raise
            except StoreError:  # The object was replaced meanwhile.
                if not num_left:
                    raise
        raise AssertionError("the last attempt returns or raises")

    root = normalize_uri(join_uri(uri, TRACES))
    listed = {stored.uri.removeprefix(f"{root}/"): stored.uri for stored in store.list(root)}
    # Others may write to the store: leave out names that lead out of the directory.
    uris = {name: place for name, place in listed.items() if is_inner_name(name) and is_wanted(name)}
    side_by_side(fetch, uris)


@contextmanager
def _working_in(incoming: Path) -> Iterator[None]:
    """Lock a directory that is being filled.

    Raises: CheckRefused if another process fills it.
    """
    incoming.mkdir(parents=True, exist_ok=True)
    lock = FileLock(incoming / LOCK_NAME)
    if not lock.try_acquire():
        raise CheckRefused(
            f"{incoming} is being filled by {lock.holder() or 'another process'}",
            allowed="one transfer to a place at a time",
            next_step="wait for it, or end it and give the same command again",
        )
    try:
        yield
    finally:
        lock.release()
