"""A run directory of any size, written by the real writers from random numbers.

For pages, queries and benchmarks of a record of a thousand steps without training. Everything is drawn from
one seed, times and memory too. A few files of rollouts are linked many times to save space, so their columns
`step` and `policy_version` are those of the first link.
"""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strop.evaluate import (
    EvalResult,
    ExampleScore,
    Score,
    Validity,
    clustered_interval,
    result_name,
    write_result,
)
from strop.record import Event, EventKind, RunDir
from strop.record.events import JsonLines
from strop.record.prediction import Prediction, write_prediction
from strop.record.rollouts import StoredRollout, write_trained
from strop.rollout import FailureOwner, FinishReason, Outcome, Rollout, Sampling, Split, Turn, make_example

_STARTED_AT = 1_780_000_000.0
_TEXT = (
    "so the sum of all numbers is first add then take ten from it which leaves two let us check once more"
    " because every digit counts we carry one over now write down what remains and compare both sides"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSize:
    """The size of a run's record."""

    num_steps: int
    num_rollouts: int
    """Rollouts per step."""
    group_size: int = 8
    num_reply_tokens: int = 200
    num_metrics: int = 60
    """Numbers of a step's line, meaningless ones included."""
    num_distinct: int = 4
    """Files of rollouts that are written; the others are links to them."""
    num_evaluations: int = 11
    """Evenly spread, step 0 and the last step included."""
    num_examples: int = 200


def make_record(root: Path, size: RecordSize, *, name: str = "synthetic", seed: int = 0) -> RunDir:
    """Write a finished run below `root`, and return it with its lock released.

    It learns, raises a few alarms, and takes 12 s per step.
    Raises: StoreError if the disk fails.
    """
    spec = _SPEC.format(name=name, seed=seed, size=size)
    run = RunDir.create(root, name, spec, f"digest-{seed}", {"model_digest": "0a1b2c"}, now=_STARTED_AT)
    rng = random.Random(seed)
    with run:
        attempt = run.begin_attempt()
        write_prediction(run.path, _PREDICTION)
        _write_logs(run, size, rng)
        _write_rollouts(run, size, rng)
        num_parts = max(size.num_evaluations - 1, 1)
        for step in sorted({size.num_steps * part // num_parts for part in range(num_parts + 1)}):
            result = make_eval_result(step, size, seed=seed)
            write_result(result, run.path / "eval" / result_name(result))
        run.end_attempt(attempt, cause="finished", exit_code=0, step=size.num_steps)
        run.mark_finished()
    return run


def learned(step: int, num_steps: int) -> float:
    """Return the model's accuracy after so many steps: from 0.29 towards 0.8."""
    return 0.29 + 0.51 / (1 + math.exp(-(step / max(num_steps, 1) - 0.45) * 8))


_SPEC = """name = "{name}"
seed = {seed}

[model]
uri = "smollm2-135m-instruct"

[task]
name = "arithmetic"
max_value = 20

[algorithm]
name = "grpo"

[train]
steps = {size.num_steps}
group_size = {size.group_size}
"""
_PREDICTION = Prediction(
    hardware="2 CPU cores",
    basis="measured on this machine",
    is_measured=True,
    is_overlapped=False,
    seconds={"generate": 6.5, "verify": 0.2, "learn": 4.0, "sync": 0.3},
    step_s=11.0,
    scored_tokens_per_s=9000.0,
    num_reply_tokens=100_000.0,
    num_positions=140_000.0,
    memory_bytes=4e9,
    bottleneck="generate",
    total_s=11_000.0,
    usd_per_hour=2.5,
)


def _write_logs(run: RunDir, size: RecordSize, rng: random.Random) -> None:
    timeline, at = JsonLines(run.path / "timeline.jsonl"), _STARTED_AT + 30.0
    run.events.append(
        Event(kind=EventKind.GATE, step=0, cause="verifier", detail="gold passes, nonsense fails")
    )
    for step in range(1, size.num_steps + 1):
        metrics = make_metrics(step, size, rng)
        run.metrics.append(step, metrics)
        timeline.append_line({"step": step, "spans": _make_spans(metrics, size, at, rng)})
        at += metrics["seconds_step"]
        if metrics["zero_variance_frac"] > 0.7:
            detail = f"zero_variance_frac is {metrics['zero_variance_frac']:.2f}, above 0.7"
            run.events.append(Event(kind=EventKind.TRIPWIRE, step=step, cause="zero_variance", detail=detail))
        if step % 50 == 7:
            lost = Event(
                kind=EventKind.ROLLOUT_LOST, step=step, cause="infra: timeout", detail="the sandbox was slow"
            )
            run.events.append(lost)
    timeline.close()


def make_metrics(step: int, size: RecordSize, rng: random.Random) -> dict[str, float]:
    """Return the numbers of one step."""
    skill = learned(step, size.num_steps)
    share = step / max(size.num_steps, 1)
    accuracy = min(1.0, max(0.0, skill + rng.gauss(0, 0.04)))
    seconds = {"generate": 6.9, "verify": 0.25, "learn": 4.2, "sync": 0.35, "other": 0.1}
    noisy = {f"seconds_{name}": mean * rng.uniform(0.9, 1.1) for name, mean in seconds.items()}
    num_tokens = float(size.num_rollouts * size.num_reply_tokens)
    step_s = sum(noisy.values())
    metrics = noisy | {
        "reward_mean": accuracy,
        "accuracy": accuracy,
        "format_ok_frac": min(1.0, 0.7 + 0.3 * share),
        "failed_frac": 1 / 64,
        "duplicate_frac": 0.1 * share,
        "zero_variance_frac": min(1.0, max(0.0, 0.15 + 0.6 * skill + rng.gauss(0, 0.06))),
        "truncated_frac": max(0.0, 0.12 - 0.1 * share),
        "entropy_nats": max(0.02, 0.62 * math.exp(-share * 2) + rng.gauss(0, 0.01)),
        "policy_entropy_nats": max(0.02, 0.66 * math.exp(-share * 2) + rng.gauss(0, 0.01)),
        "prompt_dependence": 0.2 + 0.7 * share,
        "drift_mean_nats": max(0.0, 0.0021 + rng.gauss(0, 0.0002)),
        "reply_tokens_mean": size.num_reply_tokens * (1 - 0.2 * share) + rng.gauss(0, 4),
        "staleness_mean": max(0.0, 0.5 + rng.gauss(0, 0.1)),
        "staleness_max": float(rng.choice((0, 1, 1, 2))),
        "grad_norm": abs(1.1 + rng.gauss(0, 0.2)),
        "update_ratio": 1e-4 * (1 - 0.5 * share),
        "loss": rng.gauss(0, 0.02),
        "lr": 1e-5,
        "seconds_step": step_s,
        "num_scored_tokens": num_tokens,
        "scored_tokens_per_s": num_tokens / step_s,
        "peak_memory_bytes": 3.1e9 + 1e6 * step,
        "policy_version": float(step),
    }
    # Meaningless numbers, as many as in a run with many parts.
    return metrics | {
        f"reward_part_p{index:02d}": rng.random() for index in range(size.num_metrics - len(metrics))
    }


def _make_spans(
    metrics: dict[str, float], size: RecordSize, at: float, rng: random.Random
) -> list[dict[str, object]]:
    """Return the spans of a step that began `at` (Unix seconds)."""
    sampled_at = at + metrics["seconds_generate"]
    judged_at = sampled_at + metrics["seconds_verify"]
    learned_at = judged_at + metrics["seconds_learn"]
    spans: list[dict[str, object]] = []

    def add(lane: str, name: str, start: float, end: float, **detail: object) -> None:
        spans.append({"lane": lane, "name": name, "start": start, "end": end, "detail": detail})

    add("learner", "wait", at, judged_at)
    add("learner", "learn", judged_at, learned_at)
    add("learner", "sync", learned_at, learned_at + metrics["seconds_sync"])
    add("engine", "generate", at, sampled_at)
    for number in range(size.num_rollouts // size.group_size):
        start = at + rng.uniform(0, 0.4) * (sampled_at - at)
        end = start + rng.uniform(0.3, 1) * (sampled_at - start)
        add("environments", "group", start, end, number=number, example=f"{number:016x}", status="trained")
    add("verifier", "verify", sampled_at, judged_at)
    return spans


def _write_rollouts(run: RunDir, size: RecordSize, rng: random.Random) -> None:
    written: list[Path] = []
    for step in range(1, size.num_steps + 1):
        path = run.rollouts_path(step)
        if len(written) < size.num_distinct:
            rollouts = make_rollouts(step, size, rng)
            groups = [rollouts[at : at + size.group_size] for at in range(0, len(rollouts), size.group_size)]
            write_trained(
                path, [one for group in groups for one in train_group(group, rng.choice((0, 1, 1, 2)))]
            )
            written.append(path)
        else:
            try:
                os.link(written[step % len(written)], path)
            except OSError:  # A disk without hard links.
                shutil.copyfile(written[step % len(written)], path)


def train_group(group: list[Rollout], staleness: int) -> list[StoredRollout]:
    """Return a group with the advantages of its rewards over their mean."""
    rewards = [rollout.outcome.reward for rollout in group]
    scored = [reward for reward in rewards if reward is not None]
    has_difference = len({*scored}) > 1
    return [
        StoredRollout(
            rollout=rollout,
            advantages=tuple(
                np.full(len(turn.token_ids), reward - sum(scored) / len(scored), dtype=np.float32)
                if turn.is_sampled and has_difference and reward is not None
                else None
                for turn in rollout.turns
            ),
            status="trained" if has_difference else "skipped",
            staleness=staleness,
        )
        for rollout, reward in zip(group, rewards, strict=True)
    ]


def make_rollouts(step: int, size: RecordSize, rng: random.Random) -> list[Rollout]:
    """Return the rollouts of one step: groups of attempts at sums, every fourth group over two turns."""
    rollouts: list[Rollout] = []
    for number in range(math.ceil(size.num_rollouts / size.group_size)):
        a, b = rng.randrange(100), rng.randrange(100)
        prompt = f"What is {a} + {b}? Think first, then end with the answer."
        for index in range(min(size.group_size, size.num_rollouts - len(rollouts))):
            is_correct = rng.random() < learned(step, size.num_steps)
            answer = str(a + b if is_correct else a + b + rng.randrange(1, 9))
            turns = [_hear(prompt, rng)]
            if number % 4 == 3:
                turns.append(_speak(f'{{"name": "calculator", "arguments": {{"a": {a}}}}}', 20, step, rng))
                turns.append(_hear(f"result: {a + b}", rng))
            num_words = max(size.num_reply_tokens - 1, 1)
            reply = f"{' '.join(rng.choices(_WORDS, k=num_words))} {answer}"
            turns.append(_speak(reply, size.num_reply_tokens, step, rng))
            outcome = Outcome(
                parts={"correct": float(is_correct)},
                is_correct=is_correct,
                format_ok=rng.random() < 0.9,
                truncated=rng.random() < 0.03,
                extracted=answer,
            )
            if rng.random() < 1 / 64:
                outcome = Outcome.lost(FailureOwner.INFRA, "timeout", "the sandbox was slow")
            rollout = Rollout(
                example=make_example("arithmetic", {"a": a, "b": b}, str(a + b)),
                step=step - 1,
                sample_index=index,
                turns=tuple(turns),
                outcome=outcome,
                sampling=Sampling(),
                seconds={"generate": rng.uniform(1, 6), "verify": 0.01},
            )
            rollouts.append(rollout)
    return rollouts


def _hear(text: str, rng: random.Random) -> Turn:
    ids = np.array([rng.randrange(49_000) for _ in text.split()], dtype=np.int32)
    return Turn(role="prompt", text=text, token_ids=ids)


def _speak(text: str, num_tokens: int, step: int, rng: random.Random) -> Turn:
    draw: Callable[[], float] = rng.random
    return Turn(
        role="assistant",
        text=text,
        token_ids=np.array([rng.randrange(49_000) for _ in range(num_tokens)], dtype=np.int32),
        logprobs=np.array([math.log(1.0 - 0.99 * draw()) for _ in range(num_tokens)], dtype=np.float32),
        policy_version=step - 1,
        finish_reason=FinishReason.EOS,
    )


def make_eval_result(step: int, size: RecordSize, *, seed: int = 0, gain: float = 0.0) -> EvalResult:
    """Return a greedy evaluation after `step` steps; `gain` is added to the accuracy."""
    rng = random.Random(f"{seed} {step}")
    accuracy = min(learned(step, size.num_steps) + gain, 1.0)
    # Easy examples first: a solved example mostly stays solved.
    solved = [(index + rng.gauss(0, 8)) / size.num_examples < accuracy for index in range(size.num_examples)]
    return make_result(
        solved,
        step=step,
        model_digest=f"model-{seed}-{step}",
        seed=seed,
        max_reply_tokens=size.num_reply_tokens,
        reply_tokens_mean=float(size.num_reply_tokens),
    )


def make_result(
    solved: Sequence[bool],
    *,
    step: int,
    model_digest: str,
    seed: int,
    max_reply_tokens: int,
    reply_tokens_mean: float,
    validity: Validity = Validity.VALID,
) -> EvalResult:
    """Return a greedy evaluation of sums; `solved` is by example."""
    num_examples = len(solved)
    interval = clustered_interval([[one] for one in solved])
    mean = sum(solved) / num_examples
    greedy = Score(
        accuracy=mean,
        low=interval.low,
        high=interval.high,
        num_samples=1,
        num_rollouts=num_examples,
        num_too_long=0,
        num_unscored=0,
        verifier_error_frac=0.0,
        failures={},
        timed_out_frac=0.0,
        truncated_frac=0.0,
        cut_unsolved_frac=0.0,
        format_ok_frac=None,
        reply_tokens_mean=reply_tokens_mean,
        reward_mean=mean,
        by_example={
            f"{index:016x}": ExampleScore(
                num_judged=1,
                solved_frac=float(one),
                format_ok_frac=None,
                in_format_solved_frac=None,
                reward_mean=float(one),
            )
            for index, one in enumerate(solved)
        },
    )
    return EvalResult(
        task="arithmetic",
        task_version="a1",
        replies_version="a1",
        split=Split.HELD_OUT,
        step=step,
        model_digest=model_digest,
        policy_version=step,
        dtype="float32",
        tokenizer_digest="t1",
        prompt_format="chat",
        num_examples=num_examples,
        examples_digest="e1",
        run_seed=seed,
        max_reply_tokens=max_reply_tokens,
        sampling=Sampling(),
        num_samples=None,
        pass_threshold=None,
        greedy=greedy,
        sampled=None,
        pass_at_k={},
        validity=validity,
    )
