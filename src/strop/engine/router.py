"""Several engines as one: each request goes to the least loaded replica, and to another if that one is lost.

Load is counted in tokens that may still be fed or sampled (prompt and reply limit). Requests of one prompt
that are asked together go to one replica, which prefills the prompt once, as long as that replica is not
far ahead of the others. A replica takes a bounded number of requests; the others wait in the order they
came, and each place that becomes free wakes one waiter (a group that stands together is let in together).

A replica that is lost, hangs, fails where another succeeds, or answers under an outdated version is taken out
with a named event, and its requests go to another replica once: they carry their seeds, so nothing is lost. A
weight update goes to all at once. In every mode a replica is closed from the moment the update is sent until
it has acknowledged version and digest; the engine handles its unfinished replies. A replica that does not
acknowledge is out. Replicas that are out are sent later updates too, and serve again once they have
acknowledged one.

Left out: priorities among requests, and prefixes shared by different prompts.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from strop.engine.admission import Admission, Ticket
from strop.engine.contract import (
    Completion,
    Engine,
    GenerationRequest,
    ReplyScore,
    WeightReceipt,
    WeightUpdate,
    closed,
)
from strop.errors import ConfigError, EngineError, EngineLost, StropError, WeightMismatch
from strop.hardware.busy_clock import BusyClock
from strop.rollout import IntArray

_CLOSE_LIMIT_S = 10.0
_MIN_RUNNING = 256

Answer = TypeVar("Answer", Completion, ReplyScore)


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLimits:
    """Bounds of a router."""

    max_running: int = _MIN_RUNNING
    """Requests at a replica at the same time; the others wait at the router."""
    max_group_lead: int = 16
    """A group stays together while its replica is at most so many of its requests ahead of the least
    loaded one. A group that waited together may exceed `max_running` by as many."""
    reply_limit_s: float = 3600.0
    """A replica with a request that takes longer counts as hung."""
    update_limit_s: float = 600.0
    """Time for acknowledging an update, including the replies that are finished first."""
    max_failures_in_a_row: int = 3
    """Failed requests of one replica, each of which another replica answered, before it is taken out."""

    @classmethod
    def for_rows(cls, num_rows: int) -> RouterLimits:
        """Return limits for replicas that decode `num_rows` replies at once; as many wait there."""
        return cls(max_running=max(2 * num_rows, _MIN_RUNNING))


class ReplicaCause(StrEnum):
    """Why a replica left or came back."""

    LOST = "replica_lost"
    """It died or fell silent."""
    HUNG = "replica_hung"
    """It runs, and a request or an update took longer than its limit."""
    FAILING = "replica_failing"
    """It failed several requests that another replica answered."""
    STALE = "replica_stale"
    """It answered under another version than the one that it had acknowledged."""
    UNPROVEN = "replica_unproven"
    """It did not acknowledge the version and digest of an update."""
    CANARY = "weight_canary"
    """It acknowledged an update but does not compute with its weights."""
    JOINED = "replica_joined"
    """It was added, and serves after the next update."""
    BACK = "replica_back"
    """It acknowledged an update and serves again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaEvent:
    """A replica was taken out, or came back."""

    replica: str
    cause: ReplicaCause
    detail: str
    """The sentence for a person."""
    num_moved: int = 0
    """Its requests that go to other replicas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLoad:
    """The current load of a router."""

    num_running: int
    num_waiting: int
    num_serving: int
    """Replicas that take requests or are being updated."""
    longest_wait_s: float
    """The longest time that any request has waited for a place since the router was built."""


@dataclass(slots=True, eq=False)
class _Replica:
    """One engine and its requests."""

    index: int
    name: str
    engine: Engine
    is_out: bool = False
    out_because: str = ""
    version: int | None = None
    """The last acknowledged version; None before the first update."""
    num_failures: int = 0
    """In a row."""
    patiences: dict[asyncio.Timeout, float] = field(default_factory=dict)
    """When each running request was sent, in order. All expire when the replica is taken out."""
    watch: asyncio.TimerHandle | None = None
    """Timer of the next check of the oldest request."""
    busy: BusyClock = field(default_factory=BusyClock)


class Router:
    """An `Engine` over several engines. One instance serves one event loop at a time.

    Raises: ConfigError if there is no replica.
    """

    def __init__(
        self,
        replicas: Mapping[str, Engine],
        *,
        limits: RouterLimits | None = None,
        on_event: Callable[[ReplicaEvent], None] | None = None,
    ) -> None:
        if not replicas:
            raise ConfigError(
                "a router over 0 engines",
                allowed="one engine or more",
                next_step="set placement.engines to 1 or more",
            )
        self._limits = limits or RouterLimits()
        self._on_event = on_event or (lambda event: None)
        self._replicas = [_Replica(index, *item) for index, item in enumerate(replicas.items())]
        self._admission = Admission(
            len(replicas),
            max_running=self._limits.max_running,
            max_group_lead=self._limits.max_group_lead,
        )
        self._num_serving = len(replicas)
        self._arrivals = itertools.count()
        self._update_lock = asyncio.Lock()
        self._returning: set[asyncio.Task[bool]] = set()
        self._is_closed = False

    @property
    def load(self) -> RouterLoad:
        """Requests that run and that wait."""
        return RouterLoad(
            num_running=self._admission.num_running,
            num_waiting=self._admission.num_waiting,
            num_serving=self._num_serving,
            longest_wait_s=self._admission.longest_wait_s,
        )

    @property
    def busy(self) -> dict[str, BusyClock]:
        """The clock of each replica by name; it runs while the replica has requests."""
        return {replica.name: replica.busy for replica in self._replicas}

    def add(self, name: str, engine: Engine) -> None:
        """Add an engine, or replace a lost one of the same name; it serves after the next update.

        Raises: ConfigError if an engine of this name serves.
        """
        replica = next((other for other in self._replicas if other.name == name), None)
        if replica is None:
            replica = _Replica(self._admission.add(), name, engine, is_out=True)
            self._replicas.append(replica)
        elif not replica.is_out:
            raise ConfigError(
                f"a second engine named {name}, while the first one serves",
                allowed="a new name, or that of an engine that is out",
                next_step="choose another name",
            )
        replica.engine, replica.version = engine, None
        replica.out_because = "has not acknowledged an update yet"
        self._report(replica, ReplicaCause.JOINED, "serves once it has acknowledged an update")

    # The next two return the coroutine of `_route` instead of awaiting it: a hundred thousand frames less.
    def generate(self, request: GenerationRequest) -> Coroutine[Any, Any, Completion]:
        """Sample one reply. See `Engine.generate`.

        Raises: EngineError also if two replicas in turn did not answer, or none is left.
        """
        cost = len(request.prompt_ids) + request.max_tokens
        return self._route(request.prompt_ids, cost, lambda engine: engine.generate(request))

    def score(
        self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float
    ) -> Coroutine[Any, Any, ReplyScore]:
        """Return the log-probability of each reply token. See `Engine.score` and `generate`."""
        cost = len(prompt_ids) + len(reply_ids)
        return self._route(prompt_ids, cost, lambda engine: engine.score(prompt_ids, reply_ids, temperature))

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights on every replica. See `Engine.update`. Updates are applied one at a time.

        Returns once each replica that served has acknowledged or is out, without waiting for the others.
        Raises: WeightMismatch if none acknowledged the version and digest; then none serves.
        """
        async with self._update_lock:
            self._require_open()
            await self._end_returns()
            serving = [replica for replica in self._replicas if not replica.is_out]
            absent = [replica for replica in self._replicas if replica.is_out]
            # All are closed before the first is updated: none may take a request in between.
            for replica in serving:
                self._admission.set_open(replica.index, False)
            returning = [asyncio.create_task(self._update_one(replica, update)) for replica in absent]
            self._returning.update(returning)
            updates = (self._update_one(replica, update) for replica in serving)
            has_acknowledged = await asyncio.gather(*updates)
            if not any(has_acknowledged) and not any(await asyncio.gather(*returning)):
                raise WeightMismatch(
                    f"no engine acknowledged version {update.version} with digest {update.digest}:"
                    f" {self._list_causes()}",
                    allowed="at least one engine that serves what was published",
                    next_step="read the engines' logs and start the run again; it resumes",
                )
        return WeightReceipt(version=update.version, digest=update.digest)

    async def score_each(
        self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float
    ) -> dict[str, ReplyScore]:
        """Return the score of each serving replica, by its name; a replica that cannot score is taken out.

        Raises: EngineError if none is left.
        """
        self._require_open()
        serving = [replica for replica in self._replicas if not replica.is_out]

        async def ask(replica: _Replica) -> ReplyScore | None:
            try:
                return await self._ask(
                    replica, lambda engine: engine.score(prompt_ids, reply_ids, temperature)
                )
            except WeightMismatch:
                raise
            except EngineError as error:
                if not replica.is_out:
                    self._take_out(replica, ReplicaCause.UNPROVEN, str(error))
                return None

        scores = await asyncio.gather(*(ask(replica) for replica in serving))
        pairs = zip(serving, scores, strict=True)
        by_name = {replica.name: score for replica, score in pairs if score is not None}
        if not by_name:
            raise self._none_left()
        return by_name

    def report_to(self, on_event: Callable[[ReplicaEvent], None]) -> None:
        """Set the callback for replicas that leave or come back."""
        self._on_event = on_event

    def condemn(self, name: str, detail: str, cause: ReplicaCause = ReplicaCause.CANARY) -> None:
        """Take out a replica that is lost or has wrong weights, until it acknowledges a later update."""
        for replica in self._replicas:
            if replica.name == name:
                self._take_out(replica, cause, detail)

    def serves(self, name: str) -> bool:
        """Whether a replica of this name takes requests."""
        return any(replica.name == name and not replica.is_out for replica in self._replicas)

    async def close(self) -> None:
        """Close every engine; waiting requests get an EngineError, and later ones too."""
        self._is_closed = True
        await self._end_returns()
        for replica in self._replicas:
            self._take_out(replica, None, "closed")

        async def close_one(replica: _Replica) -> None:
            async with asyncio.timeout(_CLOSE_LIMIT_S):
                await replica.engine.close()

        # An engine that cannot be closed must not keep the others open.
        await asyncio.gather(*(close_one(replica) for replica in self._replicas), return_exceptions=True)

    async def _route(
        self, prompt_ids: IntArray, cost_tokens: int, ask: Callable[[Engine], Awaitable[Answer]]
    ) -> Answer:
        """Have a request answered by one replica, or by a second one where the first did not."""
        self._require_open()
        ticket = Ticket(
            arrival=next(self._arrivals),
            # Hashed, so that long prompts are not held twice.
            key=hash(prompt_ids.tobytes()),
            cost_tokens=cost_tokens,
            arrived_at=asyncio.get_running_loop().time(),
        )
        first: _Replica | None = None
        failures: list[str] = []
        while True:
            if not self._num_serving:
                raise self._none_left()
            replica = self._replicas[await self._admission.enter(ticket)]
            try:
                answer = await self._ask(replica, ask)
            except WeightMismatch:
                raise
            except EngineError as error:
                failures.append(f"{replica.name}: {error}")
                if first is not None:
                    raise EngineError(
                        f"two engines in turn did not answer a request: {'; '.join(failures)}",
                        allowed="an answer from the first or the second",
                        next_step="read the engines' logs; the rollout is masked",
                    ) from error
                if not replica.is_out and self._num_serving == 1:
                    raise
                first, ticket.avoid = replica, replica.index
                continue
            finally:
                self._admission.leave(replica.index, ticket)
            replica.num_failures = 0
            if first is not None and first is not replica and not first.is_out:
                # The replica is at fault: another one answered the same request.
                first.num_failures += 1
                if first.num_failures >= self._limits.max_failures_in_a_row:
                    detail = (
                        f"failed {first.num_failures} requests that others answered; the last: {failures[0]}"
                    )
                    self._take_out(first, ReplicaCause.FAILING, detail)
            return answer

    async def _ask(self, replica: _Replica, ask: Callable[[Engine], Awaitable[Answer]]) -> Answer:
        """Ask one replica, until it answers, fails, or is taken out."""
        admitted_version = replica.version
        patience = asyncio.timeout(None)
        try:
            async with patience:
                replica.patiences[patience] = asyncio.get_running_loop().time()
                if replica.watch is None:
                    self._watch(replica)
                try:
                    with replica.busy.running():
                        answer = await ask(replica.engine)
                finally:
                    replica.patiences.pop(patience, None)
        except EngineLost as error:
            self._take_out(replica, ReplicaCause.LOST, str(error))
            raise
        except TimeoutError as error:
            if not patience.expired():
                raise
            raise EngineError(replica.out_because) from error
        if admitted_version is not None and answer.policy_version not in (admitted_version, replica.version):
            detail = (
                f"a reply of version {answer.policy_version} came where {replica.version} was acknowledged"
            )
            self._take_out(replica, ReplicaCause.STALE, detail)
            raise EngineError(detail)
        return answer

    def _watch(self, replica: _Replica) -> None:
        """Take out a replica whose oldest request takes too long, or check again when it could.

        One timer for all requests: a timer for each would cost more than sending it.
        """
        replica.watch = None
        oldest = next(iter(replica.patiences.values()), None)
        if oldest is None:
            return
        loop = asyncio.get_running_loop()
        due = oldest + self._limits.reply_limit_s
        if due > loop.time():
            replica.watch = loop.call_at(due, self._watch, replica)
            return
        detail = f"a request was not answered within {self._limits.reply_limit_s:g} s"
        self._take_out(replica, ReplicaCause.HUNG, detail)

    async def _update_one(self, replica: _Replica, update: WeightUpdate) -> bool:
        """Update one replica; put it in service if it acknowledges, and out of it otherwise."""
        engine = replica.engine
        try:
            async with asyncio.timeout(self._limits.update_limit_s):
                receipt = await engine.update(update)
        except TimeoutError:
            detail = f"version {update.version} was not acknowledged within {self._limits.update_limit_s:g} s"
            self._take_out(replica, ReplicaCause.HUNG, detail)
        except EngineLost as error:
            self._take_out(replica, ReplicaCause.LOST, str(error))
        except StropError as error:
            self._take_out(replica, ReplicaCause.UNPROVEN, str(error))
        except asyncio.CancelledError:
            self._take_out(replica, ReplicaCause.UNPROVEN, f"the update to {update.version} was interrupted")
            raise
        else:
            if replica.engine is not engine:
                return False  # Another engine has taken its name, and has acknowledged nothing.
            if (receipt.version, receipt.digest) == (update.version, update.digest):
                self._put_in(replica, update.version)
                return True
            detail = f"acknowledged version {receipt.version} with digest {receipt.digest}"
            detail += f" instead of version {update.version} with digest {update.digest}"
            self._take_out(replica, ReplicaCause.UNPROVEN, detail)
        return False

    def _put_in(self, replica: _Replica, version: int) -> None:
        """Open a replica that serves a version."""
        was_out = replica.is_out
        self._num_serving += was_out
        replica.is_out, replica.out_because = False, ""
        replica.version, replica.num_failures = version, 0
        if was_out:
            self._report(replica, ReplicaCause.BACK, f"serves version {version}")
        self._admission.set_open(replica.index, True)

    def _take_out(self, replica: _Replica, cause: ReplicaCause | None, detail: str) -> None:
        """Close a replica, and expire its requests. A replica leaves once, with one event."""
        was_out = replica.is_out
        self._num_serving -= not was_out
        replica.is_out = True
        replica.out_because = detail if cause is None else f"{cause}: {detail}"
        self._admission.set_open(replica.index, False)
        now = asyncio.get_running_loop().time() if replica.patiences else 0.0
        for patience in replica.patiences:
            if not patience.expired():
                patience.reschedule(now)
        num_moved, replica.patiences = len(replica.patiences), {}
        if cause is not None and not was_out:
            self._report(replica, cause, detail, num_moved)
        if not self._num_serving:
            self._admission.refuse(self._none_left())

    def _report(self, replica: _Replica, cause: ReplicaCause, detail: str, num_moved: int = 0) -> None:
        self._on_event(ReplicaEvent(replica=replica.name, cause=cause, detail=detail, num_moved=num_moved))

    async def _end_returns(self) -> None:
        """Stop waiting for replicas that are out: they would acknowledge an outdated version."""
        tasks, self._returning = self._returning, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _require_open(self) -> None:
        if self._is_closed:
            raise self._none_left()

    def _none_left(self) -> EngineError:
        if self._is_closed:
            return closed()
        return EngineError(
            f"none of {len(self._replicas)} engines is left: {self._list_causes()}",
            allowed="at least one engine that answers",
            next_step="read the engines' logs, mend the cause and start the run again; it resumes",
        )

    def _list_causes(self) -> str:
        return "; ".join(
            f"{replica.name}: {replica.out_because}" for replica in self._replicas if replica.is_out
        )
