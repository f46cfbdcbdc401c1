"""Memory and disk while a run goes on, by hand-made sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.record import RunDir
from strop.train.room import DiskWatch, MemoryWatch, is_steady_growth
from tests.fixtures.tiny_disk import tiny_disk

MIB = 1 << 20
# Peak memory (MiB) of 40 steps of recipes/arithmetic.toml, as measured: pools fill up, in jumps.
PLATEAU = (
    *(3417, 4164, 4656, 4660, 4877, 4925, 4926, 5072, 5073, 5074, 5076, 5348, 5349, 5350, 5504, 5558),
    *(5558, 5651, 5655, 5876, *[6116] * 20),
)


def first_alarm(sizes: list[float], bound: int | None = MIB) -> int | None:
    watch = MemoryWatch(bound)
    steps = (step for step, size in enumerate(sizes, start=1) if watch.find_growth(step, size))
    return next(steps, None)


def test_a_leak_is_named_in_step_33_and_a_plateau_never() -> None:
    assert first_alarm([float(size * MIB) for size in PLATEAU]) is None
    leak = [1e9 + step * 2.0 * MIB for step in range(60)]
    # 8 steps of warm-up, then 24 steps and the one before them.
    assert first_alarm(leak) == 33
    # Every other step needs 500 MiB that it gives back.
    noisy = [size + 500 * MIB * (step % 2) for step, size in enumerate(leak)]
    assert first_alarm(noisy) is not None
    # A leak below the bound, and one that nobody asked about.
    assert first_alarm([1e9 + step * 0.9 * MIB for step in range(60)]) is None
    assert first_alarm(leak, None) is None


def test_the_alarm_names_the_rate() -> None:
    watch = MemoryWatch(MIB)
    alarms = [alarm for step in range(33) for alarm in watch.find_growth(step, (100 + 3 * step) * MIB)]
    (alarm,) = alarms
    assert alarm.cause == "memory_growth"
    assert alarm.detail.startswith("resident memory grew by 3.0 MiB in each of the last 24 steps, to 196 MiB")


@pytest.mark.parametrize(
    ("sizes", "is_steady"),
    [
        (range(25), True),
        ([0] * 12 + [100] * 13, False),  # one jump
        ([*range(24), 3], False),  # given back at the end
        ([25 - size for size in range(25)], False),
    ],
)
def test_growth_is_steady_only_where_every_block_grows(sizes: list[int], is_steady: bool) -> None:
    assert is_steady_growth(list(sizes)) == is_steady


def test_a_disk_is_low_before_the_last_checkpoint_that_fits(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk") as disk, RunDir.create(disk, "demo", "", "d", {}) as run:
        # About 1.0 MB are free of 1 MiB.
        assert DiskWatch(run, 700_000).find_low(3) is None
        found = DiskWatch(run, 900_000).find_low(3)
        assert found is not None
        assert (found[0].cause, found[0].step, found[1]) == ("disk_low", 3, True)
        assert "a checkpoint takes 0.9 MB" in found[0].detail
        full = DiskWatch(run, 2_000_000).find_low(3)
        assert full is not None
        assert not full[1]
