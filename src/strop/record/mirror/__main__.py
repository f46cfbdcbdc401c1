"""`python -m strop.record.mirror ORDER`: mirror one run; started by the process that trains it."""

from __future__ import annotations

import os
import signal
import sys

from strop.record.mirror.layout import MirrorOrder
from strop.record.mirror.uploader import UPLOAD_SETTINGS, Uploader
from strop.store.opening import open_store

# These signals are for the trainer, which then asks the uploader to flush.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(words: list[str]) -> int:
    """Mirror a run until its trainer has ended."""
    parent = os.getppid()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    order = MirrorOrder.from_json(words[0])
    store = open_store(order.uri, UPLOAD_SETTINGS)
    # Linux kills it with its parent; elsewhere it has to check.
    return Uploader(order, store).run(is_orphan=lambda: os.getppid() != parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
