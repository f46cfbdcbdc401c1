"""Losses whose parts cannot go together are refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.fixtures.tiny_run import tiny_spec

RAY = {"kind": "process"}
TEACHER = {"source": "model", "model": "some/model"}
LONG = {"name": "arithmetic", "max_reply_tokens": 600}
CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"algorithm": {"name": "dppo", "mode": "single"}},
        "its range bounds the difference to the engine's probability",
    ),
    (
        {"algorithm": {"zero_variance": "skip"}, "reference": {"kl_beta": 0.04}},
        "the loss has a gradient on tokens without advantage too",
    ),
    ({"algorithm": {"name": "ipo_mask", "zero_variance": "skip"}}, "without advantage too"),
    (
        {"algorithm": {"zero_variance": "skip"}, "teacher": {"source": "initial", "form": "sampled"}},
        "without advantage too",
    ),
    ({"algorithm": {"correction": "mis_seq"}, "task": LONG}, "the ratio of a long reply is a product"),
    ({"train": {"terms": "distill"}}, "there is nobody to learn from"),
    (
        {"train": {"terms": "distill"}, "teacher": {"source": "model"}},
        "only a teacher of its own has a model of its own",
    ),
    (
        {"train": {"terms": "distill"}, "teacher": {"source": "current"}},
        "teacher and policy would be the same in every respect",
    ),
    (
        {"train": {"terms": "distill"}, "teacher": {**TEACHER, "student_frac": 0.5}},
        "the other steps need demonstrations",
    ),
    (
        {"train": {"terms": "distill"}, "teacher": TEACHER, "algorithm": {"correction": "icepop"}},
        r"algorithm\.correction='icepop'.*nothing would read the setting",
    ),
    (
        {
            "train": {"terms": "distill"},
            "teacher": {**TEACHER, "form": "sampled"},
            "algorithm": {"clip_high": 0.5, "correction": "icepop"},
        },
        r"algorithm\.clip_high=0\.5.*nothing would read .*remove algorithm\.clip_high, or",
    ),
    (
        {"train": {"terms": "distill"}, "teacher": TEACHER, "reference": {"kl_beta": 0.1}},
        r"reference\.kl_beta=0\.1.*nothing would read the setting",
    ),
    ({"teacher": TEACHER}, "beside rewards a teacher is a part of the advantage"),
    ({"train": {"terms": "dpo"}}, "pairs and the loss on them belong together"),
    ({"dpo": {"source": "runs/one"}}, "pairs and the loss on them belong together"),
    ({"algorithm": {"name": "sapo", "clip_low": 0.1}}, "algorithm.clip_low=0.1: its gate has no bounds"),
    ({"algorithm": {"name": "cispo", "dual_clip": 3.0}}, "its loss is not the clipped one"),
    (
        {"algorithm": {"entropy_weight": 0.1}, "train": {"terms": "distill"}, "teacher": TEACHER},
        "the loss has no term that the bonus belongs to",
    ),
    (
        {"algorithm": {"mode": "single"}, "train": {"epochs": 2}},
        "every ratio would be 1 in every optimizer step",
    ),
    ({"algorithm": {"zero_variance": "skip", "entropy_weight": 0.1}}, "without advantage too"),
    ({"algorithm": {"zero_variance": "skip", "advantage": "rpp_baseline"}}, "without advantage too"),
    ({"algorithm": {"name": "reinforce_pp", "zero_variance": "skip"}}, "without advantage too"),
    (
        {"algorithm": {"name": "reinforce_pp"}, "reference": {"kl_beta": 0.1, "kl_estimator": "k2"}},
        "its KL penalty is a part of the reward",
    ),
    (
        {"algorithm": {"advantage": "rpp"}, "reference": {"kl_beta": 0.1, "kl_estimator": "k3"}},
        "its KL penalty is a part of the reward",
    ),
    ({"train": {"group_size": 1}}, "every advantage would be zero"),
    (
        {"algorithm": {"name": "reinforce_pp", "zero_variance": "drop"}, "train": {"group_size": 1}},
        "every group would be left out",
    ),
    ({"train": {"prompts_per_step": 6, "mini_batches": 4}}, "the parts of a batch would differ in size"),
    (
        {"train": {"terms": "distill", "epochs": 2}, "teacher": TEACHER},
        "only a batch of rollouts alone is gone through several times",
    ),
    (
        {"train": {"terms": "rl+sft", "mini_batches": 3}, "sft": {"source": "r"}},
        "only a batch of rollouts alone",
    ),
    ({"optimizer": {"final_frac": 0.1}}, "a learning rate that stays never gets there"),
    (
        {"optimizer": {"warmup_steps": 6}, "train": {"steps": 3, "epochs": 2}},
        "before the learning rate is reached, after 6 optimizer steps",
    ),
]


@pytest.mark.parametrize(("sections", "why"), CASES)
def test_what_cannot_go_together_is_refused(sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        tiny_spec(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"name": "dppo", "mode": "bypass"}},
        {"algorithm": {"zero_variance": "keep"}, "reference": {"kl_beta": 0.04}},
        {"algorithm": {"correction": "mis_seq", "max_sequence_tokens": None}, "task": LONG},
        {"teacher": {**TEACHER, "form": "sampled"}},
        {"train": {"terms": "distill"}, "teacher": {"source": "current", "context": "It is {answer}."}},
        {"train": {"terms": "distill", "group_size": 1}, "teacher": TEACHER},
        {
            "train": {"terms": "distill"},
            "teacher": {**TEACHER, "form": "sampled"},
            "algorithm": {"correction": "icepop", "correction_cap": 3.0},
        },
        {"train": {"terms": "dpo"}, "dpo": {"source": "r", "loss": "pref_ipo"}},
        {"algorithm": {"name": "gspo", "dual_clip": 3.0}},
        {"algorithm": {"mode": "single"}, "train": {"max_staleness": 1}, "placement": RAY},
        {"algorithm": {"name": "reinforce_pp"}, "train": {"group_size": 1}},
        {"algorithm": {"name": "reinforce_pp_baseline"}, "reference": {"kl_beta": 0.1, "kl_estimator": "k2"}},
        {"train": {"prompts_per_step": 8, "mini_batches": 4, "epochs": 2}},
        {"optimizer": {"schedule": "cosine", "final_frac": 0.1, "warmup_steps": 5}, "train": {"epochs": 2}},
    ],
)
def test_what_can_is_taken(sections: dict[str, Any]) -> None:
    tiny_spec(**sections)


def test_a_reference_is_needed_only_for_a_penalty() -> None:
    assert not tiny_spec().needs_reference
    assert tiny_spec(reference={"kl_beta": 0.1}).needs_reference
    assert not tiny_spec(train={"terms": "dpo"}, dpo={"source": "r"}).needs_reference
