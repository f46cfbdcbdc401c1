"""The client of an engine in another process.

Calls of `generate` that are issued together are sent as one batch in their order, by the rule of the engine
in this process, so the other engine forms the same batch and gives the same bits. Their replies return
together, or each as it ends: then the next request does not wait for the longest reply. Calls of `score` with
one prompt are sent together too, a few prompts at a time.

Every wait ends: with the answer, with the server's death, when the server is silent for `silence_limit_s`, or
after `reply_limit_s` in all. Nothing is retried: a second reply could be of another policy version, and the
caller can decide better.

Weights are sent by file, where both processes see the same disk, or as an object of a store.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from strop.engine.contract import (
    Completion,
    GenerationRequest,
    ReplyScore,
    Waiting,
    WaitingScore,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
    closed,
    deliver,
    fail,
    settle,
)
from strop.engine.wire import (
    AnswerPart,
    ErrorForm,
    Form,
    GenerateAnswer,
    GenerateCall,
    HealthForm,
    ReceiptForm,
    ScoreAnswer,
    ScoreCall,
    UpdateForm,
    require_server_part,
)
from strop.errors import EngineError, EngineLost, StropError, WeightMismatch
from strop.rollout import IntArray

if TYPE_CHECKING:
    import httpx

# The exit of the server's process may show this long after its connection broke.
_OBITUARY_S = 2.0
_OBITUARY_LOOKS = 40

_MAX_SCORED_PROMPTS = 8
"""Prompts that are scored at the same time. Each has a connection; the server scores one after the other."""

Answer = TypeVar("Answer", bound=Form)
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitLimits:
    """Deadlines of a remote engine."""

    silence_limit_s: float = 120.0
    """A server that does not answer /health for so long counts as hung. Longer than its longest
    uninterrupted work: one prefill, or reading one publication of weights."""
    reply_limit_s: float = 3600.0
    """Limit of one batch of replies or one update."""
    poll_s: float = 0.25
    """Between two checks of the server's process; every tenth also requests /health."""


