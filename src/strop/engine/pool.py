"""Several engines as one: each request goes to the least loaded replica, and to another if that one fails.

Load is counted in tokens that may still be fed or sampled (prompt and reply limit). Requests of one prompt
that are asked together go to one replica, which prefills the prompt once, as long as that replica is not far
ahead of the others. Engines queue what they have no room for.

A replica that is lost, answers under an outdated version, or does not acknowledge an update is out until it
acknowledges a later one; its requests go to another replica once: they carry their seeds, so nothing is lost.
A weight update goes to all at once, and a replica takes no requests from then until it has acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from strop.engine.contract import (
    Completion,
    Engine,
    GenerationRequest,
    ReplyScore,
    WeightReceipt,
    WeightUpdate,
    closed,
)
from strop.errors import EngineError, EngineLost, StropError, WeightMismatch
from strop.hardware.busy_clock import BusyClock
from strop.rollout import IntArray

_MAX_GROUP_LEAD = 16
"""A group stays together while its replica is at most so many of its requests ahead of the least loaded."""
UPDATE_LIMIT_S = 600.0
"""Time for acknowledging an update, including the replies that are finished first."""

Answer = TypeVar("Answer", Completion, ReplyScore)


class ReplicaCause(StrEnum):
    """Why a replica left or came back."""

    LOST = "replica_lost"
    """It died or fell silent."""
    STALE = "replica_stale"
    """It answered under another version than the one that it had acknowledged."""
    UNPROVEN = "replica_unproven"
    """It did not acknowledge the version and digest of an update."""
    CANARY = "weight_canary"
    """It acknowledged an update but does not compute with its weights."""
    BACK = "replica_back"
    """It acknowledged an update and serves again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaEvent:
    """A replica was taken out, or came back."""

    replica: str
    cause: ReplicaCause
    detail: str
    """The sentence for a person."""


