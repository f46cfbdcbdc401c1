"""Kill -9 at any moment, then the same command again: the curve of an uninterrupted run, bit for bit.

Every attempt is a process of its own, forked from a server that has imported what training needs.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from strop.record import list_runs
from strop.store import verify_directory
from tests.fixtures.tiny_run import Curve, read_curve
from tests.fixtures.train_here import train_in_child

NUM_STEPS = 5
NUM_KILLS = 6
MAX_ROUNDS = 6
RUN_FILE = """
name = "killed"
seed = 3
[model]
uri = "{model}"
dtype = "{dtype}"
[task]
name = "reverse-text"
num_train = 20
num_held_out = 4
max_words = 1
max_reply_tokens = 12
[optimizer]
lr = 1e-3
[train]
steps = {steps}
prompts_per_step = 3
rollouts_per_prompt = 4
checkpoint_every = 2
accept = "weights: a random model for a test"
[eval]
every = 3
num_examples = 2
num_samples = 2
[placement]
threads = 1
"""


# In the order in which a run comes by. The end of a line is the moment before it happens.
DEATHS = (
    r"os\.rename .*/runs/[^/]*\.partial-[^/]*$",  # the run directory is whole and has no name yet
    r"os\.mkdir .*/attempts/1$",
    r"open .*/eval/reverse-text-step-000000\.json",
    r"os\.rename .*/rollouts/step-000001\.parquet",
    r"open .*/rollouts/step-000002\.parquet",  # right after the metrics of step 1
    r"open .*/checkpoints/step-000002\.partial-[^/]*/state/trainer\.json",
    r"os\.rename .*/checkpoints/step-000002\.partial-[^/]*/COMPLETE",
    r"os\.rename .*/checkpoints/step-000002\.partial-[^/]*$",  # complete, and not in its place
    r"os\.rename .*/eval/reverse-text-step-000003\.json",  # right after the metrics of step 3
    r"os\.rename .*/eval/reverse-text-step-000005\.json",
    r"os\.rename .*/checkpoints/step-000005\.partial-[^/]*/COMPLETE",
    r"os\.rename .*/checkpoints/step-000002$",  # all is trained, and the run not marked as done
)


class Bench:
    """A folder with a run file, and attempts to train it."""

    def __init__(self, folder: Path, model_dir: Path, dtype: str) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.log_path = folder / "log.txt"
        self.log_path.touch()
        self.num_started = 0
        self.run_file = folder / "run.toml"
        self.run_file.write_text(RUN_FILE.format(model=model_dir, dtype=dtype, steps=NUM_STEPS))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["strop.train.loop", "strop.launch.local"])

    def start(self, die_at: str | None = None) -> ForkServerProcess:
        """Give the command once."""
        arguments = [str(self.run_file), f"output.root={self.folder / 'runs'}"]
        process = self._context.Process(target=train_in_child, args=(arguments, str(self.log_path), die_at))
        process.start()
        self.num_started += 1
        return process

    def finish(self) -> Curve:
        """Give the command until the run is done; read its curve."""
        if not any(run.is_finished for run in list_runs(self.runs_path)):
            process = self.start()
            process.join(60)
            assert process.exitcode == 0, self.log_path.read_text()
        (run,) = list_runs(self.runs_path)
        assert run.is_finished
        for step in run.checkpoint_steps():
            verify_directory(run.checkpoint_path(step))
        return read_curve(run.path)

    def wait_until_begun(self, process: ForkServerProcess) -> None:
        """Wait until the attempt started last has the run's lock, or has ended."""
        deadline = time.monotonic() + 60
        while process.is_alive() and self.log_path.read_text().count("run /") < self.num_started:
            assert time.monotonic() < deadline, self.log_path.read_text()
            time.sleep(0.005)

    @property
    def runs_path(self) -> Path:
        """Where the run's directory is made."""
        return self.folder / "runs"


@dataclass(frozen=True)
class Whole:
    """A run that nobody disturbed."""

    curve: Curve
    seconds: float
    """From its lock to its end."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole(dtype: str, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    bench = Bench(tmp_path_factory.mktemp("whole") / dtype, tiny_model_dir, dtype)
    curve = bench.finish()
    (run,) = list_runs(bench.runs_path)
    attempt = json.loads((run.path / "attempts" / "1" / "attempt.json").read_text())
    assert [line["step"] for line in curve.metrics] == list(range(1, NUM_STEPS + 1))
    assert sorted(curve.evals) == [f"reverse-text-step-00000{step}.json" for step in (0, 3, 5)]
    # Something is learned from, or equality would say little.
    assert all(line["num_signal_tokens"] > 0 for line in curve.metrics)
    return Whole(curve, attempt["ended_at"] - attempt["started_at"])


@pytest.fixture
def new_bench(dtype: str, tmp_path: Path, tiny_model_dir: Path) -> Callable[[str], Bench]:
    return lambda name: Bench(tmp_path / name, tiny_model_dir, dtype)


@pytest.mark.slow
def test_ckp_3_kills_at_random_moments_do_not_change_the_curve(
    new_bench: Callable[[str], Bench], whole: Whole
) -> None:
    """Incident: resume restored a counter only, and curves bent where runs were taken up again."""
    stream = random.Random(11)
    num_killed = 0
    for round_index in range(MAX_ROUNDS):
        bench = new_bench(f"round-{round_index}")
        while num_killed < NUM_KILLS:
            process = bench.start()
            bench.wait_until_begun(process)
            process.join(stream.uniform(0.0, whole.seconds))
            if process.exitcode is not None:
                assert process.exitcode == 0, bench.log_path.read_text()
                break
            process.kill()
            process.join()
            num_killed += 1
        assert bench.finish() == whole.curve
        if num_killed == NUM_KILLS:
            return
    pytest.fail(f"only {num_killed} of {NUM_KILLS} attempts were still running when they were to be killed")


@pytest.mark.slow
def test_ckp_4_kills_between_two_writes_do_not_change_the_curve(
    new_bench: Callable[[str], Bench], whole: Whole
) -> None:
    """Incident: a torn save looked complete, and what was recorded twice was counted twice."""
    bench = new_bench("writes")
    for die_at in DEATHS:
        process = bench.start(die_at)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, (die_at, bench.log_path.read_text())
    curve = bench.finish()
    assert curve == whole.curve
    (run,) = list_runs(bench.runs_path)
    # The first death left no run behind.
    assert run.state.num_attempts == len(DEATHS)
    assert run.checkpoint_steps()[-2:] == [4, 5]
