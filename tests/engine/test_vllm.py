"""Real vLLM on a CPU, started once: the engine's contract, and weights that are proven or refused."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from strop.cluster.ray.engines import ActorEngine
from strop.engine import (
    Completion,
    Engine,
    GenerationRequest,
    UpdateMode,
    WeightTransport,
    WeightUpdate,
)
from strop.engine.vllm.environment import VLLM
from strop.errors import WeightMismatch
from strop.policy.language_model import LanguageModel
from strop.policy.publication import tensors_digest
from strop.policy.scoring import score_replies
from strop.policy.weights import own_tensors, publish_tensors
from strop.rollout import FinishReason, IntArray, Sampling, VersionSegment
from strop.tokenizer import Tokenizer
from tests.cluster.test_engines import tampered
from tests.conftest import require_system_part
from tests.engine.contract_suite import EngineContract
from tests.engine.requests import ask
from tests.fixtures.builders import request_for
from tests.fixtures.engine_actor import Closing, RunningEngine, engine_actor
from tests.fixtures.ray_traces import descendants, is_alive, wait_until
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_run import tiny_spec

pytestmark = pytest.mark.slow
CLOSE_NATS = 2e-3
"""fp32 in vLLM's kernels against fp32 in the policy's; a stale tensor moves values by far more."""
_versions = itertools.count(1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM's attention on a CPU has no heads of 16.
    return tiny_model(tmp_path_factory.mktemp("model"), head_dim=32)


@pytest.fixture(scope="module")
def running(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    require_system_part("the environment of vLLM (make vllm-deps)", VLLM.is_ready())
    spec = tiny_spec(engine={"kind": "vllm", "max_num_seqs": 16}, placement={"kind": "ray"}, lora={"rank": 8})
    with pytest.MonkeyPatch.context() as patch:
        # One core: with two, each waits for the other while the rest of the machine works.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        with engine_actor(spec, model_dir, tmp_path_factory.mktemp("roles")) as started:
            yield started


@pytest.fixture
def engine(running: RunningEngine) -> ActorEngine:
    return running.connect()


@pytest.fixture
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


def load(model_dir: Path, factor: float = 1.0) -> LanguageModel:
    """Return the model, with every weight multiplied."""
    model = LanguageModel.load(model_dir, dtype=torch.float32)
    for _, parameter in model.named_parameters():
        parameter.data.mul_(factor)
    return model


def publish(model: LanguageModel, folder: Path, mode: UpdateMode = UpdateMode.DRAIN) -> WeightUpdate:
    version = next(_versions)
    path = folder / f"v{version}.safetensors"
    digest = publish_tensors(own_tensors(model), path)
    return WeightUpdate(
        version=version, digest=digest, transport=WeightTransport.FILE, path=str(path), mode=mode
    )


def policy_logprobs(
    model: LanguageModel, prompt_ids: IntArray, reply_ids: IntArray, temperature: float = 1.0
) -> Any:
    """What the trainer says of the same tokens; it knows no cache."""
    return score_replies(model, prompt_ids, [reply_ids], temperature)[0]


def long_prompt() -> IntArray:
    """Three blocks of vLLM's prefix cache."""
    return (np.arange(390) * 5 % 250).astype(np.int32)


def long_request(max_tokens: int = 240) -> GenerationRequest:
    return request_for(np.arange(1, 9, dtype=np.int32), max_tokens=max_tokens, seed=3)


