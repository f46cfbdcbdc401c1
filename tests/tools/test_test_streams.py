"""`make test`: streams beside each other, and what fails there once more, alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.test_streams import ROOT, STREAMS, run_streams

SUITE = """
import pathlib
def test_passes(): pass
def test_passes_the_second_time():
    tried = pathlib.Path(__file__).with_name("tried")
    was_tried = tried.exists()
    tried.touch()
    assert was_tried
"""
ALWAYS = "def test_fails(): assert False"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with tests of its own."""
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_one.py").write_text(SUITE)
    (tmp_path / "test_two.py").write_text("def test_passes(): pass")
    return tmp_path


def test_what_fails_beside_others_is_run_alone_and_named(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_streams({"one": ["test_one.py"], "two": ["test_two.py"]}, folder) == 0
    told = capfd.readouterr().out
    assert "one: 1 tests failed and are run again, alone" in told
    assert told.splitlines()[-3:] == [
        "one: passed",
        "two: passed",
        "FAILED beside other streams, passed alone: test_one.py::test_passes_the_second_time",
    ]


def test_what_fails_alone_too_or_cannot_be_run_fails(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts = {"fails": ALWAYS, "lacks": "import no_such_module", "dies": "import os; os._exit(3)"}
    for name, text in texts.items():
        (folder / f"test_{name}.py").write_text(text)
    assert run_streams({name: [f"test_{name}.py"] for name in (*texts, "two")}, folder) == 1
    said = ["fails: exit code 1", "lacks: exit code 2", "dies: exit code 3", "two: passed"]
    assert capfd.readouterr().out.splitlines()[-4:] == said


def test_each_slow_test_is_in_one_stream() -> None:
    apart = [word for name in ("clusters", "jobs", "programs") for word in STREAMS[name][2:]]
    assert all((ROOT / word.removeprefix("--ignore=")).exists() for word in apart)
    ignored = {word.removeprefix("--ignore=") for word in STREAMS["slow"][2:]}
    assert ignored == {word for word in apart if not word.startswith("--")}
