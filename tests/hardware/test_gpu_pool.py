"""GPUs that attempts have one after the other: in whose turn, how many at once, and back whatever happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from strop.errors import CheckRefused
from strop.hardware.gpu_pool import GpuLease, GpuPool

LONG_S = 60.0


def run(act: Callable[[GpuPool], Awaitable[None]], *names: str) -> GpuPool:
    """Do something with a pool, and see that all of it is free in the end."""
    pool = GpuPool(names)

    async def play() -> None:
        await act(pool)
        whole = await pool.lease(len(names), limit_s=LONG_S)
        assert set(whole.names) == set(names)

    asyncio.run(play())
    return pool


async def ask(pool: GpuPool, num_gpus: float, limit_s: float = LONG_S) -> asyncio.Task[GpuLease]:
    """Ask, and return once the question stands."""
    task = asyncio.create_task(pool.lease(num_gpus, limit_s=limit_s))
    await asyncio.sleep(0)
    return task


def test_each_has_gpus_of_its_own_and_who_waits_longest_is_next() -> None:
    async def act(pool: GpuPool) -> None:
        first, second = [await pool.lease(1, limit_s=LONG_S) for _ in range(2)]
        assert {*first.names, *second.names} == {"0", "1"}
        two, one = await ask(pool, 2), await ask(pool, 1)
        first.release()
        first.release()
        await asyncio.sleep(0)
        # A GPU is free, and who needs two stands before who needs one.
        assert (pool.num_waiting, two.done(), one.done()) == (2, False, False)
        second.release()
        assert set((await two).names) == {"0", "1"}
        (await two).release()
        assert (await one).waited_s > 0.0
        (await one).release()

    run(act, "0", "1")


@pytest.mark.parametrize(("num_gpus", "at_once"), [(1.0, 2), (0.5, 4), (0.25, 8), (0.3, 6), (1 / 3, 6)])
def test_as_many_share_a_gpu_as_the_share_says(num_gpus: float, at_once: int) -> None:
    async def act(pool: GpuPool) -> None:
        leases = [await pool.lease(num_gpus, limit_s=LONG_S) for _ in range(at_once)]
        names = [lease.names[0] for lease in leases]
        assert names.count("0") == names.count("1") == at_once / 2
        beyond = await ask(pool, num_gpus)
        assert not beyond.done()
        leases[0].release()
        leases[0] = await beyond
        for lease in leases:
            lease.release()

    run(act, "0", "1")


def test_who_gives_up_takes_nothing_and_holds_up_nobody() -> None:
    async def act(pool: GpuPool) -> None:
        held = await pool.lease(1, limit_s=LONG_S)
        two, half = await ask(pool, 2), await ask(pool, 0.5)
        two.cancel()
        assert (await half).names == ("1",)
        with pytest.raises(TimeoutError):
            await pool.lease(2, limit_s=0.001)
        # Served in the moment in which it gave up.
        late = await ask(pool, 2)
        held.release()
        (await half).release()
        late.cancel()
        await asyncio.gather(two, late, return_exceptions=True)
        assert pool.num_waiting == 0

    run(act, "0", "1")


def test_several_event_loops_share_a_pool() -> None:
    pool, seen, at_once = GpuPool(["0"]), [], []

    async def attempt() -> None:
        lease = await pool.lease(1, limit_s=LONG_S)
        seen.append(lease.names)
        at_once.append(len(seen))
        await asyncio.sleep(0)
        seen.remove(lease.names)
        lease.release()

    async def attempts() -> None:
        await asyncio.gather(*(attempt() for _ in range(20)))

    threads = [threading.Thread(target=asyncio.run, args=(attempts(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_once == [1] * 80


@pytest.mark.parametrize(
    ("names", "has_slices", "num_gpus", "words"),
    [
        ((), False, 0.5, "1 GPU is asked for by each attempt, and this process has for sandboxes none"),
        (("3",), False, 2, "2 GPUs are asked for by each attempt, and this process has for sandboxes 3"),
        (("MIG-a", "MIG-b"), True, 2, "MIG slices"),
    ],
)
def test_what_would_never_be_free_is_refused(
    names: tuple[str, ...], has_slices: bool, num_gpus: float, words: str
) -> None:
    pool = GpuPool(names, has_slices=has_slices)
    with pytest.raises(CheckRefused, match=words):
        asyncio.run(pool.lease(num_gpus, limit_s=LONG_S))
