"""Jobs whose agents are wrapped, in real containers of podman: this machine's root shown, never written."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from strop.errors import CheckRefused
from strop.launch.contract import JobState
from strop.launch.launcher import Launcher
from strop.launch.local.backend import LocalBackend
from strop.launch.sagemaker.engine import Engine
from tests.fixtures.containers import list_names
from tests.fixtures.drill import preempt
from tests.fixtures.held_jobs import saved_step, told_once
from tests.fixtures.jobs import is_running, make_request, project, read_verdicts, role, saver, wait_for
from tests.launch.local.test_local import LIMIT_S, steps_of, wait_for_end

__all__ = ["project"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("engine")]


@pytest.fixture
def launcher(project: Path, engine: Engine) -> Launcher:
    """A launcher beside a site `local` whose agents are in containers."""
    words = engine.argv(
        "run", "--rm", "--interactive", "--network=none", f"--volume={project.parent}:{project.parent}"
    )
    write_wrap(project, *words, "--rootfs", "/:O")
    return Launcher(LocalBackend())


def write_wrap(project: Path, *words: str) -> None:
    (project / "strop-sites.toml").write_text(f"[sites.local]\nwrap = {json.dumps(words)}\n")


def test_a_job_succeeds_in_a_container_and_leaves_none(project: Path, launcher: Launcher) -> None:
    text = "import os, socket, sys; open(sys.argv[1], 'w').write(f'{socket.gethostname()} {os.getpid()}')"
    ref = launcher.submit(make_request(project, [role("train", text, "{run}/seen")])).ref
    assert wait_for_end(launcher, ref).state is JobState.SUCCEEDED
    host, pid = (Path(ref.home) / "seen").read_text().split()
    assert host != socket.gethostname()
    assert int(pid) < 1000
    assert list_names() == []


def test_lau_2_a_preempted_job_saves_its_state_and_goes_on(project: Path, launcher: Launcher) -> None:
    """A first process that passes no signal on was killed without a checkpoint; here it is the agent."""
    ref = launcher.submit(make_request(project, [told_once()])).ref
    wait_for(lambda: len(steps_of(ref.home)) >= 3, limit_s=LIMIT_S)
    preempt(launcher.backend, ref)
    assert wait_for_end(launcher, ref).state is JobState.SUCCEEDED
    assert steps_of(ref.home) == list(range(1, saved_step(ref.home) + 1))
    verdicts = read_verdicts(Path(ref.home))
    assert [(one["exit_code"], one["signal"]) for one in verdicts] == [(75, "SIGUSR2"), (0, "")]


@pytest.mark.parametrize("grace_s", [LIMIT_S, 0.0])
def test_a_cancelled_job_leaves_no_container(project: Path, launcher: Launcher, grace_s: float) -> None:
    marker = f"wrapped-{os.getpid()}-{grace_s}"
    stays = role("beside", "import time; time.sleep(600)", marker)
    ref = launcher.submit(make_request(project, [saver(10_000), stays])).ref
    wait_for(lambda: steps_of(ref.home) and is_running(marker), limit_s=LIMIT_S)
    outcome = launcher.cancel(ref, grace_s=grace_s)
    assert outcome.ended_by == "TERM" or not grace_s
    state = wait_for_end(launcher, ref).state
    assert state is JobState.CANCELLED or (state is JobState.FAILED and not grace_s)
    wait_for(lambda: not is_running(marker) and list_names() == [], limit_s=LIMIT_S)


def test_a_container_that_is_killed_counts_as_a_lost_node(
    project: Path, launcher: Launcher, engine: Engine
) -> None:
    ref = launcher.submit(make_request(project, [saver(100, 0.1)])).ref
    wait_for(lambda: steps_of(ref.home), limit_s=LIMIT_S)
    (name,) = list_names()
    engine.ask("kill", name)
    assert wait_for_end(launcher, ref).state is JobState.SUCCEEDED
    assert [one["number"] for one in read_verdicts(Path(ref.home))] == [0, 1]


def test_sec_1_what_cannot_be_wrapped_does_not_run_outside(project: Path, launcher: Launcher) -> None:
    """Where Docker was missing, code ran as an ordinary process of the host, with network and credentials."""
    write_wrap(project, "no-such-program")
    with pytest.raises(CheckRefused, match="no-such-program"):
        launcher.submit(make_request(project, [saver(1)]))
    write_wrap(project, "podman", "run", "--pull=never", "no/such/image")
    ref = launcher.submit(make_request(project, [saver(1)])).ref
    status = wait_for_end(launcher, ref)
    assert status.state is JobState.FAILED
    assert "no/such/image" in status.reason
    assert steps_of(ref.home) == []
