"""What `VllmEngine` makes of vLLM's words, with a core that says them without vLLM."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from strop.engine import GenerationRequest, UpdateMode, WeightTransport, WeightUpdate
from strop.engine.loading import EngineSettings
from strop.engine.vllm.core import Adapter, Piece, VllmCore
from strop.engine.vllm.engine import VllmEngine, require_instructions, vllm_arguments
from strop.engine.vllm.environment import VLLM, EngineLimits, find_python, plan_limits
from strop.errors import ConfigError, EngineError, WeightMismatch
from strop.hardware import describe_machine
from strop.policy.footprint import ModelSize
from strop.rollout import FinishReason, IntArray, VersionSegment
from strop.tokenizer import Tokenizer
from tests.engine.contract_suite import EngineContract
from tests.engine.requests import ask

LIMITS = EngineLimits(max_positions=512, vocab_size=262)
UPDATE = WeightUpdate(version=7, digest="d7", transport=WeightTransport.FILE, path="/w")


class ScriptedCore(VllmCore):
    """Says tokens of a text that depends on seed and version, one every turn of the loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.version = 0
        self.salts: list[str] = []
        self.said: list[str] = []
        self.answers: list[dict[str, Any]] = [{"refusal": None, "flaw": None}]
        self.is_aborting = False
        self.going = asyncio.Event()
        self.going.set()
        self.is_closed = False
        self.has_begun = asyncio.Event()

    def words(self, seed: int) -> list[int]:
        ids: list[int] = self.tokenizer.encode(f"reply {seed} of {self.version}. and so on, and on").tolist()
        return ids[:20]

    async def sample(
        self, request: GenerationRequest, *, salt: str, adapter: Adapter | None, is_whole: bool
    ) -> AsyncGenerator[Piece, None]:
        self.salts.append(salt)
        token_ids: list[int] = []
        segments: list[VersionSegment] = []
        while len(token_ids) < request.max_tokens:
            await asyncio.sleep(0.001)
            await self.going.wait()
            if self.is_aborting:
                kept = token_ids if is_whole else []
                yield Piece(token_ids=kept, logprobs=[-1.0] * len(kept), finish="abort")
                return
            if not segments or segments[-1].version != self.version:
                segments.append(VersionSegment(start=len(token_ids), version=self.version))
            token_ids.append(self.words(request.seed)[len(token_ids) % 20])
            if len(token_ids) == 5:
                self.has_begun.set()
            if not is_whole:
                yield Piece(token_ids=token_ids[-1:], logprobs=[-1.0])
        if is_whole:
            yield Piece(
                token_ids=token_ids,
                logprobs=[-1.0] * len(token_ids),
                finish="length",
                segments=tuple(segments),
            )

    async def score(
        self, prompt_ids: IntArray, reply_ids: IntArray, *, adapter: Adapter | None
    ) -> list[float]:
        return [-1.0] * len(reply_ids)

    async def pause(self, mode: Literal["abort", "keep"]) -> None:
        self.said.append(mode)
        self.is_aborting = mode == "abort"
        if mode == "keep":
            self.going.clear()

    async def resume(self) -> None:
        self.is_aborting = False
        self.going.set()

    async def load_weights(self, path: str, digest: str) -> list[dict[str, Any]]:
        self.said.append(f"load {path}")
        await asyncio.sleep(0.005)
        return self.answers

    async def drop_cached(self) -> None:
        self.said.append("drop")

    async def name_version(self, version: int) -> None:
        self.version = version

    async def load_adapter(self, adapter: Adapter) -> None:
        self.said.append(f"adapter {adapter.adapter_id}")

    async def drop_adapter(self, adapter: Adapter) -> None:
        self.said.append(f"no adapter {adapter.adapter_id}")

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def core(tokenizer: Tokenizer) -> ScriptedCore:
    return ScriptedCore(tokenizer)


@pytest.fixture
def engine(core: ScriptedCore, tokenizer: Tokenizer) -> VllmEngine:
    return VllmEngine(core, tokenizer, limits=LIMITS, digest="d0")


