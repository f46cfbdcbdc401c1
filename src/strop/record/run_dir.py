"""The directory of one run: its layout, its lock, its attempts and its state.

    <name>-<YYYYmmdd-HHMMSS>/          UTC, with -2, -3 ... for runs born in the same second
      run.json  spec.toml  env.txt  lock
      attempts/<k>/{attempt.json, train.log}          latest -> attempts/<k>; in a job: attempts/<its name>
      metrics.jsonl  events.jsonl  timeline.jsonl  {rollouts,discarded}/step-000012.parquet
      checkpoints/step-000020/{..., COMPLETE}  eval/<task>-step-000020.json  report.html
      trackers/{<name>.json, <name>/}          a tracker's progress, and its files

Step 12 in a name is the state after 12 steps, or the data of the 12th step.
Writing in a run requires its lock; reading does not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, ConfigError, CorruptRecord, StoreError, StropError
from strop.io.atomic import (
    explain_write_failure,
    is_complete,
    make_directory,
    remove_directory,
    write_bytes_atomically,
)
from strop.io.leftovers import partial_path_of, remove_leftovers
from strop.io.lock import FileLock
from strop.record.events import EventLog, JsonLines, MetricsLog
from strop.record.fence import ATTEMPT_VARIABLE, require_unfenced
from strop.record.parts import describe_environment
from strop.record.timeline import Timeline

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
STEP_PATTERN = re.compile(r"step-(\d{6,})(?:\.[a-z]+)?$")
WEIGHTS_FACT = "weights_digest"
"""Fact in a checkpoint's manifest: the digest of its model's tensors, which evaluations record."""
TOKENIZER_NAME = "tokenizer.json"
STATE_NAME = "run.json"
LOCK_NAME = "lock"
TIMELINE_NAME = "timeline.jsonl"
_FOLDERS = ("attempts", "rollouts", "checkpoints", "eval")
DISCARDED = "discarded"
"""Folder of the rollouts that were sampled and replaced, if there are any."""
_STEP_FOLDERS = ("rollouts", DISCARDED, "eval")
"""Folders from which a resume removes the files of later steps."""
OVERTAKE_LIMIT_S = 60.0
"""Longest wait of a job's attempt for the lock of the attempt before, which is fenced and ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The content of run.json."""

    name: str
    spec_digest: str
    created_at: float
    """Unix seconds."""
    num_attempts: int = 0
    finished_at: float | None = None
    """Unix seconds; None until every requested step is trained."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Identity of the run's inputs: model digest, task version, machine. JSON values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One process of a run, from its start to its end."""

    index: int
    """From 1."""
    path: Path

    @property
    def log_path(self) -> Path:
        """The output of this attempt's training process."""
        return self.path / "train.log"


