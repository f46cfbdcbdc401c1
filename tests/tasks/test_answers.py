"""Which part of a reply is judged, and which number in it is the answer."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.rollout import Split
from strop.spec import load_spec
from strop.tasks import build_task, render_prompt
from strop.tasks.answers import judged_text
from strop.tasks.generated import ArithmeticSpec
from strop.tasks.mathematics import Number, last_number
from strop.tasks.prompt import PosedMessage
from strop.tokenizer import Tokenizer
from tests.fixtures.judging import verdict
from tests.fixtures.row_files import write_rows
from tests.fixtures.tiny_tokenizer import tiny_tokenizer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", "12"),
        ("3 + 4 = 7.", "7"),
        ("The answer is **7**", "7"),
        ("7.0", "7"),
        (".5", "0.5"),
        ("1,234", "1234"),
        ("12,345,678.90", "12345678.9"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("= -5", "-5"),
        ("x=-5", "-5"),
        ("\u22125", "-5"),
        ("-$4", "-4"),
        ("$-4", "-4"),
        ("$18.00", "18"),
        ("7kg", "7"),
        ("1e3", "1000"),
        ("1/2", "1/2"),
        ("2 1/2", "5/2"),
        ("No.7", "7"),
        ("\\boxed{7}", "7"),
        ("1.2.3", "1.2"),
        *(
            (text, None)
            for text in ("", ".", "-", "seven", "H2O", "\u0663", ",", "$", "7-5", "(2)-5", "7 - 5", "14/2")
        ),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    found = last_number(text)
    assert (found and found.value) == (None if number is None else Fraction(number))


@given(st.integers(-(10**12), 10**12))
def test_plain_and_grouped_integers_are_found_in_a_sentence(value: int) -> None:
    assert last_number(f"So it is {value}.") == Number(str(value), Fraction(value))
    assert last_number(f"So it is {value:,}.") == Number(f"{value:,}", Fraction(value))


@given(st.text(alphabet="0123456789-,.$eE+ a)", max_size=40))
def test_any_text_is_read_without_error(text: str) -> None:
    found = last_number(text)
    assert found is None or found.text in text


@pytest.mark.parametrize(
    ("reply", "judged"),
    [
        ("so 5\nQ: more 7", "so 5"),
        ("<think>5. Q: what</think>so 7", "so 7"),  # a problem among thoughts ends nothing
        ("5. Q: what</think>so 7. Q: 8", "so 7."),  # the template opened the block
        ("<think>5? so 7", ""),
        ("<think>5</think>6<think>7", ""),
        ("so 5. Q: <think>and 7", "so 5."),  # the reply had gone on to another problem
        ("", ""),
    ],
)
def test_judged_text(reply: str, judged: str) -> None:
    assert judged_text(reply) == judged


def test_thoughts_are_not_judged() -> None:
    task = build_task(ArithmeticSpec())
    example = task.examples(Split.HELD_OUT)[0]
    gold = task.gold_replies(example)[0]
    right = verdict(task, example, f"<think>maybe 1\n12</think>{gold}")
    assert (right.is_correct, right.format_ok) == (True, True)
    unfinished = verdict(task, example, f"<think>maybe {gold}")
    assert (unfinished.is_correct, unfinished.format_ok) == (False, False)


def test_thinking_has_room_and_no_text_ends_it() -> None:
    plain, thinking = build_task(ArithmeticSpec()), build_task(ArithmeticSpec(thinking="on"))
    # 32 tokens of the task's own, and 8192.
    assert (plain.limits.max_reply_tokens, thinking.limits.max_reply_tokens) == (32, 8224)
    assert (plain.limits.stops(is_base=True), thinking.limits.stops(is_base=True)) == (("\n",), ())
    assert plain.version != thinking.version != build_task(ArithmeticSpec(thinking="off")).version


def chat_tokenizer(folder: Path, template: str) -> Tokenizer:
    model_dir = tiny_tokenizer(folder)
    (model_dir / "chat_template.jinja").write_text(template)
    return Tokenizer.load(model_dir)


def test_the_template_is_told_whether_to_think(tmp_path: Path) -> None:
    template = (
        "{{ messages[-1].content }}|{% if enable_thinking is defined %}{{ enable_thinking }}"
        "{% else %}free{% endif %}"
    )
    tokenizer = chat_tokenizer(tmp_path, template)
    told = {}
    for choice in ("off", "on", "model_default"):
        task = build_task(ArithmeticSpec(thinking=choice))
        text, _ = render_prompt(tokenizer, task.render(task.examples(Split.HELD_OUT)[0]), "chat")
        told[choice] = text.partition("|")[2]
    assert told == {"off": "False", "on": "True", "model_default": "free"}


def test_a_model_that_cannot_be_told_is_refused(tmp_path: Path) -> None:
    task = build_task(ArithmeticSpec(thinking="on"))
    messages = task.render(task.examples(Split.HELD_OUT)[0])
    tokenizer = chat_tokenizer(tmp_path, "{{ messages[-1].content }}")
    with pytest.raises(ConfigError, match=r"task\.thinking=on, but the chat template .* enable_thinking"):
        render_prompt(tokenizer, messages, "chat")
    with pytest.raises(ConfigError, match=r"task\.thinking=on with a prompt in base format"):
        render_prompt(tokenizer, messages, "base")


def test_a_model_is_told_by_tasks_of_rows_too_that_are_posed_as_they_stand(tmp_path: Path) -> None:
    """Incident: the reply had room to think, and the model was told nothing."""
    talk = [("user", "Hello"), ("assistant", "Hi"), ("user", "And?"), ("assistant", "And so on.")]
    rows = [
        {"asked": [{"role": role, "content": content} for role, content in talk], "gold": "on"},
        {"asked": "How?", "gold": "So."},
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    words = ["task.name=rows", f"task.source={tmp_path}/rows.jsonl", "task.thinking=on"]
    own = ["prompt=asked", "answer=gold", "reward=exact"]
    task = build_task(load_spec(None, ["name=x", *words, *(f"task.{word}" for word in own)]).spec.task)
    for split in Split:
        for example in task.examples(split):
            last = task.render(example)[-1]
            assert isinstance(last, PosedMessage)
            assert (last.role, last.is_thinking) == ("user", True)
