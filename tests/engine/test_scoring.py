"""Scoring many given replies through an engine elsewhere: few connections, no prompt sent twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from strop.engine.remote import RemoteEngine
from strop.engine.wire import ScoreAnswer, ScoreCall, ScoreForm, read_ids, write_floats
from strop.errors import EngineError

Answer = Callable[[ScoreCall], ScoreAnswer]


class Desk:
    """A server of one path, which counts who is served at the same time."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_open = 0
        self.max_open = 0
        self.calls: list[ScoreCall] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length"))
        self._num_open += 1
        self.max_open = max(self.max_open, self._num_open)
        call = ScoreCall.model_validate_json(await reader.readexactly(length))
        self.calls.append(call)
        await asyncio.sleep(0.02)
        body = self._answer(call).model_dump_json().encode()
        self._num_open -= 1
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n")
        writer.write(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()


@asynccontextmanager
async def connect(desk: Desk) -> AsyncIterator[RemoteEngine]:
    server = await asyncio.start_server(desk.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    engine = RemoteEngine(f"http://127.0.0.1:{port}", "k" * 16)
    try:
        yield engine
    finally:
        await engine.close()
        server.close()
        await server.wait_closed()


def score_all(desk: Desk, num_prompts: int) -> list[list[float]]:
    async def act() -> list[list[float]]:
        async with connect(desk) as engine:
            asked: list[Awaitable[object]] = []
            for prompt in range(num_prompts):
                for reply in range(4):
                    ids = np.array([prompt, 7], np.int32), np.array([reply] * (reply + 1), np.int32)
                    asked.append(engine.score(*ids, 1.0))
            scores = await asyncio.gather(*asked)
            return [score.logprobs.tolist() for score in scores]  # type: ignore[attr-defined]

    return asyncio.run(act())


def form(ids: list[int], version: int = 3) -> ScoreForm:
    values = np.array([-float(token_id) for token_id in ids], np.float32)
    return ScoreForm(logprobs=write_floats(values), policy_version=version)


def test_the_replies_to_a_prompt_travel_together_and_few_prompts_at_once() -> None:
    desk = Desk(lambda call: ScoreAnswer(scores=[form(read_ids(reply).tolist()) for reply in call.replies]))
    found = score_all(desk, 40)
    assert found == [[-float(reply)] * (reply + 1) for _ in range(40) for reply in range(4)]
    assert sorted(read_ids(call.prompt_ids)[0] for call in desk.calls) == list(range(40))
    for call in desk.calls:
        assert [read_ids(reply).tolist() for reply in call.replies] == [[0], [1, 1], [2] * 3, [3] * 4]
    # A thousand prompts must not take a thousand connections.
    assert desk.max_open <= 8


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda call: ScoreAnswer(scores=[form([1])]), r"1 scores of 4 replies"),
        (lambda call: ScoreAnswer(scores=[form([1])] * 4), r"1 log-probabilities came for 2 tokens"),
    ],
)
def test_scores_of_something_else_are_refused(answer: Answer, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        score_all(Desk(answer), 1)
