"""The OpenAI-compatible face of the model: for each rollout an address `/r/ID/v1`, and a key.

`POST chat/completions`, plain and as a stream (the reply is sampled whole, then sent), with tools and
log-probabilities; `GET models`. The run's sampling is used whatever a program asks for: other tokens would
not be the policy's. What would change the support of the distribution is refused. Shapes: openai 2.54's
types; vLLM 0.32 for `prompt_token_ids`, `token_ids` and reasoning.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from strop.engine.server import LOOPBACK, listen
from strop.engine.wire import require_server_part
from strop.environments.recording import Call, CallsUsedUp, CallTooLong, Recorder
from strop.errors import DataError, StropError, describe_error
from strop.rollout import FinishReason, Message

_MAX_BODY_BYTES = 64 << 20
_REFUSED = {
    "n": (None, 1),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
}
"""What would sample several replies or others than the policy's, and the values that are fine."""
_MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class _Refused(Exception):
    """Raised with the status and the code of an answer that is an error."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(kw_only=True, slots=True, eq=False)
class _Open:
    """A rollout whose program may ask."""

    key: str
    recorder: Recorder
    answers: dict[bytes, asyncio.Future[Call]] = field(default_factory=dict)
    """By a hash of the body: the newest call of these very bytes, for a library that sends it again."""


class Face:
    """Serves all rollouts of a process. Leaving `serving` ends it."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._closed: set[str] = set()
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Face]:
        """Serve on a free port of the loopback address."""
        require_server_part("uvicorn")
        import uvicorn

        class Server(uvicorn.Server):
            """Leaves signals to the process that it is a part of."""

            def capture_signals(self) -> Any:
                """Capture none."""
                from contextlib import nullcontext

                return nullcontext()

        listener: socket.socket = listen()
        self.url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            self._answer, interface="asgi3", lifespan="off", log_config=None, access_log=False
        )
        server = Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            # It listens already: who asks before the server has begun waits for a moment.
            yield self
        finally:
            server.should_exit = server.force_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            listener.close()

    @asynccontextmanager
    async def open(self, recorder: Recorder) -> AsyncIterator[tuple[str, str]]:
        """Let a program ask through a recorder; yield the base URL and the key for it."""
        name, key = secrets.token_hex(8), secrets.token_hex(16)
        self._open[name] = _Open(key=key, recorder=recorder)
        try:
            yield f"{self.url}/r/{name}/v1", key
        finally:
            recorder.is_sealed = True
            del self._open[name]
            self._closed.add(name)

    async def _answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            rollout = self._authorize(scope)
            path = scope["path"].split("/v1/", 1)[-1]
            if scope["method"] == "GET" and path == "models":
                await _send_json(send, 200, {"object": "list", "data": [_MODEL]})
            elif scope["method"] == "POST" and path == "chat/completions":
                await _complete(rollout, dict(scope["headers"]), receive, send)
            else:
                raise _Refused(404, f"there is no {scope['method']} {path!r:.100}", "not_found")
        except _Refused as refused:
            await _send_json(send, refused.status, _error(str(refused), refused.code))

    def _authorize(self, scope: Mapping[str, Any]) -> _Open:
        parts = scope["path"].split("/")
        name = parts[2] if len(parts) > 3 and parts[1] == "r" else ""
        if name in self._closed:
            raise _Refused(410, "this rollout is over", "gone")
        rollout = self._open.get(name)
        if rollout is None:
            raise _Refused(404, "there is no such rollout", "not_found")
        given = dict(scope["headers"]).get(b"authorization", b"").removeprefix(b"Bearer ")
        if not hmac.compare_digest(given, rollout.key.encode()):
            raise _Refused(401, "the key is not this rollout's", "invalid_api_key")
        return rollout


_MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "strop"}


async def _complete(rollout: _Open, headers: Mapping[bytes, bytes], receive: Receive, send: Send) -> None:
    """Answer a chat. A library that sends the same bytes again, and says so, gets the same reply."""
    body = await _read_body(receive)
    asked = _read_call(body)
    digest = hashlib.blake2b(body).digest()
    known = rollout.answers.get(digest)
    is_again = headers.get(b"x-stainless-retry-count", b"0") != b"0"
    if known is None or not is_again:
        known = asyncio.ensure_future(_ask(rollout, asked))
        rollout.answers[digest] = known
    gone: asyncio.Future[Any] = asyncio.ensure_future(_wait_for_end(receive))
    try:
        both: list[asyncio.Future[Any]] = [known, gone]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not known.done():
            # The client is gone; a retry of it may still want the reply.
            known.add_done_callback(_mark_undelivered)
            return
        call = known.result()
        call.is_delivered = True
        if asked.get("stream"):
            await _send_stream(send, asked, call)
        else:
            await _send_json(send, 200, _to_answer(asked, call))
    finally:
        gone.cancel()


def _mark_undelivered(found: asyncio.Future[Call]) -> None:
    if not found.cancelled() and found.exception() is None:
        found.result().is_delivered = False


async def _ask(rollout: _Open, asked: Mapping[str, Any]) -> Call:
    """Have a call sampled. Raises: _Refused."""
    if rollout.recorder.is_sealed:
        raise _Refused(410, "this rollout is over", "gone")
    tools = tuple(json.dumps(tool, ensure_ascii=False) for tool in asked.get("tools") or ())
    if asked.get("tool_choice") == "none":
        tools = ()
    try:
        return await rollout.recorder.ask(asked["messages"], tools, _limit_of(asked))
    except CallTooLong as error:
        raise _Refused(400, str(error), "context_length_exceeded") from error
    except CallsUsedUp as error:
        raise _Refused(410, str(error), "used_up") from error
    except StropError as error:
        raise _Refused(500, describe_error(error), "engine_error") from error


