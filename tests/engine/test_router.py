"""The router: places and their order, groups, lost replicas, weight updates to many."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from strop.engine import Engine, WeightReceipt, WeightTransport, WeightUpdate
from strop.engine.router import ReplicaCause, Router
from strop.errors import ConfigError, EngineError, EngineLost, WeightMismatch
from strop.tokenizer import Tokenizer
from tests.engine.contract_suite import EngineContract
from tests.engine.held import Desk, HeldEngine, ask, start, turn
from tests.fixtures.dummy_engine import DummyEngine

UPDATE = WeightUpdate(version=1, digest="d1", transport=WeightTransport.SHARED)


class TestRouterOfTwo(EngineContract):
    @pytest.fixture
    def engine(self, tokenizer: Tokenizer) -> Engine:
        replicas = {name: DummyEngine(tokenizer, lambda request: f"seed {request.seed}") for name in "ab"}
        return Router(replicas)


def test_a_router_over_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"over 0 engines\. Allowed: one engine or more"):
        Router({})


async def test_requests_go_to_the_least_loaded_by_tokens() -> None:
    desk = Desk(2)
    # 0 costs 1 + 90 tokens; the next three cost 1 + 20 each, 63 in all: they fit beside it.
    start(desk.router, ask(0, max_tokens=90), *(ask(seed, max_tokens=20) for seed in (1, 2, 3)))
    await turn()
    assert desk.seeds == [[0], [1, 2, 3]]


async def test_a_group_stays_together_until_it_would_unbalance() -> None:
    desk = Desk(3, max_group_lead=2)
    start(desk.router, *(ask(seed, [7, 7]) for seed in range(4)), ask(4, [8]), ask(5, [8]))
    await turn()
    # The lead is 0, 1 and 2 requests when 0, 1 and 2 are given; with 3 there, 3 goes elsewhere.
    # The home of [7, 7] is then e1, with one request. [8] goes to e2, which has none.
    assert desk.seeds == [[0, 1, 2], [3], [4, 5]]


async def test_places_are_bounded_and_given_in_order_of_arrival_one_at_a_time() -> None:
    desk = Desk(1, max_running=2, max_group_lead=0)
    engine = desk.engines[0]
    tasks = start(desk.router, *(ask(seed) for seed in range(5)))
    await turn()
    seen = [engine.seeds]
    num_waiting = desk.router.load.num_waiting
    for _ in range(3):
        engine.answer()
        await turn()
        seen.append(engine.seeds)
    engine.answer(2)
    replies = await asyncio.gather(*tasks)
    assert [int(reply.text) for reply in replies] == [0, 1, 2, 3, 4]
    assert seen == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert num_waiting == 3


async def test_a_group_that_waited_together_goes_in_together() -> None:
    # One place wakes the group of three: 4 run where 2 places are. 5 waits until fewer than 2 run.
    whole = [0, 1, 2, 3, 4]
    desk = Desk(1, max_running=2, max_group_lead=3)
    engine = desk.engines[0]
    group = [ask(seed, [5, 5]) for seed in (2, 3, 4)]
    start(desk.router, ask(0), ask(1), *group, ask(5))
    await turn()
    seen = [engine.seeds]
    for _ in range(4):
        engine.answer()
        await turn()
        seen.append(engine.seeds)
    assert seen == [[0, 1], whole, whole, whole, [*whole, 5]]


async def test_who_goes_away_leaves_the_queue_and_gives_the_place_back() -> None:
    desk = Desk(1, max_running=1)
    engine = desk.engines[0]
    first, second, third, fourth = start(desk.router, *(ask(seed) for seed in range(4)))
    await turn()
    second.cancel()
    await turn()
    engine.answer()
    await asyncio.sleep(0)
    # Woken and cancelled in the same turn: its place must not be lost.
    third.cancel()
    await turn()
    engine.answer(9)
    await asyncio.gather(first, fourth)
    await asyncio.gather(second, third, return_exceptions=True)
    seeds, num_running = engine.seeds, desk.router.load.num_running
    assert seeds[0] == 0
    assert seeds[-1] == 3
    assert num_running == 0


async def test_a_lost_replica_is_named_and_its_requests_are_answered_by_another() -> None:
    desk = Desk(2)
    dying, other = desk.engines
    tasks = start(desk.router, ask(0), ask(1), ask(2), ask(3))
    await turn()
    assert desk.seeds == [[0, 2], [1, 3]]
    dying.waiting[0].set_exception(EngineLost("process 17 ended with signal 9"))
    other.answers_at_once = True
    other.answer(2)
    replies = await asyncio.gather(*tasks, *start(desk.router, ask(4)))
    texts = [reply.text for reply in replies]
    # 2 was under way there too, and goes on elsewhere with its own seed.
    assert texts == ["0", "1", "2", "3", "4"]
    assert desk.seeds == [[0, 2], [1, 3, 0, 4, 2]]
    (event,) = desk.events
    assert (event.replica, event.cause, event.num_moved) == ("e0", ReplicaCause.LOST, 1)
    assert event.detail == "process 17 ended with signal 9"
    assert desk.router.load.num_serving == 1


async def test_without_any_replica_left_all_causes_are_told() -> None:
    desk = Desk(2, max_running=1)
    tasks = start(desk.router, *(ask(seed) for seed in range(3)))
    await turn()
    desk.engines[0].waiting[0].set_exception(EngineLost("cable"))
    await turn()
    desk.engines[1].waiting[0].set_exception(EngineLost("disk"))
    await turn()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    with pytest.raises(EngineError, match="none of 2 engines is left"):
        await desk.router.generate(ask(9))
    assert [type(error) for error in done] == [EngineError] * 3
    # All three were in the queue or under way when the last replica went.
    for error in done:
        assert "e0: replica_lost: cable; e1: replica_lost: disk. " in str(error)
    assert desk.causes == [("e0", ReplicaCause.LOST), ("e1", ReplicaCause.LOST)]


async def test_a_request_is_sent_to_another_replica_once() -> None:
    desk = Desk(3)
    for engine in desk.engines:
        engine.failure = EngineLost("gone")
    with pytest.raises(EngineError, match=r"e0: gone; e1: gone\."):
        await desk.router.generate(ask(0))
    assert desk.seeds == [[0], [0], []]
    assert desk.router.load.num_serving == 1


async def test_a_hung_replica_is_taken_out_with_everything_it_holds() -> None:
    desk = Desk(2, reply_limit_s=0.05)
    desk.engines[1].answers_at_once = True
    replies = await asyncio.gather(*(desk.router.generate(ask(0, [3, 4])) for _ in range(3)))
    assert [reply.text for reply in replies] == ["0", "0", "0"]
    assert desk.seeds == [[0, 0, 0], [0, 0, 0]]
    assert desk.causes == [("e0", ReplicaCause.HUNG)]
    assert "not answered within 0.05 s" in desk.events[0].detail


async def test_a_request_that_no_engine_can_answer_costs_no_replica() -> None:
    desk = Desk(2, max_failures_in_a_row=1)
    for engine in desk.engines:
        engine.failure = EngineError("prompt too long")
    for _ in range(5):
        with pytest.raises(EngineError, match="e0: prompt too long; e1: prompt too long"):
            await desk.router.generate(ask(0))
    assert desk.router.load.num_serving == 2


async def test_the_only_replica_s_own_words_are_kept() -> None:
    desk = Desk(1)
    desk.engines[0].failure = EngineError("prompt too long")
    with pytest.raises(EngineError, match=r"^prompt too long$"):
        await desk.router.generate(ask(0))


async def test_a_replica_that_fails_where_others_succeed_is_taken_out() -> None:
    desk = Desk(2, max_failures_in_a_row=2)
    desk.engines[0].failure = EngineError("CUDA out of memory")
    desk.engines[1].answers_at_once = True
    for seed in range(4):
        await desk.router.generate(ask(seed))
    # Two failures, then nothing more.
    assert desk.seeds == [[0, 1], [0, 1, 2, 3]]
    assert desk.causes == [("e0", ReplicaCause.FAILING)]
    assert "failed 2 requests that others answered; the last: e0: CUDA" in desk.events[0].detail


@pytest.mark.parametrize("between", ["an answer", "an update"])
async def test_failures_count_in_a_row(between: str) -> None:
    desk = Desk(2, max_failures_in_a_row=2)
    for engine in desk.engines:
        engine.answers_at_once = True
    for seed in range(3):
        desk.engines[0].failure = EngineError("CUDA out of memory")
        await desk.router.generate(ask(2 * seed))
        desk.engines[0].failure = None
        if between == "an answer":
            await desk.router.generate(ask(2 * seed + 1))
        else:
            await desk.router.update(replace(UPDATE, version=seed + 1))
    # Each request went to the first replica, as the least loaded one.
    assert len(desk.seeds[0]) == (6 if between == "an answer" else 3)
    assert desk.causes == []


async def test_unproven_weights_are_no_matter_of_another_replica() -> None:
    """An engine that says so must be heard: another one's answer would hide it."""
    desk = Desk(2)
    desk.engines[0].failure = WeightMismatch("the last update was not proven")
    desk.engines[1].answers_at_once = True
    with pytest.raises(WeightMismatch, match="the last update was not proven"):
        await desk.router.generate(ask(0))
    assert desk.seeds == [[0], []]


