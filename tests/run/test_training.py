"""Running a run file on this machine: finding its directory, composing it, continuing it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from strop.cluster import Roles
from strop.cluster.local import InlinePlacement
from strop.errors import CheckRefused, ConfigError, RunStopped
from strop.evaluate import Validity, read_result, write_result
from strop.evaluate.accuracy import refuse_trained
from strop.evaluate.shards import read_all_shards
from strop.hardware.number_format import DTYPE_FACT
from strop.kernels import KernelStatus
from strop.policy.language_model import LanguageModel
from strop.policy.weights import weights_digest
from strop.record import EventKind, RunDir, list_runs
from strop.record.rollouts import read_rollouts, write_rollouts
from strop.rollout import Example, Message, Outcome, Sampling, Split
from strop.run.evaluation import EvalRequest, evaluate_here
from strop.run.held_out import Evaluation, TrainOutcome
from strop.run.inference import open_model, read_setup, read_trained_ids
from strop.run.resuming import DATE_FACT
from strop.run.training import train_here
from strop.spec import load_spec
from strop.store import ModelHandle, get_model
from strop.tasks import build_task
from strop.tasks.generated import Arithmetic
from strop.tasks.judging import Judge
from strop.train import EvalSummary
from strop.train.batch import schedule_examples
from tests.evaluate.stored_results import make_result
from tests.fixtures.saved_data import save_split
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import Notes, new_run, tiny_spec
from tests.store.test_listed import sync

RUN_FILE = """
name = "here"
[model]
uri = "{model}"
dtype = "float32"
[task]
name = "arithmetic"
max_value = 4
num_held_out = 3
max_reply_tokens = 8
[train]
steps = 2
prompts_per_step = 2
group_size = 3
checkpoint_every = 1
accept = "weights: a random model for a test; audit: it earns something"
[eval]
num_examples = 2
num_samples = 2
[placement]
threads = 1
"""


class Broken(Exception):
    """What a fault of this test raises."""


class BreakingNotes(Notes):
    """Fails when it is told of a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.fatal_step = step

    def on_step(self, metrics: Mapping[str, float]) -> None:
        super().on_step(metrics)
        if metrics["step"] == self.fatal_step:
            raise Broken


