"""What every engine must do. Subclass `EngineContract` once for each engine and give its fixtures.

Each test runs in one event loop, because an engine may belong to the loop it was first used in.
Run against real engines too, so nothing here may depend on what a reply says; the suite asks only
for small models: at most 8 prompt tokens and 12 sampled ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from strop.engine import Completion, Engine, GenerationRequest, ReplyScore, WeightTransport, WeightUpdate
from strop.errors import EngineError, WeightMismatch
from strop.rollout import FinishReason
from strop.tokenizer import Tokenizer
from tests.fixtures.builders import request_for

Result = TypeVar("Result")


def run(waiting: Coroutine[Any, Any, Result]) -> Result:
    """Run in a loop of its own, at whose end what is under way has ended too, as an answer's last bytes."""

    async def act() -> Result:
        try:
            return await waiting
        finally:
            if others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others, timeout=30.0)

    return asyncio.run(act())


def answer(engine: Engine, *requests: GenerationRequest) -> list[Completion]:
    """Return the replies to requests that are made one after the other."""

    async def act() -> list[Completion]:
        return [await engine.generate(request) for request in requests]

    return run(act())


def assert_well_formed(completion: Completion, request: GenerationRequest) -> None:
    """Check what holds for every reply that is a sample."""
    num_tokens = len(completion.token_ids)
    assert completion.token_ids.dtype == np.int32
    assert 1 <= num_tokens <= request.max_tokens
    assert completion.logprobs.dtype == np.float32
    assert len(completion.logprobs) == num_tokens
    assert bool(np.isfinite(completion.logprobs).all())
    assert bool((completion.logprobs <= 0).all())
    is_stop = np.isin(completion.token_ids, sorted(request.stop_token_ids))
    assert not is_stop[:-1].any()
    assert bool(is_stop[-1]) == (completion.finish_reason is FinishReason.EOS)
    if completion.finish_reason is FinishReason.LENGTH:
        assert num_tokens == request.max_tokens
    assert not [stop for stop in request.stop_strings if stop in completion.text]