async def test_an_update_closes_every_replica_until_it_has_acknowledged() -> None:
    desk = Desk(2)
    slow, quick = desk.engines
    for engine in desk.engines:
        engine.update_gate.clear()
    updating = asyncio.create_task(desk.router.update(UPDATE))
    await turn()
    assert [engine.updates for engine in desk.engines] == [[UPDATE], [UPDATE]]
    (task,) = start(desk.router, ask(0))
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
    start(desk.router, ask(1), ask(2))
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
    await desk.router.update(UPDATE)
    for seed in range(3):
        assert (await desk.router.generate(ask(seed))).policy_version == 1
    assert desk.seeds == [[], [0, 1, 2]]
    broken.update_failure, broken.receipt = None, None
    await desk.router.update(replace(UPDATE, version=2))
    await turn()
    start(desk.router, ask(3), ask(4, max_tokens=50))
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
        await desk.router.update(UPDATE)
    with pytest.raises(EngineError, match="none of 2 engines is left"):
        await desk.router.generate(ask(0))


async def test_prc_1_an_update_that_hangs_at_one_replica_ends_and_names_it() -> None:
    """Incident: weight transfer waiting for ever with busy GPUs."""
    desk = Desk(2, update_limit_s=0.05)
    desk.engines[0].update_gate.clear()
    await asyncio.wait_for(desk.router.update(UPDATE), 60.0)
    assert desk.causes == [("e0", ReplicaCause.HUNG)]
    assert "version 1 was not acknowledged within 0.05 s" in desk.events[0].detail


