"""Each sequence by itself: for families whose layers would see the whole of a packed row.

Layers that carry a state from token to token, or whose attention is code of their own, know nothing of
rows in which several sequences stand. They are given what they were made for: a batch with one row per
prompt and reply, padded behind. What stands behind a token changes nothing before it, which the proof at
loading tries. A prompt is computed once per reply then, in training; generation computes it once, and goes
on from the model's own states (transformers' cache).

Shapes: R rows, T positions of a row, N positions of the packed layout, U scored positions, D hidden width,
n sequences being continued, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from strop.policy.packing import PackedBatch, PackedLayout, to_device
from strop.rollout import IntArray

if TYPE_CHECKING:
    # A model is proven with these when it is loaded.
    from strop.policy.language_model import LanguageModel

_CACHES = ("cache", "past_key_values", "cache_params")
"""What a trunk calls its states, among its inputs and its outputs; the first since transformers 5.24."""


def read_alone(run: Callable[..., Any], batch: PackedBatch) -> torch.Tensor:
    """Run a trunk over a batch, a row per sequence. Shapes: returns (U, D), scored positions alone."""
    source_R_T, place_N = spread_rows(batch.layout)
    device = batch.token_ids_N.device
    token_ids = batch.token_ids_N[to_device(source_R_T, device)]
    hidden = run(input_ids=token_ids, use_cache=False).last_hidden_state
    places = to_device(place_N, device)[batch.scored_positions_U]
    scored: torch.Tensor = hidden.flatten(0, 1).index_select(0, places)
    return scored


def spread_rows(layout: PackedLayout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which packed position stands where in padded rows, and where each packed position is read.

    A prompt is read in the first row of its group. Shapes: (R, T) and (N,).
    """
    prompt_starts, reply_starts = layout.prompt_starts_P.tolist(), layout.reply_starts_S.tolist()
    fed = [reply for reply, length in enumerate(layout.reply_lens_S) if length > 0]
    groups = [layout.group_of_S[reply] for reply in fed]
    # Of a group whose replies feed nothing, the prompt alone.
    rows: list[tuple[int, int | None]] = list(zip(groups, fed, strict=True))
    rows += [(group, None) for group in sorted(set(range(len(layout.prompt_lens_P))) - set(groups))]
    lens = [layout.prompt_lens_P[g] + (0 if r is None else layout.reply_lens_S[r]) for g, r in rows]
    width = max(lens)
    source_R_T = np.zeros((len(rows), width), dtype=np.int64)
    place_N = np.zeros(layout.num_positions, dtype=np.int64)
    for row, (group, reply) in reversed(list(enumerate(rows))):
        length, start = layout.prompt_lens_P[group], prompt_starts[group]
        source_R_T[row, :length] = np.arange(start, start + length)
        place_N[start : start + length] = row * width + np.arange(length)
        if reply is not None:
            own = slice(reply_starts[reply], reply_starts[reply] + layout.reply_lens_S[reply])
            source_R_T[row, length : lens[row]] = np.arange(own.start, own.stop)
            place_N[own] = row * width + np.arange(length, lens[row])
    return source_R_T, place_N


@dataclass(slots=True, eq=False)
class _Cohort:
    """Rows of one prompt that began together: equally long, with states in one cache."""

    rows: list[int]
    cache: Any
    name: str
    """What the trunk calls the cache."""


class AloneRows:
    """Sequences that a model continues from its own states. See `rows.Rows`."""

    def __init__(self, model: LanguageModel, *, max_rows: int, num_slots: int) -> None:
        self.max_rows = max_rows
        self.num_slots = num_slots
        self._model = model
        self._cohorts: list[_Cohort] = []
        self._num_rows = 0

    def begin(self, prompts: Sequence[IntArray], counts: Sequence[int]) -> torch.Tensor:
        """Add rows for prompts. See `Rows.begin`."""
        hidden = []
        for prompt, count in zip(prompts, counts, strict=True):
            token_ids = torch.from_numpy(prompt.astype(np.int64)).to(self._model.device)
            output = self._model.run(input_ids=token_ids[None], use_cache=True)
            name = next((name for name in _CACHES if getattr(output, name, None) is not None), None)
            if name is None:
                raise RuntimeError("its trunk gives back no states to go on from")
            cohort = _Cohort(list(range(self._num_rows, self._num_rows + count)), getattr(output, name), name)
            self._choose(cohort, [0] * count)
            self._cohorts.append(cohort)
            self._num_rows += count
            hidden.append(output.last_hidden_state[0, -1])
        return self._model.logits(torch.stack(hidden))

    def step(self, token_ids_n: torch.Tensor, position_ids_n: torch.Tensor) -> torch.Tensor:
        """Feed every row a token. See `Rows.step`."""
        logits: list[torch.Tensor] = [torch.empty(0)] * self._num_rows
        for cohort in self._cohorts:
            output = self._model.run(
                input_ids=token_ids_n[cohort.rows][:, None], use_cache=True, **{cohort.name: cohort.cache}
            )
            cohort.cache = getattr(output, cohort.name)
            for row, found in zip(
                cohort.rows, self._model.logits(output.last_hidden_state[:, -1]), strict=True
            ):
                logits[row] = found
        return torch.stack(logits)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these. See `Rows.keep`."""
        new_of = {old: new for new, old in enumerate(rows)}
        for cohort in self._cohorts:
            kept = [place for place, row in enumerate(cohort.rows) if row in new_of]
            if kept and len(kept) < len(cohort.rows):
                self._choose(cohort, kept)
            cohort.rows = [new_of[cohort.rows[place]] for place in kept]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]
        self._num_rows = len(rows)

    def _choose(self, cohort: _Cohort, places: Sequence[int]) -> None:
        if list(places) != [0] or len(cohort.rows) > 1:
            cohort.cache.reorder_cache(torch.tensor(places, device=self._model.device))


class AnewRows:
    """Sequences that a model computes anew at every token, for want of states. See `rows.Rows`."""

    def __init__(self, model: LanguageModel, *, max_rows: int, num_slots: int) -> None:
        self.max_rows = max_rows
        self.num_slots = num_slots
        self._model = model
        self._sequences: list[torch.Tensor] = []

    def begin(self, prompts: Sequence[IntArray], counts: Sequence[int]) -> torch.Tensor:
        """Add rows for prompts. See `Rows.begin`."""
        fresh = [torch.from_numpy(prompt.astype(np.int64)).to(self._model.device) for prompt in prompts]
        for sequence, count in zip(fresh, counts, strict=True):
            self._sequences += [sequence] * count
        return self._read(fresh)

    def step(self, token_ids_n: torch.Tensor, position_ids_n: torch.Tensor) -> torch.Tensor:
        """Feed every row a token. See `Rows.step`."""
        pairs = zip(self._sequences, token_ids_n, strict=True)
        self._sequences = [torch.cat([sequence, token[None]]) for sequence, token in pairs]
        return self._read(self._sequences)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these. See `Rows.keep`."""
        self._sequences = [self._sequences[row] for row in rows]

    def _read(self, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
        padded = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
        hidden = self._model.run(input_ids=padded, use_cache=False).last_hidden_state
        rows = torch.arange(len(sequences), device=padded.device)
        last = torch.tensor([len(sequence) - 1 for sequence in sequences], device=padded.device)
        return self._model.logits(hidden[rows, last])
