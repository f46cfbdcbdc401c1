"""The prompts that all arms get: additions, alone or after worked examples.

Standard library only. A prompt is a list of chat messages; every arm renders it with the chat
template in the model's own directory, so the token ids are the same.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cases import Case

LARGEST_TERM = 20
NUM_WORKED_EXAMPLES = 15
"""Gives about 300 prompt tokens with SmolLM2's tokenizer; every record states its real mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question with its gold answer."""

    messages: list[dict[str, str]]
    answer: str
    left: int
    right: int


def _worked_examples(generator: random.Random) -> str:
    lines = []
    for _ in range(NUM_WORKED_EXAMPLES):
        left, right = generator.randint(1, LARGEST_TERM), generator.randint(1, LARGEST_TERM)
        lines.append(f"What is {left} + {right}? {left} + {right} = {left + right}.")
    return "\n".join(lines) + "\n"


def make_prompts(case: Case, num_steps: int) -> list[Prompt]:
    """Draw the prompts of all steps of a case, different ones within each round of 400 pairs.

    Shapes: flat; step k uses prompts [k * P, (k + 1) * P).
    """
    generator = random.Random(case.seed)
    pairs = [(a, b) for a in range(1, LARGEST_TERM + 1) for b in range(1, LARGEST_TERM + 1)]
    generator.shuffle(pairs)
    prompts = []
    for index in range(num_steps * case.num_prompts):
        left, right = pairs[index % len(pairs)]
        before = _worked_examples(generator) if case.prompt_style == "long" else ""
        message = {"role": "user", "content": f"{before}What is {left} + {right}?"}
        prompts.append(Prompt(messages=[message], answer=str(left + right), left=left, right=right))
    return prompts


def write_prompts(path: Path, prompts: list[Prompt]) -> None:
    """Write prompts as one JSON file for the workers."""
    path.write_text(json.dumps([asdict(prompt) for prompt in prompts]))


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts back from `write_prompts`."""
    return [Prompt(**fields) for fields in json.loads(path.read_text())]


def step_prompts(prompts: list[Prompt], case: Case, step: int) -> list[Prompt]:
    """Return the prompts of one step; steps beyond the last one begin again."""
    num_steps = len(prompts) // case.num_prompts
    start = (step % num_steps) * case.num_prompts
    return prompts[start : start + case.num_prompts]
