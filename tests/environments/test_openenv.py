"""OpenEnv: a real server's environment is attempted, and a server's failures are no scores."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from strop.environments.openenv import OpenenvSpec
from strop.rollout import FailureOwner, Split
from strop.tasks import Task, build_task
from tests.conftest import require_system_part
from tests.environments.test_worlds import play_here as play
from tests.fixtures.judging import failed
from tests.fixtures.real_agents import OPENENV

SERVER = Path(__file__).parents[1] / "fixtures/openenv_server.py"
ONE = '{"number": 1}'


def make(url: str, **settings: Any) -> Task:
    return build_task(OpenenvSpec(name="openenv", url=url, num_train=1, num_held_out=1, **settings))


def failure_of(tmp_path: Path, task: Task, reply: str = ONE) -> tuple[FailureOwner, str]:
    return failed(play(tmp_path, task, reply).outcome)


@contextmanager
def serving() -> Iterator[str]:
    argv = [str(OPENENV.python), str(SERVER)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the package's."""
    require_system_part("the environment of openenv-core (make agents-deps)", OPENENV.is_ready())
    with serving() as url:
        yield url


@pytest.mark.slow
def test_an_attempt_earns_what_the_environment_says(tmp_path: Path, url: str) -> None:
    task = make(url, system_prompt="Add numbers.", max_return=1.0 + 1e-12)
    # The seed of the first example to train on is 1.
    rollout = play(tmp_path, task, f"Well: {ONE}", '{"number": 4} or rather {"number": 2}')
    assert "Add numbers." in rollout.turns[0].text
    assert rollout.turns[0].text.count("Count up to 3.") == 1
    assert "The total is 1." in rollout.turns[2].text
    assert rollout.outcome.reward == 1.0, rollout.outcome
    assert rollout.outcome.turn_rewards == (0.0, 1.0)
    assert rollout.outcome.is_correct
    assert play(tmp_path, make(url, max_turns=1), ONE).outcome.reward == 0.0
    numbers = make(url, action_field="number", options={"more": 1})
    assert play(tmp_path, numbers, "1", "no number", "2", "1").outcome.reward == 1.0


@pytest.mark.slow
def test_what_is_no_action_is_told(tmp_path: Path, url: str) -> None:
    rollout = play(tmp_path, make(url), "{1}", '{"number": "x"}', '{"other": 1}', '{"number": 3}')
    told = [turn.text for turn in rollout.turns[2::2]]
    assert "That is no action: it has none" in told[0]
    assert "valid integer" in told[1]
    assert rollout.outcome.reward == 1.0, rollout.outcome
    assert rollout.outcome.metrics["num_invalid_actions"] == 3.0
    assert not rollout.outcome.format_ok


@pytest.mark.slow
@pytest.mark.parametrize(("number", "kind"), [(6, "environment_failed"), (8, "no_reward")])
def test_what_fails_in_the_environment_is_the_tasks(tmp_path: Path, url: str, number: int, kind: str) -> None:
    assert failure_of(tmp_path, make(url), f'{{"number": {number}}}') == (FailureOwner.TASK, kind)


@pytest.mark.slow
def test_attempts_that_are_played_at_once_share_the_servers_room(url: str) -> None:
    """Their openings were asked for in sessions of their own, while all the server's room was held."""
    task = make(url, tool_limit_s=20.0)
    example = task.examples(Split.TRAIN)[0]

    async def play_all() -> list[float | None]:
        found = await asyncio.gather(*(task.verify(example, ONE) for _ in range(3)))
        return [outcome.reward for outcome in found]

    assert asyncio.run(play_all()) == [1.0] * 3


@pytest.mark.slow
def test_a_server_that_dies_gives_no_score(tmp_path: Path, url: str) -> None:
    with serving() as own_url:
        found = failure_of(tmp_path, make(own_url), '{"number": 7}')
    assert found == (FailureOwner.INFRA, "server_lost")


@contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """Serve connections that are answered with some bytes; None: with nothing, and left open."""
    loop, left = asyncio.new_event_loop(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await left.wait()
        else:
            writer.write(answer)
            await writer.drain()
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(left.set)
        loop.call_soon_threadsafe(server.close)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (None, "server_silent"),
        (b"", "server_lost"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "server_lost"),
        (b"HTTP/1.1 101 OK\r\nSec-WebSocket-Accept: wrong\r\n\r\n", "server_lost"),
    ],
)
def test_a_server_that_does_not_speak_gives_no_score(tmp_path: Path, answer: bytes | None, kind: str) -> None:
    with answering(answer) as url:
        found = failure_of(tmp_path, make(url, tool_limit_s=0.2 if answer is None else 60.0))
    assert found == (FailureOwner.INFRA, kind)


def test_nobody_there_gives_no_score(tmp_path: Path) -> None:
    with answering(b"") as url:
        pass
    assert failure_of(tmp_path, make(url))[0] is FailureOwner.INFRA


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://x/?a=1", "http://x y"])
def test_what_is_no_server_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        OpenenvSpec(name="openenv", url=url)
