"""Incidents of the group on sampling, each test named after the incident's id."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from strop.engine import (
    Completion,
    GenerationRequest,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
    stream_seed,
)
from strop.engine.native import NativeEngine
from strop.errors import WeightMismatch
from strop.policy.language_model import DTYPES, LanguageModel
from strop.policy.weights import publish_weights, tensors_digest, weights_digest
from strop.tokenizer import Tokenizer
from tests.engine.requests import ask, generate_all
from tests.fixtures.tiny_model import tiny_model


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


@pytest.fixture
def model(tiny_model_dir: Path) -> LanguageModel:
    return LanguageModel.load(tiny_model_dir, dtype=torch.float32)


def publish_other(model_dir: Path, path: Path, *, version: int, factor: float = 1.3) -> WeightUpdate:
    """Publish weights that are not those of the model directory."""
    other = LanguageModel.load(model_dir, dtype=torch.float32)
    for _, parameter in other.named_parameters():
        parameter.data.mul_(factor)
    return by_file(path, publish_weights(other, path), version=version)


def by_file(path: Path, digest: str, *, version: int) -> WeightUpdate:
    return WeightUpdate(version=version, digest=digest, transport=WeightTransport.FILE, path=str(path))


def test_smp_1_a_group_has_as_many_replies_as_seeds(model: LanguageModel, tokenizer: Tokenizer) -> None:
    """Incident: a constant seed in the sampling parameters; 83 rollouts held 3 distinct completions."""

    def group(run_seed: int) -> list[list[int]]:
        seeds = [stream_seed(run_seed, "example", 0, index) for index in range(16)]
        requests = [ask(tokenizer, seed=seed) for seed in seeds]
        replies = asyncio.run(generate_all(NativeEngine(model, tokenizer), requests))
        return [reply.token_ids.tolist() for reply in replies]

    first = group(0)
    assert len({tuple(ids) for ids in first}) == 16
    assert group(0) == first
    assert all(ids not in first for ids in group(1))


def test_smp_4_a_reply_is_stamped_with_the_version_that_spoke_it(
    model: LanguageModel, tokenizer: Tokenizer, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Incident: versions were taken at save time or from a directory scan.

    An update that arrives during a reply waits for it, so a reply has one version; the one asked
    for meanwhile has the new one.
    """
    update = publish_other(tiny_model_dir, tmp_path / "w.safetensors", version=5)
    request = ask(tokenizer, max_tokens=30)
    engine = NativeEngine(model, tokenizer)

    async def act() -> tuple[Completion, WeightReceipt, Completion]:
        under_way = asyncio.create_task(engine.generate(request))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not under_way.done()
        receipt = await engine.update(update)
        assert under_way.done()
        return await under_way, receipt, await engine.generate(request)

    before, receipt, after = asyncio.run(act())
    undisturbed = fresh_reply(tiny_model_dir, tokenizer, request)
    assert (before.policy_version, receipt.version, after.policy_version) == (0, 5, 5)
    assert before.token_ids.tolist() == undisturbed.token_ids.tolist()
    assert after.token_ids.tolist() != before.token_ids.tolist()


def fresh_reply(
    model_dir: Path, tokenizer: Tokenizer, request: GenerationRequest, update: WeightUpdate | None = None
) -> Completion:
    """Answer with an engine that has never spoken before."""
    engine = NativeEngine(LanguageModel.load(model_dir, dtype=torch.float32), tokenizer)

    async def act() -> Completion:
        if update is not None:
            await engine.update(update)
        return await engine.generate(request)

    return asyncio.run(act())


def test_smp_5_no_key_or_value_outlives_an_update(
    model: LanguageModel, tokenizer: Tokenizer, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Incident: prefix caches were never reset, so shared prompts kept the keys of old weights."""
    update = publish_other(tiny_model_dir, tmp_path / "w.safetensors", version=1)
    request = ask(tokenizer, max_tokens=20)
    engine = NativeEngine(model, tokenizer)

    async def act() -> Completion:
        await engine.generate(request)
        await engine.update(update)
        return await engine.generate(request)

    warm, cold = asyncio.run(act()), fresh_reply(tiny_model_dir, tokenizer, request, update)
    assert warm.token_ids.tolist() == cold.token_ids.tolist()
    assert warm.logprobs.tobytes() == cold.logprobs.tobytes()


@pytest.mark.parametrize("flaw", ["drop a tensor", "cast the type", "cut the file", "other bytes", "no file"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smp_6_weights_that_are_not_the_published_ones_are_refused(
    flaw: str, dtype: str, tmp_path: Path
) -> None:
    """Incident: engines sampled base weights throughout, or got float16 in a bfloat16 run.

    Digests of dropped and cast weights are those of the very file, so that form is looked at too.
    """
    model_dir, path = tiny_model(tmp_path / "model", dtype=dtype), tmp_path / "w.safetensors"
    model, tokenizer = LanguageModel.load(model_dir, dtype=DTYPES[dtype]), Tokenizer.load(model_dir)
    digest = publish_weights(model, path)
    tensors = load_file(path)
    name = sorted(tensors)[0]
    if flaw == "drop a tensor":
        del tensors[name]
    elif flaw == "cast the type":
        tensors = {key: tensor.to(torch.float16) for key, tensor in tensors.items()}
    elif flaw == "other bytes":
        tensors[name] = tensors[name] * 2
    save_file(tensors, path)
    if flaw in ("drop a tensor", "cast the type"):
        digest = tensors_digest(tensors.items())
    elif flaw == "cut the file":
        path.write_bytes(path.read_bytes()[:-1])
    elif flaw == "no file":
        path.unlink()
    engine = NativeEngine(model, tokenizer)
    held = weights_digest(model)
    with pytest.raises(WeightMismatch, match="the engine keeps its old weights"):
        asyncio.run(engine.update(by_file(path, digest, version=1)))
    assert weights_digest(model) == held
    assert engine.version == 0


def test_smp_6_an_update_that_names_no_file_is_refused(model: LanguageModel, tokenizer: Tokenizer) -> None:
    """Incident: updates that carried nothing were acknowledged."""
    update = WeightUpdate(version=1, digest="d", transport=WeightTransport.FILE)
    with pytest.raises(WeightMismatch, match="weight update 1 is by file and names none"):
        asyncio.run(NativeEngine(model, tokenizer).update(update))


def test_smp_6_overlapping_updates_are_applied_one_after_the_other(
    model: LanguageModel, tokenizer: Tokenizer, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Incident: overlapping updates left a mixture of two versions."""
    updates = [
        publish_other(tiny_model_dir, tmp_path / f"w{version}", version=version, factor=1 + version / 10)
        for version in (1, 2, 3)
    ]
    engine, request = NativeEngine(model, tokenizer), ask(tokenizer)

    async def act() -> tuple[list[WeightReceipt], Completion]:
        speaking = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0)
        receipts = await asyncio.gather(*map(engine.update, updates))
        await speaking
        return receipts, await engine.generate(request)

    receipts, reply = asyncio.run(act())
    assert [(receipt.version, receipt.digest) for receipt in receipts] == [
        (update.version, update.digest) for update in updates
    ]
    assert weights_digest(model) == updates[-1].digest
    assert reply.policy_version == 3
