"""Two parts at once: one output after the other, and the exit code of what failed."""

from __future__ import annotations

import sys

import pytest

from tools.test_parts import has_room, run_beside

WAITS = "import time; print('waits', flush=True); time.sleep(600)"


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_the_second_is_shown_after_the_first(capfd: pytest.CaptureFixture[str]) -> None:
    code = run_beside(program("print('fast')"), program("print('slow'); raise SystemExit(3)"))
    assert (code, capfd.readouterr().out.split()) == (3, ["fast", "slow"])


def test_a_failure_of_the_first_ends_the_second_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_beside(program("raise SystemExit(2)"), program(WAITS)) == 2
    assert "waits" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("cores", "gigabytes", "has_it"), [(2, 8, True), (1, 8, False), (2, 4, False), (2, None, False)]
)
def test_both_run_at_once_where_there_is_room(cores: int, gigabytes: int | None, has_it: bool) -> None:
    assert has_room(cores, None if gigabytes is None else gigabytes << 30) is has_it
