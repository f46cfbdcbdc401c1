"""Several engines as one: each request goes to the least loaded replica, and to another if that one fails.

Load is counted in tokens that may still be fed or sampled (prompt and reply limit). Requests of one prompt
go to one replica, which prefills the prompt once, as long as that replica is not far ahead of the others.
Engines queue what they have no room for.

A replica that is lost or does not acknowledge an update is out until it acknowledges a later one; its
requests go to another replica once: they carry their seeds, so nothing is lost. A weight update goes to all
at once, and a replica takes no requests from then until it has acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

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
RETURN_LIMIT_S = 5.0
"""Time that replicas that are out have longer than those that serve."""
Answer = TypeVar("Answer", Completion, ReplyScore)


class ReplicaCause(StrEnum):
    """Why a replica left or came back."""

    LOST = "replica_lost"
    """It died or fell silent."""
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
    load_tokens: int = 0
    asking: set[asyncio.Task[Any]] = field(default_factory=set)
    busy: BusyClock = field(default_factory=BusyClock)


class EnginePool:
    """An `Engine` over several engines. One instance serves one event loop at a time."""

    def __init__(self, replicas: Mapping[str, Engine]) -> None:
        self._replicas = {name: _Replica(name, engine) for name, engine in replicas.items()}
        self._homes: dict[int, _Replica] = {}
        """The replica of each prompt's last request since the last update."""
        self._on_event: Callable[[ReplicaEvent], None] = lambda event: None
        self._update_lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def busy(self) -> dict[str, BusyClock]:
        """The clock of each replica by name; it runs while the replica has requests."""
        return {name: replica.busy for name, replica in self._replicas.items()}

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

        Returns once each replica that served has acknowledged or is out.
        Raises: WeightMismatch if none acknowledged the version and digest; then none serves.
        """
        async with self._update_lock:
            if self._is_closed:
                raise closed()
            self._homes.clear()
            serving, absent = self._serving(), [one for one in self._replicas.values() if one.out_because]
            # All are closed before the first is updated: none may take a request in between.
            for replica in serving:
                replica.is_updating = True
            returning = {asyncio.create_task(self._update_one(replica, update)) for replica in absent}
            try:
                await asyncio.gather(*(self._update_one(replica, update) for replica in serving))
                if returning:
                    await asyncio.wait(returning, timeout=RETURN_LIMIT_S)
            finally:
                for task in returning:
                    task.cancel()
            if not self._serving():
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
        scores: dict[str, ReplyScore] = {}

        async def ask(replica: _Replica) -> None:
            try:
                scores[replica.name] = await replica.engine.score(prompt_ids, reply_ids, temperature)
            except WeightMismatch:
                raise
            except EngineError as error:
                is_lost = isinstance(error, EngineLost)
                cause = ReplicaCause.LOST if is_lost else ReplicaCause.UNPROVEN
                self.condemn(replica.name, str(error), cause)

        await asyncio.gather(*map(ask, self._serving()))
        if not scores:
            raise self._none_left()
        return scores

    def report_to(self, on_event: Callable[[ReplicaEvent], None]) -> None:
        """Set the callback for replicas that leave or come back."""
        self._on_event = on_event

    def condemn(self, name: str, detail: str, cause: ReplicaCause = ReplicaCause.CANARY) -> None:
        """Take out a replica, until it acknowledges a later update; its requests go to others."""
        replica = self._replicas[name]
        if replica.out_because is None and not self._is_closed:
            self._tell(replica, cause, detail)
        replica.out_because = f"{cause}: {detail}"
        for task in replica.asking:
            task.cancel()
        self._changed.set()

    def serves(self, name: str) -> bool:
        """Whether a replica of this name takes requests."""
        return self._replicas[name].out_because is None

    async def close(self) -> None:
        """Close every engine; waiting requests get an EngineError, and later ones too."""
        self._is_closed = True
        for name in self._replicas:
            self.condemn(name, "closed")
        # An engine that cannot be closed must not keep the others open.
        closing = [replica.engine.close() for replica in self._replicas.values()]
        await asyncio.gather(*closing, return_exceptions=True)

    async def _route(
        self, prompt_ids: IntArray, cost_tokens: int, ask: Callable[[Engine], Coroutine[Any, Any, Answer]]
    ) -> Answer:
        """Have a request answered by one replica, or by a second one where the first did not."""
        # Hashed, so that long prompts are not held twice.
        key = hash(prompt_ids.tobytes())
        first: _Replica | None = None
        failures: list[str] = []
        while True:
            replica = self._homes[key] = await self._choose(key, cost_tokens, first)
            replica.load_tokens += cost_tokens
            asking = asyncio.create_task(ask(replica.engine))
            replica.asking.add(asking)
            try:
                with replica.busy.running():
                    await asyncio.wait({asking})
                if asking.cancelled():
                    raise EngineError(replica.out_because or "the request was cancelled in the engine")
                return asking.result()
            except WeightMismatch:
                raise
            except EngineError as error:
                if isinstance(error, EngineLost):
                    self.condemn(replica.name, str(error), ReplicaCause.LOST)
                failures.append(f"{replica.name}: {error}")
                if first is not None:
                    raise EngineError(
                        f"two engines in turn did not answer a request: {'; '.join(failures)}",
                        allowed="an answer from the first or the second",
                        next_step="read the engines' logs; the rollout is masked",
                    ) from error
                if self._serving() == [replica]:
                    raise
                first = replica
            finally:
                asking.cancel()
                replica.asking.discard(asking)
                replica.load_tokens -= cost_tokens

    async def _choose(self, key: int, cost_tokens: int, avoid: _Replica | None) -> _Replica:
        """Return the home of the prompt's other requests, else the least loaded; wait while all update."""
        while serving := self._serving():
            ready = [replica for replica in serving if not replica.is_updating]
            if ready:
                # The replica that failed is better than none.
                ready = [replica for replica in ready if replica is not avoid] or ready
                least = min(ready, key=lambda replica: replica.load_tokens)
                home = self._homes.get(key, least)
                lead_tokens = home.load_tokens - least.load_tokens
                return home if home in ready and lead_tokens <= _MAX_GROUP_LEAD * cost_tokens else least
            self._changed.clear()
            await self._changed.wait()
        raise self._none_left()

    async def _update_one(self, replica: _Replica, update: WeightUpdate) -> None:
        """Update one replica; put it in service if it acknowledges, and out of it otherwise."""
        cause, detail = ReplicaCause.UNPROVEN, f"the update to {update.version} was interrupted"
        try:
            async with asyncio.timeout(UPDATE_LIMIT_S):
                receipt = await replica.engine.update(update)
            detail = f"acknowledged version {receipt.version} with digest {receipt.digest} instead of version"
            detail += f" {update.version} with digest {update.digest}"
            if (receipt.version, receipt.digest) == (update.version, update.digest):
                detail = ""
        except TimeoutError:
            detail = f"version {update.version} was not acknowledged within {UPDATE_LIMIT_S:g} s"
        except StropError as error:
            cause = ReplicaCause.LOST if isinstance(error, EngineLost) else cause
            detail = str(error)
        finally:
            replica.is_updating = False
            if detail:
                self.condemn(replica.name, detail, cause)
            else:
                was_out, replica.out_because = replica.out_because is not None, None
                self._changed.set()
                if was_out:
                    self._tell(replica, ReplicaCause.BACK, f"serves version {update.version}")

    def _tell(self, replica: _Replica, cause: ReplicaCause, detail: str) -> None:
        self._on_event(ReplicaEvent(replica=replica.name, cause=cause, detail=detail))

    def _serving(self) -> list[_Replica]:
        return [replica for replica in self._replicas.values() if replica.out_because is None]

    def _none_left(self) -> EngineError:
        if self._is_closed:
            return closed()
        return EngineError(
            f"none of {len(self._replicas)} engines is left: {self._list_causes()}",
            allowed="at least one engine that answers",
            next_step="read the engines' logs, mend the cause and start the run again; it resumes",
        )

    def _list_causes(self) -> str:
        causes = {name: replica.out_because for name, replica in self._replicas.items()}
        return "; ".join(f"{name}: {cause}" for name, cause in causes.items() if cause)
