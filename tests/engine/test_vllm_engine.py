"""What `VllmEngine` makes of vLLM's words, said here without vLLM."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strop.engine import UpdateMode, WeightTransport, WeightUpdate
from strop.engine.loading import EngineSettings
from strop.engine.vllm.engine import VllmEngine, vllm_arguments
from strop.engine.vllm.environment import VLLM, find_python
from strop.errors import ConfigError, EngineError, EngineLost, WeightMismatch
from strop.rollout import FinishReason
from strop.tokenizer import Tokenizer
from tests.engine.contract_suite import EngineContract
from tests.engine.requests import ask

UPDATE = WeightUpdate(version=7, digest="d7", transport=WeightTransport.FILE, path="/w")


class DeadError(Exception): ...


class FailedError(Exception): ...


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put what the engine takes from vLLM's modules in their place: this Python has no vLLM."""
    parts: dict[str, dict[str, Any]] = {
        "vllm": {"SamplingParams": SimpleNamespace},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY="whole", DELTA="pieces")},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {"EngineDeadError": DeadError, "EngineGenerateError": FailedError},
    }
    for name, members in parts.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


def say(
    token_ids: list[int], finish: str | None = None, versions: Sequence[Any] = (), value: float = -1.0
) -> Any:
    """Return an output of vLLM."""
    rows = [{token_id: SimpleNamespace(logprob=value)} for token_id in token_ids]
    piece = SimpleNamespace(
        token_ids=token_ids, logprobs=rows, finish_reason=finish, weight_versions=list(versions)
    )
    return SimpleNamespace(outputs=[piece])


