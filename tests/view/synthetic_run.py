"""A run directory as a run leaves it, made by the rooms that would write it, from invented numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from strop.evaluate import EvalResult, Validity, result_name, write_result
from strop.record import Event, EventKind, RunDir
from strop.record.rollouts import write_rollouts
from strop.rollout import FailureOwner, Outcome, Rollout, Sampling, Turn, make_example
from tests.fixtures import records
from tests.fixtures.builders import spoken_turn

NUM_STEPS = 40
NUM_EXAMPLES = 200
SIZE = records.RecordSize(num_steps=NUM_STEPS, num_rollouts=8, num_reply_tokens=10, num_metrics=0)
STARTED_AT = 1_780_000_000.0
SPEC_TEXT = """name = "arithmetic"
seed = 7

[model]
uri = "smollm2-135m-instruct"

[task]
name = "arithmetic"
max_value = 20

[algorithm]
name = "grpo"

[train]
steps = 40
"""


def make_run(root: Path, *, num_steps: int = NUM_STEPS, eval_steps: Iterable[int] = (0, 20, 40)) -> RunDir:
    """Write a run that learned; leave out what `num_steps` and `eval_steps` leave out."""
    run = RunDir.create(root, "arithmetic", SPEC_TEXT, "5f2b9c0d", {"model_digest": "0a1b2c"}, now=STARTED_AT)
    run.begin_attempt()
    rng = random.Random(0)
    for step in range(1, num_steps + 1):
        run.metrics.append(step, records.make_metrics(step, SIZE, rng))
    for step in eval_steps:
        result = make_result(step, num_solved=round(NUM_EXAMPLES * records.learned(step, NUM_STEPS)))
        write_result(result, run.path / "eval" / result_name(result))
    if num_steps:
        write_rollouts(run.rollouts_path(1), make_rollouts(1, ["7", "9", "The answer is 12."]))
        write_rollouts(run.rollouts_path(num_steps), make_rollouts(num_steps, ["12", "12", "11"]))
    return run


def make_result(step: int, *, num_solved: int, validity: Validity = Validity.VALID) -> EvalResult:
    """Return a greedy evaluation in which the first `num_solved` examples are solved."""
    return records.make_result(
        [index < num_solved for index in range(NUM_EXAMPLES)],
        step=step,
        model_digest=f"model-{step}",
        seed=7,
        max_reply_tokens=32,
        reply_tokens_mean=9.0,
        validity=validity,
    )


def make_rollouts(step: int, replies: list[str], *, prompt: str = "What is 5 + 7?") -> list[Rollout]:
    """Return a group of replies to one sum; a reply that ends in its answer is solved."""
    example = make_example("arithmetic", {"a": 5, "b": 7}, "12")
    return [
        Rollout(
            example=example,
            step=step,
            sample_index=index,
            turns=(
                Turn(role="user", text=prompt, token_ids=np.arange(9, dtype=np.int32)),
                spoken_turn(reply, range(4), logprob=-0.3, version=step),
            ),
            outcome=Outcome(parts={"correct": float("12" in reply)}, is_correct="12" in reply),
            sampling=Sampling(),
        )
        for index, reply in enumerate(replies)
    ]


def make_lost_rollout(step: int) -> Rollout:
    """Return a rollout that could not be scored."""
    (rollout,) = make_rollouts(step, ["?"])
    return Rollout(
        example=rollout.example,
        step=step,
        sample_index=0,
        turns=rollout.turns,
        outcome=Outcome.lost(FailureOwner.INFRA, "timeout"),
        sampling=rollout.sampling,
    )


def raise_alarm(run: RunDir, step: int, detail: str = "0.97 of all groups have equal rewards") -> None:
    """Write a tripwire's event."""
    run.events.append(Event(kind=EventKind.TRIPWIRE, step=step, cause="zero_variance", detail=detail))
