"""All sandboxes of the controller. Each change of a sandbox is journaled, counted and logged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from typing import Any

from strop.errors import StoreError, describe_error
from strop.runtime.contract import FailureKind, State
from strop.runtime.journal import Journal
from strop.runtime.session import Session

_log = logging.getLogger("strop.runtime")


class Registry:
    """Sandboxes by name and by id. Ended ones are kept for a while, so that clients can read their end."""

    def __init__(self, journal: Journal, write_event: Callable[[dict[str, Any]], None]) -> None:
        """`write_event` writes a line of the event log."""
        self.journal = journal
        self.by_name: dict[tuple[str, str], Session] = {}
        """The newest sandbox of each owner and session id."""
        self.by_runtime: dict[str, Session] = {}
        self.alive: dict[str, Session] = {}
        """The sandboxes that have not ended, by runtime id."""
        self.counts: defaultdict[str, float] = defaultdict(float)
        """Counters of events; `routes` has their names."""
        self.on_end: Callable[[Session, bool], None] = lambda _session, _is_gone: None
        """Called once for each sandbox that ends, with whether it is gone from its node."""
        self._write_event = write_event
        self._ended: deque[Session] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, session: Session) -> None:
        """Add a sandbox; it replaces an older one of its name."""
        self.by_name[session.owner, session.session_id] = session
        self.by_runtime[session.runtime_id] = session
        if session.is_alive:
            self.alive[session.runtime_id] = session
        else:
            self._ended.append(session)

    def enter(self, session: Session, state: State) -> None:
        """Change the state of a sandbox."""
        if session.state is state:
            return
        before = session.state
        session.enter(state)
        self.counts[f"entered_{state.value}"] += 1
        if state is State.READY and "ready" not in session.timeline:
            session.timeline["ready"] = time.time()
            self.counts["ready_after_s"] += session.timeline["ready"] - session.timeline["queued"]
        self.log_session(session, "state", before=before.value, state=state.value)
        self.keep(session)

    def end(
        self,
        session: Session,
        state: State,
        kind: FailureKind | None = None,
        cause: str = "",
        *,
        is_gone: bool = False,
    ) -> None:
        """End a sandbox. No-op if it has ended."""
        if not session.is_alive:
            return
        del self.alive[session.runtime_id]
        self._ended.append(session)
        session.failure_kind, session.cause = kind, cause
        session.ended_at = time.monotonic()
        session.timeline["stopped"] = time.time()
        if kind is not None:
            self.counts[f"failed_{kind.value}"] += 1
        self.enter(session, state)
        self.on_end(session, is_gone)

    def forget(self, *, older_than_s: float, max_kept: int) -> None:
        """Drop sandboxes that ended long ago, and the oldest beyond `max_kept`."""
        now = time.monotonic()
        while self._ended and (now - self._ended[0].ended_at > older_than_s or len(self._ended) > max_kept):
            session = self._ended.popleft()
            del self.by_runtime[session.runtime_id]
            if self.by_name.get((session.owner, session.session_id)) is session:
                del self.by_name[session.owner, session.session_id]
            self.journal.forget(session.runtime_id)

    async def write(self, session: Session) -> None:
        """Write the state of a sandbox to disk. Raises: StoreError."""
        await self.journal.put(session.runtime_id, session.to_json())

    def keep(self, session: Session) -> None:
        """Write the state of a sandbox to disk in the background."""
        self.spawn(self.write(session))

    def log_session(self, session: Session, event: str, **facts: Any) -> None:
        """Write a line about a sandbox into the event log."""
        kind = session.failure_kind.value if session.failure_kind else None
        self.log(
            event,
            runtime_id=session.runtime_id,
            session_id=session.session_id,
            owner=session.owner,
            node=session.node_id,
            failure_kind=kind,
            cause=session.cause,
            **facts,
        )

    def log(self, event: str, **facts: Any) -> None:
        """Write a line into the event log."""
        self._write_event({"at": time.time(), "event": event, **facts})

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the background, until `close` at the latest; its errors are logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    async def close(self) -> None:
        """Cancel the background tasks and close the journal. Sandboxes stay at their nodes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.journal.close()

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, StoreError):
            self.counts["journal_errors"] += 1
            _log.error("%s", error)
        elif error is not None:
            self.counts["bugs"] += 1
            _log.error("a task failed: %s", describe_error(error), exc_info=error)