class EngineContract:
    """The suite. `engine` is fresh for each test."""

    @pytest.fixture
    def engine(self, tokenizer: Tokenizer) -> Engine:
        raise NotImplementedError

    @pytest.fixture
    def shared_update(self) -> WeightUpdate:
        """Build an update that the engine can take over without a file."""
        return WeightUpdate(version=7, digest="d7", transport=WeightTransport.SHARED)

    @pytest.fixture
    def broken_update(self) -> WeightUpdate:
        """Build an update whose bytes do not have the promised digest."""
        pytest.skip("this engine is given no update that it could find broken")

    @pytest.fixture
    def request_(self, tokenizer: Tokenizer) -> GenerationRequest:
        return request_for(
            tokenizer.encode("1 + 2 ="), max_tokens=12, seed=11, stops=tokenizer.stop_token_ids
        )

    def test_reply_is_well_formed(self, engine: Engine, request_: GenerationRequest) -> None:
        assert_well_formed(answer(engine, request_)[0], request_)

    def test_budget_of_one_token(self, engine: Engine, request_: GenerationRequest) -> None:
        short = replace(request_, max_tokens=1)
        (completion,) = answer(engine, short)
        assert len(completion.token_ids) == 1
        assert_well_formed(completion, short)

    def test_without_stops_the_budget_is_used_up(self, engine: Engine, request_: GenerationRequest) -> None:
        endless = replace(request_, stop_token_ids=frozenset())
        (completion,) = answer(engine, endless)
        assert len(completion.token_ids) == 12
        assert completion.finish_reason is FinishReason.LENGTH

    def test_text_is_the_decoded_reply_without_its_terminator(
        self, engine: Engine, request_: GenerationRequest, tokenizer: Tokenizer
    ) -> None:
        (completion,) = answer(engine, request_)
        is_ended = completion.finish_reason is FinishReason.EOS
        assert completion.text == tokenizer.decode(completion.token_ids[: -1 if is_ended else None])

    def test_stop_string_ends_the_reply_before_it(self, engine: Engine, request_: GenerationRequest) -> None:
        async def act() -> tuple[str, GenerationRequest, Completion]:
            text = (await engine.generate(request_)).text
            if not text:
                pytest.skip("this engine ends its reply at once, so no string can stop it earlier")
            stopped = replace(request_, stop_strings=(text[-1],))
            return text, stopped, await engine.generate(stopped)

        text, stopped, completion = run(act())
        assert completion.finish_reason is FinishReason.STOP_STRING
        assert completion.text == text[: text.index(text[-1])]
        assert_well_formed(completion, stopped)

    def test_equal_requests_get_equal_replies(self, engine: Engine, request_: GenerationRequest) -> None:
        first, second = answer(engine, request_, request_)
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert first.logprobs.tolist() == second.logprobs.tolist()

    def test_company_does_not_change_a_reply(self, engine: Engine, request_: GenerationRequest) -> None:
        requests = [replace(request_, seed=seed) for seed in (11, 12, 13)]

        async def together() -> list[Completion]:
            return await asyncio.gather(*(engine.generate(request) for request in requests))

        async def alone() -> list[Completion]:
            return [await engine.generate(request) for request in requests]

        async def both() -> tuple[list[Completion], list[Completion]]:
            return await together(), await alone()

        for left, right in zip(*run(both()), strict=True):
            assert left.token_ids.tolist() == right.token_ids.tolist()

    def test_score_agrees_with_generate(self, engine: Engine, request_: GenerationRequest) -> None:
        async def both() -> tuple[Completion, Any]:
            completion = await engine.generate(request_)
            return completion, await engine.score(request_.prompt_ids, completion.token_ids, 1.0)

        completion, scored = run(both())
        assert scored.logprobs.dtype == np.float32
        # The engine and its own scoring may differ by the order of sums, not by more.
        assert scored.logprobs == pytest.approx(completion.logprobs, abs=0.05)
        assert scored.policy_version == completion.policy_version

    def test_replies_scored_together_are_scored_as_alone(
        self, engine: Engine, request_: GenerationRequest
    ) -> None:
        prompt_ids = request_.prompt_ids
        replies = [prompt_ids[:1], prompt_ids[::-1], prompt_ids[:3]]

        async def both() -> tuple[list[ReplyScore], list[ReplyScore]]:
            wanted = [(prompt_ids, reply_ids) for reply_ids in replies] + [(replies[1], replies[2])]
            together = await asyncio.gather(*(engine.score(*pair, 1.0) for pair in wanted))
            return together, [await engine.score(*pair, 1.0) for pair in wanted]

        for left, right in zip(*run(both()), strict=True):
            assert left.logprobs == pytest.approx(right.logprobs, abs=0.05)

    def test_replies_carry_the_version_that_served_them(
        self, engine: Engine, request_: GenerationRequest, shared_update: WeightUpdate
    ) -> None:
        async def act() -> tuple[Completion, Any, Completion]:
            before = await engine.generate(request_)
            receipt = await engine.update(shared_update)
            return before, receipt, await engine.generate(request_)

        before, receipt, after = run(act())
        assert before.policy_version != shared_update.version
        assert (receipt.version, receipt.digest) == (shared_update.version, shared_update.digest)
        assert after.policy_version == shared_update.version

    def test_broken_update_keeps_the_old_weights(
        self, engine: Engine, request_: GenerationRequest, broken_update: WeightUpdate
    ) -> None:
        async def act() -> tuple[Completion, Completion]:
            before = await engine.generate(request_)
            with pytest.raises(WeightMismatch, match=broken_update.digest):
                await engine.update(broken_update)
            return before, await engine.generate(request_)

        before, after = run(act())
        assert after.policy_version == before.policy_version
        assert after.token_ids.tolist() == before.token_ids.tolist()

    def test_closed_engine_refuses(self, engine: Engine, request_: GenerationRequest) -> None:
        async def act() -> None:
            await engine.close()
            await engine.close()
            await engine.generate(request_)

        with pytest.raises(EngineError, match="closed"):
            run(act())
