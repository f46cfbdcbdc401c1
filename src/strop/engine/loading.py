"""Loads the engine of a role: the native one, or vLLM, which an interpreter of its own has.

The settings are those of a run that an engine needs, free of everything else: they cross to interpreters with
other packages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from strop.engine.contract import Engine
from strop.hardware.tuning import importing
from strop.tokenizer import Tokenizer

if TYPE_CHECKING:
    from strop.spec.run import RunSpec

_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that vLLM 0.32 accepts (its LoRAConfig); smaller adapters fit as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What an engine is started with."""

    kind: Literal["native", "vllm"]
    dtype: str
    """'bfloat16' or 'float32'."""
    max_num_seqs: int | None = None
    is_eager: bool | None = None
    gpu_memory_frac: float | None = None
    max_model_tokens: int | None = None
    tensor_parallel: int = 1
    lora_rank: int | None = None
    """Largest rank of the adapters that will come in place of whole weights; None: none will."""

    @classmethod
    def of(cls, spec: RunSpec) -> EngineSettings:
        """Return those of a run's engines."""
        engine, rank = spec.engine, spec.lora.rank or 0
        return cls(
            kind=engine.kind,
            dtype=spec.model.dtype,
            max_num_seqs=engine.max_num_seqs,
            is_eager=engine.is_eager,
            gpu_memory_frac=engine.gpu_memory_frac,
            max_model_tokens=engine.max_model_tokens,
            tensor_parallel=engine.tensor_parallel or 1,
            # The smallest of vLLM's table that fits.
            lora_rank=next(size for size in _VLLM_RANKS if size >= rank) if can_swap_adapters(spec) else None,
        )


def can_swap_adapters(spec: RunSpec) -> bool:
    """Whether a run's engines keep the base model and receive adapters instead of whole weights."""
    has_adapters = spec.lora.rank is not None and spec.lora.rank <= _VLLM_RANKS[-1]
    return has_adapters and spec.engine.kind == "vllm"


def streams_replies(spec: RunSpec) -> bool:
    """Whether an engine's replies return as they end, and not a batch at a time.

    A run that gives the same bits each time (the native engine, nothing sampled ahead or
    `train.deterministic`) needs whole batches: replies that return together make later requests one batch.
    """
    is_free = spec.engine.kind == "vllm" or spec.train.max_staleness > 0
    return is_free and not spec.train.deterministic


async def load_engine(
    settings: EngineSettings, model_dir: Path, *, version: int = 0
) -> tuple[Engine, Tokenizer]:
    """Load a model directory, whose weights have a version, into an engine of this process.

    Raises: ConfigError if the model or a setting cannot be used, or this interpreter lacks vLLM.
    """
    if settings.kind == "vllm":
        from strop.engine.vllm.engine import load_vllm

        return await load_vllm(settings, model_dir, version=version)
    with importing():
        import torch

        from strop.engine.native import NativeEngine
        from strop.policy.language_model import DTYPES, LanguageModel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LanguageModel.load(model_dir, dtype=DTYPES[settings.dtype], device=device)
    tokenizer = Tokenizer.load(model_dir)
    return NativeEngine(model, tokenizer, max_num_seqs=settings.max_num_seqs, version=version), tokenizer
