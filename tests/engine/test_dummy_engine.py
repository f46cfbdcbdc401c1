"""The dummy engine keeps the contract, and its script ends loudly."""

from __future__ import annotations

import asyncio

import pytest

from strop.engine import Engine, GenerationRequest, WeightTransport, WeightUpdate
from strop.errors import EngineError
from strop.rollout import FinishReason
from strop.tokenizer import Tokenizer
from tests.engine.contract_suite import EngineContract, assert_well_formed, run
from tests.fixtures.builders import request_for
from tests.fixtures.dummy_engine import DummyEngine, ScriptedReply


class TestDummyEngine(EngineContract):
    @pytest.fixture
    def engine(self, tokenizer: Tokenizer) -> Engine:
        # A function of the request, because equal requests must get equal replies.
        return DummyEngine(tokenizer, lambda request: f"seed {request.seed}")


class TestEngineThatFindsOtherWeights(TestDummyEngine):
    @pytest.fixture
    def engine(self, tokenizer: Tokenizer) -> Engine:
        return DummyEngine(tokenizer, lambda request: f"seed {request.seed}", found_digest="d7")

    @pytest.fixture
    def broken_update(self) -> WeightUpdate:
        return WeightUpdate(
            version=8, digest="promised", transport=WeightTransport.FILE, path="w.safetensors"
        )


def ask(
    tokenizer: Tokenizer, *, max_tokens: int = 4, stop_strings: tuple[str, ...] = ()
) -> GenerationRequest:
    return request_for(
        tokenizer.encode("Say it"),
        max_tokens=max_tokens,
        seed=1,
        stops=tokenizer.stop_token_ids,
        stop_strings=stop_strings,
    )


@pytest.mark.parametrize(
    ("reply", "num_tokens", "text", "reason"),
    [
        # Letters are single tokens here; the terminator is the third of "ab".
        (ScriptedReply(text="ab"), 3, "ab", FinishReason.EOS),
        (ScriptedReply(text="abcd"), 4, "abcd", FinishReason.LENGTH),
        (ScriptedReply(text="abcdefg"), 4, "abcd", FinishReason.LENGTH),
        (ScriptedReply(text="ab", ends=False), 4, "abbb", FinishReason.LENGTH),
        (ScriptedReply(text="", ends=False), 4, "....", FinishReason.LENGTH),
        (ScriptedReply(text=""), 1, "", FinishReason.EOS),
        (ScriptedReply(text="a", is_aborted=True), 1, "a", FinishReason.ABORT),
    ],
)
def test_replies_end_like_real_ones(
    tokenizer: Tokenizer, reply: ScriptedReply, num_tokens: int, text: str, reason: FinishReason
) -> None:
    completion = run(DummyEngine(tokenizer, [reply]).generate(ask(tokenizer)))
    assert len(completion.token_ids) == num_tokens
    assert (completion.text, completion.finish_reason) == (text, reason)


def test_stop_string_keeps_the_token_that_completed_it(tokenizer: Tokenizer) -> None:
    request = ask(tokenizer, max_tokens=9, stop_strings=("Q:",))
    completion = run(DummyEngine(tokenizer, ["18 Q: 2"]).generate(request))
    assert completion.finish_reason is FinishReason.STOP_STRING
    assert completion.text == "18 "
    assert tokenizer.decode(completion.token_ids) == "18 Q:"
    assert_well_formed(completion, request)


def test_exhausted_script_quotes_the_unanswered_prompt(tokenizer: Tokenizer) -> None:
    engine = DummyEngine(tokenizer, [])
    with pytest.raises(
        EngineError, match=r"script of 0 replies has run out at the prompt 'Say it'\. Allowed"
    ):
        run(engine.generate(ask(tokenizer)))


def test_update_waits_for_replies_under_way(tokenizer: Tokenizer) -> None:
    engine = DummyEngine(tokenizer, ["ab", "cd"])
    update = WeightUpdate(version=1, digest="d1", transport=WeightTransport.SHARED)
    order: list[str] = []

    async def speak() -> None:
        completion = await engine.generate(ask(tokenizer))
        order.append(f"reply at {completion.policy_version}")

    async def publish() -> None:
        await asyncio.sleep(0)
        order.append("published")
        receipt = await engine.update(update)
        order.append(f"served {receipt.version}")

    async def act() -> None:
        await asyncio.gather(publish(), speak())
        await speak()

    run(act())
    assert order == ["published", "reply at 0", "served 1", "reply at 1"]
    assert [receipt.digest for receipt in engine.receipts] == ["d1"]
