"""The transfers of one container start: checkpoint sync, restore, record upload, log echo.

    <checkpoints>/<host>/step-000020/...COMPLETE     a checkpoint, its manifest last
    <checkpoints>/<host>/run/...                     the run's other files that a restart needs
    <checkpoints>/<host>/starts/<job>/<number>       one file per start of the job

The platform mirrors `<checkpoints>` to S3. It uploads all files it sees, even half-written ones, so files are
written elsewhere and renamed into place. It deletes in S3 what is deleted here, so states are pruned late,
only after newer ones have arrived. Not covered: checkpoints that several hosts write together.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from strop.errors import ConfigError, StoreError
from strop.io.atomic import MANIFEST_NAME, is_complete, verify_directory
from strop.io.redaction import redact
from strop.launch.sagemaker.client import JobObjects
from strop.launch.sagemaker.evaluation_files import EVALUATION_FOLDER, Worker, list_evaluation
from strop.store.policy import URI_VARIABLE
from strop.store.uris import join_uri

NUM_KEPT = 2
POLL_S = 1.0
UPLOAD_EVERY_S = 10.0
_STEP = re.compile(r"step-(\d+)")
_NOT_STATE = frozenset({"checkpoints", "attempts", "job", "members", "latest"})
_RUN_FILES = ("run.json", "spec.toml", "metrics.jsonl", "events.jsonl", "timeline.jsonl")


class CheckpointSync(Worker):
    """Copies complete checkpoints into the directory that the platform mirrors to S3."""

    def __init__(
        self,
        trial_path: Path,
        checkpoint_path: Path,
        host: str,
        staging_path: Path,
        *,
        is_safe: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._trial_path = trial_path
        self._place = checkpoint_path / host
        self._staging_path = staging_path
        self._is_safe = is_safe
        """Whether a state has arrived in S3; only then are older ones pruned."""
        self._lock = threading.Lock()
        super().__init__("checkpoint-sync", self.copy_new, POLL_S)
        self.last_error = ""

    def stop(self) -> int | None:
        """Copy complete checkpoints a last time and end; return the newest kept step."""
        self._join()
        self.copy_new()
        return max((_step_of(path) for path in _complete_states(self._place)), default=None)

    def copy_new(self) -> None:
        """Copy new complete checkpoints, oldest first; then prune."""
        with self._lock:
            kept = {path.name for path in _complete_states(self._place)}
            newest = max((_step_of(self._place / name) for name in kept), default=-1)
            try:
                for path in sorted(_complete_states(self._trial_path / "checkpoints")):
                    if path.name not in kept and _step_of(path) > newest:
                        self._sync_run()
                        staged = self._staging_path / path.name
                        shutil.rmtree(staged, ignore_errors=True)
                        shutil.copytree(path, staged, copy_function=_link_or_copy)
                        (staged / MANIFEST_NAME).rename(self._staging_path / f"{path.name}.{MANIFEST_NAME}")
                        target = self._place / path.name
                        shutil.rmtree(target, ignore_errors=True)
                        _move(staged, target)
                        # The manifest comes last: a partly uploaded directory without it is no state.
                        _move(self._staging_path / f"{path.name}.{MANIFEST_NAME}", target / MANIFEST_NAME)
                states = sorted(_complete_states(self._place), key=_step_of)
                for path in states[:-NUM_KEPT]:
                    if all(self._is_safe(newer.name) for newer in states[-NUM_KEPT:]):
                        # The manifest goes first: a directory that a kill leaves behind is then no state.
                        (path / MANIFEST_NAME).unlink()
                        shutil.rmtree(path, ignore_errors=True)
            except (OSError, StoreError) as error:
                # A checkpoint may be pruned during the copy, or the disk be full: the next one may succeed.
                self.last_error = str(error)

    def _sync_run(self) -> None:
        """Copy the run's other files that have changed, each atomically."""
        for source in sorted(self._trial_path.rglob("*")):
            name = source.relative_to(self._trial_path)
            if name.parts[0] in _NOT_STATE or source.is_symlink() or not source.is_file():
                continue
            if any(part.startswith(".") or ".partial-" in part for part in name.parts):
                continue
            if name.suffix == ".lock" or is_complete(self._trial_path / name.parts[0]):
                continue  # The mirror publishes a finished model; no restart needs it.
            target = self._place / "run" / name
            stat = source.stat()
            if target.exists() and target.stat().st_mtime_ns == stat.st_mtime_ns:
                continue
            staged = self._staging_path / "file"
            staged.parent.mkdir(parents=True, exist_ok=True)
            # Copied and not linked, because these files still grow.
            shutil.copy2(source, staged)
            _move(staged, target)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """The state that a start restored."""

    step: int | None
    """None: there is no state, and the run begins at step 0."""
    reason: str


