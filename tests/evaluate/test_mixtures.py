"""Evaluating a mixture: each part by its own budget, told apart in result, rescoring and comparison."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused
from strop.evaluate import (
    EvalSettings,
    compare_results,
    plan_evaluation,
    read_result,
    rescore,
    run_evaluation,
    write_result,
)
from strop.evaluate.shards import ShardFolder, read_all_shards
from strop.rollout import Split
from strop.spec.parts import MixtureSpec
from strop.tasks import Task, build_task
from strop.tokenizer import Tokenizer
from tests.evaluate.arithmetic_world import make_engine, make_tokenizer
from tests.evaluate.test_accuracy import evaluate
from tests.fixtures.dummy_engine import DummyEngine

# Sums of 1 to 4 and of 100 to 102: 4 and 2 held-out examples.
SMALL: dict[str, Any] = {"name": "arithmetic", "min_value": 1, "max_value": 4, "num_held_out": 4}
LARGE: dict[str, Any] = {"name": "arithmetic", "min_value": 100, "max_value": 102, "num_held_out": 2}
SETTINGS = EvalSettings(run_seed=0, step=0, split=Split.HELD_OUT)


def mixture(large: dict[str, Any] | None = None) -> Task:
    return build_task(MixtureSpec(name="mixture", parts={"small": SMALL, "large": LARGE | (large or {})}))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(tmp_path)


def engine_of(tokenizer: Tokenizer, *, small: str | None = None, large: str | None = None) -> DummyEngine:
    """Answer rightly, or with a fixed text where one is given."""
    return make_engine(tokenizer, lambda a, b, _: (large if a >= 100 else small) or str(a + b))


def test_each_part_has_its_own_budget(tokenizer: Tokenizer) -> None:
    engine = engine_of(tokenizer)
    result = evaluate(mixture({"max_reply_tokens": 12}), engine, tokenizer)
    assert Counter(request.max_tokens for request in engine.requests) == {32: 4, 12: 2}
    assert (result.max_reply_tokens, result.part_reply_tokens) == (32, {"small": 32, "large": 12})


def test_parts_are_told_apart_beside_the_whole(tokenizer: Tokenizer, tmp_path: Path) -> None:
    task = mixture()
    result = evaluate(task, engine_of(tokenizer, large="0"), tokenizer, num_samples=2, pass_at=(1, 2))
    # 4 right and 2 wrong.
    assert result.greedy.accuracy == pytest.approx(4 / 6)
    small, large = result.parts["small"], result.parts["large"]
    assert (small.task, small.greedy.accuracy, large.greedy.accuracy) == ("arithmetic", 1.0, 0.0)
    assert (len(small.example_ids), len(large.example_ids)) == (4, 2)
    assert (large.sampled is not None, large.pass_at_k[2].value, small.pass_at_k[2].value) == (True, 0.0, 1.0)
    assert small.greedy.num_rollouts + large.greedy.num_rollouts == result.greedy.num_rollouts == 6
    assert set(small.example_ids) | set(large.example_ids) == set(result.greedy.by_example)
    write_result(result, tmp_path / "r.json")
    assert read_result(tmp_path / "r.json") == result


def test_the_first_examples_are_of_all_parts(tokenizer: Tokenizer) -> None:
    engine = engine_of(tokenizer)
    result = evaluate(mixture(), engine, tokenizer, num_examples=3)
    assert {label: len(part.example_ids) for label, part in result.parts.items()} == {"small": 2, "large": 1}


def test_a_part_whose_budget_was_lowered_cannot_hide_in_the_whole(tokenizer: Tokenizer) -> None:
    # 19 or 20 tokens against a budget of 12 in one part: 2 of 6 replies are cut, and all of that part.
    long = "The total is   202"
    cut = evaluate(mixture({"max_reply_tokens": 12}), engine_of(tokenizer, large=long), tokenizer)
    assert (cut.validity.value, cut.parts["large"].greedy.truncated_frac) == ("invalid: truncation", 1.0)
    assert cut.parts["small"].greedy.truncated_frac == 0.0
    assert evaluate(mixture(), engine_of(tokenizer, large=long), tokenizer).is_valid


def test_a_mixture_is_compared_part_by_part(tokenizer: Tokenizer) -> None:
    task = mixture()
    before = evaluate(task, engine_of(tokenizer, large="0"), tokenizer)
    after = evaluate(task, engine_of(tokenizer, small="0"), tokenizer, step=5)
    change = compare_results(before, after)
    # 4 of 6 lost and 2 of 6 gained: the whole alone would hide the gain.
    assert change.greedy is not None
    assert change.greedy.estimate == pytest.approx(-2 / 6)
    small, large = change.parts["small"].greedy, change.parts["large"].greedy
    assert small is not None
    assert large is not None
    assert (small.estimate, small.num_examples, small.num_lost) == (-1.0, 4, 4)
    assert (large.estimate, large.num_examples, large.num_gained) == (1.0, 2, 2)
    other = evaluate(mixture({"max_reply_tokens": 12}), engine_of(tokenizer), tokenizer)
    with pytest.raises(CheckRefused, match=r"task_version .*part_reply_tokens \{'small': 32, 'large': 32\}"):
        compare_results(before, other)


def test_kept_replies_of_a_mixture_are_judged_anew(tokenizer: Tokenizer, tmp_path: Path) -> None:
    task = mixture({"max_reply_tokens": 12})
    planned = plan_evaluation(task=task, tokenizer=tokenizer, settings=SETTINGS, model_digest="m")
    with ShardFolder(tmp_path / "kept", planned.plan, {}) as folder:
        engine = engine_of(tokenizer, large="The total is   202")
        first = asyncio.run(run_evaluation(planned, engine, tokenizer, folder=folder))
    plan, rollouts = read_all_shards(tmp_path / "kept")
    assert asyncio.run(rescore(plan, rollouts, task)) == (first, [])
    # The budget is that of the replies: judged without the lowered limit, they stay cut by it.
    other, _ = asyncio.run(rescore(plan, rollouts, mixture()))
    assert other.validity.value == "invalid: truncation"
    assert other.parts["large"].greedy.truncated_frac == 1.0


def test_where_the_data_of_a_part_lies_is_no_part_of_the_version(tmp_path: Path) -> None:
    versions = []
    for name in ("here", "there"):
        folder = tmp_path / name
        folder.mkdir()
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text(f'{{"question": "{split}?", "answer": "#### 1"}}\n')
        parts = {"words": {"name": "gsm8k", "source": str(folder)}, "sums": SMALL}
        versions.append(build_task(MixtureSpec(name="mixture", parts=parts)).version)
    assert versions[0] == versions[1]
