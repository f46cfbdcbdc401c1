"""Scores and results as an evaluation would store them, made of nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.evaluate import EvalResult, ExampleScore, Score, Validity
from strop.evaluate.harness import HarnessMetric, HarnessResult
from strop.evaluate.result import digest_examples
from strop.rollout import Sampling, Split


def make_example_score(solved_frac: float | None, **changes: Any) -> ExampleScore:
    fields: dict[str, Any] = {
        "num_judged": 0 if solved_frac is None else 1,
        "solved_frac": solved_frac,
        "format_ok_frac": None,
        "in_format_solved_frac": None,
        "reward_mean": solved_frac,
    }
    return ExampleScore(**(fields | changes))


def make_score(shares: Mapping[str, float | ExampleScore | None], **changes: Any) -> Score:
    by_example = {
        name: share if isinstance(share, ExampleScore) else make_example_score(share)
        for name, share in shares.items()
    }
    known = [example.solved_frac for example in by_example.values() if example.solved_frac is not None]
    fields: dict[str, Any] = {
        "accuracy": sum(known) / len(known) if known else None,
        "low": 0.0,
        "high": 1.0,
        "num_rollouts": len(shares),
        "num_too_long": 0,
        "num_unscored": len(shares) - len(known),
        "verifier_error_frac": 0.0,
        "timed_out_frac": 0.0,
        "truncated_frac": 0.0,
        "format_ok_frac": None,
        "reply_tokens_mean": 9.5,
        "reward_mean": 0.5,
        "by_example": by_example,
    }
    return Score(**(fields | changes))


def make_result(
    shares: Mapping[str, float | ExampleScore | None] | None = None, **changes: Any
) -> EvalResult:
    score = make_score({"a": 1.0, "b": 0.0} if shares is None else shares)
    fields: dict[str, Any] = {
        "task": "arithmetic",
        "task_version": "v1",
        "replies_version": "v1",
        "split": Split.HELD_OUT,
        "step": 20,
        "model_digest": "m1",
        "dtype": "float32",
        "policy_version": 20,
        "tokenizer_digest": "t1",
        "prompt_format": "chat",
        "num_examples": len(score.by_example),
        "examples_digest": digest_examples(list(score.by_example)),
        "run_seed": 0,
        "max_reply_tokens": 32,
        "sampling": Sampling(),
        "num_samples": None,
        "greedy": score,
        "sampled": None,
        "pass_at_k": {},
        "validity": Validity.VALID,
    }
    return EvalResult(**(fields | changes))


def make_harness_result(**changes: Any) -> HarnessResult:
    fields: dict[str, Any] = {
        "harness": "lm-eval-0.4.13",
        "task": "gsm8k_cot",
        "task_version": "3.0",
        "step": 0,
        "model_digest": "m",
        "dtype": "float32",
        "num_examples": 1319,
        "data_digest": "d",
        "num_fewshot": 4,
        "max_reply_tokens": 1024,
        "stops": ("Q:",),
        "seed": 42,
        "engine": "hf",
        "metrics": {
            "exact_match,flexible-extract": HarnessMetric(value=0.75, stderr=0.01),
            "exact_match,strict-match": HarnessMetric(value=0.5, stderr=0.01),
        },
        "parts": {},
        "truncated_frac": 0.0,
        "num_cut_prompts": 0,
    }
    return HarnessResult(**(fields | changes))
