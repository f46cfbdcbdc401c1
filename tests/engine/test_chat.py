"""The chat face of an engine, which lets in who has its key, and the socket that it holds."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from strop.engine.chat import CHAT_PATH, ChatServer, build_app, listen
from strop.tokenizer import Tokenizer
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.tiny_tokenizer import CHAT_TEMPLATE, tiny_tokenizer
from tests.fixtures.tool_templates import HERMES

KEY = "a key that only tests know"


def talk(
    engine: DummyEngine, tokenizer: Tokenizer, *calls: tuple[str, Any], **headers: str
) -> list[httpx.Response]:
    """Post a body to each path, or get it where there is none."""

    async def act() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=build_app(engine, tokenizer, key=KEY))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://engine", headers=headers
        ) as client:
            return [
                await (client.get(path) if body is None else client.post(path, json=body))
                for path, body in calls
            ]

    return asyncio.run(act())


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
def test_sec_3_without_the_key_every_path_is_refused(headers: dict[str, str], tokenizer: Tokenizer) -> None:
    """Incident: services answered anyone, some with authentication switched off after a mismatch."""
    engine = DummyEngine(tokenizer, ["said"])
    calls = [(CHAT_PATH, {"model": "m", "messages": [{"role": "user", "content": "a"}]})]
    paths = ("/", "/docs", "/openapi.json", "/health/", "//health")
    for answer in talk(engine, tokenizer, *calls, *((path, None) for path in paths), **headers):
        assert answer.status_code == 401, answer.url
    assert not engine.requests


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
        (HERMES, [], 422, "at least 1 item"),
    ],
)
def test_a_chat_shows_the_model_calls_and_replies_of_tools(
    tmp_path: Path, template: str, sent: list[Any], status: int, answer: str
) -> None:
    (tiny_tokenizer(tmp_path) / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path)
    engine = DummyEngine(tokenizer, ["7"])
    call = (CHAT_PATH, {"model": "m", "messages": sent})
    (response,) = talk(engine, tokenizer, call, Authorization=f"Bearer {KEY}")
    assert response.status_code == status
    assert answer in response.text
    for request in engine.requests:
        asked = tokenizer.decode(request.prompt_ids)
        assert '<tool_call>\n{"name": "run", "arguments": {"n": 1}}\n</tool_call>' in asked
        assert "<tool_response>\ndone\n</tool_response>" in asked


async def test_prc_6_the_socket_is_held_from_its_choice_on_and_bound_to_loopback(
    tokenizer: Tokenizer,
) -> None:
    """Incident: a port was found free, released, and taken by another run before it was used."""
    listeners = [listen() for _ in range(20)]
    try:
        addresses = {listener.getsockname() for listener in listeners}
        assert {host for host, _ in addresses} == {"127.0.0.1"}
        assert len({port for _, port in addresses}) == 20
    finally:
        for listener in listeners:
            listener.close()
    server = ChatServer(DummyEngine(tokenizer, []), tokenizer)
    url = server.endpoint.url.removesuffix("/v1")
    async with httpx.AsyncClient(trust_env=False) as client:
        # At once: it answers the connection before anyone accepts it.
        assert (await client.get(f"{url}/v1/models")).status_code == 401
        await server.close()
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/v1/models")


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