class TestVllmEngineOverACore(EngineContract):
    @pytest.fixture
    def engine(self, tokenizer: Tokenizer) -> VllmEngine:
        return VllmEngine(ScriptedCore(tokenizer), tokenizer, limits=LIMITS)

    @pytest.fixture
    def shared_update(self) -> WeightUpdate:
        return UPDATE


def test_a_reply_is_cut_where_strop_says(engine: VllmEngine, tokenizer: Tokenizer) -> None:
    # "reply 11 of 0. and so on": the stop string's last character is the 14th.
    completion = asyncio.run(engine.generate(ask(tokenizer, max_tokens=20, stop_strings=("of 0.", "zz"))))
    assert completion.finish_reason is FinishReason.STOP_STRING
    assert completion.text == "reply 11 "
    assert tokenizer.decode(completion.token_ids) == "reply 11 of 0."
    assert len(completion.logprobs) == len(completion.token_ids)


def test_a_stop_token_is_kept_and_its_text_is_not(engine: VllmEngine, tokenizer: Tokenizer) -> None:
    stop = int(tokenizer.encode("p")[0])
    request = replace(ask(tokenizer, max_tokens=20), stop_token_ids=frozenset({stop}))
    completion = asyncio.run(engine.generate(request))
    assert (completion.finish_reason, completion.text) == (FinishReason.EOS, "re")
    assert completion.token_ids[-1] == stop


@pytest.mark.parametrize(
    ("mode", "said", "segments", "version"),
    [
        (UpdateMode.DRAIN, ["load /w", "drop"], (), 0),
        (UpdateMode.RESTART, ["abort", "load /w", "drop"], (), 7),
        (UpdateMode.CONTINUE, ["keep", "load /w", "drop"], (0, 7), 0),
    ],
)
@pytest.mark.parametrize("stop_strings", [(), ("never",)])
async def test_replies_under_way_end_as_the_mode_says(
    mode: UpdateMode,
    said: list[str],
    segments: tuple[int, ...],
    version: int,
    stop_strings: tuple[str, ...],
    engine: VllmEngine,
    core: ScriptedCore,
    tokenizer: Tokenizer,
) -> None:
    request = ask(tokenizer, max_tokens=60, stop_strings=stop_strings)
    under_way = asyncio.create_task(engine.generate(request))
    await core.has_begun.wait()
    update = asyncio.create_task(engine.update(replace(UPDATE, mode=mode)))
    await asyncio.sleep(0.002)
    # Asked while the gate is closed: served under the new weights.
    reply, late, receipt = await under_way, await engine.generate(request), await update
    assert core.said == said
    assert (receipt.version, receipt.digest) == (7, "d7")
    assert (late.policy_version, late.segments) == (7, ())
    assert reply.policy_version == version
    assert tuple(part.version for part in reply.segments) == segments
    assert len(reply.token_ids) == 60
    if segments:
        start = reply.segments[1].start
        core.version = 0
        old, core.version = core.words(11) * 3, 7
        assert reply.token_ids.tolist() == old[:start] + (core.words(11) * 3)[start:60]


async def test_refused_weights_leave_the_old_ones(
    engine: VllmEngine, core: ScriptedCore, tokenizer: Tokenizer
) -> None:
    core.answers = [{"refusal": "digest x, not d7: it keeps its old weights", "flaw": None}]
    with pytest.raises(WeightMismatch, match=r"digest x, not d7.* keeps its old weights"):
        await engine.update(UPDATE)
    assert (await engine.generate(ask(tokenizer))).policy_version == 0


