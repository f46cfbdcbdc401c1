"""Real vLLM on a CPU, started once: the engine's contract, and weights that are proven or refused."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from strop.cluster.engine_process import vllm_environment
from strop.engine import (
    Completion,
    Engine,
    GenerationRequest,
    UpdateMode,
    WeightTransport,
    WeightUpdate,
)
from strop.engine.remote import RemoteEngine
from strop.engine.vllm.environment import VLLM
from strop.engine.wire import ReadyForm
from strop.errors import EngineError, WeightMismatch
from strop.hardware.process import spawn, terminate
from strop.policy.language_model import LanguageModel
from strop.policy.publication import WeightSender, tensors_digest
from strop.policy.scoring import score_replies
from strop.policy.weights import own_tensors, publish_tensors, weights_digest
from strop.rollout import FinishReason, IntArray, Sampling, VersionSegment
from strop.tokenizer import Tokenizer
from tests.conftest import require_system_part
from tests.engine.contract_suite import EngineContract
from tests.engine.requests import ask
from tests.engine.test_remote import Closing, tampered
from tests.fixtures.builders import request_for
from tests.fixtures.engine_server import RunningServer
from tests.fixtures.faulty_vllm import FAULT_FILE
from tests.fixtures.ray_traces import descendants, is_alive, wait_until
from tests.fixtures.tiny_model import tiny_model

pytestmark = pytest.mark.slow
CLOSE_NATS = 2e-3
"""fp32 in vLLM's kernels against fp32 in the policy's; a stale tensor moves values by far more."""
_versions = itertools.count(1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM's attention on a CPU has no heads of 16.
    return tiny_model(tmp_path_factory.mktemp("model"), head_dim=32)


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file whose words break the server's worker."""
    return tmp_path_factory.mktemp("fault") / "word"