class RemoteEngine:
    """An `Engine` over HTTP. One instance serves one event loop at a time.

    `find_death` returns how the server's process ended, or None while it runs; `read_log` returns its
    last log lines. Without them only silence is noticed. `is_streamed`: replies return as they end; then the
    batches of later requests depend on the pace of both processes.

    Raises: ConfigError if the server extra is not installed.
    """

    def __init__(
        self,
        url: str,
        key: str,
        *,
        find_death: Callable[[], str | None] | None = None,
        read_log: Callable[[], str] | None = None,
        limits: WaitLimits | None = None,
        is_streamed: bool = False,
    ) -> None:
        require_server_part("httpx")
        import httpx

        self._url = url
        self._find_death = find_death or (lambda: None)
        self._read_log = read_log or (lambda: "")
        self._limits = limits or WaitLimits()
        self.is_streamed = is_streamed
        # trust_env: proxies and passwords of the environment are not for a server on this machine.
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            trust_env=False,
            timeout=httpx.Timeout(None, connect=self._limits.silence_limit_s),
            # A connection per message: on one machine it is cheap, and the server could close a kept one
            # just when it is used again.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._inbox: list[Waiting] = []
        self._sender: asyncio.Task[None] | None = None
        self._posts: set[asyncio.Task[None]] = set()
        self._unscored: dict[tuple[bytes, float], list[WaitingScore]] = {}
        self._score_places = asyncio.Semaphore(_MAX_SCORED_PROMPTS)
        self._version: int | None = None
        self._is_closed = False

    @property
    def version(self) -> int | None:
        """Version of the last weights that the server acknowledged, None before the first."""
        return self._version

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply. See `Engine.generate`."""
        self._require_open()
        waiting = Waiting(request, asyncio.get_running_loop().create_future())
        self._inbox.append(waiting)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_inbox())
        return await waiting.reply

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the log-probability of each reply token. See `Engine.score`."""
        self._require_open()
        waiting = WaitingScore(prompt_ids, reply_ids, asyncio.get_running_loop().create_future())
        key = (prompt_ids.tobytes(), temperature)
        if key not in self._unscored:
            entries: list[WaitingScore] = []
            self._unscored[key] = entries
            self._keep_post(self._post_scores(key), lambda: [entry.score for entry in entries])
        self._unscored[key].append(waiting)
        return await waiting.score

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights. See `Engine.update`.

        Raises: WeightMismatch also if the receipt names another version or digest than was published.
        """
        self._require_open()
        if update.transport is WeightTransport.SHARED:
            raise WeightMismatch(
                f"weight update {update.version} is by {update.transport}, and the engine is elsewhere"
            )
        receipt = (await self._ask("/v1/weights", UpdateForm.of(update), ReceiptForm)).read()
        if (receipt.version, receipt.digest) != (update.version, update.digest):
            raise WeightMismatch(
                f"the engine acknowledged version {receipt.version} with digest {receipt.digest}, not version"
                f" {update.version} with digest {update.digest}"
            )
        self._version = receipt.version
        return receipt

    async def health(self) -> HealthForm:
        """Return the server's status. Raises: EngineError."""
        self._require_open()
        return await self._ask("/health", None, HealthForm)

    async def close(self) -> None:
        """Drop every connection; waiting requests get an EngineError, and later ones too."""
        self._is_closed = True
        tasks = [task for task in (self._sender, *self._posts) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        fail([waiting.reply for waiting in self._inbox], closed())
        await self._client.aclose()

    async def _send_inbox(self) -> None:
        """Send the waiting requests as one batch; later ones make the next batch."""
        await settle(lambda: len(self._inbox))
        batch, self._inbox = self._inbox, []
        self._keep_post(self._post_batch(batch), lambda: [waiting.reply for waiting in batch])

    def _keep_post(
        self,
        exchange: Coroutine[Any, Any, None],
        list_waiting: Callable[[], Sequence[asyncio.Future[Any]]],
    ) -> None:
        """Run an exchange in the background, until it ends or the engine is closed.

        Futures still pending at its end fail: no caller may wait for ever, not even after a bug or a
        cancellation before the exchange began.
        """

        def end(post: asyncio.Task[None]) -> None:
            self._posts.discard(post)
            fail(
                list_waiting(),
                closed() if self._is_closed else EngineError("an exchange was abandoned"),
            )

        post = asyncio.create_task(exchange)
        self._posts.add(post)
        post.add_done_callback(end)

    async def _post_scores(self, key: tuple[bytes, float]) -> None:
        """Have all waiting replies to a prompt scored, when its turn comes."""
        entries = self._unscored[key]
        try:
            await settle(lambda: len(entries))
            async with self._score_places:
                del self._unscored[key]  # Later requests go into the next batch.
                replies = [entry.reply_ids for entry in entries]
                call = ScoreCall.of(entries[0].prompt_ids, replies, temperature=key[1])
                answer = await self._ask("/v1/score", call, ScoreAnswer)
            if len(answer.scores) != len(entries):
                raise _unreadable("/v1/score", f"{len(answer.scores)} scores of {len(entries)} replies")
            for entry, form in zip(entries, answer.scores, strict=True):
                deliver(entry.score, form.read(len(entry.reply_ids)))
        except StropError as error:
            fail([entry.score for entry in entries], error)

    async def _post_batch(self, batch: Sequence[Waiting]) -> None:
        call = GenerateCall.of([waiting.request for waiting in batch])
        try:
            if self.is_streamed:
                await self._guard("/v1/replies", self._receive_parts(call, batch))
                return
            answer = await self._ask("/v1/generate", call, GenerateAnswer)
            for waiting, outcome in zip(batch, answer.read(len(batch)), strict=True):
                _settle(waiting, outcome)
        except StropError as error:
            fail([waiting.reply for waiting in batch], error)

    async def _receive_parts(self, call: GenerateCall, batch: Sequence[Waiting]) -> None:
        """Deliver replies line by line, as they come."""
        path = "/v1/replies"
        left = dict(enumerate(batch))
        async with self._post(path, call) as response:
            if not response.is_success:
                await response.aread()
                raise _read_error(path, response)
            async for line in _read_lines(response):
                try:
                    part = AnswerPart.model_validate_json(line)
                except ValidationError as error:
                    raise _unreadable(path, line[:500].decode(errors="replace")) from error
                for place, outcome in part.read():
                    if place not in left:
                        raise _unreadable(
                            path, f"request {place} of {len(batch)} is answered twice, or is none"
                        )
                    _settle(left.pop(place), outcome)
        if left:
            raise _unreadable(path, f"{len(left)} of {len(batch)} requests are not answered")

    async def _ask(self, path: str, call: Form | None, answer: type[Answer]) -> Answer:
        """Exchange one message."""
        response = await self._guard(path, self._exchange(path, call))
        if not response.is_success:
            raise _read_error(path, response)
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise _unreadable(path, _shown(response)) from error

    async def _guard(self, path: str, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Wait for an exchange, until the server is dead, silent or too slow."""
        exchange = asyncio.create_task(coroutine)
        trouble = asyncio.create_task(self._await_trouble())
        limit_s = self._limits.reply_limit_s
        try:
            await asyncio.wait({exchange, trouble}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if exchange.done():
                return await exchange
            cause = trouble.result() if trouble.done() else f"no answer within {limit_s:g} s"
            raise self._lost(path, cause)
        finally:
            exchange.cancel()
            trouble.cancel()
            await asyncio.gather(exchange, trouble, return_exceptions=True)

    async def _exchange(self, path: str, call: Form | None) -> httpx.Response:
        async with self._post(path, call) as response:
            await response.aread()
        return response

    @asynccontextmanager
    async def _post(self, path: str, call: Form | None) -> AsyncIterator[httpx.Response]:
        """Yield a response whose body is not read yet. Without a call the request is a GET."""
        import httpx

        method, content = ("GET", None) if call is None else ("POST", call.model_dump_json())
        headers = {} if call is None else {"Content-Type": "application/json"}
        try:
            async with self._client.stream(method, path, content=content, headers=headers) as response:
                yield response
        except httpx.TransportError as error:
            raise self._lost(path, await self._await_obituary() or repr(error)) from error

    async def _await_trouble(self) -> str:
        """Return how the server died, or that it is silent, once either is true."""
        import httpx

        while True:
            for _ in range(10):
                await asyncio.sleep(self._limits.poll_s)
                cause = self._find_death()
                if cause is not None:
                    return cause
            try:
                await self._client.get("/health", timeout=self._limits.silence_limit_s)
            except httpx.TimeoutException:
                return f"no sign of life for {self._limits.silence_limit_s:g} s"
            except httpx.TransportError:
                continue  # The exchange reports broken connections.

    async def _await_obituary(self) -> str | None:
        """Return how the server died; wait a while, as its exit shows after the broken connection."""
        for _ in range(_OBITUARY_LOOKS):
            cause = self._find_death()
            if cause is not None:
                return cause
            await asyncio.sleep(_OBITUARY_S / _OBITUARY_LOOKS)
        return None

    def _lost(self, path: str, cause: str) -> EngineLost:
        log = self._read_log()
        return EngineLost(
            f"the engine at {self._url} did not answer {path}: {cause}"
            + (f"\nIts last log lines:\n{log}\n" if log else ""),
            allowed="a server that runs and answers",
            next_step="read its log, mend the cause and start the run again; it resumes",
        )

    def _require_open(self) -> None:
        if self._is_closed:
            raise closed()


def _settle(waiting: Waiting, outcome: Completion | StropError) -> None:
    """Deliver a reply or an error to a waiting caller."""
    if isinstance(outcome, StropError):
        fail([waiting.reply], outcome)
    else:
        deliver(waiting.reply, outcome)


async def _read_lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield an answer's lines as they come. Only a line feed ends one: texts hold other line breaks."""
    held: list[bytes] = []
    async for piece in response.aiter_bytes():
        *ended, rest = piece.split(b"\n")
        for line in ended:
            yield b"".join((*held, line))
            held = []
        held.append(rest)
    if any(held):
        yield b"".join(held)


def _read_error(path: str, response: httpx.Response) -> StropError:
    """Return the error that the server answered with."""
    try:
        return ErrorForm.model_validate_json(response.content).read()
    except ValidationError:
        return _unreadable(path, _shown(response))


def _shown(response: httpx.Response) -> str:
    return f"status {response.status_code}: {response.text[:500]}"


def _unreadable(path: str, flaw: str) -> EngineError:
    return EngineError(
        f"the engine's answer to {path} cannot be used ({flaw})",
        allowed="the answers of the server of the same version of strop",
        next_step="read the engine's log; the rollouts of this batch are masked",
    )