class RunDir:
    """The directory of one run. Use `create`, `open` or `find_resumable` to get one."""

    def __init__(self, path: Path, state: RunState, lock: FileLock) -> None:
        self.path = path
        self.state = state
        self._lock = lock
        self._holding, self._held_step = threading.Lock(), -1
        self.metrics = MetricsLog(self.path / "metrics.jsonl")
        self.events = EventLog(self.path / "events.jsonl")
        self.timeline = Timeline(self.path / TIMELINE_NAME)
        self._logs: tuple[JsonLines, ...] = self.metrics, self.events, self.timeline

    @classmethod
    def create(
        cls,
        root: Path,
        name: str,
        spec_text: str,
        spec_digest: str,
        facts: Mapping[str, Any],
        *,
        now: float | None = None,
    ) -> RunDir:
        """Make a directory of the run's name and the time a run, and return it with its lock held.

        Raises: like `adopt`.
        """
        created_at = time.time() if now is None else now
        stamp = datetime.fromtimestamp(created_at, tz=UTC).strftime("%Y%m%d-%H%M%S")
        path = _take_name(root, name, f"{name}-{stamp}")
        return cls.adopt(path, name, spec_text, spec_digest, facts, now=created_at)

    @classmethod
    def adopt(
        cls,
        path: Path,
        name: str,
        spec_text: str,
        spec_digest: str,
        facts: Mapping[str, Any],
        *,
        now: float | None = None,
    ) -> RunDir:
        """Make a new folder, or one that a launcher prepared, a run, and return it with its lock held.

        The files in it stay. A run that another process made of it meanwhile is returned as it is.

        Raises: ConfigError if the name cannot be a directory name; CheckRefused if another process holds its
            lock; StoreError if the disk fails, after which nothing new is there.
        """
        _check_name(name)
        created_at = time.time() if now is None else now
        state = RunState(name=name, spec_digest=spec_digest, created_at=created_at, facts=dict(facts))
        make_directory(path)
        run = cls(path, state, FileLock(path / LOCK_NAME))
        run.lock_once()
        is_new = os.listdir(path) == [LOCK_NAME]
        try:
            if (path / STATE_NAME).exists():
                run.state = _read_state(path)
                return run
            for folder in _FOLDERS:
                make_directory(path / folder)
            write_bytes_atomically(path / "spec.toml", spec_text.encode())
            write_bytes_atomically(path / "env.txt", describe_environment().encode())
            # Last: a folder without this file is no run.
            run._save(state)
        except StropError:
            if is_new:
                shutil.rmtree(path, ignore_errors=True)
            run.release()
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open a run for reading; call `acquire` before writing in it.

        Raises: StoreError if it is not a run directory; CorruptRecord if run.json is damaged.
        """
        return cls(path, _read_state(path), FileLock(path / LOCK_NAME))

    @property
    def is_locked_here(self) -> bool:
        """Whether this object holds the run's lock."""
        return self._lock.is_held

    @property
    def is_finished(self) -> bool:
        """Whether every requested step was trained."""
        return self.state.finished_at is not None

    @property
    def spec_path(self) -> Path:
        """The resolved spec."""
        return self.path / "spec.toml"

    @property
    def checkpoints_path(self) -> Path:
        """The folder of all checkpoints."""
        return self.path / "checkpoints"

    def rollouts_path(self, step: int) -> Path:
        """The file of the rollouts of a step."""
        return self.path / "rollouts" / f"{_step_name(step)}.parquet"

    def discarded_path(self, step: int) -> Path:
        """The file of the rollouts that were sampled for a step and replaced; it may not exist."""
        return self.path / DISCARDED / f"{_step_name(step)}.parquet"

    def rollouts_files(self) -> list[Path]:
        """Return the existing files of rollouts, by step."""
        return sorted((self.path / "rollouts").glob("step-*.parquet"))

    def checkpoint_path(self, step: int) -> Path:
        """The directory of the checkpoint after `step` steps."""
        return self.checkpoints_path / _step_name(step)

    def eval_path(self, task: str, step: int) -> Path:
        """The file of the evaluation of a task after `step` steps."""
        return self.path / "eval" / f"{task}-{_step_name(step)}.json"

    def acquire(self) -> None:
        """Take the run's lock and reread its state.

        Raises: CheckRefused naming the holder if another process holds the lock.
        """
        deadline = time.monotonic() + (OVERTAKE_LIMIT_S if ATTEMPT_VARIABLE in os.environ else 0.0)
        while time.monotonic() < deadline and not self._lock.try_acquire():
            time.sleep(0.1)
        self.lock_once()
        self.state = _read_state(self.path)
        for folder in (".", *_STEP_FOLDERS, "checkpoints"):
            remove_leftovers(self.path / folder)

    def release(self) -> None:
        """Close the logs and release the lock."""
        for log in self._logs:
            log.close()
        self._lock.release()

    def __enter__(self) -> RunDir:
        """Take the lock, unless it is held already."""
        if not self.is_locked_here:
            self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self.release()

    def next_attempt(self) -> Attempt:
        """Return the attempt that `begin_attempt` would start now."""
        return self._attempt_of(self.state.num_attempts + 1)

    def _attempt_of(self, index: int) -> Attempt:
        # A launcher sets the name of its attempt's folder.
        name = os.environ.get(ATTEMPT_VARIABLE) or str(index)
        return Attempt(index=index, path=self.path / "attempts" / name)

    def begin_attempt(self, facts: Mapping[str, Any] | None = None) -> Attempt:
        """Start the next attempt: its directory, attempt.json and the `latest` link.

        Raises: CheckRefused if this process does not hold the lock; StoreError if the disk fails.
        """
        self._check_locked()
        self._save(replace(self.state, num_attempts=self.state.num_attempts + 1))
        attempt = self._attempt_of(self.state.num_attempts)
        attempt.path.mkdir(parents=True, exist_ok=True)
        who = {"attempt": attempt.index, "pid": os.getpid(), "host": socket.gethostname()}
        content = {**who, "started_at": time.time(), "facts": dict(facts or {})}
        _write_json(attempt.path / "attempt.json", content)
        point_latest(self.path, attempt.path.name)
        return attempt

    def end_attempt(self, attempt: Attempt, *, cause: str, exit_code: int, step: int) -> None:
        """Record why an attempt ended; an attempt without this record was killed."""
        self._check_locked()
        content = json.loads((attempt.path / "attempt.json").read_bytes())
        content |= {"ended_at": time.time(), "cause": cause, "exit_code": exit_code, "step": step}
        _write_json(attempt.path / "attempt.json", content)

    def mark_finished(self) -> None:
        """Record that every requested step was trained: the run is not resumed any more.

        Raises: CheckRefused if this process does not hold the lock; StoreError if the disk fails.
        """
        self._check_locked()
        self._save(replace(self.state, finished_at=time.time()))

    def truncate_after(self, step: int) -> None:
        """Remove the records of steps after `step`, which a resume writes again.

        These are metrics, events, spans, rollouts and evaluations. Checkpoints stay: a later one that is
        damaged is replaced when its step is reached again.

        Raises: CheckRefused if this process does not hold the lock; CorruptRecord if a log is damaged.
        """
        self._check_locked()
        for log in self._logs:
            log.truncate_after(step)
        for folder in _STEP_FOLDERS:
            for path in sorted((self.path / folder).glob("*")):
                if (step_of(path) or 0) > step:
                    # A folder has the replies of an evaluation beside the run.
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def checkpoint_steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, in order. Bytes are not verified."""
        paths = {step_of(path): path for path in self.checkpoints_path.glob("step-*")}
        return sorted(step for step, path in paths.items() if step is not None and is_complete(path))

    def latest_checkpoint(self) -> tuple[int, Path] | None:
        """Return step and path of the newest complete checkpoint, or None.

        Incomplete directories are skipped. A complete one may still be damaged: verify it with
        `store.verify_directory`, and let a refusal stop the run, since skipping it silently would
        hide a failing disk.
        """
        steps = self.checkpoint_steps()
        return (steps[-1], self.checkpoint_path(steps[-1])) if steps else None

    def keep_checkpoints(self, num_kept: int) -> list[int]:
        """Remove all but the newest complete checkpoints (at least one); return the removed steps.

        One that is held stays.
        """
        self._check_locked()
        with self._holding:
            steps = self.checkpoint_steps()[: -max(1, num_kept)]
            removed = [step for step in steps if step != self._held_step]
            for step in removed:
                remove_directory(self.checkpoint_path(step))
        return removed

    @contextmanager
    def hold_latest(self) -> Iterator[tuple[int, Path] | None]:
        """Return `latest_checkpoint`, and keep `keep_checkpoints` of other threads from removing it."""
        with self._holding:
            latest = self.latest_checkpoint()
            self._held_step = -1 if latest is None else latest[0]
        try:
            yield latest
        finally:
            self._held_step = -1

    def sync(self) -> None:
        """Make the logs durable; call it before a checkpoint is sealed."""
        for log in self._logs:
            log.sync()

    def lock_once(self) -> None:
        """Take the run's lock, without waiting. Raises: CheckRefused naming the holder."""
        if not self._lock.try_acquire():
            raise CheckRefused(
                f"run {self.path} is in use by {self._lock.holder() or 'another process'}",
                allowed="one process per run directory",
                next_step="wait for it or stop it, or give this run another name",
            )

    def _save(self, state: RunState) -> None:
        _write_json(self.path / STATE_NAME, asdict(state))
        self.state = state

    def _check_locked(self) -> None:
        if not self.is_locked_here:
            raise CheckRefused(
                f"run {self.path} was opened for reading only",
                allowed="changes by the process that holds the run's lock",
                next_step="call acquire() first",
            )
        require_unfenced(self.path)