@dataclass(slots=True, eq=False)
class _Replica:
    """One engine and its requests."""

    name: str
    engine: Engine
    out_because: str | None = None
    """None: it serves."""
    is_updating: bool = False
    version: int | None = None
    """The last acknowledged version; None before the first update."""
    load_tokens: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is taken out: its requests go on elsewhere."""
    busy: BusyClock = field(default_factory=BusyClock)


class EnginePool:
    """An `Engine` over several engines. One instance serves one event loop at a time."""

    def __init__(self, replicas: Mapping[str, Engine]) -> None:
        assert replicas, "a pool has an engine"
        self._replicas = [_Replica(name, engine) for name, engine in replicas.items()]
        self._homes: dict[int, list[_Replica]] = {}
        """By prompt the replicas of its requests, in their order; the last one takes the next request."""
        self._on_event: Callable[[ReplicaEvent], None] = lambda event: None
        self._update_lock = asyncio.Lock()
        self._returning: set[asyncio.Task[bool]] = set()
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def busy(self) -> dict[str, BusyClock]:
        """The clock of each replica by name; it runs while the replica has requests."""
        return {replica.name: replica.busy for replica in self._replicas}

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply. See `Engine.generate`.

        Raises: EngineError also if two replicas in turn did not answer, or none is left.
        """
        cost = len(request.prompt_ids) + request.max_tokens
        return await self._route(request.prompt_ids, cost, lambda engine: engine.generate(request))

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the log-probability of each reply token. See `Engine.score` and `generate`."""
        cost = len(prompt_ids) + len(reply_ids)
        return await self._route(
            prompt_ids, cost, lambda engine: engine.score(prompt_ids, reply_ids, temperature)
        )

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights on every replica. See `Engine.update`. Updates are applied one at a time.

        Returns once each replica that served has acknowledged or is out, without waiting for the others.
        Raises: WeightMismatch if none acknowledged the version and digest; then none serves.
        """
        async with self._update_lock:
            self._require_open()
            await self._end_returns()
            serving = [replica for replica in self._replicas if replica.out_because is None]
            # All are closed before the first is updated: none may take a request in between.
            for replica in serving:
                replica.is_updating = True
            absent = [replica for replica in self._replicas if replica.out_because is not None]
            returning = [asyncio.create_task(self._update_one(replica, update)) for replica in absent]
            self._returning.update(returning)
            has_acknowledged = await asyncio.gather(*(self._update_one(one, update) for one in serving))
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
        scores: dict[str, ReplyScore] = {}

        async def ask(replica: _Replica) -> None:
            try:
                scores[replica.name] = await self._ask(
                    replica, lambda engine: engine.score(prompt_ids, reply_ids, temperature)
                )
            except WeightMismatch:
                raise
            except EngineError as error:
                self._take_out(replica, ReplicaCause.UNPROVEN, str(error))

        await asyncio.gather(*(ask(replica) for replica in self._replicas if replica.out_because is None))
        if not scores:
            raise self._none_left()
        return scores

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
        return any(replica.name == name and replica.out_because is None for replica in self._replicas)

    async def close(self) -> None:
        """Close every engine; waiting requests get an EngineError, and later ones too."""
        self._is_closed = True
        await self._end_returns()
        for replica in self._replicas:
            self._take_out(replica, None, "closed")
        # An engine that cannot be closed must not keep the others open.
        await asyncio.gather(*(one.engine.close() for one in self._replicas), return_exceptions=True)

    async def _route(
        self, prompt_ids: IntArray, cost_tokens: int, ask: Callable[[Engine], Awaitable[Answer]]
    ) -> Answer:
        """Have a request answered by one replica, or by a second one where the first did not."""
        # Hashed, so that long prompts are not held twice.
        key = hash(prompt_ids.tobytes())
        first: _Replica | None = None
        failures: list[str] = []
        while True:
            self._require_open()
            replica = await self._choose(key, cost_tokens, first)
            replica.load_tokens += cost_tokens
            homes = self._homes.setdefault(key, [])
            homes.append(replica)
            try:
                return await self._ask(replica, ask)
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
                if [other for other in self._replicas if other.out_because is None] == [replica]:
                    raise
                first = replica
            finally:
                replica.load_tokens -= cost_tokens
                homes.remove(replica)
                if not homes:
                    self._homes.pop(key, None)

    async def _choose(self, key: int, cost_tokens: int, avoid: _Replica | None) -> _Replica:
        """Return the home of the prompt's other requests, else the least loaded; wait while all update."""
        while True:
            serving = [replica for replica in self._replicas if replica.out_because is None]
            if not serving:
                raise self._none_left()
            ready = [replica for replica in serving if not replica.is_updating]
            if ready:
                break
            self._changed.clear()
            await self._changed.wait()
        # The replica that failed is better than none.
        ready = [replica for replica in ready if replica is not avoid] or ready
        least = min(ready, key=lambda replica: replica.load_tokens)
        home = (self._homes.get(key) or [least])[-1]
        lead_tokens = home.load_tokens - least.load_tokens
        return home if home in ready and lead_tokens <= _MAX_GROUP_LEAD * cost_tokens else least

    async def _ask(self, replica: _Replica, ask: Callable[[Engine], Awaitable[Answer]]) -> Answer:
        """Ask one replica, until it answers, fails, or is taken out."""
        admitted_version = replica.version
        with replica.busy.running():
            asking = asyncio.ensure_future(ask(replica.engine))
            gone = asyncio.ensure_future(replica.gone.wait())
            try:
                await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
                if replica.out_because is not None:
                    raise EngineError(replica.out_because)
                answer = await asking
            except EngineLost as error:
                self._take_out(replica, ReplicaCause.LOST, str(error))
                raise
            finally:
                asking.cancel()
                gone.cancel()
        if admitted_version is not None and answer.policy_version not in (admitted_version, replica.version):
            detail = (
                f"a reply of version {answer.policy_version} came where {replica.version} was acknowledged"
            )
            self._take_out(replica, ReplicaCause.STALE, detail)
            raise EngineError(detail)
        return answer

    async def _update_one(self, replica: _Replica, update: WeightUpdate) -> bool:
        """Update one replica; put it in service if it acknowledges, and out of it otherwise."""
        cause, detail = ReplicaCause.UNPROVEN, ""
        try:
            async with asyncio.timeout(UPDATE_LIMIT_S):
                receipt = await replica.engine.update(update)
            if (receipt.version, receipt.digest) != (update.version, update.digest):
                detail = f"acknowledged version {receipt.version} with digest {receipt.digest}"
                detail += f" instead of version {update.version} with digest {update.digest}"
        except TimeoutError:
            detail = f"version {update.version} was not acknowledged within {UPDATE_LIMIT_S:g} s"
        except EngineLost as error:
            cause, detail = ReplicaCause.LOST, str(error)
        except StropError as error:
            detail = str(error)
        except asyncio.CancelledError:
            self._take_out(replica, cause, f"the update to {update.version} was interrupted")
            raise
        if detail:
            self._take_out(replica, cause, detail)
            return False
        was_out, replica.out_because = replica.out_because is not None, None
        replica.version, replica.is_updating = update.version, False
        replica.gone.clear()
        self._changed.set()
        if was_out:
            self._report(replica, ReplicaCause.BACK, f"serves version {update.version}")
        return True

    def _take_out(self, replica: _Replica, cause: ReplicaCause | None, detail: str) -> None:
        """Close a replica, and move its requests. A replica leaves once, with one event."""
        was_out = replica.out_because is not None
        replica.out_because = detail if cause is None else f"{cause}: {detail}"
        replica.gone.set()
        self._changed.set()
        if cause is not None and not was_out:
            self._report(replica, cause, detail)

    def _report(self, replica: _Replica, cause: ReplicaCause, detail: str) -> None:
        self._on_event(ReplicaEvent(replica=replica.name, cause=cause, detail=detail))

    async def _end_returns(self) -> None:
        """Stop waiting for replicas that are out: they would acknowledge an outdated version."""
        tasks, self._returning = self._returning, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _require_open(self) -> None:
        if self._is_closed:
            raise closed()

    def _none_left(self) -> EngineError:
        if self._is_closed:
            return closed()
        return EngineError(
            f"none of {len(self._replicas)} engines is left: {self._list_causes()}",
            allowed="at least one engine that answers",
            next_step="read the engines' logs, mend the cause and start the run again; it resumes",
        )

    def _list_causes(self) -> str:
        causes = [(replica.name, replica.out_because) for replica in self._replicas]
        return "; ".join(f"{name}: {cause}" for name, cause in causes if cause is not None)
