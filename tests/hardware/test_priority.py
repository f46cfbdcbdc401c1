"""Stepping back counts where Linux shares processors among sessions first, and where it does not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.hardware import priority
from strop.hardware.priority import step_back


@pytest.fixture
def leader() -> Iterator[int]:
    """The process id of a session's leader."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in of /proc: other systems and kernels than this one."""
    monkeypatch.setattr(priority, "_PROC", tmp_path)
    return tmp_path


def write_autogroups(proc: Path, own: str, pid: int) -> Path:
    for name, text in (("self", own), (str(pid), "")):
        (proc / name).mkdir()
        (proc / name / "autogroup").write_text(text)
    return proc / str(pid) / "autogroup"


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="sessions are not told apart here")
def test_the_session_steps_back_with_its_process(leader: int) -> None:
    text = Path(f"/proc/{leader}/autogroup").read_text()
    if not text:
        pytest.skip("this session is in no group of its own")
    own = int((Path("/proc/self/autogroup").read_text().split() or ["0"])[-1])
    assert step_back(leader, by=7)
    assert Path(f"/proc/{leader}/autogroup").read_text().split()[-1] == str(min(own + 7, 19))


def test_a_member_of_a_session_does_not_pull_the_others_down() -> None:
    with subprocess.Popen(["sleep", "60"], process_group=0) as process:
        autogroup = Path(f"/proc/{process.pid}/autogroup")
        before = autogroup.read_text() if autogroup.exists() else ""
        assert step_back(process.pid, by=5)
        assert (autogroup.read_text() if autogroup.exists() else "") == before
        assert os.getpriority(os.PRIO_PROCESS, process.pid) > os.getpriority(os.PRIO_PROCESS, 0)
        process.kill()


@pytest.mark.parametrize(
    ("own", "written"), [("", "10"), ("/autogroup-12 nice 3\n", "13"), ("/autogroup-12 nice 15\n", "19")]
)
def test_a_session_without_a_group_of_its_own_can_step_back_too(
    proc: Path, leader: int, own: str, written: str
) -> None:
    autogroup = write_autogroups(proc, own, leader)
    before = os.getpriority(os.PRIO_PROCESS, leader)
    assert step_back(leader, by=10)
    assert os.getpriority(os.PRIO_PROCESS, leader) == min(before + 10, 19)
    assert autogroup.read_text() == written


@pytest.mark.parametrize("own", [None, "not told here\n"])
def test_a_system_without_sessions_shares_has_processes(proc: Path, leader: int, own: str | None) -> None:
    if own is not None:
        write_autogroups(proc, own, leader)
    before = os.getpriority(os.PRIO_PROCESS, leader)
    assert step_back(leader, by=10)
    assert os.getpriority(os.PRIO_PROCESS, leader) == min(before + 10, 19)


def test_linux_that_wants_to_be_asked_less_often_is_asked_again_later(
    proc: Path, leader: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    write_autogroups(proc, "", leader)
    before = os.getpriority(os.PRIO_PROCESS, leader)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", refuse)
        assert not step_back(leader, by=10)
    assert os.getpriority(os.PRIO_PROCESS, leader) == before
    assert step_back(leader, by=10)


def test_a_kernel_that_knows_no_priority_of_a_group_ends_nothing(
    leader: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(which: int, who: int, priority: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "setpriority", refuse)
    assert step_back(leader, by=0)
