"""The training tasks whose replies must follow instructions, on rows in the published columns."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.errors import DataError
from strop.rollout import Split
from strop.tasks import Task, build_task
from strop.tasks.instructions.rules import load_detector
from strop.tasks.instructions.tasks import InstructionSpec, is_echo
from tests.fixtures.judging import run_self_test, verdict
from tests.fixtures.row_files import write_rows
from tests.tasks.instructions.instruction_cases import MULTI_ARGUMENTS, RLVR_ARGUMENTS, Arguments

pytest.importorskip("langdetect")

Row = dict[str, Any]

TWO_PARTS = ["punctuation:no_comma", "detectable_format:number_bullet_lists"]


def messages(text: str) -> list[Row]:
    return [{"role": "user", "content": text}]


def rlvr_row(function: str, arguments: Arguments) -> Row:
    unused = dict.fromkeys(("N", "quantifier", "end_phrase", "word", "i", "options"))
    truth = json.dumps({"func_name": function, **unused, **arguments})
    return {
        "messages": messages(f"Write about the sea, please: {function} {json.dumps(dict(arguments))}"),
        "ground_truth": truth,
        "constraint_type": function,
        "constraint": "as said",
        "dataset": "ifeval",
    }


def multi_row(cases: dict[str, Arguments | None], number: int = 0) -> Row:
    truth = repr([{"instruction_id": list(cases), "kwargs": list(cases.values())}])
    text = f"Write about the sea, please ({number}): {', '.join(cases)}"
    return {"messages": messages(text), "ground_truth": truth, "constraint_type": "multi", "constraint": "-"}


def write(path: Path, rows: Sequence[Row]) -> str:
    return str(write_rows(path, rows))


def task_of(name: str, folder: Path, rows: Sequence[Row], **settings: Any) -> Task:
    spec: Any = InstructionSpec
    return build_task(spec(name=name, source=write(folder / "rows.jsonl", rows), **settings))


ALL_ROWS = {
    "rlvr-ifeval": [rlvr_row(function, case) for function, case in RLVR_ARGUMENTS.items()],
    "if-multi": [multi_row({id_: case or None}, n) for n, (id_, case) in enumerate(MULTI_ARGUMENTS.items())],
}
NO_COMMAS = [multi_row({"punctuation:no_comma": None}, n) for n in range(2)]


def test_unclosed_reasoning_and_silence_are_no_format_and_an_echo_earns_nothing(tmp_path: Path) -> None:
    task = task_of("if-multi", tmp_path, NO_COMMAS)
    example = task.examples(Split.TRAIN)[0]
    for reply in ("<think>The sea is salt water.", "<think>well</think> \n", "", " \n"):
        outcome = verdict(task, example, reply)
        assert (outcome.reward, outcome.format_ok, outcome.is_correct) == (0.0, False, False)
    example = replace(example, fields={**example.fields, "prompt": "Write about the sea without commas"})
    assert verdict(task, example, example.fields["prompt"]).reward == 0.0
    assert verdict(task, example, "The sea is salt water.").reward == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Say it now", True),
        (" say  it\nnow 7", False),
        ("Say it\nnow! 42 a", True),
        ("Say it now and I did", False),
    ],
)
def test_rew_4_an_echo_is_the_prompt_and_next_to_nothing(text: str, expected: bool) -> None:
    assert is_echo(text, "Say it now") is expected


def test_without_langdetect_the_task_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    load_detector.cache_clear()
    with pytest.raises(ValueError, match=r"strop\[tasks\]"):
        task_of("if-multi", tmp_path, ALL_ROWS["if-multi"]).examples(Split.TRAIN)


def test_the_share_that_is_followed_is_paid(tmp_path: Path) -> None:
    rows = [multi_row({id_: MULTI_ARGUMENTS[id_] or None for id_ in TWO_PARTS}, n) for n in range(10)]
    task = task_of("if-multi", tmp_path, rows)
    outcome = verdict(task, task.examples(Split.TRAIN)[0], "The sea is blue <answer>and wide</answer>")
    assert (outcome.parts, outcome.is_correct) == ({"satisfied_frac": 0.5}, False)
    assert outcome.metrics == {"instructions_total": 2.0, "instructions_satisfied": 1.0}


def test_answer_tags_are_not_judged(tmp_path: Path) -> None:
    rows = [multi_row({"last_word:last_word_answer": {"last_word": "blue"}}, n) for n in range(2)]
    task = task_of("if-multi", tmp_path, rows)
    assert verdict(task, task.examples(Split.TRAIN)[0], "<answer>The sea is blue</answer>").reward == 1.0


@pytest.mark.parametrize("name", ALL_ROWS)
def test_right_replies_earn_full_marks(name: str, tmp_path: Path) -> None:
    task = task_of(name, tmp_path, ALL_ROWS[name])
    found = run_self_test(task, [*task.examples(Split.TRAIN), *task.examples(Split.HELD_OUT)])
    # Some instructions are followed by any text, such as that to use no commas.
    assert {"gold", "ceiling"} & {result.probe for result in found} == set()


@pytest.mark.parametrize(
    "change",
    [
        {"ground_truth": "func_name: x"},
        {"ground_truth": None},
        {"ground_truth": '{"N": 3}'},
        {"ground_truth": '{"func_name": "verify_all"}'},
        {"ground_truth": '{"func_name": "validate_title", "N": 0}'},
        {"ground_truth": '{"func_name": "validate_response_language"}'},
        {"ground_truth": '{"func_name": "validate_choice", "options": "yes"}'},
        {"ground_truth": '{"func_name": "validate_choice", "options": "[a]"}'},
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "Hi"}]},
    ],
)
def test_malformed_training_rows_are_refused(tmp_path: Path, change: Row) -> None:
    row = rlvr_row("validate_title", {}) | change
    with pytest.raises(DataError, match="row 2"):
        task_of("rlvr-ifeval", tmp_path, [rlvr_row("validate_no_commas", {}), row]).examples(Split.TRAIN)


def test_unequal_lists_of_a_multi_row_are_refused(tmp_path: Path) -> None:
    row = multi_row({}) | {"ground_truth": repr([{"instruction_id": TWO_PARTS, "kwargs": [None]}])}
    with pytest.raises(DataError, match="row 2"):
        task_of("if-multi", tmp_path, [NO_COMMAS[0], row]).examples(Split.TRAIN)


@pytest.mark.parametrize("name", ALL_ROWS)
def test_one_prompt_with_several_instructions_stays_in_one_split(name: str, tmp_path: Path) -> None:
    """The data has no split: whole rows told apart would be held out and trained on by the same prompt."""
    prompts = [f"Write about the sea, number {number}." for number in range(30)]
    rows = []
    for prompt in prompts:
        # Three rows of one prompt but for white space, each with an instruction of its own.
        for space, word in (("", "ship"), (" ", "harbor"), ("\n", "sail")):
            row = (
                rlvr_row("verify_keywords", {"keyword_list": [word]})
                if name == "rlvr-ifeval"
                else multi_row({"keywords:word_once": {"keyword": word}})
            )
            rows.append(row | {"messages": messages(f"{prompt}{space}")})
    task = task_of(name, tmp_path, rows)
    asked = {split: {" ".join(e.fields["prompt"].split()) for e in task.examples(split)} for split in Split}
    assert asked[Split.TRAIN] & asked[Split.HELD_OUT] == set()
    assert asked[Split.TRAIN] | asked[Split.HELD_OUT] == set(prompts)
    # A tenth of the prompts, not of the rows.
    assert len(asked[Split.HELD_OUT]) == 3
