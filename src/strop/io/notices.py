"""Notices for the user, from deep in a read to the listener of the context.

A model that another source stands in for, or a bucket that another tool filled, is found deep in a read that
returns a path. A command listens for all that it does; a run, which keeps its notices as events, for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]
_listener: ContextVar[Listener | None] = ContextVar("listener of notices", default=None)


def tell(notice: str) -> None:
    """Give a notice to the listener of this context; without one, log it as a warning."""
    listener = _listener.get()
    if listener is None:
        logging.getLogger(__name__).warning(notice)
    else:
        listener(notice)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Hand every notice of the block to a listener, once each; a listener of a block around it hears none."""
    heard: set[str] = set()

    def hear(notice: str) -> None:
        if notice not in heard:
            heard.add(notice)
            listener(notice)

    token = _listener.set(hear)
    try:
        yield
    finally:
        _listener.reset(token)
