"""Sums over the scored tokens of a sequence, given back to each of its tokens.

A sequence is what was trained in one piece: a packed reply. Nothing here is differentiated.
Shapes: N scored tokens; `sequence_N` names each token's sequence by a number from 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sum_over(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Return, for every token, the sum over its sequence. Shapes: (N,) to (N,)."""
    num_sequences = int(sequence_N.max()) + 1 if len(sequence_N) else 0
    # float64: a sum of ten thousand log-ratios decides what all of them weigh.
    totals = values_N.new_zeros(num_sequences).double().index_add_(0, sequence_N, values_N.double())
    return totals[sequence_N].to(values_N.dtype)


def mean_over(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Return, for every token, the mean over its sequence. Shapes: (N,) to (N,)."""
    return sum_over(values_N, sequence_N) / sum_over(values_N.new_ones(values_N.shape), sequence_N)
