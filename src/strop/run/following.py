"""Evaluate a run's checkpoints while it trains: always the newest without a result, and the last one.

Each is evaluated in a separate process (`strop eval CHECKPOINT --config FILE`), whose memory is free
afterwards and whose crash affects one checkpoint. The only state is on disk: a checkpoint is evaluated if it
has a complete result in the run's `eval/`. Checkpoints that the trainer prunes are skipped with a notice.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strop.errors import EXIT_REFUSED, EXIT_USAGE, CheckRefused, StoreError
from strop.evaluate import read_result
from strop.evaluate.accuracy import refuse_trained
from strop.hardware import ChildProcess, spawn, terminate
from strop.io import is_complete
from strop.record import RunDir
from strop.record.fence import require_unfenced
from strop.record.files import list_shards
from strop.record.mirror import UPLOAD_SETTINGS, mirror_uri
from strop.record.run_dir import STATE_NAME
from strop.spec import RunSpec, load_spec
from strop.spec.eval_file import is_of_file, read_eval_file
from strop.store import follow_store
from strop.store.opening import open_store
from strop.store.policy import find_mirror_root
from strop.store.uris import join_uri

MAX_TRIES = 2
"""Most evaluations of one checkpoint: a machine may fail once."""
_POLL_S = 0.5
_REPORT_EVERY_S = 10.0
_OWN_OUTPUT = Path("/proc/self/fd/1")
"""The children's output goes to this role's log."""
_REFUSALS = frozenset({EXIT_USAGE, EXIT_REFUSED})


def choose_step(
    steps: Sequence[int], done: Collection[int], begun: Collection[int], *, is_finished: bool
) -> int | None:
    """Return the step of the checkpoint to evaluate next: the newest that was begun, else the newest.

    `steps`: complete checkpoints, in order. `done`: with a result, or given up. `begun`: with some replies on
    the disk. `is_finished`: the run has ended; then only its last checkpoint is evaluated.
    """
    left = [step for step in steps if step not in done]
    if is_finished:
        return steps[-1] if left and left[-1] == steps[-1] else None
    return max([step for step in left if step in begun] or left, default=None)


def follow_run(run_path: Path, eval_path: Path, *, say: Callable[[str], None]) -> None:
    """Evaluate a run's checkpoints as they appear, until it is finished and its last one has a result.

    Raises: ConfigError or CheckRefused if the file does not fit the run, before anything is evaluated, or if
        the first evaluation is refused; StoreError if the last checkpoint has no result at the end.
    """
    from strop.run.evaluation import read_file_setup
    from strop.run.inference import read_trained_ids
    from strop.tasks import build_task

    file = read_eval_file(eval_path)
    if not (run_path / STATE_NAME).is_file():
        say(f"waiting for a run in {run_path}")
    while not (run_path / STATE_NAME).is_file():
        time.sleep(_POLL_S)
    spec = load_spec(run_path / "spec.toml").spec
    # Refused now, because it would be refused at every checkpoint.
    setups = [read_file_setup(file, spec, task) for task in file.tasks]
    with follow_store(spec.store):
        for setup in setups:
            task = build_task(setup.spec.task)
            refuse_trained(task, setup.split, task.examples(setup.split), read_trained_ids(run_path))
    follower = _Follower(
        run_path=run_path,
        eval_path=eval_path,
        name=file.name,
        num_tasks=len(setups),
        spec=spec,
        say=say,
    )
    say(f"evaluation {file.name} follows {run_path}")
    while True:
        # Read before the checkpoints: those of a finished run are complete then.
        is_finished = RunDir.open(run_path).is_finished
        steps = RunDir.open(run_path).checkpoint_steps()
        done = {*follower.evaluated_steps(), *follower.given_up}
        step = choose_step(steps, done, follower.begun_steps(), is_finished=is_finished)
        if step is not None:
            follower.evaluate(step)
        elif is_finished:
            follower.require_last(steps)
            return
        else:
            time.sleep(_POLL_S)


@dataclass(kw_only=True, slots=True)
class _Follower:
    """Evaluates single checkpoints, and knows which are done."""

    run_path: Path
    eval_path: Path
    name: str
    num_tasks: int
    """Results that a step has when it is evaluated."""
    spec: RunSpec
    say: Callable[[str], None]
    given_up: set[int] = field(default_factory=set)
    _tries: Counter[int] = field(default_factory=Counter)

    def evaluated_steps(self) -> list[int]:
        """Return the steps with a result, in order."""
        counts = Counter(int(path.stem.rpartition("-")[2]) for path in self._results("*"))
        return sorted(step for step, count in counts.items() if count >= self.num_tasks)

    def _results(self, step: str) -> list[Path]:
        paths = (self.run_path / "eval").glob(f"{self.name}.*-step-{step}.json")
        tables = f"{self.name}.table-"
        return sorted(path for path in paths if is_of_file(path) and not path.name.startswith(tables))

    def begun_steps(self) -> set[int]:
        """Return the steps whose evaluation began, here or with kept replies in an earlier process."""
        folders = (self.run_path / "eval").glob(f"{self.name}.*-step-*")
        kept = {int(path.name.rpartition("-")[2]) for path in folders if path.is_dir()}
        return kept | set(self._tries)

    def evaluate(self, step: int) -> None:
        """Evaluate one checkpoint in a separate process, and report the outcome.

        Raises: CheckRefused if it is the first one and is refused.
        """
        run = RunDir.open(self.run_path)
        checkpoint, out_path = run.checkpoint_path(step), self.run_path / "eval"
        require_unfenced(self.run_path)
        self._tries[step] += 1
        self.say(f"step {step}: evaluation begins")
        argv = [sys.executable, "-m", "strop.cli", "eval", str(checkpoint)]
        argv += ["--config", str(self.eval_path), "--out", str(out_path)]
        child = spawn(argv, _OWN_OUTPUT)
        try:
            exit_code = self._wait(child, step)
        finally:
            terminate(child, 0.0)
        if step in self.evaluated_steps():
            self._announce(step)
        elif not is_complete(checkpoint):
            self.given_up.add(step)
            self.say(
                f"notice: step {step} is not evaluated: the trainer has removed its checkpoint meanwhile"
            )
        elif exit_code in _REFUSALS and not self.evaluated_steps():
            raise CheckRefused(
                f"the evaluation of the checkpoint of step {step} was refused (exit code {exit_code}),"
                " and so would be every other one",
                allowed="a file that this run's checkpoints can be evaluated by",
                next_step="see the lines above",
            )
        else:
            then = "it is evaluated again"
            if exit_code in _REFUSALS or self._tries[step] >= MAX_TRIES:
                self.given_up.add(step)
                then = "it is left out"
            self.say(f"alarm: step {step}: the evaluation ended with {exit_code} and no result; {then}")

    def _wait(self, child: ChildProcess, step: int) -> int:
        """Wait for a child, and report its progress: a silent job looks stalled."""
        num_kept, looked_at = 0, time.monotonic()
        while (exit_code := child.wait(_POLL_S)) is None:
            if time.monotonic() - looked_at < _REPORT_EVERY_S:
                continue
            looked_at = time.monotonic()
            folders = (self.run_path / "eval").glob(f"{self.name}.*-step-{step:06d}")
            num_shards = sum(len(list_shards(folder)) for folder in folders)
            if num_shards != num_kept:
                num_kept = num_shards
                self.say(f"step {step}: the replies of {num_shards} parts are kept")
        return exit_code

    def _announce(self, step: int) -> None:
        """Report a result, and send it to the run's mirror, whose thread ends with the trainer."""
        paths = self._results(f"{step:06d}")
        for path in paths:
            result = read_result(path)
            accuracy = result.greedy.accuracy
            shown = "unknown" if accuracy is None else f"{accuracy:.1%}"
            note = "" if result.is_valid else f", not valid: {result.verdict}"
            self.say(f"step {step}: greedy accuracy of {result.full_name} {shown}{note}; {path}")
        with follow_store(self.spec.store):
            root = find_mirror_root(self.spec.store)
            if root is None:
                return
            uri = mirror_uri(root, self.spec.store.mirror_as or self.run_path.name)
            try:
                store = open_store(uri, UPLOAD_SETTINGS)
                for path in paths:
                    store.objects.write(join_uri(uri, f"eval/{path.name}"), path.read_bytes())
            except StoreError as error:
                self.say(f"alarm: the results of step {step} were not mirrored to {uri}: {error}")

    def require_last(self, steps: Sequence[int]) -> None:
        """Raises: StoreError if the last checkpoint has no result."""
        if not steps or steps[-1] not in self.evaluated_steps():
            last = f"step {steps[-1]}" if steps else "a checkpoint"
            raise StoreError(
                f"the run is finished, and {last} has no result of evaluation {self.name}",
                allowed="a result for the last checkpoint",
                next_step=f"strop eval {self.run_path} --config {self.eval_path} --out"
                f" {self.run_path / 'eval'}",
            )
