"""Notices for the user, from deep inside a read to the listener of the context.

A command listens to everything that it does; a run records the notices as its events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]
_listener: ContextVar[Listener] = ContextVar(
    "listener of notices", default=logging.getLogger(__name__).warning
)


def tell(notice: str) -> None:
    """Pass a notice to the listener of this context; without one, log it as a warning."""
    _listener.get()(notice)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Pass every distinct notice of the block to a listener, instead of to that of an enclosing block."""
    passed: set[str] = set()

    def pass_once(notice: str) -> None:
        if notice not in passed:
            passed.add(notice)
            listener(notice)

    token = _listener.set(pass_once)
    try:
        yield
    finally:
        _listener.reset(token)
