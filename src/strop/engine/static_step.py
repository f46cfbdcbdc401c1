"""A decode step over tensors that never move, so that a GPU replays it as one graph.

Below some three billion parameters a step's kernels take less time than starting them one by one. Here
everything that a step needs from the host arrives in one copy, everything it answers leaves in one, and
between them lies a function of tensors: forward, KV write, sampling. On a GPU it is captured once for each
number of rows and slots that occurs, both rounded up; elsewhere the same function is called as it is.
Rows beyond the live ones decode nothing that anyone reads, in slots that an admission overwrites.

A graph reads weights where they lie, so weights may be changed in place and in no other way.

Shapes: n live rows, R rows of the cache.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from strop.engine.sampler import Draw, draw_on_device, temperature_kinds
from strop.policy.kv_cache import KVCache
from strop.policy.language_model import LanguageModel

SLOT_STEP = 128
"""Slots are rounded up to multiples of this."""
_ROW_COUNTS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True, slots=True)
class _Form:
    """What decides which kernels a step starts."""

    num_rows: int
    width: int
    kinds: tuple[bool, bool]
    """Of the temperatures, as `temperature_kinds` tells them."""


class StaticStep:
    """Decodes one token for the first rows of one cache."""

    def __init__(self, model: LanguageModel, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._captures = model.device.type == "cuda"
        self._graphs: dict[_Form, torch.cuda.CUDAGraph] = {}
        # In fp64, which holds ids, lengths and log-probabilities exactly.
        sizes = {"dtype": torch.float64, "device": model.device}
        self._inputs = torch.zeros(4, cache.max_rows, **sizes)  # type: ignore[call-overload]
        """Newest token, tokens stored, uniform and temperature of each row."""
        self._outputs = torch.zeros(2, cache.max_rows, **sizes)  # type: ignore[call-overload]
        """Token drawn and its log-probability."""
        self._sent = torch.zeros(4, cache.max_rows, dtype=torch.float64, pin_memory=self._captures)
        self._received = torch.zeros(2, cache.max_rows, dtype=torch.float64, pin_memory=self._captures)

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def draw(
        self,
        token_ids_n: NDArray[np.int64],
        lengths_n: NDArray[np.int64],
        uniforms_n: NDArray[np.float64],
        temperatures_n: NDArray[np.float64],
    ) -> Draw:
        """Feed each row its newest token and draw the next one, from whole distributions."""
        num_rows = len(token_ids_n)
        width = -(-(int(lengths_n.max()) + 1) // SLOT_STEP) * SLOT_STEP
        form = _Form(
            num_rows=min(next((c for c in _ROW_COUNTS if c >= num_rows), num_rows), self._cache.max_rows),
            width=min(width, self._cache.num_slots),
            kinds=temperature_kinds(np.unique(temperatures_n).tolist()),
        )
        sent = self._sent.numpy()
        sent[:, num_rows : form.num_rows] = 0.0
        sent[:, :num_rows] = (token_ids_n, lengths_n, uniforms_n, temperatures_n)
        self._inputs.copy_(self._sent, non_blocking=True)
        self._run(form)
        self._received.copy_(self._outputs, non_blocking=True)
        if self._captures:
            torch.cuda.current_stream().synchronize()
        self._cache.advance()
        token_ids, logprobs = self._received.numpy()[:, :num_rows]
        return Draw(token_ids=token_ids.astype(np.int64), logprobs=logprobs.astype(np.float32))

    def _compute(self, form: _Form) -> None:
        """Decode one token of each row from `_inputs` into `_outputs`. Twice is the same as once."""
        token_ids, lengths, uniforms, temperatures = self._inputs[:, : form.num_rows]
        positions = lengths.long()
        window = self._cache.window(positions, form.width)
        hidden = self._model.trunk(token_ids.long(), positions, window)
        logits = self._model.logits(hidden)
        drawn, logprobs = draw_on_device(logits, uniforms, temperatures.float(), form.kinds)
        self._outputs[0, : form.num_rows] = drawn.double()
        self._outputs[1, : form.num_rows] = logprobs.double()

    def _run(self, form: _Form) -> None:
        if self._captures and form not in self._graphs:
            self._capture(form)
        if form in self._graphs:
            self._graphs[form].replay()
        else:
            self._compute(form)

    def _capture(self, form: _Form) -> None:
        """Record the step of one form; go without graphs from now on if that fails."""
        # Once beforehand, on a stream of its own as PyTorch asks: libraries allocate, layers are compiled.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute(form)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        try:
            # Only this thread is held to what a capture allows: a learner may be at work in another.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._compute(form)
        except RuntimeError as error:
            self._captures = False
            lines = str(error).strip().splitlines() or [""]
            warnings.warn(
                f"decode steps are started kernel by kernel from now on: {form.num_rows} rows could not be "
                f"captured as a graph ({type(error).__name__}: {lines[0]})",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._graphs[form] = graph
