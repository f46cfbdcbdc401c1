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
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, ConfigError, CorruptRecord, StoreError
from strop.io.atomic import (
    explain_write_failure,
    is_complete,
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
        self._open_logs()

    def _open_logs(self) -> None:
        self.metrics = MetricsLog(self.path / "metrics.jsonl")
        self.events = EventLog(self.path / "events.jsonl")
        self.timeline = Timeline(self.path / TIMELINE_NAME)

    @property
    def _logs(self) -> tuple[JsonLines, ...]:
        return self.metrics, self.events, self.timeline

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
        """Create a run directory atomically, locked by this process.

        Raises: ConfigError if the name cannot be a directory name; StoreError if the disk fails.
        """
        _check_name(name)
        created_at = time.time() if now is None else now
        state = RunState(name=name, spec_digest=spec_digest, created_at=created_at, facts=dict(facts))
        stamp = datetime.fromtimestamp(created_at, tz=UTC).strftime("%Y%m%d-%H%M%S")
        partial_path = partial_path_of(root / f"{name}-{stamp}")
        lock = FileLock(partial_path / LOCK_NAME)
        path = None
        try:
            root.mkdir(parents=True, exist_ok=True)
            partial_path.mkdir()
            # Locked before it gets its name, so that no process sees it unlocked.
            lock.acquire()
            for folder in _FOLDERS:
                (partial_path / folder).mkdir()
            write_bytes_atomically(partial_path / "spec.toml", spec_text.encode())
            write_bytes_atomically(partial_path / "env.txt", describe_environment().encode())
            write_bytes_atomically(partial_path / STATE_NAME, _state_to_bytes(state))
            path = _claim_name(partial_path, root / f"{name}-{stamp}")
        except OSError as error:
            raise explain_write_failure(error, root / f"{name}-{stamp}") from error
        finally:
            if path is None:
                lock.release()
            shutil.rmtree(partial_path, ignore_errors=True)
        lock.path = path / LOCK_NAME
        return cls(path, state, lock)

    @classmethod
    def adopt(
        cls, path: Path, name: str, spec_text: str, spec_digest: str, facts: Mapping[str, Any]
    ) -> RunDir:
        """Turn a folder that a launcher prepared into a locked run directory, and keep its files.

        Raises: ConfigError if the name cannot be a directory name; CheckRefused if another process holds its
            lock; StoreError if the disk fails.
        """
        _check_name(name)
        state = RunState(name=name, spec_digest=spec_digest, created_at=time.time(), facts=dict(facts))
        run = cls(path, state, FileLock(path / LOCK_NAME))
        if not run._lock.try_acquire():
            raise run._in_use()
        is_made = False
        try:
            if (path / STATE_NAME).exists():
                # Another process made it, and has ended since.
                run.state, is_made = _read_state(path), True
                return run
            for folder in _FOLDERS:
                (path / folder).mkdir(exist_ok=True)
            write_bytes_atomically(path / "spec.toml", spec_text.encode())
            write_bytes_atomically(path / "env.txt", describe_environment().encode())
            # Last: a folder without this file is no run.
            write_bytes_atomically(path / STATE_NAME, _state_to_bytes(state))
            is_made = True
        except OSError as error:
            raise explain_write_failure(error, path) from error
        finally:
            if not is_made:
                run.release()
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
        while not self._lock.try_acquire():
            if time.monotonic() >= deadline:
                raise self._in_use()
            time.sleep(0.1)
        self.state = _read_state(self.path)
        for folder in (".", *_STEP_FOLDERS, "checkpoints"):
            remove_leftovers(self.path / folder)

    def move_to(self, path: Path) -> None:
        """Rename the directory and keep its lock. Call it before anything is logged.

        Raises: StoreError if the name is taken or the disk fails.
        """
        self._check_locked()
        try:
            # An existing run is never empty, so rename cannot replace one.
            self.path.rename(path)
        except OSError as error:
            raise explain_write_failure(error, path) from error
        self.path, self._lock.path = path, path / LOCK_NAME
        self._open_logs()

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
        content = {
            "attempt": attempt.index,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started_at": time.time(),
            "facts": dict(facts or {}),
        }
        write_bytes_atomically(attempt.path / "attempt.json", json.dumps(content, indent=1).encode())
        point_latest(self.path, attempt.path.name)
        return attempt

    def end_attempt(self, attempt: Attempt, *, cause: str, exit_code: int, step: int) -> None:
        """Record why an attempt ended; an attempt without this record was killed."""
        self._check_locked()
        content = json.loads((attempt.path / "attempt.json").read_bytes())
        content |= {"ended_at": time.time(), "cause": cause, "exit_code": exit_code, "step": step}
        write_bytes_atomically(attempt.path / "attempt.json", json.dumps(content, indent=1).encode())

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
                if (step_of(path) or 0) <= step:
                    continue
                if path.is_dir():
                    # Replies of an evaluation beside the run.
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def checkpoint_steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, in order. Bytes are not verified."""
        if not self.checkpoints_path.is_dir():
            return []
        paths = {step_of(path): path for path in self.checkpoints_path.iterdir()}
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
        """Remove all but the newest complete checkpoints (at least one); return the removed steps."""
        self._check_locked()
        removed = self.checkpoint_steps()[: -max(1, num_kept)]
        for step in removed:
            remove_directory(self.checkpoint_path(step))
        return removed

    def sync(self) -> None:
        """Make the logs durable; call it before a checkpoint is sealed."""
        for log in self._logs:
            log.sync()

    def _in_use(self) -> CheckRefused:
        return CheckRefused(
            f"run {self.path} is in use by {self._lock.holder() or 'another process'}",
            allowed="one process per run directory",
            next_step="wait for it or stop it, or give this run another name",
        )

    def _save(self, state: RunState) -> None:
        write_bytes_atomically(self.path / STATE_NAME, _state_to_bytes(state))
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
        if not is_wanted:
            continue
        try:
            run.acquire()
        except CheckRefused:
            continue
        # The run may have been finished between reading its state and taking its lock.
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


def _claim_name(partial_path: Path, wanted_path: Path) -> Path:
    """Rename to the first free name. An existing run is never empty, so rename cannot replace it."""
    for number in range(1, 1000):
        path = wanted_path if number == 1 else wanted_path.with_name(f"{wanted_path.name}-{number}")
        try:
            return partial_path.rename(path)
        except OSError:
            if not path.exists():
                raise
    raise StoreError(
        f"{wanted_path} and its numbered successors are all taken",
        allowed="fewer than 1000 runs of one name per second",
        next_step="wait a second and start again",
    )


def _state_to_bytes(state: RunState) -> bytes:
    return json.dumps(asdict(state), indent=1).encode()


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
