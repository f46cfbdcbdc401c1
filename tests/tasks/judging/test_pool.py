"""Worker processes: results, deadlines, crashes, fairness, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused
from strop.rollout import Failure, FailureOwner
from strop.tasks.judging import WorkerPool
from strop.tasks.judging.pool import Handler


def make_handler() -> Handler:
    return handle


def handle(payload: Any) -> Any:
    """Do what the payload says, as verifiers of all kinds do."""
    match payload:
        case {"sleep": seconds}:
            time.sleep(seconds)
        case {"hang": True}:
            while True:
                # Deaf to every signal that can be ignored.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case {"write": text}:
            # Into every connection that it has, its pool's among them.
            for descriptor in range(3, 64):
                with suppress(OSError):
                    os.write(descriptor, text.encode())
        case {"exit": code}:
            os._exit(code)
        case {"raise": text}:
            raise TypeError(text)
        case {"once": path}:
            if not Path(path).exists():
                Path(path).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        case {"fork": path}:
            child = os.fork()
            if child == 0:
                time.sleep(600)
            Path(f"{path}.part").write_text(str(child))
            os.rename(f"{path}.part", path)
            time.sleep(600)
        case {"unpicklable": True}:
            return lambda: None
        case {"spoiled": True}:
            return Spoiled()
        case {"allocate": num_bytes}:
            return len(bytearray(num_bytes))
    return {"pid": os.getpid(), "echo": payload}


class Spoiled:
    """Can be pickled, and not be read again."""

    def __reduce__(self) -> Any:
        return {}.__getitem__, ("absent",)


def refuse_to_build() -> Handler:
    raise FileNotFoundError("no data set here")


def with_pool(
    work: Callable[[WorkerPool], Awaitable[Any]], *, num_workers: int = 2, limit_s: float = 60.0
) -> Any:
    async def run() -> Any:
        workers = WorkerPool(make_handler, num_workers=num_workers, limit_s=limit_s)
        try:
            return await work(workers)
        finally:
            await workers.close()

    return asyncio.run(run())


async def call_all(payloads: Sequence[Any], workers: WorkerPool) -> list[Any]:
    return list(await asyncio.gather(*(workers.call(payload) for payload in payloads)))


def living() -> dict[int, int]:
    """Return the session of each process that is no zombie; a pool's processes have one of their own."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session, *_ = path.read_text().rsplit(")", 1)[1].split()
            if state != "Z":
                found[int(path.parent.name)] = int(session)
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_serves_many_calls_and_is_then_replaced() -> None:
    async def work(workers: WorkerPool) -> list[int]:
        return [(await workers.call({}))["pid"] for _ in range(1001)]

    pids = with_pool(work, num_workers=1)
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [1000, 1]


def test_calls_that_fail_leave_no_more_workers_than_the_pool_may_have() -> None:
    """Incident: each failed call left the worker of its second try beside that of its first."""

    async def work(workers: WorkerPool) -> None:
        session = os.getsid((await workers.call({}))["pid"])
        # The one that forks, and each worker with its guard.
        await call_all([{"raise": "no such field"}] * 8, workers)
        await asyncio.to_thread(wait_until, lambda: list(living().values()).count(session) <= 1 + 2 * 2)

    with_pool(work)


def test_a_hung_call_is_killed_and_tried_once_more() -> None:
    started_at = time.monotonic()
    failure = with_pool(lambda workers: workers.call({"hang": True}), limit_s=0.2)
    assert failure == Failure(owner=FailureOwner.TASK, kind="timeout", detail="no verdict after 0.8 s")
    assert 1.0 <= time.monotonic() - started_at < 120.0


@pytest.mark.parametrize(
    ("payload", "kind", "detail"),
    [
        ({"exit": 3}, "crash", "EOFError"),
        ({"raise": "no such field"}, "TypeError", "no such field"),
        ({"allocate": 8 << 30}, "MemoryError", "bytearray"),
        ({"write": "I am no answer."}, "crash", "ValueError"),
        ({"text": "a" * (1 << 24)}, "crash", "ValueError"),
        ({"unpicklable": True}, "crash", "EOFError"),
        ({"spoiled": True}, "crash", "KeyError"),
    ],
)
def test_what_a_verifier_can_do_to_its_process_costs_only_its_own_call(
    payload: Any, kind: str, detail: str
) -> None:
    def work(workers: WorkerPool) -> Awaitable[list[Any]]:
        return call_all([{"number": 1}, payload, {"number": 2}], workers)

    before, failure, after = with_pool(work)
    assert (before["echo"], after["echo"]) == ({"number": 1}, {"number": 2})
    assert failure.kind == kind
    assert detail in failure.detail