class Here:
    """A folder with a run file."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self.folder = folder
        self.model = str(model_dir)
        self.run_file = folder / "run.toml"
        self.run_file.write_text(RUN_FILE.format(model=model_dir))
        self.notes: Notes = Notes()
        self.told: list[RunDir] = []

    def train(self, *overrides: str, is_new: bool = False) -> TrainOutcome:
        resolved = load_spec(self.run_file, [f"output.root={self.folder / 'runs'}", *overrides])
        return train_here(resolved, self.notes, is_new=is_new, on_run=self.tell)

    def break_off(self, step: int, *overrides: str) -> None:
        """Train until something fails after a step."""
        self.notes = BreakingNotes(step)
        with pytest.raises(Broken):
            self.train(*overrides)
        self.notes = Notes()

    def tell(self, run_dir: RunDir) -> None:
        assert run_dir.is_locked_here
        self.told.append(run_dir)

    def attempt(self, index: int) -> dict[str, object]:
        path = self.told[-1].path / "attempts" / str(index) / "attempt.json"
        content: dict[str, object] = json.loads(path.read_text())
        return content


@pytest.fixture
def here(tmp_path: Path, own_cache: Path, tiny_model_dir: Path, paid_letters: None) -> Here:
    return Here(tmp_path, tiny_model_dir)


def test_a_run_file_becomes_a_trained_run(here: Here, tiny_model_dir: Path) -> None:
    outcome = here.train()
    (run,) = list_runs(here.folder / "runs")
    assert outcome.run_path == run.path == here.told[0].path
    assert run.is_finished
    assert run.state.facts["model_digest"] == get_model(str(tiny_model_dir)).digest
    assert (run.state.facts["task"], run.state.facts["num_threads"]) == ("arithmetic", 1)
    assert (here.attempt(1)["cause"], here.attempt(1)["exit_code"], here.attempt(1)["step"]) == ("done", 0, 2)
    assert here.notes.ends == ["done"]
    # The resolved spec is kept, and is a run file itself.
    assert load_spec(run.spec_path).spec.train.steps == 2
    assert not here.told[0].is_locked_here
    # Held-out accuracy before and after, without eval.every, as in a run file that says nothing of it.
    assert outcome.before is not None
    assert outcome.after is not None
    assert (outcome.before.step, outcome.after.step) == (0, 2)
    assert (outcome.before.split, outcome.before.num_examples) == ("held_out", 2)
    assert outcome.before.model_digest != outcome.after.model_digest
    assert [summary.step for summary in here.notes.summaries] == [0, 2]
    names = [f"arithmetic-step-00000{step}" for step in (0, 2)]
    for name in names:
        # The replies, too, two examples with two sampled ones each: another judge may read them again.
        _, replies = read_all_shards(run.path / "eval" / name)
        assert len(replies) == 2 * (1 + (outcome.before.num_samples or 0))
    assert sorted(path.stem for path in (run.path / "eval").glob("*.json")) == names
    # A checkpoint that does not name its weights is named by its files.
    checkpoint = run.path / "checkpoints" / "step-000002"
    manifest = json.loads((checkpoint / "COMPLETE").read_text())
    del manifest["facts"]["weights_digest"]
    (checkpoint / "COMPLETE").write_text(json.dumps(manifest))
    assert open_model(str(checkpoint)).digest == get_model(str(checkpoint / "model")).digest


def test_a_run_goes_on_behind_an_epoch_with_the_rows_and_the_date_that_it_began_with(
    here: Here, tmp_path: Path
) -> None:
    model = shutil.copytree(here.model, tmp_path / "dated")
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }} " + template.read_text())
    words = [f"model.uri={model}", "task.num_held_out=12", "train.steps=4"]
    # Two of two steps of an epoch are done.
    here.break_off(2, *words)
    (run,) = list_runs(here.folder / "runs")
    (record := run.path / "run.json").write_text(
        record.read_text().replace(str(run.state.facts[DATE_FACT]), "2001-02-03")
    )
    here.train(*words)
    rollouts = [read_rollouts(run.rollouts_path(step)) for step in range(1, 5)]
    # As many GPUs as it finds, and so many learners, draw the same rows.
    spec = load_spec(run.spec_path, ["placement.kind=ray", "placement.learners=3"]).spec
    schedule = schedule_examples(spec, task := build_task(spec.task))
    assert schedule is not None
    drawn = [list(dict.fromkeys(one.example.example_id for one in step)) for step in rollouts]
    assert drawn == [[one.example_id for one in schedule.examples(step)] for step in range(4)]
    dates = [step[0].turns[0].text.partition(" <")[0] for step in rollouts]
    assert dates[:2] != dates[2:] == ["03 Feb 2001"] * 2
    # As does the evaluation of its checkpoints, whose own date holds for its life.
    setup = read_setup(task.name, ["max_value=4", "num_held_out=12"], Split.HELD_OUT)
    request = EvalRequest(num_examples=1, out_dir=tmp_path / "evals")
    for date in ("2001-02-03", "2002-02-03"):
        record.write_text(record.read_text().replace("2001-02-03", date))
        opened = open_model(str(run.path))
        (stored,) = evaluate_here([setup], opened, request, say=lambda text: None)
        assert stored.result.date == "2001-02-03"
        assert (stored.result.first_prompt or "").startswith("03 Feb 2001")


def test_missing_kernels_are_said_and_written_down(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is the same but slower, and whoever waits for it should know why."""
    monkeypatch.setattr(
        "strop.run.training.kernel_status", lambda: KernelStatus(path=None, note="no such file: 'cc'")
    )
    here.train()
    notices = [event.detail for event in here.told[0].events.read() if event.kind is EventKind.NOTICE]
    assert any("not compiled (no such file: 'cc')" in notice for notice in notices)
    assert "no such file: 'cc'" in str(here.attempt(1)["facts"])


@pytest.mark.parametrize("words", [(), ("lora.rank=2",)], ids=["whole", "adapters"])
def test_an_evaluation_names_the_weights_that_answered(here: Here, words: tuple[str, ...]) -> None:
    """Incident: within a run they carried the digest of the start and a step, whatever the weights were."""
    outcome, same = here.train(*words), here.train(*words, is_new=True)
    faster = here.train("optimizer.lr=1e-3", *words)
    assert outcome.before is not None
    assert same.after is not None
    assert faster.before is not None
    assert outcome.before.model_digest == faster.before.model_digest == get_model(here.model).digest
    digests = [one.after.model_digest for one in (outcome, same, faster) if one.after is not None]
    assert digests[0] == digests[1] != digests[2]
    # As `strop eval` calls the checkpoint, and as its tensors are.
    checkpoint = outcome.run_path / "checkpoints" / "step-000002"
    model = LanguageModel.load(checkpoint / "model", dtype=torch.float32)
    assert digests[0] == open_model(str(outcome.run_path)).digest == weights_digest(model)
    assert open_model(str(outcome.run_path / "checkpoints" / "step-000001")).digest not in digests


