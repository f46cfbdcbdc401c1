"""Losses whose parts cannot go together are refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tests.fixtures.tiny_run import tiny_spec

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
        {
            "algorithm": {"zero_variance": "skip"},
            "teacher": {"source": "initial", "form": "sampled"},
        },
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
    (
        {
            "train": {"terms": "dpo"},
            "dpo": {"source": "runs/one", "label_noise_frac": 0.1},
        },
        "only 'cdpo' knows about wrong labels",
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
        {"train": {"terms": "distill", "rollouts_per_prompt": 1}, "teacher": TEACHER},
        {
            "train": {"terms": "distill"},
            "teacher": {**TEACHER, "form": "sampled"},
            "algorithm": {"correction": "icepop", "correction_cap": 3.0},
        },
        {"train": {"terms": "dpo"}, "dpo": {"source": "r", "loss": "cdpo", "label_noise_frac": 0.1}},
    ],
)
def test_what_can_is_taken(sections: dict[str, Any]) -> None:
    tiny_spec(**sections)


def test_a_reference_is_needed_only_for_a_penalty() -> None:
    assert not tiny_spec().needs_reference
    assert tiny_spec(reference={"kl_beta": 0.1}).needs_reference
    assert not tiny_spec(train={"terms": "dpo"}, dpo={"source": "r"}).needs_reference
