from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.hardware import describe_machine
from strop.hardware.calibrate import (
    CPU_EFFICIENCY,
    GPU_EFFICIENCY,
    Efficiency,
    read_efficiency,
    write_efficiency,
)


def test_what_was_measured_here_is_read_again(tmp_path: Path) -> None:
    assert read_efficiency(tmp_path / "absent") is None
    mine = replace(CPU_EFFICIENCY, cpu_name=describe_machine().cpu_name, is_measured=True)
    path = write_efficiency(mine, tmp_path / "cache")
    assert path == tmp_path / "cache" / "efficiency.json"
    assert read_efficiency(tmp_path / "cache") == mine
    # Another machine's, on a home directory that both share.
    write_efficiency(replace(mine, cpu_name="abacus"), tmp_path / "cache")
    assert read_efficiency(tmp_path / "cache") is None
    path.write_text("{}")
    assert read_efficiency(tmp_path / "cache") is None


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StoreError, match="cache"):
        write_efficiency(CPU_EFFICIENCY, tmp_path / "cache")


@pytest.mark.parametrize("known", [CPU_EFFICIENCY, GPU_EFFICIENCY])
def test_the_defaults_name_their_measurement_and_are_shares(known: Efficiency) -> None:
    assert known.source
    assert not known.is_measured
    assert 0 < known.learn_frac <= 1
    assert 0 < known.decode_frac <= 1
