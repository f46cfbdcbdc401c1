"""The pool: load, groups, lost replicas, weight updates to many."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from strop.engine import Engine, WeightReceipt, WeightTransport, WeightUpdate, pool
from strop.engine.pool import EnginePool, ReplicaCause
from strop.errors import EngineError, EngineLost, WeightMismatch
from strop.tokenizer import Tokenizer
from tests.engine.contract_suite import EngineContract
from tests.engine.held import Desk, ask, start, turn
from tests.fixtures.dummy_engine import DummyEngine

UPDATE = WeightUpdate(version=1, digest="d1", transport=WeightTransport.SHARED)


class TestPoolOfTwo(EngineContract):
    @pytest.fixture
    def engine(self, tokenizer: Tokenizer) -> Engine:
        replicas = {name: DummyEngine(tokenizer, lambda request: f"seed {request.seed}") for name in "ab"}
        return EnginePool(replicas)


async def test_requests_go_to_the_least_loaded_by_tokens() -> None:
    desk = Desk(2)
    # 0 costs 1 + 90 tokens; the next three cost 1 + 20 each, 63 in all: they fit beside it.
    start(desk.pool, ask(0, max_tokens=90), *(ask(seed, max_tokens=20) for seed in (1, 2, 3)))
    await turn()
    assert desk.seeds == [[0], [1, 2, 3]]


async def test_a_group_stays_together_until_it_would_unbalance() -> None:
    desk = Desk(3)
    start(desk.pool, *(ask(seed, [7, 7]) for seed in range(18)), ask(18, [8]), ask(19, [8]))
    await turn()
    # The lead is 16 requests when number 16 is given; with 17 there, 17 goes elsewhere.
    # The home of [7, 7] is then e1, with one request. [8] goes to e2, which has none.
    assert desk.seeds == [list(range(17)), [17], [18, 19]]


async def test_a_lost_replica_is_named_and_its_requests_are_answered_by_another() -> None:
    desk = Desk(2)
    dying, other = desk.engines
    tasks = start(desk.pool, ask(0), ask(1), ask(2), ask(3))
    await turn()
    assert desk.seeds == [[0, 2], [1, 3]]
    dying.waiting[0].set_exception(EngineLost("process 17 ended with signal 9"))
    other.answers_at_once = True
    other.answer(2)
    replies = await asyncio.gather(*tasks)
    replies += await asyncio.gather(*start(desk.pool, ask(4)))
    texts = [reply.text for reply in replies]
    # 2 was under way there too, and goes on elsewhere with its own seed.
    assert texts == ["0", "1", "2", "3", "4"]
    assert desk.seeds == [[0, 2], [1, 3, 0, 2, 4]]
    (event,) = desk.events
    assert (event.replica, event.cause) == ("e0", ReplicaCause.LOST)
    assert event.detail == "process 17 ended with signal 9"
    assert [desk.pool.serves(name) for name in ("e0", "e1")] == [False, True]


async def test_without_any_replica_left_all_causes_are_told() -> None:
    desk = Desk(2)
    tasks = start(desk.pool, *(ask(seed) for seed in range(3)))
    await turn()
    desk.engines[0].waiting[0].set_exception(EngineLost("cable"))
    await turn()
    desk.engines[1].waiting[0].set_exception(EngineLost("disk"))
    await turn()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    with pytest.raises(EngineError, match="none of 2 engines is left"):
        await desk.pool.generate(ask(9))
    assert [type(error) for error in done] == [EngineError] * 3
    # All three were in the queue or under way when the last replica went.
    for error in done:
        assert "cable" in str(error)
        assert "disk" in str(error)
    assert desk.causes == [("e0", ReplicaCause.LOST), ("e1", ReplicaCause.LOST)]


async def test_a_request_is_sent_to_another_replica_once() -> None:
    desk = Desk(3)
    for engine in desk.engines:
        engine.failure = EngineLost("gone")
    with pytest.raises(EngineError, match=r"e0: gone; e1: gone\."):
        await desk.pool.generate(ask(0))
    assert desk.seeds == [[0], [0], []]
    assert [desk.pool.serves(f"e{index}") for index in range(3)] == [False, False, True]


async def test_a_request_that_no_engine_can_answer_costs_no_replica() -> None:
    desk = Desk(2)
    for engine in desk.engines:
        engine.failure = EngineError("prompt too long")
    for _ in range(5):
        with pytest.raises(EngineError, match=r"e\d: prompt too long; e\d: prompt too long"):
            await desk.pool.generate(ask(0))
    assert desk.events == []


async def test_the_only_replica_s_own_words_are_kept() -> None:
    desk = Desk(1)
    desk.engines[0].failure = EngineError("prompt too long")
    with pytest.raises(EngineError, match=r"^prompt too long$"):
        await desk.pool.generate(ask(0))


async def test_unproven_weights_are_no_matter_of_another_replica() -> None:
    """An engine that says so must be heard: another one's answer would hide it."""
    desk = Desk(2)
    desk.engines[0].failure = WeightMismatch("the last update was not proven")
    desk.engines[1].answers_at_once = True
    with pytest.raises(WeightMismatch, match="the last update was not proven"):
        await desk.pool.generate(ask(0))
    assert desk.seeds == [[0], []]