async def _read_body(receive: Receive) -> bytes:
    body = b""
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise _Refused(400, "the request was cut", "bad_request")
        body += bytes(event.get("body", b""))
        if len(body) > _MAX_BODY_BYTES:
            raise _Refused(413, f"a request has {_MAX_BODY_BYTES} bytes at most", "too_large")
        if not event.get("more_body"):
            return body


async def _wait_for_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _read_call(body: bytes) -> dict[str, Any]:
    """Return a request whose messages are read. Raises: _Refused."""
    try:
        asked = json.loads(body)
        values = asked["messages"]
        messages = [
            Message.from_json(
                {key: one[key] for key in _MESSAGE_KEYS if one.get(key) is not None} | _role(one)
            )
            for one in values
        ]
        if not messages:
            raise ValueError("there is no message")
        for tool in asked.get("tools") or ():
            if not isinstance(tool["function"]["name"], str):
                raise ValueError("a tool has no name")
        limit = _limit_of(asked)
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ValueError("max_tokens is no number of 1 or more")
    except (ValueError, LookupError, TypeError, AttributeError, DataError) as error:
        raise _Refused(400, f"this is no chat request: {error}", "bad_request") from error
    for name, fine in _REFUSED.items():
        if asked.get(name) not in fine:
            allowed = " or ".join(json.dumps(one) for one in fine if one is not None)
            raise _Refused(
                400, f"{name}={json.dumps(asked[name]):.80}; allowed: {allowed}", "unsupported_value"
            )
    return {**asked, "messages": messages}


def _limit_of(asked: Mapping[str, Any]) -> Any:
    limit = asked.get("max_completion_tokens")
    return asked.get("max_tokens") if limit is None else limit


def _role(message: Mapping[str, Any]) -> dict[str, str]:
    """Return the role by which models know it."""
    return {"role": "system" if message["role"] == "developer" else message["role"]}


def _to_message(call: Call) -> dict[str, Any]:
    spoken = call.spoken
    content = spoken.content if spoken.content or not spoken.calls else None
    found: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if spoken.reasoning is not None:
        found["reasoning_content"] = spoken.reasoning
    if spoken.calls:
        found["tool_calls"] = [
            {
                "id": one.call_id,
                "type": "function",
                "function": {"name": one.name, "arguments": one.arguments},
            }
            for one in spoken.calls
        ]
    return found


def _finish_of(call: Call) -> str:
    if call.reply.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if call.spoken.calls else "stop"


def _usage_of(call: Call) -> dict[str, int]:
    num_prompt, num_reply = len(call.prompt_ids), len(call.reply.token_ids)
    total = num_prompt + num_reply
    return {"prompt_tokens": num_prompt, "completion_tokens": num_reply, "total_tokens": total}


_numbers = itertools.count()


def _head(asked: Mapping[str, Any], kind: str) -> dict[str, Any]:
    name = f"chatcmpl-{next(_numbers):08d}"
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": str(asked.get("model", "policy")),
    }


def _to_answer(asked: Mapping[str, Any], call: Call) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "message": _to_message(call),
        "finish_reason": _finish_of(call),
        "logprobs": _to_logprobs(call) if asked.get("logprobs") else None,
    }
    answer = _head(asked, "chat.completion") | {"choices": [choice], "usage": _usage_of(call)}
    if asked.get("return_token_ids"):
        answer["prompt_token_ids"] = call.prompt_ids.tolist()
        choice["token_ids"] = call.reply.token_ids.tolist()
    return answer


def _to_logprobs(call: Call) -> dict[str, Any]:
    assert call.reply.logprobs is not None
    pairs = zip(call.reply.token_ids.tolist(), call.reply.logprobs.tolist(), strict=True)
    return {
        "content": [
            {"token": f"token_id:{token_id}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token_id, value in pairs
        ],
        "refusal": None,
    }


async def _send_stream(send: Send, asked: Mapping[str, Any], call: Call) -> None:
    head = _head(asked, "chat.completion.chunk")
    message = _to_message(call)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if "reasoning_content" in message:
        deltas.append({"reasoning_content": message["reasoning_content"]})
    deltas += [{"content": message["content"]}] if message["content"] else []
    for index, one in enumerate(message.get("tool_calls", ())):
        function = one["function"]
        begun = {**one, "index": index, "function": {"name": function["name"], "arguments": ""}}
        goes_on = {"index": index, "function": {"arguments": function["arguments"]}}
        deltas += [{"tool_calls": [begun]}, {"tool_calls": [goes_on]}]
    chunks = [{**head, "choices": [_choice_of(delta, None)]} for delta in deltas]
    chunks.append({**head, "choices": [_choice_of({}, _finish_of(call))]})
    if (asked.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": _usage_of(call)})
    text = "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks)
    await _send(send, 200, b"text/event-stream", f"{text}data: [DONE]\n\n".encode())


def _choice_of(delta: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}


def _error(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}


async def _send_json(send: Send, status: int, content: Mapping[str, Any]) -> None:
    await _send(send, status, b"application/json", json.dumps(content, ensure_ascii=False).encode())


async def _send(send: Send, status: int, kind: bytes, body: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    if status == 500:
        # What the engine failed to do is lost for this rollout: asking again helps nobody.
        headers.append((b"x-should-retry", b"false"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
