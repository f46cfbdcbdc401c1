"""A stop that comes after the entry's handler and before the agent's."""

from __future__ import annotations

import os
import signal
import threading
import time

from strop.launch.sagemaker.entry import _repeat_early_stop
from strop.launch.sagemaker.node import StopFlag
from tests.launch.sagemaker.test_contract import wait_until


def test_a_stop_before_the_agents_handlers_is_repeated_once_they_are_up_however_late() -> None:
    """On a busy machine they were later than the half second after which it was repeated, and it was lost."""
    before = signal.getsignal(signal.SIGTERM)
    stop, released, heard = StopFlag(), threading.Event(), list[int]()
    try:
        stop.install()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_asked
        repeater = threading.Thread(target=_repeat_early_stop, args=(stop, released))
        repeater.start()
        time.sleep(1.0)
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        repeater.join()
        wait_until(lambda: heard == [signal.SIGTERM], "the stop was lost")
    finally:
        signal.signal(signal.SIGTERM, before)