class ScriptedLlm:
    """An AsyncLLM that says a text depending on seed and version, one token every turn of the loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.version = 0
        self.salts: list[str] = []
        self.said: list[str] = []
        self.answers: list[dict[str, Any]] = [{"refusal": None, "flaw": None}]
        self.is_aborting = False
        self.failure: Exception | None = None
        self.value = -1.0
        self.going = asyncio.Event()
        self.going.set()
        self.has_begun = asyncio.Event()

    def words(self, seed: int) -> list[int]:
        ids: list[int] = self.tokenizer.encode(f"reply {seed} of {self.version}. and so on, and on").tolist()
        return ids[:20]

    async def generate(
        self, prompt: dict[str, Any], params: Any, request_id: str, *, lora_request: Any
    ) -> AsyncGenerator[Any, None]:
        if self.failure is not None:
            raise self.failure
        if hasattr(params, "prompt_logprobs"):
            await asyncio.sleep(0.01)
            await self.going.wait()
            rows = [{one: SimpleNamespace(logprob=-1.0)} for one in prompt["prompt_token_ids"]]
            yield SimpleNamespace(prompt_logprobs=None if self.is_aborting else rows)
            return
        self.salts.append(prompt["cache_salt"])
        is_whole = params.output_kind == "whole"
        token_ids: list[int] = []
        versions: list[Any] = []
        while len(token_ids) < params.max_tokens:
            await asyncio.sleep(0.001)
            await self.going.wait()
            if self.is_aborting:
                yield say(token_ids if is_whole else [], "abort")
                return
            if not versions or versions[-1].version != str(self.version):
                versions.append(SimpleNamespace(start=len(token_ids), version=str(self.version)))
            token_ids.append(self.words(params.seed)[len(token_ids) % 20])
            if len(token_ids) == 5:
                self.has_begun.set()
            if not is_whole:
                yield say(token_ids[-1:])
        if is_whole:
            yield say(token_ids, "length", versions, self.value)

    async def pause_generation(self, mode: str) -> None:
        self.said.append(mode)
        self.is_aborting = mode == "abort"
        if mode == "keep":
            self.going.clear()

    async def resume_generation(self) -> None:
        self.is_aborting = False
        self.going.set()

    async def collective_rpc(self, method: str, args: tuple[str, str]) -> list[dict[str, Any]]:
        self.said.append(f"load {args[0]}")
        await asyncio.sleep(0.005)
        return self.answers

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        assert reset_running_requests
        self.said.append("drop")

    async def update_weight_version(self, version: str) -> None:
        self.version = int(version)

    def shutdown(self) -> None:
        self.said.append("shutdown")


@pytest.fixture
def llm(tokenizer: Tokenizer) -> ScriptedLlm:
    return ScriptedLlm(tokenizer)


@pytest.fixture
def engine(llm: ScriptedLlm, tokenizer: Tokenizer) -> VllmEngine:
    return VllmEngine(llm, tokenizer, max_positions=512, vocab_size=262)


class TestVllmEngine(EngineContract):
    @pytest.fixture
    def engine(self, tokenizer: Tokenizer) -> VllmEngine:
        return VllmEngine(ScriptedLlm(tokenizer), tokenizer, max_positions=512, vocab_size=262)

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
        (UpdateMode.DRAIN, ["wait", "load /w", "drop"], (), 0),
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
    llm: ScriptedLlm,
    tokenizer: Tokenizer,
) -> None:
    request = ask(tokenizer, max_tokens=60, stop_strings=stop_strings)
    under_way = asyncio.create_task(engine.generate(request))
    await llm.has_begun.wait()
    score = asyncio.create_task(engine.score(request.prompt_ids, request.prompt_ids, 1.0))
    update = asyncio.create_task(engine.update(replace(UPDATE, mode=mode)))
    await asyncio.sleep(0.002)
    # Asked while the gate is closed: served under the new weights.
    reply, late, receipt = await under_way, await engine.generate(request), await update
    assert llm.said == said
    assert (receipt.version, receipt.digest) == (7, "d7")
    assert (late.policy_version, late.segments) == (7, ())
    assert reply.policy_version == version
    assert tuple(part.version for part in reply.segments) == segments
    assert len(reply.token_ids) == 60
    # Of one version also where the update aborted it, or held it.
    assert (await score).policy_version == (0 if mode is UpdateMode.DRAIN else 7)
    if segments:
        start = reply.segments[1].start
        llm.version = 0
        old, llm.version = llm.words(11) * 3, 7
        assert reply.token_ids.tolist() == old[:start] + (llm.words(11) * 3)[start:60]


async def test_refused_weights_leave_the_old_ones(
    engine: VllmEngine, llm: ScriptedLlm, tokenizer: Tokenizer
) -> None:
    llm.answers = [{"refusal": "digest x, not d7: it keeps its old weights", "flaw": None}]
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
    answers: list[dict[str, Any]], engine: VllmEngine, llm: ScriptedLlm, tokenizer: Tokenizer
) -> None:
    """Incident: engines went on with weights that were not those of the policy."""
    llm.answers = answers
    with pytest.raises(WeightMismatch, match=r"q_proj is not live.* serves nothing now"):
        await engine.update(UPDATE)
    with pytest.raises(EngineError, match="weights are of no version"):
        await engine.generate(ask(tokenizer))
    llm.answers = [{"refusal": "late", "flaw": None}]
    with pytest.raises(WeightMismatch, match="late"):
        await engine.update(UPDATE)
    # A refused update does not mend what an earlier one broke.
    with pytest.raises(EngineError, match="weights are of no version"):
        await engine.generate(ask(tokenizer))
    llm.answers = [{"refusal": None, "flaw": None}]
    await engine.update(UPDATE)
    assert (await engine.generate(ask(tokenizer))).policy_version == 7


async def test_smp_5_no_prefix_is_shared_by_two_versions(
    engine: VllmEngine, llm: ScriptedLlm, tokenizer: Tokenizer
) -> None:
    """Incident: a prefix cache outlived weight updates, so shared prefixes kept old keys and values."""
    for version, digest in ((7, "d7"), (8, "d8"), (9, "d7")):
        await engine.update(replace(UPDATE, version=version, digest=digest))
        await asyncio.gather(engine.generate(ask(tokenizer)), engine.generate(ask(tokenizer)))
    assert [llm.salts.count(salt) for salt in dict.fromkeys(llm.salts)] == [2, 2, 2]
    assert llm.said.count("drop") == 3


async def test_overlapping_updates_follow_each_other(engine: VllmEngine, llm: ScriptedLlm) -> None:
    updates = [replace(UPDATE, version=v, digest=f"d{v}", path=f"/{v}") for v in (7, 8)]
    await asyncio.gather(*map(engine.update, updates))
    assert llm.said == ["wait", "load /7", "drop", "wait", "load /8", "drop"]
    assert llm.version == 8


@pytest.mark.parametrize(
    "update", [replace(UPDATE, transport=WeightTransport.SHARED), replace(UPDATE, path=None)]
)
def test_an_update_that_names_nothing_is_refused(update: WeightUpdate, engine: VllmEngine) -> None:
    named = "by shared and names /w|by file and names None"
    with pytest.raises(WeightMismatch, match=f"weight update 7 is ({named})"):
        asyncio.run(engine.update(update))


async def test_what_cannot_be_generated_or_scored_is_refused(
    engine: VllmEngine, llm: ScriptedLlm, tokenizer: Tokenizer
) -> None:
    too_long, prompt_ids = ask(tokenizer, max_tokens=510), tokenizer.encode("1")
    for bad in (too_long, replace(ask(tokenizer), prompt_ids=np.array([262], np.int32))):
        with pytest.raises(EngineError, match=r"510|262"):
            await engine.generate(bad)
    with pytest.raises(EngineError, match="512"):
        await engine.score(prompt_ids, np.repeat(prompt_ids, 512), 1.0)


def test_log_4_a_value_that_is_not_finite_is_no_sample(
    engine: VllmEngine, llm: ScriptedLlm, tokenizer: Tokenizer
) -> None:
    llm.value = math.nan
    with pytest.raises(EngineError, match="log-probability that is not finite"):
        asyncio.run(engine.generate(ask(tokenizer, max_tokens=1)))


@pytest.mark.parametrize(("failure", "kind"), [(DeadError(), EngineLost), (FailedError(), EngineError)])
async def test_an_error_of_vllm_is_the_request_s_or_the_engine_s_end(
    failure: Exception, kind: type[EngineError], engine: VllmEngine, llm: ScriptedLlm, tokenizer: Tokenizer
) -> None:
    llm.failure = failure
    prompt = tokenizer.encode("1")
    for asked in (engine.generate(ask(tokenizer)), engine.score(prompt, prompt, 1.0)):
        with pytest.raises(EngineError) as caught:
            await asked
        assert type(caught.value) is kind


def test_what_vllm_ends_by_itself_is_no_sample(
    engine: VllmEngine, llm: ScriptedLlm, tokenizer: Tokenizer
) -> None:
    llm.is_aborting = True
    completion = asyncio.run(engine.generate(ask(tokenizer)))
    assert completion.finish_reason is FinishReason.ABORT
    assert len(completion.token_ids) == 0


# ---------------------------------------------------------------- settings and interpreter


def test_without_vllm_the_next_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm")
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
    settings = vllm_arguments(wanted, Path("m"), 2048, is_gpu=is_gpu)
    assert (settings["max_num_seqs"], settings["max_num_batched_tokens"]) == (rows, batched)
    # Sampling is what a request asks for, and what is reported is what was sampled from.
    assert (settings["generation_config"], settings["logprobs_mode"]) == ("vllm", "processed_logprobs")
    # Cutting prompts kills it on a CPU.
    assert settings.get("enable_chunked_prefill", True) == is_gpu
    assert settings["enforce_eager"] != is_gpu
    few = replace(wanted, max_num_seqs=7, is_eager=True)
    assert vllm_arguments(few, Path("m"), 2048, is_gpu=is_gpu)["max_num_seqs"] == 7
    assert vllm_arguments(few, Path("m"), 2048, is_gpu=is_gpu)["enforce_eager"]
