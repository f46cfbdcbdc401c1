"""Runs that are mirrored while they train, and go on from their mirror on another machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.launch.training import TrainOutcome, train_here
from strop.record import EventKind, RunDir, list_runs
from strop.spec import load_spec
from strop.store import get_model, verify_directory
from tests.fixtures.attempts import Bench
from tests.fixtures.tiny_run import Curve, Notes, read_curve

NUM_STEPS = 6
RUN_FILE = """
name = "here"
seed = 3
[model]
uri = "{model}"
dtype = "float32"
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
prompts_per_step = 2
rollouts_per_prompt = 3
checkpoint_every = 2
accept = "weights: a random model for a test"
[eval]
every = 3
num_examples = 2
num_samples = 2
[placement]
threads = 1
[store]
mirror_every_s = 0.1
"""


def describe_run(model_dir: Path, steps: int = NUM_STEPS) -> str:
    return RUN_FILE.format(model=model_dir, steps=steps)


class Here:
    """A machine: a folder with a run file, and a store that other machines see too."""

    def __init__(self, folder: Path, model_dir: Path, store_uri: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.runs_path = folder / "runs"
        self.run_file = folder / "run.toml"
        self.run_file.write_text(describe_run(model_dir))
        self.store_uri = store_uri
        self.notes = Notes()

    def overrides(self, *more: str) -> list[str]:
        return [f"output.root={self.runs_path}", f"store.uri={self.store_uri}", "store.mirror=true", *more]

    def train(self, *more: str, trained: Callable[[TrainOutcome], None] = lambda _: None) -> RunDir:
        resolved = load_spec(self.run_file, self.overrides(*more))
        outcome = train_here(resolved, self.notes, on_run=lambda run: None, on_trained=trained)
        return RunDir.open(outcome.run_path)

    def causes(self) -> list[str]:
        (run,) = list_runs(self.runs_path)
        return [event.cause for event in run.events.read()]


@pytest.fixture
def here(tmp_path: Path, own_cache: Path, tiny_model_dir: Path) -> Here:
    return Here(tmp_path / "here", tiny_model_dir, str(tmp_path / "store"))


@pytest.fixture(scope="module")
def whole(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """A run that nobody disturbed, and nobody mirrored."""
    bench = Bench(tmp_path_factory.mktemp("whole") / "bench", describe_run(tiny_model_dir))
    return bench.finish()


def list_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_is_whole_in_its_store(here: Here, whole: Curve) -> None:
    run = here.train(trained=lambda outcome: void((outcome.run_path / "report.html").write_text("report")))
    mirror = Path(here.store_uri) / "checkpoints" / run.path.name
    # store.keep_last is 2, and checkpoints are written after steps 2, 4 and 6.
    assert {path.name for path in mirror.iterdir() if path.is_dir()} == {
        "here_step4",
        "here_step6",
        "here_final",
        "traces",
    }
    for name in ("here_step4", "here_step6", "here_final"):
        verify_directory(mirror / name)
    latest = json.loads((mirror / "latest.json").read_text())
    assert (latest["step"], latest["uri"]) == (6, str(mirror / "here_step6"))
    names = {"run.json", "spec.toml", "env.txt", "metrics.jsonl", "events.jsonl", "report.html"}
    names |= {f"rollouts/step-00000{step}.parquet" for step in range(1, 7)}
    names |= {f"eval/reverse-text-step-00000{step}.json" for step in (0, 3, 6)}
    names |= {"attempts/1/attempt.json", "attempts/1/mirror.log"}
    assert list_files(mirror / "traces") == names
    for name in names - {"events.jsonl", "attempts/1/mirror.log"}:
        assert (mirror / "traces" / name).read_bytes() == (run.path / name).read_bytes(), name
    # The model loads as it is, without the rest of its run.
    assert get_model(str(mirror / "here_final")).digest == get_model(str(latest_model(run))).digest
    # The mirror costs nothing of what the run computes.
    assert read_curve(run.path) == whole
    assert run.is_finished
    assert not [event for event in run.events.read() if event.kind is EventKind.TRIPWIRE]
    # The link to the store is written down.
    assert any(str(mirror) in event.detail for event in run.events.read() if event.cause == "mirror")


def void(_: object) -> None:
    """Drop a result."""


def latest_model(run: RunDir) -> Path:
    latest = run.latest_checkpoint()
    assert latest is not None
    return latest[1] / "model"