class TestVllmEngine(EngineContract):
    @pytest.fixture
    def engine(self, running: RunningEngine) -> Engine:
        return running.connect()

    @pytest.fixture
    def shared_update(self, model_dir: Path, tmp_path: Path) -> WeightUpdate:
        return publish(load(model_dir), tmp_path)

    @pytest.fixture
    def broken_update(self, model_dir: Path, tmp_path: Path) -> WeightUpdate:
        return replace(publish(load(model_dir), tmp_path), digest="0" * 64)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.6), Sampling(temperature=1.7), Sampling(temperature=0.0)]
)
def test_log_1_values_are_those_of_the_distribution_sampled_from(
    sampling: Sampling, engine: ActorEngine, model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Incident: an engine reported values before the division by the temperature."""
    model = load(model_dir)
    request = replace(ask(tokenizer, sampling=sampling, max_tokens=40), stop_token_ids=frozenset())

    async def act() -> Completion:
        await engine.update(publish(model, tmp_path))
        return await engine.generate(request)

    completion = Closing(engine).run(act())
    # Greedy decoding reports values at temperature 1.
    expected = policy_logprobs(model, request.prompt_ids, completion.token_ids, sampling.temperature or 1.0)
    assert completion.logprobs == pytest.approx(expected, abs=CLOSE_NATS)
    if sampling.temperature == 0.0:
        assert len(set(completion.token_ids.tolist())) > 1


def test_smp_5_a_prompt_after_an_update_is_that_of_a_cold_engine(
    engine: ActorEngine, model_dir: Path, tmp_path: Path
) -> None:
    """Incident: a prefix cache outlived weight updates, so shared prefixes kept old keys and values."""
    request = replace(long_request(20), prompt_ids=long_prompt())

    async def act() -> list[list[Completion]]:
        found = []
        for factor in (1.0, 1.3, 1.0):
            await engine.update(publish(load(model_dir, factor), tmp_path))
            # The second is answered from the cache that the first has filled.
            found.append([await engine.generate(request), await engine.generate(request)])
        return found

    for factor, replies in zip((1.0, 1.3, 1.0), Closing(engine).run(act()), strict=True):
        for reply in replies:
            expected = policy_logprobs(load(model_dir, factor), request.prompt_ids, reply.token_ids)
            assert reply.logprobs == pytest.approx(expected, abs=CLOSE_NATS)


def test_more_prompts_than_one_forward_takes_are_all_answered(engine: ActorEngine) -> None:
    """Prompts that vLLM would cut into chunks, and it dies of that on a CPU where a request has a seed."""
    # 14 prompts of 390 tokens, each its own: 5,460 tokens, and a forward takes 4,096.
    requests = [
        replace(long_request(4), prompt_ids=(long_prompt() + first) % 250, seed=first) for first in range(14)
    ]

    async def act() -> list[Completion]:
        return await asyncio.gather(*map(engine.generate, requests))

    assert [len(reply.token_ids) for reply in Closing(engine).run(act())] == [4] * 14


@pytest.mark.parametrize("kind", ["truncated", "other bytes", "extra"])
def test_smp_6_damaged_weights_are_refused_and_old_ones_stay(
    kind: str, engine: ActorEngine, model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Incident: engines served weights that nobody had published."""
    publish_tensors(own_tensors(load(model_dir, 1.3)), tmp_path / "w.safetensors")
    bad = tampered(kind, tmp_path / "w.safetensors")
    request = ask(tokenizer)

    async def act() -> tuple[Completion, Completion]:
        before = await engine.generate(request)
        with pytest.raises(WeightMismatch, match="published weights"):
            await engine.update(bad)
        return before, await engine.generate(request)

    before, after = Closing(engine).run(act())
    assert before.token_ids.tolist() == after.token_ids.tolist()
    assert before.logprobs.tolist() == after.logprobs.tolist()
    assert before.policy_version == after.policy_version


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_replies_under_way_end_as_the_mode_says(
    mode: UpdateMode, engine: ActorEngine, model_dir: Path, tmp_path: Path
) -> None:
    old, new = load(model_dir), load(model_dir, 1.2)
    request = long_request()

    async def act() -> tuple[Completion, WeightUpdate, WeightUpdate, Completion]:
        # The update may come before the first token, or behind the last: vLLM keeps both cores busy, and
        # this process often wakes only when it is done. Then once more; mostly the first is enough.
        for wait_s in 10 * (0.15, 0.05, 0.02, 0.03, 0.01):
            first, second = publish(old, tmp_path), publish(new, tmp_path, mode)
            await engine.update(first)
            under_way = asyncio.create_task(engine.generate(request))
            await asyncio.sleep(wait_s)
            await engine.update(second)
            reply = await under_way
            hoped = {UpdateMode.DRAIN: first.version, UpdateMode.RESTART: second.version}
            if reply.segments or reply.policy_version == hoped.get(mode):
                break
        return reply, first, second, await engine.generate(request)

    reply, first, second, fresh = Closing(engine).run(act())
    assert reply.finish_reason is FinishReason.LENGTH
    assert len(reply.token_ids) == request.max_tokens
    if mode is UpdateMode.DRAIN:
        assert (reply.policy_version, reply.segments) == (first.version, ())
        expected = policy_logprobs(old, request.prompt_ids, reply.token_ids)
        assert reply.logprobs == pytest.approx(expected, abs=CLOSE_NATS)
    elif mode is UpdateMode.RESTART:
        assert (reply.policy_version, reply.segments) == (second.version, ())
        assert reply.token_ids.tolist() == fresh.token_ids.tolist()
    else:
        assert reply.policy_version == first.version
        begin, change = reply.segments
        assert begin == VersionSegment(start=0, version=first.version)
        assert change.version == second.version
        assert 0 < change.start < request.max_tokens
        # Each token under the weights that sampled it; keys and values were all made anew.
        before = policy_logprobs(old, request.prompt_ids, reply.token_ids)[: change.start]
        after = policy_logprobs(new, request.prompt_ids, reply.token_ids)[change.start :]
        assert reply.logprobs == pytest.approx(np.concatenate([before, after]), abs=CLOSE_NATS)


def write_adapter(folder: Path, scale: float) -> str:
    """Write a LoRA adapter of rank 4 in peft's format. Returns its digest."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(4, 64, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(128, 4, generator=generator) * scale
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"bias": "none"}))
    return tensors_digest(tensors.items())


def with_adapter(model: LanguageModel, folder: Path) -> LanguageModel:
    """Add an adapter to the weights: alpha / r times B A, and alpha / r is 2."""
    tensors = load_file(folder / "adapter_model.safetensors")
    parameters = dict(model.named_parameters())
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj"
        a = tensors[f"base_model.model.{name}.lora_A.weight"]
        b = tensors[f"base_model.model.{name}.lora_B.weight"]
        parameters[f"{name}.weight"].data.add_(2.0 * b @ a)
    return model


def test_adapters_are_swapped_and_end_with_the_next_weights(
    engine: ActorEngine, model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    request = ask(tokenizer)
    scales = {"one": 0.05, "two": -0.05}
    digests = {name: write_adapter(tmp_path / name, scale) for name, scale in scales.items()}

    def adapter_update(name: str, digest: str) -> WeightUpdate:
        return WeightUpdate(
            version=next(_versions),
            digest=digest,
            transport=WeightTransport.FILE,
            path=str(tmp_path / name),
            is_adapter=True,
        )

    async def act() -> dict[str, tuple[Completion, WeightUpdate]]:
        found = {}
        base = publish(load(model_dir), tmp_path)
        await engine.update(base)
        found["base"] = await engine.generate(request), base
        for name, digest in digests.items():
            update = adapter_update(name, digest)
            await engine.update(update)
            found[name] = await engine.generate(request), update
        with pytest.raises(WeightMismatch, match="has digest"):
            await engine.update(adapter_update("one", "0" * 64))
        found["kept"] = await engine.generate(request), update
        base = publish(load(model_dir), tmp_path)
        await engine.update(base)
        found["after"] = await engine.generate(request), base
        return found

    found = Closing(engine).run(act())
    folders = {"one": "one", "two": "two", "kept": "two"}
    values = []
    for name, (reply, update) in found.items():
        model = load(model_dir)
        if name in folders:
            model = with_adapter(model, tmp_path / folders[name])
        expected = policy_logprobs(model, request.prompt_ids, reply.token_ids)
        assert reply.logprobs == pytest.approx(expected, abs=CLOSE_NATS), name
        assert reply.policy_version == update.version
        values.append(expected[0])
    assert abs(values[0] - values[1]) > 0.01
    assert abs(values[1] - values[2]) > 0.01


def test_prc_5_nothing_of_vllm_outlives_its_actor(running: RunningEngine) -> None:
    """Last in this file: it kills the actor, as the kernel would for want of memory."""
    below = descendants(running.pid)
    assert below
    os.kill(running.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, below)), 120.0)