class OneLongPrompt(SpellTask):
    """Asks one held-out question that leaves a model of 512 positions no room for a reply."""

    def render(self, example: Example) -> tuple[Message, ...]:
        (message,) = super().render(example)
        is_long = example.example_id == self.examples(Split.HELD_OUT)[0].example_id
        return (replace(message, content=message.text * 300) if is_long else message,)


def test_an_evaluation_asks_as_the_run_says_and_the_model_can_read(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    spec = tiny_spec(sampling={"temperature": 0.7}, eval={"num_examples": 4, "num_samples": 2})
    task, run_dir = OneLongPrompt(max_reply_tokens=8), new_run(tmp_path)

    async def act() -> EvalSummary:
        placement = InlinePlacement(spec, ModelHandle(path=tiny_model_dir, digest="unused"))
        roles = await placement.start()
        try:
            return await Evaluation(spec, task, Judge(task), roles, "digest", run_dir)(0, lambda: None)
        finally:
            await placement.stop()

    summary = asyncio.run(act())
    assert (summary.num_examples, summary.invalid_cause) == (4, None)
    result = read_result(run_dir.eval_path("spell", 0))
    # Not solved, and no engine's fault.
    assert (result.greedy.num_too_long, result.greedy.num_unscored) == (1, 0)
    assert (result.sampling, result.num_samples) == (Sampling(temperature=0.7), 2)
    run_dir.release()


def test_an_evaluation_is_compared_with_the_best_valid_one_of_its_protocol(tmp_path: Path) -> None:
    run_dir, task = new_run(tmp_path), SpellTask()
    stored = [
        make_result({"a": 1.0, "b": 0.0}, step=0),
        make_result({"a": 0.0, "b": 1.0}, step=10),  # As good, and later.
        make_result({"a": 0.0, "b": 0.0}, step=20),
        make_result({"a": 1.0, "b": 1.0}, step=30, validity=Validity.TRUNCATION),
        make_result({"a": 1.0, "b": 1.0}, step=40, prompt_format="base"),
        make_result({"a": 1.0, "b": 1.0}, step=60),  # Of a later step.
    ]
    for one in stored:
        write_result(one, run_dir.eval_path(task.name, one.step))
    evaluation = Evaluation(tiny_spec(), task, Judge(task), cast(Roles, None), "digest", run_dir)
    best = evaluation._find_best(make_result({"a": 0.0, "b": 0.0}, step=50))
    assert best is not None
    assert best.step == 0
    assert evaluation._find_best(make_result(step=50, validity=Validity.TRUNCATION)) is None
    run_dir.release()


def test_what_a_run_trained_on_is_known_although_its_task_has_changed(here: Here) -> None:
    """Incident: splits that changed with a version made held-out what older runs had trained on."""
    path = here.train().run_path
    task = build_task(load_spec(path / "spec.toml").spec.task)
    trained, held_out = (task.examples(split) for split in Split)
    known = read_trained_ids(path)
    assert known == {name for one in trained for name in (one.example_id, task.problem_of(one))}
    (rollout, *_) = read_rollouts(path / "rollouts" / "step-000001.parquet")
    write_rollouts(path / "rollouts" / "step-000001.parquet", [replace(rollout, example=held_out[0])])
    # The task is as it was, so its splits are.
    assert read_trained_ids(path) == known
    state = json.loads((path / "run.json").read_text())
    state["facts"]["task_version"] = "before"
    (path / "run.json").write_text(json.dumps(state))
    found = read_trained_ids(path)
    assert found == known | {held_out[0].example_id, task.problem_of(held_out[0])}
    with pytest.raises(
        CheckRefused, match=r"2 of 3 examples of task arithmetic called held_out were trained"
    ):
        refuse_trained(task, Split.HELD_OUT, held_out, found)


def test_the_same_command_goes_on_and_reports_what_earlier_attempts_found(here: Here) -> None:
    here.break_off(2)
    assert (here.attempt(1)["cause"], here.attempt(1)["exit_code"]) == ("Broken", 1)
    outcome = here.train()
    assert len(list_runs(here.folder / "runs")) == 1
    assert here.notes.starts == [(str(outcome.run_path), 1, 2)]
    # The first attempt measured it; the second did not start at step 0.
    assert [summary.step for summary in here.notes.summaries] == [2]
    assert outcome.before is not None
    assert outcome.before.step == 0


def test_a_run_keeps_its_number_format_on_a_machine_with_another(here: Here) -> None:
    """`auto` was float32 where it began; where it goes on it would be bfloat16, or the other way round."""
    here.break_off(1, "model.dtype=auto")
    path = here.told[0].path / "run.json"
    state = json.loads(path.read_text())
    other = {"float32": "bfloat16", "bfloat16": "float32"}[state["facts"][DTYPE_FACT]]
    state["facts"][DTYPE_FACT] = other
    path.write_text(json.dumps(state))
    here.train("model.dtype=auto")
    assert len(list_runs(here.folder / "runs")) == 1
    (weights,) = [event.detail for event in here.notes.events if event.cause == "weights"]
    assert f", in {other}" in weights
    assert any(f"model.dtype: {other}: the run began with it" in event.detail for event in here.notes.events)


def test_a_new_run_can_be_asked_for_and_another_spec_makes_another(here: Here) -> None:
    here.break_off(1)
    outcome = here.train(is_new=True)
    assert len(list_runs(here.folder / "runs")) == 2
    assert outcome.run_path != here.told[0].path
    assert here.notes.starts[0][1] == 0
    here.train("seed=9")
    assert len(list_runs(here.folder / "runs")) == 3


def test_a_finished_run_in_a_named_directory_is_refused(here: Here) -> None:
    """R4: training zero steps is never success."""
    named = here.folder / "mine"
    outcome = here.train(f"output.dir={named}")
    assert outcome.run_path == named
    before = sorted(path.name for path in named.rglob("*"))
    with pytest.raises(CheckRefused, match=r"mine holds a finished run; nothing is left to do") as caught:
        here.train(f"output.dir={named}")
    assert caught.value.exit_code == 76
    assert sorted(path.name for path in named.rglob("*")) == before
    assert len(here.told) == 1


def test_a_named_directory_is_for_one_run_and_one_process(here: Here) -> None:
    named = here.folder / "mine"
    named.mkdir()
    with pytest.raises(CheckRefused, match="mine is there already"):
        here.train(f"output.dir={named}", is_new=True)
    # Nothing was written into it.
    named.rmdir()
    here.break_off(1, f"output.dir={named}")
    with pytest.raises(CheckRefused, match="seed=0 there and 9 here"):
        here.train(f"output.dir={named}", "seed=9")
    with RunDir.open(named), pytest.raises(CheckRefused, match=r"mine is in use by process \d+"):
        here.train(f"output.dir={named}")
    # And its own spec goes on there.
    assert here.train(f"output.dir={named}").run_path == named


def test_a_refusal_of_the_gate_is_on_record_and_can_be_mended(here: Here) -> None:
    with pytest.raises(CheckRefused, match="weights look random"):
        here.train("train.accept=none")
    assert (here.attempt(1)["cause"], here.attempt(1)["exit_code"]) == ("CheckRefused", 76)
    assert not here.told[0].is_finished
    with pytest.raises(ConfigError, match="wieghts"):
        here.train("train.accept=wieghts: a typo")


def test_a_task_that_cannot_say_right_or_wrong_cannot_be_evaluated(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def say_nothing(self: Arithmetic, example: Example, text: str) -> Outcome:
        return Outcome(parts={"similarity": 1.0 if text.strip().endswith(example.answer or "") else 0.0})

    monkeypatch.setattr(Arithmetic, "verify", say_nothing)
    accepted = "train.accept=weights: random; audit: it says nothing"
    with pytest.raises(RunStopped, match=r"none of 2 held-out replies at step 0 could be judged"):
        here.train(accepted)


def test_a_run_does_not_call_examples_held_out_that_it_trains_on(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate says so; whoever accepts that by name, and with a reason, gets the score."""
    examples = Arithmetic.examples
    monkeypatch.setattr(Arithmetic, "examples", lambda self, split: examples(self, Split.TRAIN))
    accepted = "train.accept=weights: random; audit: random"
    with pytest.raises(CheckRefused, match="overlap: "):
        here.train(accepted)
    here.train(f"{accepted}; overlap: to see what the evaluation says")
    assert not list((here.told[0].path / "eval").iterdir())
    assert list((here.told[1].path / "eval").iterdir())


def test_what_another_tool_put_into_the_bucket_is_told_at_the_start(
    here: Here, s3_root: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    sync(tiny_model_dir, f"{s3_root}/models/tiny")
    for name, first in (("train", 0), ("test", 100)):
        rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(first, first + 12)]
        sync(save_split(rows, tmp_path / name), f"{s3_root}/datasets/gsm8k_{name}")
    words = ["model.uri=org/tiny", "task.name=gsm8k", f"store.uri={s3_root}", "store.order=store-only"]
    # A random model earns nothing here, and the gate may say so; it was told before.
    with suppress(CheckRefused):
        here.train(*words, "store.mirror=false")
    told = [event.detail for event in here.told[0].events.read() if event.kind is EventKind.NOTICE]
    for place in ("models/tiny", "datasets/gsm8k_train", "datasets/gsm8k_test"):
        assert any(f"{s3_root}/{place} has no COMPLETE" in one for one in told), told
