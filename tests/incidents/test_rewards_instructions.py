"""Incidents on rewards, in the tasks whose replies must follow instructions."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from strop.errors import DataError
from strop.rollout import Example, make_example
from strop.tasks import Task, build_task
from strop.tasks.instructions import google
from strop.tasks.instructions.rlvr import as_instruction
from strop.tasks.instructions.segments import detect_language
from strop.tasks.instructions.tasks import IfMultiSpec, RlvrIfevalSpec
from strop.tasks.judging import InlineJudge

pytest.importorskip("langdetect")


def one(*constraints: tuple[str, dict[str, Any]]) -> Example:
    listed = [{"id": id_, "arguments": arguments} for id_, arguments in constraints]
    return make_example("if-multi", {"prompt": "Write of the sea.", "constraints": listed}, None)


def multi() -> Task:
    return build_task(IfMultiSpec(name="if-multi", source="unused.jsonl"))


def test_rew_1_an_exception_of_a_checker_is_not_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One benchmark read 0 % for every model, because a broad except hid a TypeError."""

    def broken(text: str) -> str:
        raise TypeError("detector")

    monkeypatch.setattr(google, "detect_language", broken)
    example = one(("language:response_language", {"language": "de"}))
    with pytest.raises(TypeError, match="detector"):
        multi().verify(example, "Das Meer ist blau und weit.")
    with pytest.raises(TypeError, match="detector"):
        asyncio.run(InlineJudge(multi()).judge(example, "Das Meer ist blau und weit."))


@pytest.mark.parametrize("text", ["", " ", "a", "asdf", "m", "y", "yes", "."])
def test_rew_4_next_to_nothing_earns_nothing(text: str) -> None:
    """A two-way substring match accepted 'a'; an empty reply satisfied 'no commas'."""
    rlvr = build_task(RlvrIfevalSpec(name="rlvr-ifeval", source="unused.jsonl"))
    for function, arguments in (
        ("validate_choice", {"options": ["My answer is yes.", "My answer is no."]}),
        ("validate_no_commas", {}),
        ("validate_lowercase", {}),
        ("validate_word_constraint", {"N": 50, "quantifier": "at most"}),
    ):
        instruction_id, renamed = as_instruction(function, arguments)
        listed = [{"id": instruction_id, "arguments": renamed}]
        example = make_example("rlvr-ifeval", {"prompt": "Well?", "constraints": listed}, None)
        assert rlvr.verify(example, text).reward == 0.0


def test_rew_4_no_instruction_is_dropped_by_a_short_list() -> None:
    """Ids and arguments of unequal length were zipped, and the surplus instructions always followed."""
    example = one(("punctuation:no_comma", {}), ("detectable_format:title", {}))
    assert multi().verify(example, "The sea is blue").metrics["instructions_total"] == 2.0


def test_rew_5_the_language_of_a_text_does_not_change() -> None:
    """An unseeded detector gave one reply different scores; so did calls at the same time."""
    torn = "Das ist not sure ob it gut is und maybe non lo so."
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(detect_language, [torn] * 40))
    assert len(found) == 1


def test_rew_6_unknown_names_are_refused_and_not_scored() -> None:
    """An unknown constraint, and one without its argument, scored 0."""
    for constraint in (
        ("keywords:rhyme", {}),
        ("keywords:existence", {}),
        ("keywords:existence", {"word": "a"}),
    ):
        with pytest.raises(DataError, match=r"^example [0-9a-f]{16} of task if-multi"):
            multi().verify(one(constraint), "The sea is blue")
