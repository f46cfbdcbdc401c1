"""Parts of a check that end in every way a part can end."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.gpu.result import PartResult, Setting


def find_device(setting: Setting) -> PartResult:
    result = PartResult()
    result.details = {
        "name": "none",
        "flop_per_s": 3.0,
        "bytes_per_s": 1.0,
        "measured_flop_per_s": 1.0,
        "measured_bytes_per_s": 1.0,
        "source": "measured",
        "memory_bytes": 0,
        "more": "than the peaks",
    }
    return result


def tell_peaks(setting: Setting) -> PartResult:
    assert setting.peaks is not None
    result = PartResult()
    result.measure("peak", setting.peaks.flop_per_s, "FLOP/s")
    return result


def break_down(setting: Setting) -> PartResult:
    raise ValueError("broken on purpose")


def kill_itself(setting: Setting) -> PartResult:
    os.kill(os.getpid(), signal.SIGKILL)
    return PartResult()


def hang(setting: Setting) -> PartResult:
    time.sleep(600.0)
    return PartResult()
