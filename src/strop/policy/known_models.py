"""Sizes of well-known open models, so that a plan needs none of their files.

One row is one config.json: the names on the hub, and the numbers that `footprint.size_of_config` reads. The
parameter count of a row is tested against the model's name or paper (`tests/policy/test_known_models.py`).
Source: the config.json of each hub id, as published there. A file on this machine has precedence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

TABLE = "the table of known models"
_COLUMNS = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
# Names with alternatives in braces | layers, width, MLP, heads, key-value heads, head width, vocabulary,
# positions, tied (1 or 0) | experts, experts of a token, width of one.
_ROWS = """
HuggingFaceTB/SmolLM2-135M{,-Instruct} | 30 576 1536 9 3 64 49152 8192 1
HuggingFaceTB/SmolLM2-360M{,-Instruct} | 32 960 2560 15 5 64 49152 8192 1
HuggingFaceTB/SmolLM2-1.7B{,-Instruct} | 24 2048 8192 32 32 64 49152 8192 1
HuggingFaceTB/SmolLM3-3B{,-Base} | 36 2048 11008 16 4 128 128256 65536 1
Qwen/Qwen2.5-0.5B{,-Instruct} | 24 896 4864 14 2 64 151936 32768 1
Qwen/Qwen2.5-1.5B | 28 1536 8960 12 2 128 151936 131072 1
Qwen/Qwen2.5-1.5B-Instruct | 28 1536 8960 12 2 128 151936 32768 1
Qwen/Qwen2.5-3B{,-Instruct} | 36 2048 11008 16 2 128 151936 32768 1
Qwen/Qwen2.5-7B | 28 3584 18944 28 4 128 152064 131072 0
Qwen/Qwen2.5-7B-Instruct | 28 3584 18944 28 4 128 152064 32768 0
Qwen/Qwen2.5-14B | 48 5120 13824 40 8 128 152064 131072 0
Qwen/Qwen2.5-14B-Instruct | 48 5120 13824 40 8 128 152064 32768 0
Qwen/Qwen2.5-32B | 64 5120 27648 40 8 128 152064 131072 0
Qwen/Qwen2.5-32B-Instruct | 64 5120 27648 40 8 128 152064 32768 0
Qwen/Qwen2.5-72B | 80 8192 29568 64 8 128 152064 131072 0
Qwen/Qwen2.5-72B-Instruct | 80 8192 29568 64 8 128 152064 32768 0
Qwen/Qwen2.5-Coder-0.5B{,-Instruct} | 24 896 4864 14 2 64 151936 32768 1
Qwen/Qwen2.5-Coder-1.5B{,-Instruct} | 28 1536 8960 12 2 128 151936 32768 1
Qwen/Qwen2.5-Coder-3B{,-Instruct} | 36 2048 11008 16 2 128 151936 32768 1
Qwen/Qwen2.5-Coder-7B{,-Instruct} | 28 3584 18944 28 4 128 152064 32768 0
Qwen/Qwen2.5-Coder-14B{,-Instruct} | 48 5120 13824 40 8 128 152064 32768 0
Qwen/Qwen2.5-Coder-32B{,-Instruct} | 64 5120 27648 40 8 128 152064 32768 0
Qwen/Qwen2.5-Math-1.5B{,-Instruct} | 28 1536 8960 12 2 128 151936 4096 1
Qwen/Qwen2.5-Math-7B{,-Instruct} | 28 3584 18944 28 4 128 152064 4096 0
Qwen/Qwen2.5-Math-72B{,-Instruct} | 80 8192 29568 64 8 128 152064 4096 0
Qwen/Qwen3-0.6B | 28 1024 3072 16 8 128 151936 40960 1
Qwen/Qwen3-0.6B-Base | 28 1024 3072 16 8 128 151936 32768 1
Qwen/Qwen3-1.7B | 28 2048 6144 16 8 128 151936 40960 1
Qwen/Qwen3-1.7B-Base | 28 2048 6144 16 8 128 151936 32768 1
Qwen/Qwen3-4B | 36 2560 9728 32 8 128 151936 40960 1
Qwen/Qwen3-4B-Base | 36 2560 9728 32 8 128 151936 32768 1
Qwen/Qwen3-4B-{Instruct,Thinking}-2507 | 36 2560 9728 32 8 128 151936 262144 1
Qwen/Qwen3-8B | 36 4096 12288 32 8 128 151936 40960 0
Qwen/Qwen3-8B-Base | 36 4096 12288 32 8 128 151936 32768 0
Qwen/Qwen3-14B | 40 5120 17408 40 8 128 151936 40960 0
Qwen/Qwen3-14B-Base | 40 5120 17408 40 8 128 151936 32768 0
Qwen/Qwen3-32B | 64 5120 25600 64 8 128 151936 40960 0
Qwen/Qwen3-30B-A3B | 48 2048 6144 32 4 128 151936 40960 0 | 128 8 768
Qwen/Qwen3-30B-A3B-Base | 48 2048 6144 32 4 128 151936 32768 0 | 128 8 768
Qwen/Qwen3-30B-A3B-{Instruct,Thinking}-2507 | 48 2048 6144 32 4 128 151936 262144 0 | 128 8 768
Qwen/Qwen3-Coder-30B-A3B-Instruct | 48 2048 6144 32 4 128 151936 262144 0 | 128 8 768
Qwen/Qwen3-235B-A22B | 94 4096 12288 64 4 128 151936 40960 0 | 128 8 1536
Qwen/Qwen3-235B-A22B-{Instruct,Thinking}-2507 | 94 4096 12288 64 4 128 151936 262144 0 | 128 8 1536
meta-llama/Llama-3.2-1B{,-Instruct} | 16 2048 8192 32 8 64 128256 131072 1
meta-llama/Llama-3.2-3B{,-Instruct} | 28 3072 8192 24 8 128 128256 131072 1
meta-llama/Llama-3.1-8B{,-Instruct} | 32 4096 14336 32 8 128 128256 131072 0
meta-llama/Meta-Llama-3.1-8B{,-Instruct} | 32 4096 14336 32 8 128 128256 131072 0
meta-llama/Meta-Llama-3-8B{,-Instruct} | 32 4096 14336 32 8 128 128256 8192 0
meta-llama/Llama-3.1-70B{,-Instruct} | 80 8192 28672 64 8 128 128256 131072 0
meta-llama/Meta-Llama-3.1-70B{,-Instruct} | 80 8192 28672 64 8 128 128256 131072 0
meta-llama/Llama-3.3-70B-Instruct | 80 8192 28672 64 8 128 128256 131072 0
meta-llama/Meta-Llama-3-70B{,-Instruct} | 80 8192 28672 64 8 128 128256 8192 0
meta-llama/Llama-3.1-405B{,-Instruct} | 126 16384 53248 128 8 128 128256 131072 0
google/gemma-2b{,-it} | 18 2048 16384 8 1 256 256000 8192 1
google/gemma-7b{,-it} | 28 3072 24576 16 16 256 256000 8192 1
google/gemma-2-2b{,-it} | 26 2304 9216 8 4 256 256000 8192 1
google/gemma-2-9b{,-it} | 42 3584 14336 16 8 256 256000 8192 1
google/gemma-2-27b{,-it} | 46 4608 36864 32 16 128 256000 8192 1
google/gemma-3-270m{,-it} | 18 640 2048 4 1 256 262144 32768 1
google/gemma-3-1b-{pt,it} | 26 1152 6912 4 1 256 262144 32768 1
google/gemma-3-4b-{pt,it} | 34 2560 10240 8 4 256 262208 131072 1
google/gemma-3-12b-{pt,it} | 48 3840 15360 16 8 256 262208 131072 1
google/gemma-3-27b-{pt,it} | 62 5376 21504 32 16 128 262208 131072 1
allenai/OLMo-2-0425-1B{,-SFT,-DPO,-Instruct} | 16 2048 8192 16 16 128 100352 4096 0
allenai/OLMo-2-1124-7B{,-SFT,-DPO,-Instruct} | 32 4096 11008 32 32 128 100352 4096 0
allenai/OLMo-2-1124-13B{,-SFT,-DPO,-Instruct} | 40 5120 13824 40 40 128 100352 4096 0
allenai/OLMo-2-0325-32B{,-SFT,-DPO,-Instruct} | 64 5120 27648 40 8 128 100352 4096 0
allenai/OLMoE-1B-7B-0924{,-SFT,-Instruct} | 16 2048 1024 16 16 128 50304 4096 0 | 64 8 1024
mistralai/Mistral-7B-v0.1 | 32 4096 14336 32 8 128 32000 32768 0
mistralai/Mistral-7B-Instruct-v0.2 | 32 4096 14336 32 8 128 32000 32768 0
mistralai/Mistral-7B{,-Instruct}-v0.3 | 32 4096 14336 32 8 128 32768 32768 0
mistralai/Mistral-Nemo-{Base,Instruct}-2407 | 40 5120 14336 32 8 128 131072 131072 0
mistralai/Mistral-Small-24B-{Base,Instruct}-2501 | 40 5120 32768 32 8 128 131072 32768 0
mistralai/Mixtral-8x7B{,-Instruct}-v0.1 | 32 4096 14336 32 8 128 32000 32768 0 | 8 2 14336
microsoft/phi-4 | 40 5120 17920 40 10 128 100352 16384 0
openai/gpt-oss-20b | 24 2880 2880 64 8 64 201088 131072 0 | 32 4 2880
openai/gpt-oss-120b | 36 2880 2880 64 8 64 201088 131072 0 | 128 4 2880
TinyLlama/TinyLlama-1.1B-Chat-v1.0 | 22 2048 5632 32 4 64 32000 2048 0
deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B | 28 1536 8960 12 2 128 151936 131072 0
deepseek-ai/DeepSeek-R1-Distill-Qwen-7B | 28 3584 18944 28 4 128 152064 131072 0
deepseek-ai/DeepSeek-R1-Distill-Qwen-14B | 48 5120 13824 40 8 128 152064 131072 0
deepseek-ai/DeepSeek-R1-Distill-Qwen-32B | 64 5120 27648 40 8 128 152064 131072 0
deepseek-ai/DeepSeek-R1-Distill-Llama-8B | 32 4096 14336 32 8 128 128256 131072 0
deepseek-ai/DeepSeek-R1-Distill-Llama-70B | 80 8192 28672 64 8 128 128256 131072 0
deepseek-ai/DeepSeek-R1-0528-Qwen3-8B | 36 4096 12288 32 8 128 151936 131072 0
"""


def find_known_config(repo: str) -> Mapping[str, Any] | None:
    """Return the sizes of a model on the hub, as in its config.json; None if it is not in the table."""
    return _read_table().get(repo.lower())


def list_known_models() -> tuple[str, ...]:
    """Return the hub ids of the table, in lowercase."""
    return tuple(_read_table())


@cache
def _read_table() -> Mapping[str, Mapping[str, int]]:
    found: dict[str, Mapping[str, int]] = {}
    for row in _ROWS.strip().splitlines():
        names, *numbers = row.split("|")
        values = [int(word) for column in numbers for word in column.split()]
        config = dict(zip(_COLUMNS, values, strict=False))
        found.update(dict.fromkeys(_expand(names.strip().lower()), config))
    return found


def _expand(name: str) -> Iterator[str]:
    """Yield all names of a pattern with alternatives in braces."""
    before, brace, rest = name.partition("{")
    if not brace:
        yield name
        return
    choices, _, after = rest.partition("}")
    yield from (f"{before}{choice}{after}" for choice in choices.split(","))
