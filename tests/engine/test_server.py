"""The server's face: its key, its socket, its ready file, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from strop.engine import Completion, GenerationRequest, WeightTransport, WeightUpdate
from strop.engine.server import announce, build_app, listen, main, read_key
from strop.engine.wire import GenerateCall, ReadyForm, ScoreCall, UpdateForm
from strop.errors import ConfigError
from strop.tokenizer import Tokenizer
from tests.engine.requests import ask
from tests.fixtures.dummy_engine import DummyEngine, ScriptedReply
from tests.fixtures.places import line_of
from tests.fixtures.tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer
from tests.fixtures.tool_templates import HERMES

KEY = "0123456789abcdef-secret"
UPDATE = WeightUpdate(version=4, digest="d4", transport=WeightTransport.FILE, path="w")


def talk(engine: DummyEngine, *messages: tuple[str, str | None], **headers: str) -> list[httpx.Response]:
    """Post bodies to the application without a socket, or get what has none; one after the other."""

    async def act() -> list[httpx.Response]:
        app = build_app(engine, key=KEY, model_digest="m0", tokenizer_digest="t0")
        # What is raised after the answer is for the server's log.
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        given = {"Content-Type": "application/json", **headers}
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", headers=given) as client:
            return [
                await client.request("GET" if body is None else "POST", path, content=body)
                for path, body in messages
            ]

    return asyncio.run(act())


BEARER = {"Authorization": f"Bearer {KEY}"}


def messages(tokenizer: Tokenizer) -> dict[str, str]:
    request = ask(tokenizer)
    ids = request.prompt_ids
    return {
        "/v1/generate": GenerateCall.of([request]).model_dump_json(),
        "/v1/score": ScoreCall.of(ids, [ids], 1.0).model_dump_json(),
        "/v1/weights": UpdateForm.of(UPDATE).model_dump_json(),
    }


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": KEY},
        {"Authorization": "Basic " + KEY},
        {"Authorization": f"Bearer {KEY} "[:-2]},
        {"Authorization": "Bearer "},
    ],
)
def test_sec_3_without_the_key_every_path_but_health_is_refused(
    headers: dict[str, str], tokenizer: Tokenizer
) -> None:
    """Incident: services answered anyone, some with authentication switched off after a mismatch."""
    engine = DummyEngine(tokenizer, ["said"] * 9)
    paths = ["/", "/docs", "/openapi.json", "/health/", "//health"]
    for answer in talk(engine, *messages(tokenizer).items(), *((path, "") for path in paths), **headers):
        assert answer.status_code == 401, answer.url
        assert "without the key of this server. Allowed" in answer.json()["message"]
    assert not engine.requests
    assert not engine.receipts


def test_health_needs_no_key_and_tells_no_secret(tokenizer: Tokenizer) -> None:
    (before,) = talk(DummyEngine(tokenizer, []), ("/health", None))
    body = messages(tokenizer)["/v1/weights"]
    _, after = talk(DummyEngine(tokenizer, []), ("/v1/weights", body), ("/health", None), **BEARER)
    same = {"pid": os.getpid(), "model_digest": "m0", "tokenizer_digest": "t0"}
    assert before.json() == {**same, "version": 0, "digest": "m0"}
    assert after.json() == {**same, "version": 4, "digest": "d4"}


def test_a_batch_is_answered_in_its_order(tokenizer: Tokenizer) -> None:
    # A reply of many tokens next to short ones: order is that of the requests, not of the endings.
    engine = DummyEngine(tokenizer, [ScriptedReply(text="a long one"), "b", "c"])
    call = GenerateCall.of([ask(tokenizer, seed=seed) for seed in range(3)])
    (answer,) = talk(engine, ("/v1/generate", call.model_dump_json()), **BEARER)
    assert answer.json()["texts"] == ["a long one", "b", "c"]
    assert [request.seed for request in engine.requests] == [0, 1, 2]


def test_errors_are_answered_by_their_class(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    engine = DummyEngine(tokenizer, [], found_digest="other")

    generate, _, weights = talk(engine, *messages(tokenizer).items(), **BEARER)
    assert weights.status_code == 500
    assert weights.json()["kind"] == "WeightMismatch"
    # One failed request is no failed batch.
    assert generate.status_code == 200
    assert generate.json()["errors"][0]["kind"] == "EngineError"
    assert "WeightMismatch: weights of version 4 have digest other" in caplog.text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_bug_is_answered_with_its_place_and_its_traceback(is_streamed: bool, tokenizer: Tokenizer) -> None:
    class Broken(DummyEngine):
        async def generate(self, request: GenerationRequest) -> Completion:
            raise KeyError("no such operator")

    engine = Broken(tokenizer, [])
    path = "/v1/replies" if is_streamed else "/v1/generate"

    (response,) = talk(engine, (path, messages(tokenizer)["/v1/generate"]), **BEARER)
    answer = response.json()
    (error,) = answer["answer"]["errors"] if is_streamed else answer["errors"]
    place = f"(test_server.py:{line_of(Broken, 'raise')})"
    said = f"it failed in the engine: KeyError: 'no such operator' {place}"
    assert (error["kind"], error["message"]) == ("EngineError", said)
    assert 'raise KeyError("no such operator")' in error["trace"]


def test_a_malformed_message_is_refused(tokenizer: Tokenizer) -> None:
    bodies = ("", "{}", '{"requests": [{}]}', '{"requests": [], "more": 1}')
    answers = talk(DummyEngine(tokenizer, []), *(("/v1/generate", body) for body in bodies), **BEARER)
    assert [answer.status_code for answer in answers] == [422] * 4


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    for mode in (0o640, 0o604, 0o644, 0o660):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"has mode {mode:04o}, so others can read it"):
            read_key(path)
    path.chmod(0o600)
    assert read_key(path) == KEY


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), ("short", "has 5 characters")])
def test_a_missing_or_weak_key_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.touch(mode=0o600)
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_key(path)


def test_prc_6_the_socket_is_held_from_its_choice_on_and_bound_to_loopback(tmp_path: Path) -> None:
    """Incident: a port was found free, released, and taken by another run before it was used."""
    listeners = [listen() for _ in range(20)]
    try:
        addresses = {listener.getsockname() for listener in listeners}
        assert {host for host, _ in addresses} == {"127.0.0.1"}
        assert len({port for _, port in addresses}) == 20
        ready_path = tmp_path / "ready"
        url = announce(listeners[0], ready_path)
        ready = ReadyForm.model_validate_json(ready_path.read_bytes())
        assert (ready.url, ready.pid) == (url, os.getpid())
        # It answers the connection before anyone accepts it: nothing lies between choice and use.
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{url}/health", timeout=httpx.Timeout(60.0, read=0.1), trust_env=False)
        assert [entry.name for entry in tmp_path.iterdir()] == ["ready"]
    finally:
        for listener in listeners:
            listener.close()


def start_arguments(tmp_path: Path, model: str) -> list[str]:
    key_path = tmp_path / "key"
    key_path.touch(mode=0o600)
    key_path.write_text(KEY)
    assert stat.S_IMODE(key_path.stat().st_mode) == 0o600
    args = ["--model", str(tmp_path / model), "--dtype", "float32", "--threads", "1"]
    return [*args, "--key-file", str(key_path), "--ready-file", str(tmp_path / "ready")]


def test_a_model_that_cannot_be_loaded_ends_with_its_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        assert main(start_arguments(tmp_path, "absent")) == ConfigError.exit_code
    assert "cannot be loaded as a causal language model" in caplog.text
    assert not (tmp_path / "ready").exists()
    assert KEY not in caplog.text


ASSISTANT = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "run", "arguments": '{"n": 1}'}}],
}
TOOL = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "done"}]}


@pytest.mark.parametrize(
    ("template", "sent", "status", "answer"),
    [
        (HERMES, [ASSISTANT, TOOL], 200, "7"),
        (CHAT_TEMPLATE, [ASSISTANT, TOOL], 500, "leaves out a call of the tool run"),
        (HERMES, [{"role": "user", "content": [{"type": "image_url"}]}], 422, "image_url"),
        (HERMES, ["Hi"], 422, "no attribute 'items'"),
    ],
)
def test_a_chat_shows_the_model_calls_and_replies_of_tools(
    tmp_path: Path, template: str, sent: list[Any], status: int, answer: str
) -> None:
    (tiny_tokenizer(tmp_path) / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path)
    engine = DummyEngine(tokenizer, ["7"])

    async def act() -> httpx.Response:
        transport = httpx.ASGITransport(
            app=build_app(engine, key=KEY, model_digest="m0", tokenizer=tokenizer)
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            headers = {"Authorization": f"Bearer {KEY}"}
            call = {"model": "m", "messages": sent}
            return await client.post("/v1/chat/completions", json=call, headers=headers)

    response = asyncio.run(act())
    assert response.status_code == status
    assert answer in response.text
    for request in engine.requests:
        asked = tokenizer.decode(request.prompt_ids)
        assert '<tool_call>\n{"name": "run", "arguments": {"n": 1}}\n</tool_call>' in asked
        assert "<tool_response>\ndone\n</tool_response>" in asked


async def test_answers_of_several_writes_are_sent_at_once() -> None:
    """A listener without a named protocol leaves the second write waiting for an acknowledgement, 40 ms."""
    found: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        found.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(serve, sock=listen()) as server:
        place = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*place)
        await reader.read()
        writer.close()
    assert found == [1]