async def test_a_replica_that_is_out_does_not_hold_up_later_updates() -> None:
    desk = Desk(2, update_limit_s=600.0)
    gone, sound = desk.engines
    gone.update_failure = EngineLost("gone")
    await desk.router.update(UPDATE)
    gone.update_failure = None
    gone.update_gate.clear()
    for version in (2, 3):
        await asyncio.wait_for(desk.router.update(replace(UPDATE, version=version)), 60.0)
    gone.update_gate.set()
    await turn()
    # It acknowledges the newest only: the wait for version 2 was given up.
    assert gone.version == 3
    assert sound.version == 3
    assert desk.causes == [("e0", ReplicaCause.LOST), ("e0", ReplicaCause.BACK)]


async def test_smp_6_a_reply_of_weights_that_were_given_up_takes_its_replica_out() -> None:
    """Incident: runs sampled base weights throughout because the update had not been loaded."""
    desk = Desk(2)
    await desk.router.update(UPDATE)
    for engine in desk.engines:
        engine.answers_at_once = True
    desk.engines[0].version = 0
    version = (await desk.router.generate(ask(0))).policy_version
    assert version == 1
    assert desk.causes == [("e0", ReplicaCause.STALE)]
    assert "a reply of version 0 came where 1 was acknowledged" in desk.events[0].detail


async def test_smp_6_updates_do_not_overlap() -> None:
    """Incident: overlapping updates are reported."""
    desk = Desk(1)
    desk.engines[0].update_gate.clear()
    both = [asyncio.create_task(desk.router.update(replace(UPDATE, version=v))) for v in (1, 2)]
    await turn()
    assert [update.version for update in desk.engines[0].updates] == [1]
    desk.engines[0].update_gate.set()
    await asyncio.gather(*both)
    assert ([update.version for update in desk.engines[0].updates]) == [1, 2]


async def test_an_engine_that_is_added_serves_after_the_next_update() -> None:
    desk = Desk(1)
    late, again = HeldEngine(), HeldEngine()
    desk.router.add("late", late)
    with pytest.raises(ConfigError, match="a second engine named e0, while the first one serves"):
        desk.router.add("e0", again)
    start(desk.router, ask(0), ask(1))
    await turn()
    assert (desk.seeds, late.seeds) == ([[0, 1]], [])
    await desk.router.update(UPDATE)
    await turn()
    start(desk.router, ask(2))
    await turn()
    assert late.seeds == [2]
    assert desk.causes == [("late", ReplicaCause.JOINED), ("late", ReplicaCause.BACK)]


async def test_an_engine_that_takes_a_name_during_an_update_has_acknowledged_nothing() -> None:
    desk = Desk(2)
    lost, fresh = desk.engines[0], HeldEngine()
    desk.router.condemn("e0", "its node is gone", ReplicaCause.LOST)
    lost.update_gate.clear()
    await desk.router.update(UPDATE)
    desk.router.add("e0", fresh)
    lost.update_gate.set()
    await turn()
    # What the lost one says at last is not the other one's word.
    assert (lost.version, desk.router.serves("e0")) == (1, False)
    await desk.router.update(replace(UPDATE, version=2))
    await turn()
    assert (fresh.version, desk.router.serves("e0")) == (2, True)
    causes = [cause for _, cause in (desk).causes]
    assert causes == [ReplicaCause.LOST, ReplicaCause.JOINED, ReplicaCause.BACK]


async def test_scores_are_routed_and_moved_like_replies() -> None:
    desk = Desk(2)
    desk.engines[0].failure = EngineLost("gone")
    ids = np.array([1, 2], np.int32)
    scored = await desk.router.score(ids, ids, 1.0)
    assert scored.logprobs.tolist() == [0.0, 0.0]
    assert desk.causes == [("e0", ReplicaCause.LOST)]


async def test_close_ends_who_runs_and_who_waits_and_closes_every_engine() -> None:
    desk = Desk(2, max_running=1)
    tasks = start(desk.router, *(ask(seed) for seed in range(4)))
    await turn()
    await desk.router.close()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in done] == [EngineError] * 4
    assert {"closed" in str(error) for error in done} == {True}
    assert [engine.is_closed for engine in desk.engines] == [True, True]
    assert desk.events == []
