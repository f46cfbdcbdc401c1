"""The gate's check `overlap`: whatever is evaluated and learned from is told, however it is written there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.parts import MixtureSpec
from strop.tasks import Task, build_task
from strop.tasks.generated import ArithmeticSpec
from strop.tasks.rows.judged_rows import RowsSpec
from strop.tasks.task import TaskLimits
from strop.tokenizer import Tokenizer
from strop.train import gate_checks
from strop.train.data.offline import Demonstrations
from strop.train.gate_checks import GateCheck, GateInput, check_overlap
from tests.fixtures.tiny_run import tiny_spec
from tests.fixtures.tiny_tokenizer import tiny_tokenizer


@dataclass
class Asks(Task):
    """Asks the texts that it is given."""

    train: Sequence[str]
    held_out: Sequence[str]
    name: str = "asks"
    version: str = "1"
    limits: TaskLimits = field(default_factory=lambda: TaskLimits(max_reply_tokens=8))

    def examples(self, split: Split) -> Sequence[Example]:
        texts = self.train if split is Split.TRAIN else self.held_out
        return [make_example(self.name, {"text": text}, None) for text in texts]

    def render(self, example: Example) -> tuple[Message, ...]:
        return (Message(role="user", content=example.fields["text"]),)

    async def verify(self, example: Example, text: str) -> Outcome:
        raise NotImplementedError

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return ()


def check(task: Task, root: Path, terms: str = "rl", **given: Any) -> GateCheck:
    """Ask the check alone; it looks at nothing but examples, what is given, and the tokenizer."""
    train = {"terms": terms}
    sft = {"source": "rows.jsonl"} if terms == "sft" else {}
    dpo = {"source": "run"} if terms == "dpo" else {}
    roles: Any = SimpleNamespace(tokenizer=Tokenizer.load(tiny_tokenizer(root / "tokenizer")))
    spec = tiny_spec(train=train, sft=sft, dpo=dpo)
    return check_overlap(GateInput(spec=spec, task=task, roles=roles, model_dir=root, run_path=root, **given))


def numbered(count: int, form: str = "Which number is {}?") -> list[str]:
    return [form.format(number) for number in range(count)]


@pytest.mark.parametrize(
    ("leak", "how"),
    [
        ("Which number is 3?", "as they are"),
        ("which number\tis \uff13", "in the same words"),
        ("Which number -- is \u201c3\u201d?", None),
    ],
)
def test_a_question_in_other_letters_and_marks_is_the_same(
    tmp_path: Path, leak: str, how: str | None
) -> None:
    found = check(Asks(numbered(20), [leak, "Which number is 30?"]), tmp_path)
    assert found.is_passed is (how is None)
    if how is not None:
        assert found.detail.startswith(f"1 of 2 held-out examples are learned from: 1 {how}; the first is ")
        assert f"{leak!r}, there 'Which number is 3?'; remove them from one of the two" in found.detail


STORY = (
    "In the valley behind the hills a miller grinds corn for seven villages, and each of them pays him with a"
    " sack of flour at the end of the harvest, which he sells. How many sacks does he sell, number {}?"
)


def test_a_few_questions_that_are_nearly_the_same_are_told_and_many_are_refused(tmp_path: Path) -> None:
    train = [*numbered(50), STORY.format("six")]
    twin = STORY.format("six").replace("corn", "wheat")
    for num_others, is_passed in ((99, True), (98, False)):
        held_out = [*(f"What comes before {number}?" for number in range(num_others)), twin]
        found = check(Asks(train, held_out), tmp_path)
        assert found.is_passed is is_passed
        # Long texts are cut.
        assert found.detail.count("a miller grinds") == 2
        assert "1 in nearly the same words" in found.detail
        assert len(found.detail) < 420
        assert (found.notice is not None) is is_passed


def test_problems_that_a_task_can_name_are_compared_by_name_alone(tmp_path: Path) -> None:
    # Every other sum of the range is trained on, and some are asked in nearly the same words.
    task = build_task(ArithmeticSpec(max_value=12, num_held_out=20))
    assert check(task, tmp_path).is_passed

    class Mirrored(type(task)):  # type: ignore[misc]
        def examples(self, split: Split) -> Sequence[Example]:
            found = [make_example("arithmetic", {"a": 2, "b": 9}, "11")]
            if split is Split.HELD_OUT:
                found = [make_example("arithmetic", {"a": 9, "b": 2}, "11")]
            return found

    found = check(Mirrored(ArithmeticSpec()), tmp_path)
    assert not found.is_passed
    assert "1 of 1 held-out examples are learned from: 1 as the same problem; the first is " in found.detail
    assert "'What is 9 + 2?', there 'What is 2 + 9?'" in found.detail


def test_parts_of_a_mixture_are_compared_with_each_other(tmp_path: Path) -> None:
    sums = build_task(ArithmeticSpec())
    (trained,), (held_out,) = (sums.examples(split)[:1] for split in Split)
    lines = [{"q": f"Say {number}.", "a": "1"} for number in range(20)]
    # A row that asks a held-out sum is trained on, and one that asks a trained sum is held out.
    said = {"train": [*lines, {"q": sums.render(held_out)[0].text.lower(), "a": "1"}]}
    said |= {"test": [{"q": sums.render(trained)[0].text.upper(), "a": "1"}]}
    for name, rows in said.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = {"name": "rows", "source": str(tmp_path), "prompt": "q", "answer": "a", "reward": ["exact"]}
    parts = {"own": own, "sums": {"name": "arithmetic"}}
    task = build_task(MixtureSpec.model_validate({"name": "mixture", "parts": parts}))
    found = check(task, tmp_path)
    assert "2 of 101 held-out examples are learned from: 2 in the same words" in found.detail


def test_rows_of_one_file_that_ask_the_same_are_held_out_together(tmp_path: Path) -> None:
    asked = [f"{'WHICH' if number % 2 else 'Which'} number is {number // 2}" for number in range(200)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"q": text, "a": "1"}) for text in asked))
    task = build_task(RowsSpec(name="rows", source=str(path), prompt="q", answer="a", reward=["exact"]))
    # One question in ten, and both rows of each.
    assert (len(task.examples(Split.HELD_OUT)), len(task.examples(Split.TRAIN))) == (20, 180)
    assert check(task, tmp_path).is_passed


def demonstrations(root: Path, *prompts: str, problems: Sequence[str] = ()) -> Demonstrations:
    tokenizer = Tokenizer.load(tiny_tokenizer(root / "tokenizer"))
    members: Any = tuple(SimpleNamespace(asked_ids=tokenizer.encode(prompt)) for prompt in prompts)
    return Demonstrations(source="rows", members=members, problems=frozenset(problems), counts={})


def test_what_is_imitated_is_learned_from(tmp_path: Path) -> None:
    task = Asks(["never asked"], ["Which number is 3?", STORY.format("six")])
    # The task's own training examples are not, in a run that imitates.
    same = Asks(["Which number is 3?"], ["Which number is 3?"])
    nothing = demonstrations(tmp_path, "Who are you?")
    assert check(same, tmp_path, "sft", demonstrations=nothing).is_passed
    prompts = [f"<|start|>user\n{text}<|end|>\n<|start|>assistant\n" for text in ("who", "where")]
    long = f"<|start|>user\nTell me. {STORY.format('six')}<|end|>\n<|start|>assistant\n"
    found = check(task, tmp_path, "sft", demonstrations=demonstrations(tmp_path, *prompts, "why", long))
    assert "1 in nearly the same words" in found.detail
    asked = "<|start|>user\nWHICH number is 3<|end|>\n<|start|>assistant\n"
    found = check(task, tmp_path, "sft", demonstrations=demonstrations(tmp_path, asked))
    assert "1 in the same words; the first is" in found.detail
    named = demonstrations(tmp_path, "Count!", problems=["which number is 3"])
    assert "1 in the same words" in check(task, tmp_path, "sft", demonstrations=named).detail


def test_what_is_preferred_is_learned_from(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path / "tokenizer"))
    prompt = "<|start|>user\nwhich number is 3?<|end|>\n<|start|>assistant\n"
    pairs: Any = SimpleNamespace(members=(SimpleNamespace(prompt_ids=tokenizer.encode(prompt)),))
    task = Asks(["never asked"], ["Which number is 3?"])
    found = check(task, tmp_path, "dpo", preferences=pairs)
    assert "1 of 1 held-out examples are learned from: 1 in the same words" in found.detail


def test_of_very_many_examples_some_are_compared_and_the_check_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_checks, "_MAX_EXAMPLES", 10)
    found = check(Asks(numbered(25), numbered(30, "And {}?")), tmp_path)
    assert found.is_passed
    assert found.detail.endswith(
        "; of 30 held-out examples one in 3 was compared; of 25 training examples one in 3 was compared"
    )