@pytest.mark.parametrize(
    "answers",
    [
        [{"refusal": None, "flaw": "q_proj is not live"}],
        # One worker has taken them, the other has not: the engine's weights are of no version.
        [{"refusal": None, "flaw": None}, {"refusal": "q_proj is not live", "flaw": None}],
    ],
)
async def test_smp_6_unproven_weights_are_served_to_nobody(
    answers: list[dict[str, Any]], engine: VllmEngine, core: ScriptedCore, tokenizer: Tokenizer
) -> None:
    """Incident: engines went on with weights that were not those of the policy."""
    core.answers = answers
    with pytest.raises(WeightMismatch, match=r"q_proj is not live.* serves nothing now"):
        await engine.update(UPDATE)
    with pytest.raises(EngineError, match="weights are of no version"):
        await engine.generate(ask(tokenizer))
    core.answers = [{"refusal": "late", "flaw": None}]
    with pytest.raises(WeightMismatch, match="late"):
        await engine.update(UPDATE)
    # A refused update does not mend what an earlier one broke.
    with pytest.raises(EngineError, match="weights are of no version"):
        await engine.generate(ask(tokenizer))
    core.answers = [{"refusal": None, "flaw": None}]
    await engine.update(UPDATE)
    assert (await engine.generate(ask(tokenizer))).policy_version == 7


async def test_smp_5_no_prefix_is_shared_by_two_versions(
    engine: VllmEngine, core: ScriptedCore, tokenizer: Tokenizer
) -> None:
    """Incident: a prefix cache outlived weight updates, so shared prefixes kept old keys and values."""
    for version, digest in ((7, "d7"), (8, "d8"), (9, "d7")):
        await engine.update(replace(UPDATE, version=version, digest=digest))
        await asyncio.gather(engine.generate(ask(tokenizer)), engine.generate(ask(tokenizer)))
    assert [core.salts.count(salt) for salt in dict.fromkeys(core.salts)] == [2, 2, 2]
    assert core.said.count("drop") == 3


async def test_overlapping_updates_are_applied_one_after_the_other(
    engine: VllmEngine, core: ScriptedCore
) -> None:
    await asyncio.gather(
        *(engine.update(replace(UPDATE, version=v, digest=f"d{v}", path=f"/{v}")) for v in (7, 8))
    )
    assert core.said == ["load /7", "drop", "load /8", "drop"]
    assert engine.version == 8


@pytest.mark.parametrize(
    "update", [replace(UPDATE, transport=WeightTransport.SHARED), replace(UPDATE, path=None)]
)
def test_an_update_that_names_nothing_is_refused(update: WeightUpdate, engine: VllmEngine) -> None:
    named = "by shared and names /w|by file and names None"
    with pytest.raises(WeightMismatch, match=f"weight update 7 is ({named})"):
        asyncio.run(engine.update(update))


async def test_what_cannot_be_generated_or_scored_is_refused(
    engine: VllmEngine, core: ScriptedCore, tokenizer: Tokenizer
) -> None:
    too_long, prompt_ids = ask(tokenizer, max_tokens=510), tokenizer.encode("1")
    for bad in (too_long, replace(ask(tokenizer), prompt_ids=np.array([262], np.int32))):
        with pytest.raises(EngineError, match=r"510|262"):
            await engine.generate(bad)
    with pytest.raises(EngineError, match="512"):
        await engine.score(prompt_ids, np.repeat(prompt_ids, 512), 1.0)


