"""How the memory of the language-model head grows with the length of replies and with the vocabulary.

Every point is a process of its own: hidden states of so many scored positions, a random head, and one call
of the routine that a training step makes. What is measured is the largest resident set during the call, less
what was resident before it: the workspace, the gradient of the hidden states, and what each token leaves
behind. Weights and the head's gradient are there before. `naive` holds all logits, as a loss on a model's
output does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.figures import Figure, Measured

ROOT = Path(__file__).parents[1]
KINDS = ("sft", "rl-sequence", "distill", "naive")
HIDDEN_WIDTH = 256
LENGTHS = (512, 2048, 8192)
VOCABULARIES = (4_096, 32_768, 151_936)
QUICK = (("sft", "naive"), (512,), (4_096,))
MAX_LOGITS = 320_000_000
"""A point of more is left out: it would take minutes, and its growth shows in the others."""
MAX_NAIVE_BYTES = 4 << 30
"""The same for what would not fit."""
_NAIVE_BYTES = 14
"""Per logit: bf16 and its gradient, fp32 log-probabilities and theirs."""
MAX_GROWTH_BYTES = 4 * HIDDEN_WIDTH * 2
"""Per position: twice the hidden state and its gradient, in the type computed with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One measurement."""

    kind: str
    vocabulary: int
    num_positions: int
    peak_bytes: int
    """Above what was resident before the call."""


def measure_head_memory(*, is_quick: bool) -> Measured:
    """Measure every point, and how the peak grows with each further position."""
    kinds, lengths, vocabularies = QUICK if is_quick else (KINDS, LENGTHS, VOCABULARIES)
    points = [
        _measure_apart(kind, vocabulary, length)
        for kind in kinds
        for vocabulary in vocabularies
        for length in lengths
        if length * vocabulary <= MAX_LOGITS
        and (kind != "naive" or length * vocabulary * _NAIVE_BYTES <= MAX_NAIVE_BYTES)
    ]
    figures = [_tell_growth(points, kind, vocabulary) for kind in kinds for vocabulary in vocabularies]
    details = {"hidden_width": HIDDEN_WIDTH, "dtype": "bfloat16", "points": [asdict(one) for one in points]}
    return Measured(figures=figures, details=details)


def _measure_apart(kind: str, vocabulary: int, num_positions: int) -> Point:
    command = [sys.executable, "-m", "benchmarks.head_memory", kind, str(vocabulary), str(num_positions)]
    # A fixed threshold: what is freed leaves the resident set at once, so a peak is what was held.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment)
    print(done.stdout, end="", file=sys.stderr, flush=True)
    return Point(**json.loads(done.stdout))


def _tell_growth(points: Sequence[Point], kind: str, vocabulary: int) -> Figure:
    """Return the bytes that each further position takes, between the shortest and the longest."""
    chosen = [one for one in points if (one.kind, one.vocabulary) == (kind, vocabulary)]
    first, last = chosen[0], chosen[-1]
    num_more = max(last.num_positions - first.num_positions, 1)
    return Figure(
        name=f"{kind}, vocabulary {vocabulary}: per position",
        unit="bytes",
        value=(last.peak_bytes - first.peak_bytes) / num_more,
        measured=tuple(float(one.peak_bytes) for one in chosen),
        at_most=None if kind == "naive" else MAX_GROWTH_BYTES,
    )


def read_resident_bytes(name: str) -> int:
    """Return a field of this process's status: 'VmRSS' now, 'VmHWM' at its peak. Linux only."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def _watch(call: Callable[[], object]) -> int:
    """Return the largest resident set during a call, less what was resident before it."""
    before = read_resident_bytes("VmRSS")
    # 5 makes the kernel forget the peak: proc(5), clear_refs.
    Path("/proc/self/clear_refs").write_text("5")
    call()
    return read_resident_bytes("VmHWM") - before


def measure_here(kind: str, vocabulary: int, num_positions: int) -> Point:
    """Measure one point in this process. Imports torch."""
    import torch

    from benchmarks.arms.head_calls import make_call

    torch.set_num_threads(2)
    # Once on two positions: what is loaded and reserved at first use is no part of the growth.
    make_call(kind, 64, 2, HIDDEN_WIDTH)()
    call = make_call(kind, vocabulary, num_positions, HIDDEN_WIDTH)
    return Point(kind=kind, vocabulary=vocabulary, num_positions=num_positions, peak_bytes=_watch(call))


if __name__ == "__main__":
    print(json.dumps(asdict(measure_here(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
