"""Tests of mmlu-choice: its rows and prompts are mmlu's, its replies are chosen, and nothing trains on it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from strop.audit import AuditSettings, Verdict, run_audit
from strop.errors import ConfigError, DataError
from strop.rollout import Split, make_example
from strop.spec import load_spec
from strop.tasks import Task, build_task, choices_of, self_test
from strop.tasks.blend import BlendSpec
from strop.tasks.mixture import MixtureSpec
from strop.tasks.mmlu import MmluChoiceSpec, MmluSpec
from strop.tasks.traits import require_written
from strop.train.batch import schedule_examples

LETTERS = ("A", "B", "C", "D")


def row(number: int) -> dict[str, Any]:
    choices = [f"{number + place}" for place in range(4)]
    return {"question": f"What is {number} + {number % 4}?", "subject": "law", "choices": choices}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, numbers in (("dev", range(5)), ("train", range(10, 12)), ("test", range(20, 32))):
        rows = [{**row(number), "answer": number % 4} for number in numbers]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
    return tmp_path


def make(folder: Path, **settings: Any) -> Task:
    return build_task(MmluChoiceSpec(name="mmlu-choice", source=str(folder), **settings))


def test_it_asks_what_mmlu_asks(folder: Path) -> None:
    chosen = make(folder, num_few_shot=5)
    written = build_task(MmluSpec(name="mmlu", source=str(folder), num_few_shot=5))
    pairs = zip(chosen.examples(Split.HELD_OUT), written.examples(Split.HELD_OUT), strict=True)
    for mine, theirs in pairs:
        assert chosen.render(mine) == written.render(theirs)
        assert mine.answer == theirs.answer
        # Another task has other examples, and no score of one is compared with one of the other.
        assert mine.example_id != theirs.example_id
        assert chosen.gold_replies(mine) == (mine.answer,)
        assert choices_of(chosen, mine) == LETTERS
        assert choices_of(written, theirs) == ()
    assert chosen.version != written.version
    assert chosen.version != make(folder).version


@pytest.mark.parametrize(
    ("text", "is_correct", "format_ok"),
    [("C", True, True), (" C", True, True), ("B", False, True), ("C.", False, False), ("", False, False)],
)
def test_the_whole_reply_is_the_letter(folder: Path, text: str, is_correct: bool, format_ok: bool) -> None:
    task = make(folder)
    example = next(e for e in task.examples(Split.HELD_OUT) if e.answer == "C")
    outcome = task.verify(example, text)
    assert (outcome.is_correct, outcome.format_ok, outcome.reward) == (
        is_correct,
        format_ok,
        float(is_correct),
    )
    assert outcome.extracted == (text.strip() if format_ok else None)


@pytest.mark.parametrize("name", ["mmlu", "mmlu-choice"])
def test_an_example_without_an_answer_has_no_score(folder: Path, name: str) -> None:
    task = make(folder) if name == "mmlu-choice" else build_task(MmluSpec(name="mmlu", source=str(folder)))
    with pytest.raises(DataError, match="which has no answer"):
        task.verify(make_example(name, {}, None), "A")


def test_the_self_test_and_every_probe_pass(folder: Path) -> None:
    task = make(folder)
    assert asyncio.run(self_test(task, task.examples(Split.HELD_OUT))) == []
    report = asyncio.run(run_audit(task, AuditSettings()))
    assert report.verdict is Verdict.GREEN
    # One letter for all questions earns what the task says that chance earns.
    assert task.limits.chance == 0.25


@pytest.mark.parametrize("settings", [{"thinking": "on"}, {"max_reply_tokens": 2}])
def test_what_only_a_written_reply_has_is_refused(settings: dict[str, Any]) -> None:
    words = [f"task.{key}={value}" for key, value in settings.items()]
    with pytest.raises(
        ConfigError, match=r"task\.(thinking|max_reply_tokens).* writes no reply.* Next: remove"
    ):
        load_spec(None, ["name=x", "task.name=mmlu-choice", *words])


def test_training_is_refused(folder: Path) -> None:
    words = ["name=x", "task.name=mmlu-choice", f"task.source={folder}", "train.prompts_per_step=1"]
    spec = load_spec(None, words).spec
    task = build_task(spec.task)
    message = (
        r"^training on task mmlu-choice, whose replies are chosen by their likelihood: the model samples"
        r" nothing .* Allowed: such a task in `strop eval`.* Next: train on a task whose replies"
    )
    imitating = load_spec(None, [*words, "train.terms=sft", "sft.source=rows.jsonl"]).spec
    for asked in (spec, imitating):
        with pytest.raises(ConfigError, match=message):
            schedule_examples(asked, task)
    with pytest.raises(ConfigError, match=message):
        require_written(task)
    assert task.examples(Split.TRAIN) == ()


@pytest.mark.parametrize("kind", ["mixture", "blend", "curriculum"])
def test_in_another_task_the_letters_stay_and_training_is_refused(kind: str, folder: Path) -> None:
    part: dict[str, Any] = {"name": "mmlu-choice", "source": str(folder)}
    if kind == "mixture":
        task = build_task(MixtureSpec(name="mixture", parts={"facts": part}))
    elif kind == "blend":
        task = build_task(BlendSpec(name="blend", parts={"facts": part}))
    else:
        task = make(folder, order_file=str(folder / "order.jsonl"))
        ids = [example.example_id for example in task.examples(Split.HELD_OUT)]
        (folder / "order.jsonl").write_text("".join(json.dumps({"example_id": one}) + "\n" for one in ids))
    for example in task.examples(Split.HELD_OUT):
        assert choices_of(task, example) == LETTERS
    # An order file names training examples, and there are none.
    refusal = DataError if kind == "curriculum" else ConfigError
    with pytest.raises(refusal, match=r"are no training examples|whose replies are chosen"):
        require_written(task)