@pytest.fixture(scope="module")
def server(model_dir: Path, fault: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    require_system_part("the environment of vLLM (make vllm-deps)", VLLM.is_ready())
    work_dir = tmp_path_factory.mktemp("server")
    key, key_path, ready_path = secrets.token_urlsafe(24), work_dir / "key", work_dir / "ready"
    key_path.touch(mode=0o600)
    key_path.write_text(key)
    modules = work_dir / "modules"
    modules.mkdir()
    (modules / "tests").symlink_to(Path(__file__).parents[1])
    # One core: with two, each waits for the other while the rest of the machine works.
    added = {**vllm_environment(modules), FAULT_FILE: str(fault), "VLLM_CPU_OMP_THREADS_BIND": "0"}
    added["TORCH_COMPILE_DISABLE"] = "1"
    args = [str(VLLM.python), "-P", "-m", "tests.fixtures.faulty_vllm", "--model", str(model_dir)]
    args += ["--dtype", "float32", "--key-file", str(key_path), "--ready-file", str(ready_path)]
    args += ["--eager", "--max-num-seqs", "16", "--lora-rank", "8"]
    child = spawn(args, work_dir / "engine.log", {**os.environ, **added})
    try:
        deadline = time.monotonic() + 900
        while not ready_path.exists():
            assert child.poll() is None, child.tail()
            assert time.monotonic() < deadline, child.tail()
            time.sleep(0.1)
        ready = ReadyForm.model_validate_json(ready_path.read_bytes())
        yield RunningServer(child=child, url=ready.url, key=key)
    finally:
        terminate(child, 5)


@pytest.fixture
def engine(server: RunningServer) -> RemoteEngine:
    return server.connect()


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


@contextmanager
def broken(fault: Path, word: str) -> Iterator[None]:
    """Have the server's worker treat new weights badly."""
    fault.write_text(word)
    try:
        yield
    finally:
        fault.unlink()


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
    def engine(self, server: RunningServer) -> Engine:
        return server.connect()

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
    sampling: Sampling, engine: RemoteEngine, model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
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


def test_weights_come_through_a_process_group(
    engine: RemoteEngine, model_dir: Path, tokenizer: Tokenizer
) -> None:
    model = load(model_dir, 1.1)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    sender, version = WeightSender("127.0.0.1"), next(_versions)
    update = WeightUpdate(
        version=version,
        digest=weights_digest(model),
        transport=WeightTransport.BROADCAST,
        path=sender.address("v"),
    )
    prompt, reply = tokenizer.encode("1 + 2 ="), tokenizer.encode(" 3, as we all know")

    async def act() -> Any:
        sending = asyncio.create_task(asyncio.to_thread(sender.send, "v", tensors, 1))
        await engine.update(update)
        await sending
        return await engine.score(prompt, reply, 1.0)

    score = Closing(engine).run(act())
    assert score.policy_version == version
    assert score.logprobs == pytest.approx(policy_logprobs(model, prompt, reply), abs=CLOSE_NATS)


def test_smp_5_a_prompt_after_an_update_is_that_of_a_cold_engine(
    engine: RemoteEngine, model_dir: Path, tmp_path: Path
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


def test_more_prompts_than_one_forward_takes_are_all_answered(engine: RemoteEngine) -> None:
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
    kind: str, engine: RemoteEngine, model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Incident: engines served weights that nobody had published."""
    publish_tensors(own_tensors(load(model_dir, 1.3)), tmp_path / "w.safetensors")
    bad = tampered(kind, tmp_path / "w.safetensors")
    request = ask(tokenizer)

    async def act() -> tuple[Completion, Completion]:
        before = await engine.generate(request)
        with pytest.raises(WeightMismatch, match="Allowed: exactly the tensors"):
            await engine.update(bad)
        return before, await engine.generate(request)

    before, after = Closing(engine).run(act())
    assert before.token_ids.tolist() == after.token_ids.tolist()
    assert before.logprobs.tolist() == after.logprobs.tolist()
    assert before.policy_version == after.policy_version


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("drop", "is not live"),
        ("forget the head", "lm_head.weight is not live"),
        ("half", "the reload failed .*the connection broke"),
    ],
)
def test_smp_6_an_engine_that_keeps_old_weights_is_found_and_serves_nothing(
    word: str,
    message: str,
    engine: RemoteEngine,
    fault: Path,
    model_dir: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    """Incident: agents sampled base weights throughout, because the update could not be loaded."""
    good = load(model_dir)

    async def act() -> Completion:
        await engine.update(publish(good, tmp_path))
        with broken(fault, word), pytest.raises(WeightMismatch, match=message):
            await engine.update(publish(load(model_dir, 1.01), tmp_path))
        with pytest.raises(EngineError, match="weights are of no version"):
            await engine.generate(ask(tokenizer))
        await engine.update(publish(good, tmp_path))
        return await engine.generate(ask(tokenizer))

    reply = Closing(engine).run(act())
    expected = policy_logprobs(good, ask(tokenizer).prompt_ids, reply.token_ids)
    assert reply.logprobs == pytest.approx(expected, abs=CLOSE_NATS)


def test_smp_6_one_changed_value_in_a_hundred_is_enough_to_be_found(
    engine: RemoteEngine, fault: Path, model_dir: Path, tmp_path: Path
) -> None:
    """A small step: 1 % of the values move, each by 1e-4 of itself."""
    old = load(model_dir)
    new = load(model_dir)
    generator = torch.Generator().manual_seed(1)
    for _, parameter in new.named_parameters():
        is_moved = torch.rand(parameter.shape, generator=generator) < 0.01
        parameter.data[is_moved] *= 1.0001

    async def act() -> None:
        await engine.update(publish(old, tmp_path))
        with broken(fault, "drop"), pytest.raises(WeightMismatch, match="is not live"):
            await engine.update(publish(new, tmp_path))
        await engine.update(publish(old, tmp_path))

    Closing(engine).run(act())


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_replies_under_way_end_as_the_mode_says(
    mode: UpdateMode, engine: RemoteEngine, model_dir: Path, tmp_path: Path
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
    engine: RemoteEngine, model_dir: Path, tokenizer: Tokenizer, tmp_path: Path
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


def test_prc_5_nothing_of_vllm_outlives_its_server(server: RunningServer) -> None:
    """Last in this file: it kills the server, as the kernel would for want of memory."""
    below = descendants(server.child.pid)
    assert len(below) >= 2
    os.kill(server.child.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, below)), 120.0)
