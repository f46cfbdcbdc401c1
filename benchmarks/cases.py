"""What is measured: the work of one GRPO step or of one generation, the same for every arm.

Standard library only: rivals' interpreters import it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Literal

LEARNING_RATE = 1e-5
CLIP_LOW = 0.2
CLIP_HIGH = 0.28
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One piece of work that two arms do alternately."""

    name: str
    kind: Literal["grpo", "generate"]
    prompt_style: Literal["short", "long"] = "short"
    """'long' puts worked examples before the question, about 300 prompt tokens in all."""
    num_prompts: int = 8
    """Prompts per step (P)."""
    group_size: int = 8
    """Completions per prompt (G)."""
    max_new_tokens: int = 32
    rewards: Literal["natural", "forced"] = "natural"
    """'forced' gives every group variance (z = 0) whatever the text says."""
    ignore_eos: bool = False
    """Sample exactly `max_new_tokens` tokens per row; generation only."""
    seed: int = 0

    @property
    def num_rows(self) -> int:
        """Completions per step (S = P * G)."""
        return self.num_prompts * self.group_size

    def to_json(self) -> str:
        """Return the case as one JSON line, for a worker's command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Read a case back from `to_json`."""
        return cls(**json.loads(text))


GRPO_CASES = (
    Case(name="grpo-32-natural", kind="grpo"),
    Case(name="grpo-32-forced", kind="grpo", rewards="forced"),
    Case(name="grpo-128-natural", kind="grpo", max_new_tokens=128),
    Case(name="grpo-prompt300-natural", kind="grpo", prompt_style="long"),
)
GENERATION_CASES = (
    Case(name="generate-64x128", kind="generate", max_new_tokens=128, ignore_eos=True),
    Case(name="generate-64x128-eos", kind="generate", max_new_tokens=128),
)
CASES = {case.name: case for case in GRPO_CASES + GENERATION_CASES}