async def test_an_update_closes_every_replica_until_it_has_acknowledged() -> None:
    desk = Desk(2)
    slow, quick = desk.engines
    for engine in desk.engines:
        engine.update_gate.clear()
    updating = asyncio.create_task(desk.pool.update(UPDATE))
    await turn()
    assert [engine.updates for engine in desk.engines] == [[UPDATE], [UPDATE]]
    (task,) = start(desk.pool, ask(0))
    await turn()
    assert desk.seeds == [[], []]
    quick.answers_at_once = True
    quick.update_gate.set()
    # The first that serves the new version takes the request; the other one is still between versions.
    assert (await task).policy_version == 1
    assert desk.seeds == [[], [0]]
    assert not updating.done()
    slow.update_gate.set()
    assert await updating == WeightReceipt(version=1, digest="d1")
    start(desk.pool, ask(1), ask(2))
    await turn()
    assert desk.seeds == [[1], [0, 2]]
    assert not desk.events


@pytest.mark.parametrize(
    ("update_failure", "receipt", "detail"),
    [
        (WeightMismatch("digest is d7"), None, "digest is d7"),
        (None, WeightReceipt(version=1, digest="d7"), "version 1 with digest d7 instead of version 1 with"),
        (None, WeightReceipt(version=0, digest="d1"), "version 0 with digest d1 instead of version 1 with"),
    ],
)
async def test_a_replica_that_does_not_acknowledge_never_serves_until_it_does(
    update_failure: Exception | None, receipt: WeightReceipt | None, detail: str
) -> None:
    desk = Desk(2)
    broken, sound = desk.engines
    broken.update_failure, broken.receipt, sound.answers_at_once = update_failure, receipt, True
    await desk.pool.update(UPDATE)
    for seed in range(3):
        assert (await desk.pool.generate(ask(seed))).policy_version == 1
    assert desk.seeds == [[], [0, 1, 2]]
    broken.update_failure, broken.receipt = None, None
    await desk.pool.update(replace(UPDATE, version=2))
    await turn()
    start(desk.pool, ask(3), ask(4, max_tokens=50))
    await turn()
    assert desk.seeds == [[3], [0, 1, 2, 4]]
    assert desk.causes == [("e0", ReplicaCause.UNPROVEN), ("e0", ReplicaCause.BACK)]
    assert detail in desk.events[0].detail


async def test_an_update_that_nobody_acknowledges_is_a_weight_mismatch() -> None:
    desk = Desk(2)
    desk.engines[0].update_failure = WeightMismatch("digest is d7")
    desk.engines[1].update_failure = EngineLost("gone")
    causes = r"e0: replica_unproven: digest is d7; e1: replica_lost: gone\."
    with pytest.raises(WeightMismatch, match=rf"version 1 with digest d1: {causes}"):
        await desk.pool.update(UPDATE)
    with pytest.raises(EngineError, match="none of 2 engines is left"):
        await desk.pool.generate(ask(0))


async def test_prc_1_an_update_that_hangs_at_one_replica_ends_and_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Incident: weight transfer waiting for ever with busy GPUs."""
    monkeypatch.setattr(pool, "UPDATE_LIMIT_S", 0.05)
    desk = Desk(2)
    desk.engines[0].update_gate.clear()
    await asyncio.wait_for(desk.pool.update(UPDATE), 60.0)
    assert desk.causes == [("e0", ReplicaCause.UNPROVEN)]
    assert "version 1 was not acknowledged within 0.05 s" in desk.events[0].detail


async def test_a_replica_that_is_out_does_not_hold_up_later_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "RETURN_LIMIT_S", 0.05)
    desk = Desk(2)
    gone, sound = desk.engines
    gone.update_failure = EngineLost("gone")
    await desk.pool.update(UPDATE)
    gone.update_failure = None
    gone.update_gate.clear()
    await asyncio.wait_for(desk.pool.update(replace(UPDATE, version=2)), 60.0)
    assert not desk.pool.serves("e0")
    gone.update_gate.set()
    await desk.pool.update(replace(UPDATE, version=3))
    # It acknowledges the newest only: the wait for version 2 was given up.
    assert (gone.version, sound.version) == (3, 3)
    assert desk.causes == [("e0", ReplicaCause.LOST), ("e0", ReplicaCause.BACK)]


async def test_smp_6_updates_do_not_overlap() -> None:
    """Incident: overlapping updates are reported."""
    desk = Desk(1)
    desk.engines[0].update_gate.clear()
    both = [asyncio.create_task(desk.pool.update(replace(UPDATE, version=v))) for v in (1, 2)]
    await turn()
    assert [update.version for update in desk.engines[0].updates] == [1]
    desk.engines[0].update_gate.set()
    await asyncio.gather(*both)
    assert ([update.version for update in desk.engines[0].updates]) == [1, 2]


async def test_scores_are_routed_and_moved_like_replies() -> None:
    desk = Desk(2)
    desk.engines[0].failure = EngineLost("gone")
    ids = np.array([1, 2], np.int32)
    scored = await desk.pool.score(ids, ids, 1.0)
    assert scored.logprobs.tolist() == [0.0, 0.0]
    assert desk.causes == [("e0", ReplicaCause.LOST)]


async def test_close_ends_who_runs_and_who_waits_and_closes_every_engine() -> None:
    desk = Desk(2)
    tasks = start(desk.pool, *(ask(seed) for seed in range(4)))
    await turn()
    await desk.pool.close()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in done] == [EngineError] * 4
    assert {"closed" in str(error) for error in done} == {True}
    assert [engine.is_closed for engine in desk.engines] == [True, True]
    assert desk.events == []
