"""Commands that are over in a moment: `@brief` saves them the search for garbage, `lasting` returns it."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")


def brief(command: Callable[P, None]) -> Callable[P, None]:
    """Run a command without Python's cyclic garbage collector: what it makes goes with its process.

    Of the time of a plan, a tenth was the walk over modules and vocabulary, of which nothing is garbage.
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        # Also at the interpreter's end, which walks over everything twice.
        atexit.unregister(gc.freeze)
        atexit.register(gc.freeze)
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            command(*args, **kwargs)
        finally:
            if was_enabled:
                gc.enable()

    return run


@contextmanager
def lasting() -> Iterator[None]:
    """Give a brief command its collector back while it waits: hours of garbage are some."""
    was_enabled = gc.isenabled()
    gc.enable()
    try:
        yield
    finally:
        if not was_enabled:
            gc.disable()