def restore_newest(
    checkpoint_path: Path, home: Path, job_name: str, *, reaches_store: bool, parent: str = ""
) -> Restored:
    """Restore the newest state into a run's directory; report its source, or why there is none.

    Either the checkpoint directory or the run's mirror may be newer: the platform copies the former at any
    time, and a reclaim comes without a warning. `parent`: the job that this one continues, whose mirror may
    also be ahead.

    Raises: OSError if the disk fails.
    """
    if not reaches_store:
        return restore_state(checkpoint_path, home)
    newest = find_newest_step(checkpoint_path)
    mirrors = {_mirror_uri(home, name): name == job_name for name in (parent, job_name) if name}
    try:
        # The job's own mirror first: once it has any state, it is ahead of the parent's.
        for uri, is_own in reversed(mirrors.items()):
            if (
                uri is not None
                and (restored := _restore_mirror(uri, home, newest, is_own=is_own)) is not None
            ):
                return restored
    except StoreError as error:
        # The checkpoint directory is enough; the store may answer later.
        kept = restore_state(checkpoint_path, home)
        return Restored(step=kept.step, reason=f"{kept.reason}; the mirror was not read: {error}")
    return restore_state(checkpoint_path, home)


def _restore_mirror(uri: str, home: Path, newest: int | None, *, is_own: bool) -> Restored | None:
    from strop.record.mirror import LATEST_NAME, find_remote_run, restore_run
    from strop.store.s3_objects import S3Objects

    remote = find_remote_run(uri)
    if remote is None:
        return None
    if remote.step is None:
        if newest is None and is_own:
            # An earlier start claimed the mirror and was lost before its first checkpoint. The claim would
            # refuse the new start, although there is nothing to protect.
            S3Objects().remove(join_uri(uri, LATEST_NAME))
        return None
    if newest is not None and newest >= remote.step:
        return None
    incoming = home.with_name(f"{home.name}.mirror")
    shutil.rmtree(incoming, ignore_errors=True)
    restored = restore_run(uri, incoming.parent, name=incoming.name)
    # Attempts of earlier starts stay in the store: here they could be mistaken for this start's.
    shutil.rmtree(restored / "attempts", ignore_errors=True)
    shutil.copytree(restored, home, dirs_exist_ok=True, symlinks=True)
    shutil.rmtree(restored)
    own_state = "no state" if newest is None else f"step {newest}"
    return Restored(
        step=remote.step,
        reason=f"the mirror {uri} has step {remote.step}; the checkpoint directory {own_state}",
    )


def _mirror_uri(home: Path, job_name: str) -> str | None:
    """Return the URI that the trainer mirrors the run to, or None."""
    from strop.spec import load_spec

    try:
        store = load_spec(home / "job" / "spec.toml").spec.store
    except ConfigError:
        return None  # The trainer reports it with more detail.
    root = store.uri or os.environ.get(URI_VARIABLE, "")
    if store.mirror is False or not root.startswith("s3://"):
        return None
    return join_uri(root, "checkpoints", store.mirror_as or job_name)


def find_newest_step(checkpoint_path: Path) -> int | None:
    """Return the newest step with a manifest, without reading its files."""
    return max(
        (_step_of(path) for path in checkpoint_path.glob("*/step-*") if is_complete(path)), default=None
    )