def list_runs(root: Path, name: str | None = None) -> list[RunDir]:
    """Return the runs under `root`, newest first, opened for reading. Other directories are left out.

    With `name`, only directories whose name begins with it and a dash are read.

    Raises: CorruptRecord if a run.json is damaged.
    """
    pattern = f"{name}-*/{STATE_NAME}" if name else f"*/{STATE_NAME}"
    paths = [path.parent for path in root.glob(pattern) if ".partial-" not in path.parent.name]
    runs = [RunDir.open(path) for path in paths]
    return sorted(runs, key=lambda run: (run.state.created_at, run.path.name), reverse=True)


def find_resumable(root: Path, name: str, spec_digest: str) -> RunDir | None:
    """Return the newest unfinished run of this name and spec, with its lock held, or None.

    Runs that another process holds are skipped.
    """
    remove_leftovers(root)
    for run in list_runs(root, name):
        is_wanted = run.state.name == name and run.state.spec_digest == spec_digest and not run.is_finished
        if is_wanted:
            with suppress(CheckRefused):
                run.acquire()
                # It may have been finished between reading its state and taking its lock.
                if not run.is_finished:
                    return run
                run.release()
    return None


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint, rollouts or evaluation file, or None."""
    match = STEP_PATTERN.search(path.name)
    return int(match[1]) if match else None


def _step_name(step: int) -> str:
    return f"step-{step:06d}"


def _check_name(name: str) -> None:
    if not NAME_PATTERN.fullmatch(name) or ".partial-" in name:
        raise ConfigError(
            f"run name {name!r} cannot be a directory name",
            allowed="1 to 80 letters, digits, dots, dashes and underscores, the first a letter or digit",
            next_step="change `name` in the run file",
        )


def _take_name(root: Path, name: str, wanted: str) -> Path:
    """Make the first free directory of a name in `root`: runs of the same second get numbers."""
    _check_name(name)
    make_directory(root)
    path, number = root / wanted, 1
    while True:
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            path = root / f"{wanted}-{number}"
        except OSError as error:
            raise explain_write_failure(error, path) from error
        else:
            return path


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_bytes_atomically(path, json.dumps(content, indent=1).encode())


def _read_state(path: Path) -> RunState:
    try:
        return parse_state((path / STATE_NAME).read_bytes(), path / STATE_NAME)
    except OSError as error:
        raise StoreError(
            f"{path} is not a run directory: {STATE_NAME} cannot be read ({error.strerror})",
            allowed="a directory that a training run made",
            next_step="give the directory that holds run.json and spec.toml",
        ) from error


def parse_state(data: bytes, place: Path | str) -> RunState:
    """Parse run.json; `place` names it. Raises: CorruptRecord if it is damaged."""
    try:
        return RunState(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise CorruptRecord(
            f"{place} is damaged ({error})",
            allowed="the JSON that strop wrote",
            next_step="move this run aside; its checkpoints and rollouts can still be read",
        ) from error


def point_latest(run_path: Path, attempt: str) -> None:
    """Point the link `latest` to an attempt's directory. Raises: StoreError if the disk fails."""
    link_path = partial_path_of(run_path / "latest")
    try:
        link_path.symlink_to(Path("attempts") / attempt)
        link_path.replace(run_path / "latest")
    except OSError as error:
        raise explain_write_failure(error, run_path / "latest") from error
