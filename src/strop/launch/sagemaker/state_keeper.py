"""The run's state in the directory that the platform keeps in step with S3, and its way back.

    <checkpoints>/<host>/step-000020/...COMPLETE     a checkpoint, its manifest last
    <checkpoints>/<host>/run/...                     what else the run goes on with
    <checkpoints>/<host>/starts/<job>/<number>       how often the job has begun

The platform uploads whatever it sees, half-written files too: everything is written outside and renamed in.
What it no longer sees it deletes in S3, so states are pruned late, and only once newer ones are there.
Not covered: checkpoints that several hosts write together; one host writes the run's directory.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from strop.errors import StoreError
from strop.io.atomic import MANIFEST_NAME, is_complete, verify_directory

NUM_KEPT = 2
POLL_S = 1.0
_STEP = re.compile(r"step-(\d+)")
_NOT_STATE = frozenset({"checkpoints", "attempts", "job", "members", "latest"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a start found."""

    step: int | None
    """None: nothing, the run begins at step 0."""
    reason: str


class StateKeeper:
    """Copies what is complete; a thread does so while the run goes on."""

    def __init__(
        self,
        member_path: Path,
        checkpoint_path: Path,
        host: str,
        staging_path: Path,
        *,
        is_safe: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._member_path = member_path
        self._place = checkpoint_path / host
        self._staging_path = staging_path
        self._is_safe = is_safe
        """Whether a state has arrived in S3; older ones are pruned only then."""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="state-keeper", daemon=True)
        self.last_error = ""

    def start(self) -> None:
        """Begin to copy every checkpoint as soon as it is complete."""
        self._thread.start()

    def stop(self) -> int | None:
        """Copy what is complete now and end; return the newest step that is kept."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self.copy_new()
        return max((_step_of(path) for path in _complete_states(self._place)), default=None)

    def copy_new(self) -> None:
        """Copy complete checkpoints that are not there yet, oldest first; then prune."""
        with self._lock:
            kept = {path.name for path in _complete_states(self._place)}
            newest = max((_step_of(self._place / name) for name in kept), default=-1)
            try:
                for path in sorted(_complete_states(self._member_path / "checkpoints")):
                    if path.name not in kept and _step_of(path) > newest:
                        self._copy(path)
                self._prune()
            except (OSError, StoreError) as error:
                # A checkpoint may be pruned while it is copied, a disk may be full: the next one will do.
                self.last_error = str(error)

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_S):
            self.copy_new()

    def _copy(self, path: Path) -> None:
        self._sync_run()
        staged = self._staging_path / path.name
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(path, staged, copy_function=_link_or_copy)
        (staged / MANIFEST_NAME).rename(self._staging_path / f"{path.name}.{MANIFEST_NAME}")
        target = self._place / path.name
        shutil.rmtree(target, ignore_errors=True)
        _move(staged, target)
        # Last: a directory without it is no state, whatever of it has been uploaded.
        _move(self._staging_path / f"{path.name}.{MANIFEST_NAME}", target / MANIFEST_NAME)

    def _sync_run(self) -> None:
        """Bring the run's other files up to date; each appears whole."""
        for source in sorted(self._member_path.rglob("*")):
            name = source.relative_to(self._member_path)
            if name.parts[0] in _NOT_STATE or source.is_symlink() or not source.is_file():
                continue
            if any(part.startswith(".") or ".partial-" in part for part in name.parts):
                continue
            if name.suffix == ".lock" or is_complete(self._member_path / name.parts[0]):
                continue  # A finished model is published by the mirror; it continues nothing.
            target = self._place / "run" / name
            found = source.stat()
            if target.exists() and target.stat().st_mtime_ns == found.st_mtime_ns:
                continue
            staged = self._staging_path / "file"
            staged.parent.mkdir(parents=True, exist_ok=True)
            # A copy, no link: these files still grow.
            shutil.copy2(source, staged)
            _move(staged, target)

    def _prune(self) -> None:
        states = sorted(_complete_states(self._place), key=_step_of)
        for path in states[:-NUM_KEPT]:
            if all(self._is_safe(newer.name) for newer in states[-NUM_KEPT:]):
                # The manifest first: what is left of a kill in between is no state.
                (path / MANIFEST_NAME).unlink()
                shutil.rmtree(path, ignore_errors=True)


def find_newest_step(checkpoint_path: Path) -> int | None:
    """Return the newest step that says it is complete; its files are not read."""
    return max(
        (_step_of(path) for path in checkpoint_path.glob("*/step-*") if is_complete(path)), default=None
    )


def restore_state(checkpoint_path: Path, member_path: Path) -> Restored:
    """Bring the newest state that is whole back into a run's directory; others are passed over with a reason.

    Raises: OSError if the disk fails.
    """
    reasons: list[str] = []
    for path in sorted(checkpoint_path.glob("*/step-*"), key=_step_of, reverse=True):
        if not is_complete(path):
            reasons.append(f"{path.name} has no {MANIFEST_NAME}")
            continue
        try:
            verify_directory(path)
        except StoreError as error:
            reasons.append(str(error))
            continue
        _restore(path, member_path)
        reasons.append(f"{path.name} is the newest whole one")
        return Restored(step=_step_of(path), reason="; ".join(reasons))
    reasons.append("no state is there: from step 0")
    return Restored(step=None, reason="; ".join(reasons))


def count_start(checkpoint_path: Path, host: str, job: str) -> int:
    """Return how often this job began on this host before, and note that it does once more."""
    folder = checkpoint_path / host / "starts" / job
    folder.mkdir(parents=True, exist_ok=True)
    number = sum(1 for path in folder.iterdir() if path.name.isdigit())
    (folder / str(number)).touch()
    return number


def _restore(path: Path, member_path: Path) -> None:
    run_path = path.parent / "run"
    member_path.mkdir(parents=True, exist_ok=True)
    if run_path.is_dir():
        shutil.copytree(run_path, member_path, dirs_exist_ok=True)
    target = member_path / "checkpoints" / path.name
    partial = target.with_name(f".partial-{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(path, partial)
    partial.rename(target)


def _complete_states(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if is_complete(path)]


def _step_of(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _move(source: Path, target: Path) -> None:
    """Rename; where the directory is another file system, copy beside and rename there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.rename(target)
    except OSError:
        aside = target.with_name(f".partial-{target.name}")
        if source.is_dir():
            shutil.copytree(source, aside)
            shutil.rmtree(source)
        else:
            shutil.copy2(source, aside)
            source.unlink()
        aside.rename(target)
