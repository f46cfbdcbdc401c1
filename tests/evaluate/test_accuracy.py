"""Evaluating a task with a scripted engine: what is asked, counted, refused and stored."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.engine import Engine, GenerationRequest
from strop.errors import ConfigError, EngineError
from strop.evaluate import (
    EvalResult,
    EvalSettings,
    Validity,
    plan_evaluation,
    read_result,
    run_evaluation,
    scoring,
    write_result,
)
from strop.rollout import Example, Outcome, Sampling, Split
from strop.tasks import Task
from strop.tasks.generated import Arithmetic
from strop.tokenizer import Tokenizer
from tests.evaluate.arithmetic_world import (
    NUM_HELD_OUT,
    BrittleArithmetic,
    PartialArithmetic,
    add,
    make_engine,
    make_spec,
    make_task,
    make_tokenizer,
)
from tests.fixtures.dummy_engine import DummyEngine, ScriptedReply
from tests.fixtures.evaluating import evaluate_task

SETTINGS = EvalSettings(run_seed=0, step=7, split=Split.HELD_OUT)


def evaluate(task: Task, engine: Engine, tokenizer: Tokenizer, **changes: Any) -> EvalResult:
    settings = replace(SETTINGS, **changes)
    return asyncio.run(
        evaluate_task(task=task, engine=engine, tokenizer=tokenizer, settings=settings, model_digest="m")
    )


def test_whoever_waits_is_told_of_every_example(tmp_path: Path) -> None:
    tokenizer, task, told = make_tokenizer(tmp_path), make_task(), []
    settings = replace(SETTINGS, num_samples=2)
    planned = plan_evaluation(task=task, tokenizer=tokenizer, settings=settings, model_digest="m")
    engine = make_engine(tokenizer, add)
    result = asyncio.run(run_evaluation(planned, engine, tokenizer, on_example=lambda: told.append(1)))
    assert len(told) == result.num_examples > 1


def test_right_answers_are_counted(tmp_path: Path) -> None:
    tokenizer, task = make_tokenizer(tmp_path), make_task()
    engine = make_engine(tokenizer, lambda a, b, request: str(a + b if b > 2 else 0))
    held_out = task.examples(Split.HELD_OUT)
    num_solved = sum(example.fields["b"] > 2 for example in held_out)
    result = evaluate(task, engine, tokenizer)
    assert 0 < num_solved < NUM_HELD_OUT
    assert result.greedy.accuracy == num_solved / NUM_HELD_OUT
    assert result.greedy.low < num_solved / NUM_HELD_OUT < result.greedy.high
    assert (result.greedy.num_rollouts, result.sampled) == (NUM_HELD_OUT, None)
    assert {name: example.solved_frac for name, example in result.greedy.by_example.items()} == {
        example.example_id: float(example.fields["b"] > 2) for example in held_out
    }
    assert (result.validity, result.policy_version, result.prompt_format) == (Validity.VALID, 0, "chat")


def test_greedy_and_sampled_rollouts_are_told_apart(tmp_path: Path) -> None:
    tokenizer, task = make_tokenizer(tmp_path), make_task()

    def answer(a: int, b: int, request: GenerationRequest) -> str:
        # Right when greedy, and in sampled rollouts when the stream's name is even.
        is_right = request.sampling.temperature == 0 or request.seed % 2 == 0
        return str(a + b if is_right else 0)

    engine = make_engine(tokenizer, answer)
    sampling = Sampling(temperature=0.8, top_k=5)
    result = evaluate(task, engine, tokenizer, num_samples=4, sampling=sampling)
    sampled = [request for request in engine.requests if request.sampling == sampling]
    assert len(engine.requests) - len(sampled) == NUM_HELD_OUT
    assert len({request.seed for request in sampled}) == len(sampled) == 4 * NUM_HELD_OUT
    assert result.sampled is not None
    assert result.greedy.accuracy == 1.0
    assert result.sampled.accuracy == sum(r.seed % 2 == 0 for r in sampled) / len(sampled)
    assert result.sampled.num_rollouts == 4 * NUM_HELD_OUT


def test_all_requests_are_in_flight_at_once(tmp_path: Path) -> None:
    tokenizer, task = make_tokenizer(tmp_path), make_task()
    waiting = 0
    largest = 0

    class SlowEngine(DummyEngine):
        async def generate(self, request: GenerationRequest) -> Any:
            nonlocal waiting, largest
            waiting += 1
            largest = max(largest, waiting)
            # Long enough for every other rollout to arrive, whatever the order.
            for _ in range(50):
                await asyncio.sleep(0)
            waiting -= 1
            return await super().generate(request)

    evaluate(task, SlowEngine(tokenizer, lambda request: "1"), tokenizer, num_samples=2)
    assert largest == 3 * NUM_HELD_OUT


def test_the_result_is_the_same_again_and_survives_storage(tmp_path: Path) -> None:
    tokenizer, task = make_tokenizer(tmp_path), make_task()
    first, second = (
        evaluate(task, make_engine(tokenizer, add), tokenizer, num_samples=2, num_examples=3)
        for _ in range(2)
    )
    assert first == second
    assert first.num_examples == 3
    write_result(first, tmp_path / "r.json")
    assert read_result(tmp_path / "r.json") == first


def test_format_and_length_are_reported_apart_from_being_right(tmp_path: Path) -> None:
    tokenizer, task = make_tokenizer(tmp_path), make_task()
    engine = make_engine(tokenizer, lambda a, b, request: f"{a + b} it is")
    result = evaluate(task, engine, tokenizer)
    assert (result.greedy.accuracy, result.greedy.format_ok_frac) == (1.0, 0.0)
    # One or two digits, six further single-byte tokens and the terminator.
    assert result.greedy.reply_tokens_mean is not None
    assert 8 <= result.greedy.reply_tokens_mean <= 10


def test_an_unscored_rollout_is_neither_right_nor_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(tmp_path)
    task = BrittleArithmetic(make_spec())
    held_out = task.examples(Split.HELD_OUT)
    num_unscored = sum(example.fields["a"] == 1 for example in held_out)
    result = evaluate(task, make_engine(tokenizer, add), tokenizer)
    assert 0 < num_unscored < NUM_HELD_OUT
    assert (result.greedy.accuracy, result.greedy.num_unscored) == (1.0, num_unscored)
    shares = [example.solved_frac for example in result.greedy.by_example.values()]
    assert shares.count(None) == num_unscored
    assert result.greedy.verifier_error_frac == num_unscored / NUM_HELD_OUT
    assert [(cause.failure.kind, cause.num) for cause in result.causes] == [("TypeError", num_unscored)]
    assert result.validity is Validity.VERIFIER
    monkeypatch.setattr(scoring, "MAX_VERIFIER_ERROR_FRAC", 0.9)
    assert evaluate(task, make_engine(tokenizer, add), tokenizer).validity is Validity.UNSCORED
    monkeypatch.setattr(scoring, "MAX_UNSCORED_FRAC", 0.9)
    assert evaluate(task, make_engine(tokenizer, add), tokenizer).is_valid


def test_pass_at_k_by_hand(tmp_path: Path) -> None:
    tokenizer, task = make_tokenizer(tmp_path), make_task()
    first_two = [example.fields for example in task.examples(Split.HELD_OUT)[:2]]
    num_asked: Counter[tuple[int, int]] = Counter()

    def answer(a: int, b: int, request: GenerationRequest) -> str:
        # Of four samples the first of the first example is right, and all of the second.
        num_asked[a, b] += request.sampling.temperature > 0
        is_right = {"a": a, "b": b} == first_two[1] or num_asked[a, b] == 1
        return str(a + b if is_right else 0)

    engine = make_engine(tokenizer, answer)
    result = evaluate(task, engine, tokenizer, num_examples=2, num_samples=4, pass_at=(1, 2, 4))
    # Example 1: 1/4, 1 - C(3, 2) / C(4, 2) = 1/2, 1. Example 2: 1 throughout.
    assert {k: found.value for k, found in result.pass_at_k.items()} == {1: 0.625, 2: 0.75, 4: 1.0}
    assert result.sampled is not None
    assert result.sampled.accuracy == 0.625
    for found in result.pass_at_k.values():
        assert found.value is not None
        assert 0.0 < found.low < found.value <= found.high
        assert (found.num_examples, found.num_left_out) == (2, 0)


def test_eva_5_a_part_of_the_marks_is_not_solved(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path)
    engine = make_engine(tokenizer, lambda a, b, request: "no idea")
    score = evaluate(PartialArithmetic(make_spec()), engine, tokenizer).greedy
    assert score.accuracy == 0.0
    assert score.reward_mean == pytest.approx(0.3)


def test_code_that_ran_out_of_time_is_wrong_and_counted(tmp_path: Path) -> None:
    class Endless(Arithmetic):
        async def verify(self, example: Example, text: str) -> Outcome:
            return Outcome(parts={"correct": 0.0}, is_correct=False, timed_out=True)

    tokenizer = make_tokenizer(tmp_path)
    result = evaluate(Endless(make_spec()), make_engine(tokenizer, add), tokenizer)
    assert (result.greedy.accuracy, result.greedy.timed_out_frac) == (0.0, 1.0)
    assert (result.greedy.verifier_error_frac, result.is_valid) == (0.0, True)


def test_eva_5_an_aborted_reply_is_unscored(tmp_path: Path) -> None:
    tokenizer, task = make_tokenizer(tmp_path), make_task()
    aborted = ScriptedReply(text="4", is_aborted=True)
    result = evaluate(task, DummyEngine(tokenizer, lambda request: aborted), tokenizer)
    assert (result.greedy.accuracy, result.greedy.num_unscored) == (None, NUM_HELD_OUT)
    assert (result.greedy.low, result.greedy.high) == (0.0, 1.0)
    assert result.validity is Validity.UNSCORED


def test_an_engine_that_never_replies_is_an_error(tmp_path: Path) -> None:
    tokenizer, task = make_tokenizer(tmp_path), make_task()
    with pytest.raises(EngineError, match=r"all 10 .*engine, EngineError: .*\(dummy_engine\.py:\d+\)"):
        evaluate(task, DummyEngine(tokenizer, []), tokenizer)


def test_weights_that_change_in_between_are_an_error(tmp_path: Path) -> None:
    tokenizer, task = make_tokenizer(tmp_path), make_task()

    def answer(a: int, b: int, request: GenerationRequest) -> str:
        engine.policy_version = len(engine.requests) // 5
        return "1"

    engine = make_engine(tokenizer, answer)
    with pytest.raises(EngineError, match=r"\[0, 1\]"):
        evaluate(task, engine, tokenizer)


@pytest.mark.parametrize(
    ("changes", "given"),
    [
        ({"num_examples": 11}, "11 examples"),
        ({"num_examples": 0}, "0 examples"),
        ({"pass_at": (1,)}, "pass@1"),
        ({"pass_at": (2, 4), "num_samples": 3}, "pass@4"),
        ({"pass_at": (0,), "num_samples": 3}, "pass@0"),
        ({"split": Split.TRAIN}, "train"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(tmp_path: Path, changes: dict[str, Any], given: str) -> None:
    class HeldOutOnly(Arithmetic):
        def examples(self, split: Split) -> Sequence[Example]:
            return super().examples(split) if split is Split.HELD_OUT else []

    tokenizer = make_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=given):
        evaluate(HeldOutOnly(make_spec()), DummyEngine(tokenizer, []), tokenizer, **changes)


def test_a_setting_that_concerns_the_whole_run_ends_the_evaluation(tmp_path: Path) -> None:
    # A ConfigError passes the rollout's boundary, as itself and not inside an exception group.
    tokenizer = make_tokenizer(tmp_path)
    engine = DummyEngine(tokenizer, [ConfigError("the engine was set up wrongly")])
    with pytest.raises(ConfigError, match="set up wrongly"):
        evaluate(make_task(), engine, tokenizer)
