"""The table of known models against what their names and papers say."""

from __future__ import annotations

import re

import pytest

from strop.policy.footprint import size_of_config
from strop.policy.known_models import find_known_config, list_known_models

# In billions, as model cards and papers have them.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 0.49,
    "Qwen/Qwen2.5-1.5B": 1.54,
    "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-7B": 7.62,
    "Qwen/Qwen2.5-7B-Instruct": 7.62,
    "Qwen/Qwen2.5-14B": 14.8,
    "Qwen/Qwen2.5-32B": 32.8,
    "Qwen/Qwen2.5-72B": 72.7,
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-14B": 14.8,
    "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-235B-A22B": 235.0,
    "meta-llama/Llama-3.2-1B": 1.24,
    "meta-llama/Llama-3.2-3B": 3.21,
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.3-70B-Instruct": 70.6,
    "google/gemma-2-2b": 2.61,
    "google/gemma-2-9b": 9.24,
    "google/gemma-2-27b": 27.2,
    "google/gemma-3-1b-it": 1.0,
    "HuggingFaceTB/SmolLM2-135M": 0.135,
    "HuggingFaceTB/SmolLM3-3B": 3.08,
    "allenai/OLMo-2-0425-1B": 1.48,
    "allenai/OLMo-2-1124-7B": 7.30,
    "allenai/OLMoE-1B-7B-0924": 6.92,
    "mistralai/Mistral-7B-v0.1": 7.24,
    "mistralai/Mixtral-8x7B-v0.1": 46.7,
    "microsoft/phi-4": 14.7,
    "openai/gpt-oss-20b": 20.9,
    "openai/gpt-oss-120b": 116.8,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.78,
}
# Those that a token passes through.
ACTIVE = {
    "Qwen/Qwen3-30B-A3B": 3.3,
    "Qwen/Qwen3-235B-A22B": 22.0,
    "mistralai/Mixtral-8x7B-v0.1": 12.9,
    "allenai/OLMoE-1B-7B-0924": 1.28,
}


def params_of(name: str) -> float:
    config = find_known_config(name)
    assert config is not None
    return size_of_config(config).num_params / 1e9


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_row_gives_the_published_number_of_parameters(name: str) -> None:
    assert params_of(name) == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_passes_through_the_experts_that_are_chosen(name: str) -> None:
    config = find_known_config(name)
    assert config is not None
    size = size_of_config(config)
    assert (size.body_params + size.outer_params) / 1e9 == pytest.approx(ACTIVE[name], rel=0.02)


def test_no_row_is_far_from_its_name() -> None:
    # Names round down: gemma-2b has 2.5 billion, OLMo-2-1B 1.5. Mixtral's counts its experts.
    for name in list_known_models():
        found = re.search(r"(?<![\dx])(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", name.partition("/")[2])
        if found is None or "mixtral" in name or "olmoe" in name:
            continue
        named = float(found[1]) / (1000 if found[2] == "m" else 1)
        assert 0.95 <= params_of(name) / named <= 1.55, name


def test_names_are_those_of_the_hub_in_any_case() -> None:
    assert find_known_config("qwen/qwen2.5-7b-instruct") == find_known_config("Qwen/Qwen2.5-7B-Instruct")
    assert find_known_config("Qwen/Qwen2.5-7B-Chat") is None
    assert find_known_config("Qwen2.5-7B") is None
