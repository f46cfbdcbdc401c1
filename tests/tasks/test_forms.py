"""Chat and plain text: which is asked, to the letter, and which texts end a reply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.errors import DataError
from strop.rollout import Message, Split
from strop.tasks import PromptFormat, Task, build_task, render_prompt, resolve_prompt_format
from strop.tasks.rows.judged_rows import PresetSpec, ProgramSpec
from strop.tokenizer import Tokenizer
from tests.fixtures.tiny_tokenizer import tiny_tokenizer


def write(folder: Path, **files: list[dict[str, Any]]) -> str:
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def base_of(task: Task, index: int = 0) -> str:
    (message,) = task.render(task.examples(Split.HELD_OUT)[index])
    base = getattr(message, "base", None)
    assert isinstance(base, str)
    return base


GSM8K = [{"question": f"{n} and {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(1, 7)]


@pytest.fixture
def gsm8k(tmp_path: Path) -> str:
    return write(tmp_path, train=GSM8K[:4], test=GSM8K[4:])


def test_gsm8k_asks_as_lm_eval(gsm8k: str) -> None:
    task = build_task(PresetSpec(name="gsm8k", source=gsm8k))
    assert base_of(task) == "Question: 5 and 5?\nAnswer:"
    assert task.limits.stops(is_base=True)[:3] == ("Question:", "[Question]", "Q:")


def test_math_asks_as_minerva_math(tmp_path: Path) -> None:
    rows = [
        {
            "problem": f"Find ${n}+1$.",
            "level": "Level 1",
            "type": "Algebra",
            "solution": f"$\\boxed{{{n + 1}}}$",
        }
        for n in range(3)
    ]
    source = write(tmp_path, train=rows[:2], test=rows[2:])
    task = build_task(PresetSpec(name="math", source=source))
    assert base_of(task) == "Problem:\nFind $2+1$.\n\nSolution:"


def mbpp_row(number: int) -> dict[str, Any]:
    return {
        "task_id": number,
        "text": f"Add {number}.",
        "code": f"def f(x):\n    return x + {number}",
        "test_list": [f"assert f({n}) == {n + number}" for n in range(3)],
        "test_setup_code": "",
        "challenge_test_list": [],
    }


def test_mbpp_asks_as_lm_eval(tmp_path: Path) -> None:
    source = write(tmp_path, train=[mbpp_row(601)], test=[mbpp_row(11)])
    task = build_task(ProgramSpec(name="mbpp", source=source))
    assert base_of(task) == (
        "You are an expert Python programmer, and here is your task: Add 11."
        " Your code should pass these tests:"
        "\n\nassert f(0) == 11\nassert f(1) == 12\nassert f(2) == 13\n[BEGIN]\n"
    )
    assert set(task.limits.stops(is_base=True)) == {"[DONE]", "\n```"}


def test_auto_follows_the_model(tmp_path: Path) -> None:
    for has_template, form in ((True, PromptFormat.CHAT), (False, PromptFormat.BASE)):
        tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path / form, with_chat_template=has_template))
        assert resolve_prompt_format(tokenizer, "auto") is form


def test_prompt_without_a_token_is_refused(tmp_path: Path) -> None:
    model_dir = tiny_tokenizer(tmp_path)
    (model_dir / "chat_template.jinja").write_text("{{ messages[-1].content if messages | length > 1 }}")
    with pytest.raises(DataError, match="a prompt of 1 messages has no token"):
        render_prompt(Tokenizer.load(model_dir), [Message(role="user", content="Hi")], "chat")