def test_log_4_a_value_that_is_not_finite_is_no_sample(
    engine: VllmEngine, core: ScriptedCore, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def say_nan(*_: Any, **__: Any) -> AsyncGenerator[Piece, None]:
        yield Piece(token_ids=[5], logprobs=[math.nan], finish="length")

    monkeypatch.setattr(core, "sample", say_nan)
    with pytest.raises(EngineError, match="log-probability that is not finite"):
        asyncio.run(engine.generate(ask(tokenizer, max_tokens=1)))


def test_what_vllm_ends_by_itself_is_no_sample(
    engine: VllmEngine, core: ScriptedCore, tokenizer: Tokenizer
) -> None:
    core.is_aborting = True
    completion = asyncio.run(engine.generate(ask(tokenizer)))
    assert completion.finish_reason is FinishReason.ABORT
    assert len(completion.token_ids) == 0


# ---------------------------------------------------------------- limits and interpreter

SIZE = ModelSize(
    num_layers=2,
    hidden_width=64,
    mlp_width=128,
    num_heads=4,
    num_kv_heads=2,
    head_width=32,
    vocab_size=262,
    max_positions=512,
    is_tied=True,
)


def test_limits_are_the_model_own_or_less() -> None:
    limits = plan_limits(SIZE, dtype="float32", max_model_tokens=None, kv_cache_bytes=None)
    assert limits == LIMITS
    limits = plan_limits(SIZE, dtype="float32", max_model_tokens=100, kv_cache_bytes=None)
    assert limits.max_positions == 100


def test_more_positions_than_the_model_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_tokens=513, but the model has 512 positions"):
        plan_limits(SIZE, dtype="float32", max_model_tokens=513, kv_cache_bytes=None)


def test_a_cache_without_room_for_one_sequence_is_refused_with_both_numbers() -> None:
    # 2 (keys, values) x 2 layers x 2 heads x 32 wide x 2 bytes = 512 bytes per token;
    # 512 positions and one block of 128 are 640 tokens: 327,680 bytes.
    with pytest.raises(ConfigError, match="one sequence of 512 tokens takes 327680"):
        plan_limits(SIZE, dtype="bfloat16", max_model_tokens=None, kv_cache_bytes=327_679)
    plan_limits(SIZE, dtype="bfloat16", max_model_tokens=None, kv_cache_bytes=327_680)


def test_without_vllm_the_next_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"this Python has no vllm and .* Next: run `make vllm-deps`"):
        find_python(None)
    with pytest.raises(ConfigError, match=r"engine.python=/no/such is no file"):
        find_python("/no/such")
    python = tmp_path / "python"
    python.touch()
    assert find_python(str(python)) == python
    VLLM.python.parent.mkdir(parents=True)
    VLLM.python.touch()
    (VLLM.path / "strop-stamp.json").write_text(f'{{"stamp": "{VLLM.stamp}"}}')
    assert find_python(None) == VLLM.python


async def test_scores_are_at_temperature_1(engine: VllmEngine, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("1")
    with pytest.raises(EngineError, match=r"at temperature 0.7 by vLLM"):
        await engine.score(prompt, prompt, 0.7)
    assert np.array_equal(
        (await engine.score(prompt, prompt, 0.0)).logprobs, np.full(len(prompt), -1.0, np.float32)
    )


@pytest.mark.parametrize(("is_gpu", "rows", "batched"), [(True, 512, 8192), (False, 64, 4096)])
def test_vllm_is_told_how_much_it_does_at_once(is_gpu: bool, rows: int, batched: int) -> None:
    """By itself it decodes 128 replies at once, on a GPU that has room for thousands."""
    wanted = EngineSettings(kind="vllm", dtype="bfloat16")
    limits = EngineLimits(max_positions=2048, vocab_size=100)
    settings = vllm_arguments(wanted, Path("m"), limits, is_gpu=is_gpu)
    assert (settings["max_num_seqs"], settings["max_num_batched_tokens"]) == (rows, batched)
    # Sampling is what a request asks for, and what is reported is what was sampled from.
    assert (settings["generation_config"], settings["logprobs_mode"]) == ("vllm", "processed_logprobs")
    # Cutting prompts kills it on a CPU.
    assert settings.get("enable_chunked_prefill", True) == is_gpu
    assert settings["enforce_eager"] != is_gpu
    few = replace(wanted, max_num_seqs=7, is_eager=True)
    assert vllm_arguments(few, Path("m"), limits, is_gpu=is_gpu)["max_num_seqs"] == 7
    assert vllm_arguments(few, Path("m"), limits, is_gpu=is_gpu)["enforce_eager"]


def test_a_processor_that_vllm_has_no_library_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    machine = replace(describe_machine(), cpu_name="Nehalem", cpu_flags=())
    with pytest.raises(ConfigError, match=r"engine.kind=vllm on Nehalem without AVX2.*engine.kind=native"):
        require_instructions(machine)
    require_instructions(replace(machine, cpu_flags=("avx2",)))
