"""Simulated engines keep the contract and take the time that their figures say, on simulated clocks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from strop.engine import Completion, Engine, UpdateMode, WeightTransport, WeightUpdate
from strop.engine.router import ReplicaCause, ReplicaEvent, Router, RouterLimits
from strop.errors import EngineError, EngineLost, RunStopped
from strop.rollout import FinishReason, VersionSegment
from strop.testing.simulated_engine import SimulatedEngine, SimulatedSpeed, SimulatedTrouble
from strop.testing.virtual_time import run_virtually
from strop.tokenizer import Tokenizer
from tests.engine.contract_suite import EngineContract
from tests.engine.held import ask

Result = TypeVar("Result")
# Replies of exactly 100 tokens; a step of 10 ms and 1 ms for each row; 1,000 prompt tokens/s.
SPEED = SimulatedSpeed(
    median_reply_tokens=100,
    reply_sigma=0.0,
    prefill_tokens_per_s=1000.0,
    step_base_s=0.010,
    step_row_s=0.001,
    max_num_seqs=4,
    update_s=0.5,
)
UPDATE = WeightUpdate(version=1, digest="d1", transport=WeightTransport.SHARED)


class TestSimulatedEngine(EngineContract):
    @pytest.fixture
    def engine(self, tokenizer: Tokenizer) -> Engine:
        quick = SimulatedSpeed(step_base_s=1e-5, step_row_s=0.0, prefill_tokens_per_s=1e9, update_s=1e-3)
        return SimulatedEngine(speed=quick)

    def test_text_is_the_decoded_reply_without_its_terminator(self) -> None:  # type: ignore[override]
        pytest.skip("what simulated tokens mean is left out")


def timed(work: Coroutine[Any, Any, Result]) -> tuple[Result, float]:
    """Return a result and the simulated seconds that it took."""

    async def act() -> tuple[Result, float]:
        result = await work
        return result, asyncio.get_running_loop().time()

    return run_virtually(act())


def test_a_reply_takes_its_prefill_and_its_steps() -> None:
    request = ask(1, [5] * 20, max_tokens=500)
    completion, seconds = timed(SimulatedEngine(speed=SPEED).generate(request))
    # 20 prompt tokens at 1,000/s; 100 steps of 11 ms.
    assert seconds == pytest.approx(0.020 + 1.1)
    assert len(completion.token_ids) == 100
    assert completion.finish_reason is FinishReason.EOS


def test_rows_slow_each_other_down_and_share_the_prefill_of_their_prompt() -> None:
    async def act(engine: SimulatedEngine) -> None:
        await asyncio.gather(*(engine.generate(ask(seed, [5] * 20, max_tokens=500)) for seed in range(4)))

    # One prefill of 20 ms; 100 steps of 14 ms.
    assert timed(act(SimulatedEngine(speed=SPEED)))[1] == pytest.approx(0.020 + 1.4)


def test_rows_without_a_place_or_a_cache_wait() -> None:
    async def act(engine: SimulatedEngine) -> None:
        await asyncio.gather(*(engine.generate(ask(seed, [5], max_tokens=500)) for seed in range(8)))

    # Two rounds of four; the second round's prompt is not held by anyone any more.
    assert timed(act(SimulatedEngine(speed=SPEED)))[1] == pytest.approx(2 * (0.001 + 1.4))
    # 101 tokens each: two fit into 250 tokens, so four rounds of 100 steps of 12 ms.
    narrow = replace(SPEED, max_cache_tokens=250)
    assert timed(act(SimulatedEngine(speed=narrow)))[1] == pytest.approx(4 * (0.001 + 1.2))


def test_lengths_follow_from_the_seed_and_are_log_normal() -> None:
    speed = replace(SPEED, reply_sigma=0.6, max_num_seqs=4000, step_row_s=0.0)

    async def act(seed: int) -> list[int]:
        engine = SimulatedEngine(speed=speed, seed=seed)
        requests = [ask(number, [5], max_tokens=10_000) for number in range(4000)]
        return [len(reply.token_ids) for reply in await asyncio.gather(*map(engine.generate, requests))]

    lengths = run_virtually(act(0))
    assert run_virtually(act(1)) == lengths
    logs = np.log(lengths)
    # Standard error of the mean 0.6 / sqrt(4000) = 0.0095, of the deviation 0.0067.
    assert np.exp(logs.mean()) == pytest.approx(100, rel=0.04)
    assert logs.std() == pytest.approx(0.6, abs=0.03)


def test_a_request_that_is_cancelled_gives_its_row_back() -> None:
    async def act() -> None:
        engine = SimulatedEngine(speed=replace(SPEED, max_num_seqs=1))
        first = asyncio.create_task(engine.generate(ask(0, max_tokens=500)))
        second = asyncio.create_task(engine.generate(ask(1, max_tokens=500)))
        await asyncio.sleep(0.5)
        first.cancel()
        await second

    # Half a second, then a prefill of one token and 100 steps of 11 ms.
    assert timed(act())[1] == pytest.approx(0.5 + 0.001 + 1.1)


@pytest.mark.parametrize(
    ("mode", "seconds", "versions"),
    [
        # The reply ends after 1.101 s under version 0; then the update takes 0.5 s.
        (UpdateMode.DRAIN, 1.101 + 0.5, [(0, 0)]),
        # 0.5 s of decoding are lost, 0.5 s pass, and the reply takes 100 steps once more.
        (UpdateMode.RESTART, 0.5 + 0.5 + 1.1, [(0, 1)]),
        # It stands still for 0.5 s; 0.499 s of 11 ms steps are 45 whole tokens of version 0.
        (UpdateMode.CONTINUE, 1.101 + 0.5, [(0, 0), (45, 1)]),
    ],
)
def test_an_update_does_to_replies_under_way_what_its_mode_says(
    mode: UpdateMode, seconds: float, versions: list[tuple[int, int]]
) -> None:
    async def act() -> Completion:
        engine = SimulatedEngine(speed=SPEED)
        under_way = asyncio.create_task(engine.generate(ask(0, max_tokens=500)))
        await asyncio.sleep(0.5)
        receipt = await engine.update(replace(UPDATE, mode=mode))
        assert (receipt.version, receipt.digest) == (1, "d1")
        return await under_way

    completion, took_s = timed(act())
    assert took_s == pytest.approx(seconds)
    segments = completion.segments or (VersionSegment(start=0, version=completion.policy_version),)
    assert [(segment.start, segment.version) for segment in segments] == versions


def test_a_dead_engine_tells_whoever_waits_and_comes_back() -> None:
    trouble = SimulatedTrouble(mean_life_s=0.5, repair_s=10.0)

    async def act() -> float:
        engine = SimulatedEngine(speed=replace(SPEED, median_reply_tokens=100_000), trouble=trouble)
        with pytest.raises(EngineLost, match="a simulated engine has died"):
            await engine.generate(ask(0, max_tokens=10**6))
        died_at = asyncio.get_running_loop().time()
        with pytest.raises(EngineLost, match="has died"):
            await engine.update(UPDATE)
        await asyncio.sleep(10.0)
        await engine.update(UPDATE)
        assert engine.version == 1
        return died_at

    died_at, _ = timed(act())
    assert 0.0 < died_at < 10.0


def test_a_silent_engine_answers_nobody() -> None:
    trouble = SimulatedTrouble(mean_life_s=0.1, silent_frac=1.0)

    async def act() -> None:
        engine = SimulatedEngine(speed=SPEED, trouble=trouble)
        under_way = asyncio.create_task(engine.generate(ask(0, max_tokens=500)))
        updating = asyncio.create_task(engine.update(UPDATE))
        await asyncio.sleep(1000.0)
        assert not under_way.done()
        assert not updating.done()
        with pytest.raises(RunStopped, match="a simulation stands still at 1000 s: everything waits"):
            await under_way

    with pytest.raises(RunStopped, match="stands still"):
        run_virtually(act())


def test_a_fleet_with_stragglers_and_deaths_answers_everything() -> None:
    speed = replace(SPEED, reply_sigma=0.6, max_num_seqs=64)
    # Some 400 s of work: each engine dies about twice, and one death in three is silent.
    trouble = SimulatedTrouble(
        straggler_frac=0.2, mean_life_s=200.0, repair_s=90.0, silent_frac=0.33, straggler_factor=4.0
    )
    events: list[ReplicaEvent] = []

    async def act() -> tuple[int, int]:
        engines = {f"e{seed}": SimulatedEngine(speed=speed, trouble=trouble, seed=seed) for seed in range(20)}
        limits = RouterLimits(max_running=64, reply_limit_s=60.0, update_limit_s=60.0)
        router = Router(engines, limits=limits, on_event=events.append)
        num_lost = num_answered = 0
        for version in range(1, 10):
            requests = [ask(500 * version + seed, [5] * 10, max_tokens=500) for seed in range(500)]
            replies = await asyncio.gather(*map(router.generate, requests), return_exceptions=True)
            num_lost += sum(isinstance(reply, EngineError) for reply in replies)
            num_answered += sum(isinstance(reply, Completion) for reply in replies)
            await asyncio.sleep(20.0)
            await router.update(replace(UPDATE, version=version))
        await router.close()
        return num_answered, num_lost

    (num_answered, num_lost), seconds = timed(act())
    assert num_answered + num_lost == 4_500
    # Lost are those whose second engine died too.
    assert num_lost < 100
    causes = Counter(event.cause for event in events)
    assert causes[ReplicaCause.LOST] > 5
    assert causes[ReplicaCause.HUNG] > 0
    assert causes[ReplicaCause.BACK] > 5
    assert seconds > 200


def test_simulated_time_stands_still_while_a_thread_works() -> None:
    async def act() -> tuple[float, str]:
        ticks = asyncio.create_task(asyncio.sleep(3600.0, "an hour later"))
        await asyncio.to_thread(time.sleep, 0.05)
        return asyncio.get_running_loop().time(), await ticks

    worked_at, words = run_virtually(act())
    assert worked_at == 0.0
    assert words == "an hour later"
