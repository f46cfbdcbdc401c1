"""Replies that are kept: a killed evaluation goes on, and nobody else's replies are taken for its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.engine import Engine, GenerationRequest
from strop.errors import CheckRefused, CorruptRecord, StoreError
from strop.evaluate import EvalResult, EvalSettings, ShardFolder, plan_evaluation, run_evaluation
from strop.evaluate.shards import read_all_shards, read_plan
from strop.record.files import list_shards
from strop.record.rollouts import read_rollouts, write_rollouts
from strop.rollout import Split
from strop.tokenizer import Tokenizer
from tests.evaluate.arithmetic_world import make_engine, make_task, make_tokenizer
from tests.fixtures.dummy_engine import DummyEngine, ScriptedReply

SETTINGS = EvalSettings(run_seed=0, step=0, split=Split.HELD_OUT, num_samples=2, pass_at=(1, 2))
NUM_EXAMPLES = 70


def add_sometimes(a: int, b: int, request: GenerationRequest) -> str:
    return str(a + b if request.seed % 3 else 0)


def evaluate(
    tokenizer: Tokenizer, engine: Engine | None, path: Path | None, *, model_digest: str = "m", **changes: Any
) -> EvalResult:
    planned = plan_evaluation(
        task=make_task(max_value=12, num_held_out=NUM_EXAMPLES),
        tokenizer=tokenizer,
        settings=replace(SETTINGS, **changes),
        model_digest=model_digest,
    )
    if path is None:
        return asyncio.run(run_evaluation(planned, engine, tokenizer))
    with ShardFolder(path, planned.plan, {"name": "arithmetic"}) as folder:
        return asyncio.run(run_evaluation(planned, engine, tokenizer, folder=folder))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(tmp_path)


def test_every_reply_is_kept_with_its_plan(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "an eval" / "kept"
    result = evaluate(tokenizer, make_engine(tokenizer, add_sometimes), path)
    assert [len(read_rollouts(shard)) for shard in list_shards(path)] == [96, 96, 18]
    plan, rollouts = read_all_shards(path)
    assert (plan, {"name": "arithmetic"}) == read_plan(list_shards(path)[1])
    assert plan == result.identity
    assert len(rollouts) == 3 * NUM_EXAMPLES
    assert result == evaluate(tokenizer, make_engine(tokenizer, add_sometimes), None)


def test_only_what_is_missing_is_attempted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    whole = evaluate(tokenizer, make_engine(tokenizer, add_sometimes), tmp_path / "kept")
    list_shards(tmp_path / "kept")[1].unlink()
    engine = make_engine(tokenizer, add_sometimes)
    assert evaluate(tokenizer, engine, tmp_path / "kept") == whole
    assert len(engine.requests) == 3 * 32
    # Now all of it is there: no engine is needed, not even for other k.
    again = evaluate(tokenizer, None, tmp_path / "kept", pass_at=(2,))
    assert again.pass_at_k == {2: whole.pass_at_k[2]}
    assert again.greedy == whole.greedy


def test_what_an_engine_lost_is_attempted_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def answer(a: int, b: int, request: GenerationRequest) -> str | ScriptedReply:
        return ScriptedReply(text="", is_aborted=True) if a == 12 else add_sometimes(a, b, request)

    broken = evaluate(tokenizer, make_engine(tokenizer, answer), tmp_path / "kept")
    assert {cause.failure.kind for cause in broken.causes} == {"abort"}
    assert not broken.is_valid
    mended = evaluate(tokenizer, make_engine(tokenizer, add_sometimes), tmp_path / "kept")
    assert mended == evaluate(tokenizer, make_engine(tokenizer, add_sometimes), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_digest": "n"}, "model_digest 'm' and 'n'"),
        ({"run_seed": 1}, "run_seed 0 and 1"),
        ({"num_samples": 3}, "num_samples 2 and 3"),
        ({"num_examples": 64}, "num_examples 70 and 64; examples_digest"),
        ({"dtype": "bfloat16"}, "dtype None and 'bfloat16'"),
    ],
)
def test_another_evaluation_is_refused_by_what_differs(
    tokenizer: Tokenizer, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    evaluate(tokenizer, make_engine(tokenizer, add_sometimes), tmp_path / "kept")
    before = {path: path.read_bytes() for path in list_shards(tmp_path / "kept")}
    with pytest.raises(CheckRefused, match=rf"belongs to another evaluation, there and now: {message}"):
        evaluate(tokenizer, make_engine(tokenizer, add_sometimes), tmp_path / "kept", **changes)
    assert before == {path: path.read_bytes() for path in list_shards(tmp_path / "kept")}


def test_two_processes_do_not_share_a_folder(tokenizer: Tokenizer, tmp_path: Path) -> None:
    planned = plan_evaluation(task=make_task(), tokenizer=tokenizer, settings=SETTINGS, model_digest="m")
    with ShardFolder(tmp_path / "kept", planned.plan, {}):
        second = ShardFolder(tmp_path / "kept", planned.plan, {})
        with (
            pytest.raises(CheckRefused, match=r"kept is in use by process \d+ .* Allowed: .* Next: wait"),
            second,
        ):
            pass


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(bytes(data))


def swap_two_rollouts(path: Path) -> None:
    plan, settings = read_plan(path)
    rollouts = read_rollouts(path)
    facts = {
        "strop.evaluation": plan.model_dump_json(),
        "strop.task": json.dumps(settings),
        "strop.lost": "0",
    }
    write_rollouts(path, [rollouts[1], rollouts[0], *rollouts[2:]], facts=facts)


def forget_the_plan(path: Path) -> None:
    write_rollouts(path, read_rollouts(path))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_byte, "does not hold rollouts"),
        (swap_two_rollouts, "holds 96 rollouts that are not the planned ones"),
        (forget_the_plan, "is no shard of an evaluation"),
        (lambda path: path.write_bytes(b""), "does not hold rollouts"),
    ],
)
def test_a_damaged_shard_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    evaluate(tokenizer, make_engine(tokenizer, add_sometimes), tmp_path / "kept")
    damage(list_shards(tmp_path / "kept")[0])
    with pytest.raises(CorruptRecord, match=rf"(?s)examples-000000-000031\.parquet {message}.* Next: "):
        evaluate(tokenizer, DummyEngine(tokenizer, []), tmp_path / "kept")


def test_an_incomplete_folder_is_no_evaluation(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere holds the replies to 0 of an evaluation"):
        read_all_shards(tmp_path / "nowhere")
    evaluate(tokenizer, make_engine(tokenizer, add_sometimes), tmp_path / "kept")
    list_shards(tmp_path / "kept")[1].unlink()
    with pytest.raises(StoreError, match=r"holds the replies to 32 of 70 examples in a row\. .*Next: repeat"):
        read_all_shards(tmp_path / "kept")
