"""IFEval and IFBench by the package if-verifiable itself, and what is refused around it.

`ifeval_parity.jsonl` holds texts of strop's own with the verdicts of lm-eval 0.4.13 on them. Nothing is
fetched: the data packages of nltk in tests/fixtures/nltk_data are tiny.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError, DataError
from strop.rollout import Example, Split
from strop.tasks import Task, build_task
from strop.tasks.instructions.rules import bind
from strop.tasks.instructions.tasks import (
    NLTK_DATA,
    PACKAGE,
    RELEASE,
    InstructionSpec,
    judge,
    load_package,
)
from tests.fixtures.judging import verdict
from tests.tasks.instructions.instruction_cases import BENCH_ARGUMENTS, GOOGLE_ARGUMENTS, Arguments
from tests.tasks.instructions.test_tasks import Row, write

pytest.importorskip("if_verifiable")

RECORDED: Sequence[Mapping[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parent / "ifeval_parity.jsonl").read_text(encoding="utf-8").splitlines()
]
# On the recorded texts the rules for training and the published ones disagree this often, and only here.
OWN_DISAGREEMENTS = {
    "keywords:existence": 4,  # keywords are texts, not patterns: 'h.rb' does not find 'harb'
    "keywords:frequency": 1,  # '...' says nothing, so the bread that it leaves out earns nothing
    "keywords:forbidden_words": 2,  # '{}' and '"' say nothing
    "keywords:letter_frequency": 1,  # 'asdf' says nothing
    "language:response_language": 3,  # '...' and '"' are in no language; the harness counts them as English
    "length_constraints:number_sentences": 3,  # a blank line and a mark before the quote end a sentence
    "length_constraints:number_words": 3,  # two words or none are no answer of less than 30 words
    "startend:end_checker": 1,  # the phrase stands in a fence, which closes behind it
    "change_case:capital_word_frequency": 2,  # '{}' and '"' say nothing
    "punctuation:no_comma": 2,  # 'asdf' and '"' say nothing
}
TWO_PARTS = ["punctuation:no_comma", "detectable_format:number_bullet_lists"]


def eval_row(key: int, cases: Mapping[str, Arguments]) -> Row:
    """A row of IFEval or IFBench; the published tables name every argument and leave most empty."""
    names = sorted({name for arguments in cases.values() for name in arguments})
    tables = [{name: arguments.get(name) for name in names} for arguments in cases.values()]
    prompt = f"Write about the sea, please. Task {key}, following {', '.join(cases)}."
    return {"key": key, "prompt": prompt, "instruction_id_list": list(cases), "kwargs": tables}


@pytest.fixture
def two_parts(tmp_path: Path) -> str:
    return write(tmp_path / "two.jsonl", [eval_row(99, {id_: GOOGLE_ARGUMENTS[id_] for id_ in TWO_PARTS})])


def ifeval(source: str, **settings: Any) -> Task:
    return build_task(InstructionSpec(name="ifeval", source=source, **settings))


def ifbench(source: str) -> Task:
    return build_task(InstructionSpec(name="ifbench", source=source))


def last(task: Task) -> Example:
    return task.examples(Split.HELD_OUT)[-1]


def test_verdicts_are_the_published_ones() -> None:
    differing = [
        record
        for record in RECORDED
        if judge("ifeval", "Say it.", [record], record["text"]) != [(record["strict"], record["loose"])]
    ]
    assert differing == []


def test_rules_for_training_differ_where_they_mean_to() -> None:
    differing = [
        record["id"]
        for record in RECORDED
        if bind(record["id"], record["arguments"], place="a record")(record["text"]) is not record["strict"]
    ]
    assert Counter(differing) == OWN_DISAGREEMENTS


def test_all_instructions_can_be_judged(tmp_path: Path) -> None:
    rows = [eval_row(number, {id_: case}) for number, (id_, case) in enumerate(GOOGLE_ARGUMENTS.items())]
    task = ifeval(write(tmp_path / "ifeval.jsonl", rows))
    assert len(task.examples(Split.HELD_OUT)) == 25
    with pytest.raises(DataError):
        task.examples(Split.TRAIN)
    assert len(ifeval(str(tmp_path / "ifeval.jsonl"), num_held_out=3).examples(Split.HELD_OUT)) == 3
    assert (task.limits.max_reply_tokens, task.limits.stop_strings) == (4096, ())
    rows = [eval_row(number, {id_: case}) for number, (id_, case) in enumerate(BENCH_ARGUMENTS.items())]
    task = ifbench(write(tmp_path / "ifbench.jsonl", rows))
    assert len(task.examples(Split.HELD_OUT)) == 58


@pytest.mark.parametrize(
    ("instruction_id", "arguments", "good", "bad"),
    [
        ("count:numbers", {"N": 2}, "1 of 20", "one"),
        ("words:start_verb", {}, "Write it down", "The sea"),
        ("sentence:keyword", {"word": "sea", "N": 2}, "It rains. The sea waits.", "The sea waits. It rains."),
    ],
)
def test_ifbench(instruction_id: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    constraint = {"id": instruction_id, "arguments": arguments}
    assert judge("ifbench", "Say it.", [constraint], good) == [(True, True)]
    assert judge("ifbench", "Say it.", [constraint], bad) == [(False, False)]


def test_chance_is_the_same_each_time() -> None:
    # The package draws a number of bullets where a row says 0.
    constraint = {"id": "detectable_format:number_bullet_lists", "arguments": {"num_bullets": 0}}
    before = random.getstate()
    found = {
        tuple(judge("ifeval", "Say it.", [constraint], "* a\n" * n)[0] for n in range(6)) for _ in range(5)
    }
    assert len(found) == 1
    assert random.getstate() == before


def test_the_prompt_is_the_users_text(two_parts: str) -> None:
    task = ifeval(two_parts)
    (message,) = task.render(last(task))
    assert message.text == f"Write about the sea, please. Task 99, following {', '.join(TWO_PARTS)}."


def test_all_instructions_count_and_each_is_counted(two_parts: str) -> None:
    task = ifeval(two_parts)
    example = last(task)  # no comma, two bullets
    outcome = verdict(task, example, "<think>one, two</think>Of the sea:\n* blue\n* wide")
    assert (outcome.parts, outcome.is_correct, outcome.format_ok) == ({"correct": 1.0}, True, True)
    half = verdict(task, example, "The sea is blue and wide")
    assert (half.parts, half.is_correct) == ({"correct": 0.0}, False)
    assert half.metrics == {
        "instructions_total": 2.0,
        "instructions_satisfied": 1.0,
        "instructions_satisfied_loose": 1.0,
        "correct_strict": 0.0,
        "correct_loose": 0.0,
    }


def test_the_score_is_strict_and_both_are_reported(two_parts: str) -> None:
    # The first line has the comma; without it, every instruction is followed.
    task = ifeval(two_parts)
    outcome = verdict(task, last(task), "Sure, gladly:\nOf the sea:\n* blue\n* wide")
    assert outcome.reward == 0.0
    assert (outcome.metrics["correct_strict"], outcome.metrics["correct_loose"]) == (0.0, 1.0)


def test_unclosed_reasoning_and_silence_are_no_format(two_parts: str) -> None:
    task = ifeval(two_parts)
    for reply in ("<think>Of the sea:\n* a\n* b", "<think>well</think> \n", "", " \n"):
        outcome = verdict(task, last(task), reply)
        assert (outcome.reward, outcome.format_ok, outcome.is_correct) == (0.0, False, False)
        assert outcome.metrics["instructions_total"] == 2.0


_WORKER = """
import asyncio, time
from strop.rollout import make_example
from strop.tasks import build_warm_task
from strop.tasks.instructions.tasks import InstructionSpec
task = build_warm_task(InstructionSpec(name="ifeval", source="unused.jsonl"))
constraints = [
    {"id": "language:response_language", "arguments": {"language": "de"}},
    {"id": "length_constraints:number_sentences", "arguments": {"num_sentences": 2, "relation": "at least"}},
]
example = make_example("ifeval", {"prompt": "Say it.", "constraints": constraints}, None)
started_s = time.process_time()
for reply in ("Das ist das Haus. Es ist alt.", "", "lorem " * 17_000):
    asyncio.run(task.verify(example, reply))
