"""README's picture is there, small, and made by the script."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.conftest import require_system_part
from tests.fixtures.browser import find_chromium
from tests.fixtures.records import RecordSize, make_record
from tools.picture import HEIGHT, MAX_BYTES, PICTURE, WIDTH, main

ROOT = Path(__file__).parents[2]


def size_of(picture: bytes) -> tuple[int, ...]:
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", picture[16:24])


def test_the_readme_shows_a_small_picture() -> None:
    assert f"]({PICTURE})" in (ROOT / "README.md").read_text()
    picture = (ROOT / PICTURE).read_bytes()
    assert size_of(picture) == (WIDTH, HEIGHT)
    assert len(picture) <= MAX_BYTES


@pytest.mark.slow
def test_a_picture_is_made_of_a_run(tmp_path: Path) -> None:
    require_system_part("chromium", find_chromium() is not None)
    run = make_record(tmp_path, RecordSize(num_steps=20, num_rollouts=8, num_reply_tokens=8))
    assert main([str(run.path), str(tmp_path / "page.png")]) == 0
    assert size_of((tmp_path / "page.png").read_bytes()) == (WIDTH, HEIGHT)