def restore_state(checkpoint_path: Path, trial_path: Path) -> Restored:
    """Restore the newest intact state into a run's directory; skip damaged ones with a reason.

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
        run_path = path.parent / "run"
        trial_path.mkdir(parents=True, exist_ok=True)
        if run_path.is_dir():
            shutil.copytree(run_path, trial_path, dirs_exist_ok=True)
        target = trial_path / "checkpoints" / path.name
        partial = target.with_name(f".partial-{path.name}")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(path, partial)
        partial.rename(target)
        reasons.append(f"{path.name} is the newest whole one")
        return Restored(step=_step_of(path), reason="; ".join(reasons))
    reasons.append("no state is there: from step 0")
    return Restored(step=None, reason="; ".join(reasons))


def count_start(checkpoint_path: Path, host: str, job: str) -> int:
    """Count this start; return the number of earlier starts of the job on this host."""
    folder = checkpoint_path / host / "starts" / job
    folder.mkdir(parents=True, exist_ok=True)
    number = sum(1 for path in folder.iterdir() if path.name.isdigit())
    (folder / str(number)).touch()
    return number


Send = Callable[[Path, str], None]
"""Sends a file under a name. Raises: StoreError or OSError."""


def send_to_store(objects: JobObjects, record_uri: str, path: Path, name: str) -> None:
    """Send a file whole to the run's folder in a store."""
    objects.write(f"{record_uri}/{name}", path.read_bytes())


def copy_into(folder: Path, path: Path, name: str) -> None:
    """Copy a file atomically into a folder that the platform mirrors to S3."""
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".partial-{target.name}")
    shutil.copyfile(path, partial)
    partial.rename(target)


class RecordUploader(Worker):
    """Sends changed files of the attempt, every few seconds and at the end.

    They go to the run's folder in the store, or without network to the checkpoint directory. A
    failing store delays only this thread.
    """

    def __init__(
        self,
        send: Send,
        trial_path: Path,
        attempt: str,
        *,
        has_run: bool,
        evaluation_path: Path | None = None,
    ) -> None:
        """`evaluation_path`: the mirrored folder for an evaluation, which has no mirror of its own."""
        self._send, self._trial_path, self._attempt = send, trial_path, attempt
        self._evaluation_path = evaluation_path
        self._has_run = has_run
        """Whether this host writes the run's own files."""
        self._sent: dict[str, tuple[int, int]] = {}
        self._last_error = ""
        # The first upload is early, because the start record shows that the job runs.
        super().__init__("record-upload", self.send_changed, 1.0, UPLOAD_EVERY_S)

    def stop(self) -> None:
        """Send the remaining changes and end."""
        self._join()
        self.send_changed()

    def send_changed(self) -> None:
        """Send every file that changed since it was last sent."""
        attempt_path = self._trial_path / "attempts" / self._attempt
        paths = [path for path in sorted(attempt_path.rglob("*")) if path.is_file()]
        if self._has_run:
            paths += [self._trial_path / name for name in _RUN_FILES]
        if self._evaluation_path is not None:
            paths += list_evaluation(self._trial_path)
        for path in paths:
            name = path.relative_to(self._trial_path).as_posix()
            try:
                stat = path.stat()
                version = (stat.st_mtime_ns, stat.st_size)
                if self._sent.get(name) != version:
                    self._send(path, name)
                    if self._evaluation_path is not None and name.startswith(f"{EVALUATION_FOLDER}/"):
                        copy_into(self._evaluation_path, path, name)
                    self._sent[name] = version
            except FileNotFoundError:
                continue
            except (OSError, StoreError) as error:
                if str(error) != self._last_error:
                    self._last_error = str(error)
                    sys.stderr.write(f"record: {name} was not sent: {error}\n")


class LogEcho(Worker):
    """Copies the roles' logs to standard output as `role| line`, for the platform's log service."""

    def __init__(self, folder: Path, *, hide: tuple[str, ...]) -> None:
        self._folder, self._hide = folder, hide
        self._offsets: dict[str, int] = {}
        super().__init__("log-echo", self.echo_new, 0.5)

    def stop(self) -> None:
        """Copy the remaining lines and end."""
        self._join()
        self.echo_new(is_last=True)

    def echo_new(self, *, is_last: bool = False) -> None:
        """Copy complete new lines, and at the end an incomplete one."""
        for path in sorted(self._folder.glob("*.log")):
            if path.name == "agent.log":
                continue  # It is on standard error already.
            with suppress(OSError), path.open("rb") as file:
                file.seek(self._offsets.get(path.name, 0))
                data = file.read()
                end = len(data) if is_last else data.rfind(b"\n") + 1
                self._offsets[path.name] = self._offsets.get(path.name, 0) + end
                text = redact(data[:end].decode(errors="backslashreplace"), self._hide)
                for line in text.splitlines():
                    sys.stdout.write(f"{path.stem}| {line}\n")
        with suppress(OSError, ValueError):
            sys.stdout.flush()


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
    """Rename; across file systems copy to a temporary name next to the target, and rename that."""
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