print(time.process_time() - started_s)
"""


def test_a_warm_task_has_loaded_what_judging_needs() -> None:
    """Incident: each worker imported the package anew, at seconds of processor time, and was replaced."""
    done = subprocess.run([sys.executable, "-c", _WORKER], capture_output=True, text=True, check=True)
    # Seconds; on a quiet machine 0.15.
    assert float(done.stdout) < 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"kwargs": [{}]},
        {"kwargs": "none"},
        {"kwargs": [{}, 3]},
        {"instruction_id_list": [], "kwargs": []},
        {"prompt": " "},
        {"instruction_id_list": [*TWO_PARTS[:1], "format:nothing"]},
        {"kwargs": [{}, {"num_bullets": 3, "colour": "blue"}]},
        {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["c++ (new"]}]},
    ],
)
def test_rows_that_cannot_be_judged_are_refused(tmp_path: Path, change: Row) -> None:
    row = eval_row(1, {id_: GOOGLE_ARGUMENTS[id_] for id_ in TWO_PARTS}) | change
    with pytest.raises(DataError) as caught:
        ifeval(write(tmp_path / "one.jsonl", [row])).examples(Split.HELD_OUT)
    assert "row 1" in str(caught.value)


@pytest.fixture
def unloaded() -> Any:
    load_package.cache_clear()
    yield
    load_package.cache_clear()


@pytest.mark.usefixtures("unloaded")
def test_without_data_of_nltk_it_says_what_to_bring(
    two_parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *_, **__: pytest.fail("it was fetched"))
    for name, task in (("ifeval", ifeval(two_parts)), ("ifbench", ifbench(two_parts))):
        with pytest.raises(ConfigError) as caught:
            task.examples(Split.HELD_OUT)
        for place in NLTK_DATA[name]:
            assert place.partition("/")[2] in str(caught.value)


@pytest.mark.usefixtures("unloaded")
def test_another_release_is_refused(two_parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("if_verifiable"), "__version__", "0.1.1")
    with pytest.raises(ConfigError) as caught:
        ifeval(two_parts).examples(Split.HELD_OUT)
    assert f"{PACKAGE} {RELEASE}" in str(caught.value)
    assert "strop[ifeval]" in str(caught.value)
