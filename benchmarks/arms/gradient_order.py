"""One batch of rollouts whose gradient two arms compute, and the command line that asks for it.

Standard library only: rivals' interpreters import it. Token ids, not text, so nothing is tokenized
twice; advantages as numbers, so nothing is judged twice. The old log-probabilities are each arm's own
current ones: the ratio is 1 and the loss is minus the advantage times the log-probability, averaged
over all tokens of the batch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.cases import Case


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientGroup:
    """One prompt with its replies."""

    prompt_ids: list[int]
    replies: list[list[int]]
    """Sampled token ids of each reply, the terminator included; none is empty."""
    advantages: list[float]
    """One for each reply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientOrder:
    """What a gradient worker was started with."""

    case: Case
    model_dir: Path
    rollouts_path: Path
    gradient_path: Path
    """Where the gradient goes: safetensors, float32, by the parameter names of transformers."""
    dtype: str
    """'bfloat16' as each arm trains by default, or 'float32' throughout."""
    threads: int


def count_tokens(groups: Sequence[GradientGroup]) -> int:
    """Return the number of sampled tokens, which the loss is averaged over."""
    return sum(len(reply) for group in groups for reply in group.replies)


def write_groups(path: Path, groups: Sequence[GradientGroup]) -> None:
    """Write the batch for the workers."""
    path.write_text(json.dumps([asdict(group) for group in groups]))


def read_groups(path: Path) -> list[GradientGroup]:
    """Read the batch back from `write_groups`."""
    return [GradientGroup(**fields) for fields in json.loads(path.read_text())]


def read_gradient_order(arguments: Sequence[str] | None = None) -> GradientOrder:
    """Parse a gradient worker's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True, type=Case.from_json)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--rollouts", required=True, type=Path)
    parser.add_argument("--gradient", required=True, type=Path)
    parser.add_argument("--dtype", required=True, choices=("bfloat16", "float32"))
    parser.add_argument("--threads", required=True, type=int)
    parsed = parser.parse_args(arguments)
    return GradientOrder(
        case=parsed.case,
        model_dir=parsed.model,
        rollouts_path=parsed.rollouts,
        gradient_path=parsed.gradient,
        dtype=parsed.dtype,
        threads=parsed.threads,
    )
