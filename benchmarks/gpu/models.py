"""Models of published sizes with random weights, made on the spot, and a tokenizer for each vocabulary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers
from transformers import Qwen2Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from strop.policy.footprint import ModelSize
from strop.policy.fused_trunk import build_fused_trunk
from strop.policy.language_model import LanguageModel
from strop.tokenizer import Tokenizer

_TERMINATOR = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomModel:
    """A decoder of Qwen2's kind. `size` counts what rooflines are made of."""

    name: str
    size: ModelSize


def _size(layers: int, width: int, mlp: int, heads: tuple[int, int, int], vocab: int) -> ModelSize:
    return ModelSize(
        num_layers=layers,
        hidden_width=width,
        mlp_width=mlp,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_width=heads[2],
        vocab_size=vocab,
        max_positions=4096,
        is_tied=True,
    )


# The config.json of Qwen2.5-0.5B and Qwen2.5-1.5B.
QWEN_0_5B = RandomModel(name="0.5B", size=_size(24, 896, 4864, (14, 2, 64), 151_936))
QWEN_1_5B = RandomModel(name="1.5B", size=_size(28, 1536, 8960, (12, 2, 128), 151_936))
TINY = RandomModel(name="tiny", size=_size(2, 64, 128, (4, 2, 16), 300))
SMALL = RandomModel(name="small", size=_size(4, 256, 512, (4, 2, 64), 1_000))


def config_of(model: RandomModel, **changes: Any) -> Qwen2Config:
    """Return the transformers config of a model."""
    size = model.size
    settings: dict[str, Any] = {
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden_width,
        "intermediate_size": size.mlp_width,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_width,
        "max_position_embeddings": size.max_positions,
        "tie_word_embeddings": size.is_tied,
        "eos_token_id": _TERMINATOR,
        "pad_token_id": None,
        "bos_token_id": None,
    }
    return Qwen2Config(**(settings | changes))


def build_model(model: RandomModel, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """Make a model on a device; nothing is written to disk."""
    torch.manual_seed(0)
    with torch.device(device):
        module: Any = AutoModelForCausalLM.from_config(config_of(model), dtype=dtype)  # type: ignore[no-untyped-call]
    language_model = LanguageModel(module.to(dtype))
    language_model.fused = build_fused_trunk(language_model.module)
    return language_model


def save_model(model: RandomModel, path: Path, dtype: torch.dtype, *, spread: float = 0.15) -> Path:
    """Write a model directory with its tokenizer, for everything that loads one.

    The weights' spread is by default wide enough that the next token is far from uniform.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    make_tokenizer(model.size.vocab_size, path)
    torch.manual_seed(0)
    config = config_of(model, initializer_range=spread)
    module: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:  # Biases and norms: at 0 and 1 a forgotten one would not show.
                parameter.add_(torch.randn_like(parameter) * 0.2)
    module.to(dtype).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": _TERMINATOR}))
    return path


def make_tokenizer(vocab_size: int, path: Path) -> Tokenizer:
    """Write a tokenizer of whole words, t0 to the last id, and load it."""
    path.mkdir(parents=True, exist_ok=True)
    vocabulary = {f"t{index}": index for index in range(vocab_size)}
    fast = FastTokenizer(models.WordLevel(vocab=vocabulary, unk_token="t0"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": f"t{_TERMINATOR}",
        "pad_token": "t0",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": _TERMINATOR}))
    return Tokenizer.load(path)