def test_a_crash_that_does_not_come_again_costs_nothing(tmp_path: Path) -> None:
    once = {"once": str(tmp_path / "seen")}
    assert with_pool(lambda workers: workers.call(once))["echo"] == once


def test_a_worker_that_was_killed_while_it_had_nothing_to_do_costs_no_call() -> None:
    async def work(workers: WorkerPool) -> Any:
        os.kill(pid := (await workers.call({}))["pid"], signal.SIGKILL)
        await asyncio.to_thread(wait_until, lambda: pid not in living())
        return await workers.call({"number": 2})

    assert with_pool(work)["echo"] == {"number": 2}


def test_no_more_run_at_once_than_there_are_workers() -> None:
    async def work(workers: WorkerPool) -> int:
        replies = await call_all([{"number": number} for number in range(6)], workers)
        return len({reply["pid"] for reply in replies})

    assert with_pool(work) == 2


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_cancelled_call_does_not_answer_the_next(is_warm: bool) -> None:
    async def work(workers: WorkerPool) -> Any:
        if is_warm:
            await workers.call({})
        first = asyncio.ensure_future(workers.call({"sleep": 0.3, "number": 1}))
        await asyncio.sleep(0.1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return await workers.call({"number": 2})

    assert with_pool(work, num_workers=1)["echo"] == {"number": 2}


def test_descendants_of_a_killed_worker_go_with_it(tmp_path: Path) -> None:
    async def work(workers: WorkerPool) -> Any:
        return await workers.call({"fork": str(tmp_path / "pid")})

    # A worker that was ended before it had forked shows nothing: the next one has longer.
    for limit_s in (0.3, 3.0, 30.0):
        assert with_pool(work, limit_s=limit_s).kind == "timeout"
        if (tmp_path / "pid").exists():
            break
    wait_until(lambda: int((tmp_path / "pid").read_text()) not in living())


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_killed_server_is_replaced(is_idle: bool) -> None:
    """With workers of it that have nothing to do, and without."""

    async def work(workers: WorkerPool) -> list[Any]:
        server = os.getsid((await workers.call({}))["pid"])
        if not is_idle:
            await workers.call({"exit": 3})
        os.kill(server, signal.SIGKILL)
        return await call_all([{"number": 1}, {"number": 2}], workers)

    assert [reply["echo"]["number"] for reply in with_pool(work)] == [1, 2]


def test_a_handler_that_cannot_be_built_is_refused_with_its_cause_and_ends_the_starts_of_others() -> None:
    async def run() -> None:
        workers = WorkerPool(refuse_to_build, num_workers=4, limit_s=1.0)
        calls = [asyncio.ensure_future(workers.call({})) for _ in range(4)]
        try:
            await asyncio.gather(*calls)
        finally:
            await workers.close()
            found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), timeout=60)
            assert CheckRefused in map(type, found)

    with pytest.raises(CheckRefused, match="no data set here"):
        asyncio.run(run())


def test_closing_ends_what_is_under_way() -> None:
    """Incident: calls went on in a pool that was closed, and started processes that nobody ended."""

    async def run() -> list[Any]:
        workers = WorkerPool(make_handler, num_workers=2, limit_s=600.0)
        session = os.getsid((await workers.call({}))["pid"])
        # Two sleep, and the third waits for its turn.
        calls = [asyncio.ensure_future(workers.call({"sleep": 600, "number": n})) for n in range(3)]
        await asyncio.sleep(0.2)
        await asyncio.wait_for(workers.close(), timeout=60)
        await asyncio.to_thread(wait_until, lambda: session not in living().values())
        await asyncio.wait_for(workers.close(), timeout=60)
        return [*await asyncio.wait_for(asyncio.gather(*calls), timeout=60), await workers.call({})]

    replies = asyncio.run(run())
    assert [reply.owner for reply in replies] == [FailureOwner.INFRA] * 4


_OWNER = """
import asyncio, sys
from tests.tasks.judging.test_pool import make_handler
from strop.tasks.judging import WorkerPool

async def main():
    workers = WorkerPool(make_handler, num_workers=2, limit_s=600.0)
    reply = await workers.call({})
    print(reply["pid"], flush=True)
    await workers.call({"hang": True})

asyncio.run(main())
"""


def test_nothing_survives_a_killed_owner() -> None:
    """The workers end although they hang and were asked nothing."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER], cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    session = os.getsid(int(owner.stdout.readline()))
    time.sleep(0.2)  # The hanging one begins.
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: session not in living().values())
