"""Servers of a run are found by name where they were handed over, and their keys stand in files alone."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from strop.io.endpoints import (
    ENDPOINTS_VARIABLE,
    Endpoint,
    find_endpoint,
    hand_over,
    list_endpoints,
    withdraw,
    write_secret,
)

JUDGE = Endpoint(url="http://10.0.0.1:1/v1", key="key-of-the-judge")
SANDBOXES = Endpoint(url="http://10.0.0.1:2", key="key-of-the-sandboxes")


@pytest.fixture(autouse=True)
def no_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set first: what a test sets itself is taken back too.
    monkeypatch.setenv(ENDPOINTS_VARIABLE, "")
    monkeypatch.delenv(ENDPOINTS_VARIABLE)


def test_without_a_hand_over_there_is_none() -> None:
    assert list_endpoints() == {}
    assert find_endpoint("judge") is None


def test_servers_are_found_by_name_here_and_in_processes_that_are_started(tmp_path: Path) -> None:
    folder = tmp_path / "roles"
    hand_over(folder, {"judge org/a": JUDGE})
    hand_over(folder, {"sandboxes": SANDBOXES})
    assert find_endpoint("judge org/a") == JUDGE
    assert find_endpoint("judge org/b") is None
    program = (
        "from strop.io.endpoints import find_endpoint as f; print(f('sandboxes').url, f('judge org/a').key)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == [SANDBOXES.url, JUDGE.key]


def test_another_machine_is_handed_what_one_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand_over(tmp_path / "run", {"judge": JUDGE, "sandboxes": SANDBOXES})
    sent = pickle.loads(pickle.dumps(list_endpoints()))
    monkeypatch.setenv(ENDPOINTS_VARIABLE, "/nowhere")
    assert list_endpoints() == {}
    folder = tmp_path / "worker" / "keys"
    for _ in range(2):
        hand_over(folder, sent)
    assert (find_endpoint("judge"), find_endpoint("sandboxes")) == (JUDGE, SANDBOXES)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_server_that_ends_leaves_the_others(tmp_path: Path) -> None:
    hand_over(tmp_path, {"judge": JUDGE, "sandboxes": SANDBOXES})
    withdraw(tmp_path, ["judge"])
    assert (find_endpoint("judge"), find_endpoint("sandboxes")) == (None, SANDBOXES)
    for _ in range(2):
        withdraw(tmp_path, ["sandboxes"])
    assert list(tmp_path.iterdir()) == []
    assert ENDPOINTS_VARIABLE not in os.environ


def test_what_another_run_handed_over_stays(tmp_path: Path) -> None:
    hand_over(tmp_path / "other", {"judge": JUDGE})
    withdraw(tmp_path / "ours", ["judge"])
    assert find_endpoint("judge") == JUDGE


def test_a_key_stands_in_files_alone(tmp_path: Path) -> None:
    hand_over(tmp_path, {"judge": JUDGE})
    shown = [
        repr(JUDGE),
        str(list_endpoints()),
        *os.environ.values(),
        *(path.name for path in tmp_path.iterdir()),
    ]
    assert not any(JUDGE.key in text for text in shown)


def test_a_secret_never_replaces_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("open")
    with pytest.raises(FileExistsError):
        write_secret(tmp_path / "key", "secret")
    assert (tmp_path / "key").read_text() == "open"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_file_that_is_no_endpoint_is_none(tmp_path: Path, content: str) -> None:
    hand_over(tmp_path, {"judge": JUDGE})
    next(tmp_path.iterdir()).write_text(content)
    assert find_endpoint("judge") is None
