"""Which held-out examples a run came to solve, with both replies, and what is said of them at its end."""

from __future__ import annotations

import asyncio
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from strop.engine import GenerationRequest
from strop.evaluate import EvalResult, EvalSettings, ShardFolder, plan_evaluation, run_evaluation
from strop.rollout import Split
from strop.run.held_out import ChangedExample, Changes, TrainOutcome, find_changes
from strop.tokenizer import Tokenizer
from strop.view.summary import describe_changes, describe_next
from tests.evaluate.arithmetic_world import Answer, make_engine, make_task, make_tokenizer

NUM_EXAMPLES = 40


def evaluate(tokenizer: Tokenizer, answer: Answer, path: Path, *, step: int) -> EvalResult:
    settings = EvalSettings(run_seed=0, step=step, split=Split.HELD_OUT, num_samples=2)
    planned = plan_evaluation(
        task=make_task(max_value=12, num_held_out=NUM_EXAMPLES),
        tokenizer=tokenizer,
        settings=settings,
        model_digest=str(step),
    )
    with ShardFolder(path, planned.plan, {}) as folder:
        return asyncio.run(run_evaluation(planned, make_engine(tokenizer, answer), tokenizer, folder=folder))


def even_at_first(a: int, b: int, request: GenerationRequest) -> str:
    return f"= {a + b if (a + b) % 2 == 0 else 0}"


def odd_then(a: int, b: int, request: GenerationRequest) -> str:
    return f"{a} + {b} = {a + b if (a + b) % 2 or a + b > 12 else 0}"


@pytest.fixture
def changes(tmp_path: Path) -> Changes:
    tokenizer = make_tokenizer(tmp_path)
    folders = tmp_path / "before", tmp_path / "after"
    before = evaluate(tokenizer, even_at_first, folders[0], step=0)
    after = evaluate(tokenizer, odd_then, folders[1], step=2)
    found = find_changes(make_task(max_value=12, num_held_out=NUM_EXAMPLES), before, after, folders)
    assert found is not None
    return found


def test_examples_are_paired_and_shown_with_both_replies(changes: Changes) -> None:
    task = make_task(max_value=12, num_held_out=NUM_EXAMPLES)
    sums = [(one.fields["a"], one.fields["b"]) for one in task.examples(Split.HELD_OUT)]
    odd = [(a, b) for a, b in sums if (a + b) % 2]
    assert changes.num_examples == NUM_EXAMPLES
    assert changes.num_gained == len(odd)
    assert changes.num_lost == sum((a + b) % 2 == 0 and a + b <= 12 for a, b in sums) > 0
    a, b = odd[0]
    assert changes.examples[0] == ChangedExample(
        question=f"What is {a} + {b}?", before="= 0", after=f"{a} + {b} = {a + b}"
    )
    assert len(changes.examples) == 3
    lines = describe_changes(changes, width=100)
    assert lines[0].startswith(f"gained {len(odd)} of 40 examples")
    assert [line.strip().split(":")[-1].strip() for line in lines[1:4]] == [
        *(f"What is {a} + {b}?", "= 0", f"{a} + {b} = {a + b}")
    ]
    assert len(lines) == 10


def test_evaluations_of_other_protocols_are_not_compared(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    folders = tmp_path / "before", tmp_path / "after"
    before = evaluate(tokenizer, even_at_first, folders[0], step=0)
    after = evaluate(tokenizer, odd_then, folders[1], step=2)
    other = after.model_copy(update={"task_version": "another"})
    task = make_task(max_value=12, num_held_out=NUM_EXAMPLES)
    assert find_changes(task, before, other, folders) is None
    # Without the replies, as of a run that began elsewhere, the counts are still true.
    found = find_changes(task, before, after, (tmp_path / "gone", folders[1]))
    assert found is not None
    assert found.num_gained > 0
    assert found.examples == ()


def test_hostile_replies_stay_text_and_on_their_line(changes: Changes) -> None:
    hostile = ChangedExample(question="\x1b[2J\nwhat?", before="x" * 10**6, after="")
    lines = describe_changes(replace(changes, examples=(hostile,)), width=60)
    assert lines[1].strip() == "␛[2J what?"
    assert len(lines[2]) == 60


def test_what_to_do_next_can_be_typed_as_it_stands(
    changes: Changes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = TrainOutcome(run_path=tmp_path / "my runs" / "a", before=None, after=None, changes=changes)
    words = ("run.toml", "train.accept=weights: random", "seed=3", "output.dir=here")
    lines = describe_next(outcome, words, seed=3)
    assert lines[0] == "next   every curve and every reply, in a browser:"
    own = [sys.executable, "-m", "strop.cli"]
    assert [shlex.split(line) for line in lines[1::2]] == [
        [*own, "view", str(outcome.run_path)],
        [*own, "sample", str(outcome.run_path), "--prompt", changes.examples[0].question],
        [*own, "train", "run.toml", "train.accept=weights: random", "seed=4"],
    ]
    # A program is called as it was called here.
    program = tmp_path / "bin" / "strop"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(program), "train"])
    assert describe_next(outcome, words, seed=3)[1].split()[0] == str(program)
    monkeypatch.setenv("PATH", str(program.parent))
    assert describe_next(outcome, words, seed=3)[1].split()[0] == "strop"
    # A question that a shell would not pass on is not put into a command.
    hostile = ChangedExample(question="\x1b[2J", before="", after="")
    asked = replace(outcome, changes=replace(changes, examples=(hostile,)))
    assert [line.split()[1] for line in describe_next(asked, words, seed=3)[1::2]] == ["view", "train"]
