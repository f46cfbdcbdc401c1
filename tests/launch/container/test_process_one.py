"""What a container's process 1 does with SIGTERM, in five shapes of starting a program (LAU-2)."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from strop.launch.backends import open_backend
from strop.launch.container.backend import ContainerBackend
from strop.launch.container.command import Mount
from strop.launch.container.engine import Engine
from strop.launch.container.image import BuiltImage
from strop.launch.contract import JobPlan, JobState, RolePlan
from strop.launch.job_dir import write_job_dir
from strop.launch.launcher import Launcher
from tests.fixtures.containers import find_watchers, inspect, list_names, write_sites
from tests.fixtures.held_jobs import ENDLESS, HELD, held, let_go, saved_step
from tests.fixtures.jobs import make_request, project, read_verdicts, role, wait_for
from tests.fixtures.tiny_disk import tiny_disk

__all__ = ["project"]
pytestmark = pytest.mark.slow
NAME = "shape"
LIMIT_S = 180.0
# Passes TERM on to its one child and reaps, as the small init programs of engines do.
INIT = """
import os, signal, sys
child = os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
while True:
    pid, status = os.wait()
    if pid == child:
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
"""
DRIVER = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
CHILDREN = """
import subprocess, sys
for _ in range(3):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
"""
SECOND = """
import signal, sys, time
from pathlib import Path
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
(Path(sys.argv[1]) / "ready").touch()
while not told:
    time.sleep(0.05)
(Path(sys.argv[1]) / "second").write_text("saved")
sys.exit(75)
"""
# Until they are told, however long that takes; only where TERM is lost they are let go.
ONE = [held()]
SEVERAL = [role("train", CHILDREN + HELD, "{run}", ENDLESS, 0.05), role("second", SECOND, "{run}")]


def prepare(project: Path, image: BuiltImage, roles: list[RolePlan]) -> JobPlan:
    """Fill the home of a job, and start nothing."""
    write_sites(project, image.name)
    request = make_request(project, roles, site="box")
    plan = Launcher(open_backend(request.site)).plan(request)
    write_job_dir(plan, request, os.environ)
    return plan


def run_shape(engine: Engine, image: BuiltImage, plan: JobPlan, shape: int, *, is_lost: bool = False) -> int:
    """Start the supervisor in a shape, send TERM once its roles work; return the container's exit code.

    `is_lost`: TERM reaches nobody, and the role ends by itself afterwards.
    """
    entry = ["python", "-m", "strop.launch.local.supervisor", "--job", f"{plan.home}/job", "--job-id", NAME]
    line = shlex.join(entry)
    argv = {
        1: entry,
        2: ["bash", "-c", line],
        3: ["bash", "-c", f"true && {line}; true"],
        4: ["python", "-c", INIT, "bash", "-c", f"true && {line}; true"],
        5: ["python", "-c", DRIVER, *entry],
    }[shape]
    mount = Mount(source=plan.home, target=plan.home).to_words()
    words = ["--detach", "--name", NAME, "--network", "none", *mount, "--entrypoint", argv[0], image.name]
    done = engine.ask("run", *words, *argv[1:], limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    steps = Path(plan.home) / "steps"
    wait_for(lambda: steps.exists() and len(steps.read_text().splitlines()) >= 3, limit_s=LIMIT_S)
    if len(plan.roles) > 1:
        wait_for((Path(plan.home) / "ready").exists, limit_s=LIMIT_S)
    assert engine.ask("kill", "--signal", "TERM", NAME, limit_s=LIMIT_S).returncode == 0
    if is_lost:
        let_go(plan.home)
    waited = engine.ask("wait", NAME, limit_s=LIMIT_S)
    return int(waited.stdout)


@pytest.fixture(autouse=True)
def no_container_stays(engine: Engine) -> Iterator[None]:
    yield
    engine.ask("rm", "--force", "--time", "0", NAME, limit_s=LIMIT_S)


@pytest.mark.parametrize("roles", [ONE, SEVERAL], ids=["one child", "several children"])
@pytest.mark.parametrize("shape", [1, 2], ids=["exec form", "a shell that replaces itself"])
def test_term_reaches_the_supervisor_and_the_state_is_saved(
    project: Path, engine: Engine, agent_image: BuiltImage, shape: int, roles: list[RolePlan]
) -> None:
    plan = prepare(project, agent_image, roles)
    assert run_shape(engine, agent_image, plan, shape) == 75
    home = Path(plan.home)
    assert saved_step(home) >= 3
    assert (home / "second").exists() == (len(roles) > 1)
    assert [(one["exit_code"], one["signal"]) for one in read_verdicts(home)] == [(75, "SIGTERM")]


@pytest.mark.parametrize("shape", [3, 5], ids=["a shell in front", "a driver without handler"])
def test_in_other_shapes_term_is_lost_and_so_we_start_none(
    project: Path, engine: Engine, agent_image: BuiltImage, shape: int
) -> None:
    plan = prepare(project, agent_image, ONE)
    assert run_shape(engine, agent_image, plan, shape, is_lost=True) == 0
    assert [one["signal"] for one in read_verdicts(Path(plan.home))] == [""]


def test_behind_an_init_and_a_shell_the_job_dies_unsaved(
    project: Path, engine: Engine, agent_image: BuiltImage
) -> None:
    plan = prepare(project, agent_image, ONE)
    assert run_shape(engine, agent_image, plan, 4) == 128 + signal.SIGTERM
    assert not (Path(plan.home) / "state").exists()


def test_a_full_disk_is_no_success_and_its_record_is_completed_once_there_is_room(
    project: Path, agent_image: BuiltImage, tmp_path: Path
) -> None:
    filler = role(
        "train",
        "import sys\n"
        "with open(sys.argv[1] + '/ballast', 'wb', buffering=0) as file:\n"
        "    try:\n"
        "        while True:\n"
        "            file.write(bytes(4096))\n"
        "    except OSError as error:\n"
        "        sys.exit(f'{error.strerror}')\n",
        "{run}",
    )
    write_sites(project, agent_image.name)
    with tiny_disk(tmp_path / "disk", size_bytes=300 << 20) as disk:
        request = replace(make_request(project, [filler], site="box"), home=str(disk / "run"))
        backend = open_backend(request.site)
        assert isinstance(backend, ContainerBackend)
        launcher = Launcher(backend)
        plan = launcher.plan(request)
        # The check of the launcher wants more room than this disk has; here the disk fills up later.
        assert "disk" in {finding.code for finding in launcher.check(plan)}
        write_job_dir(plan, request, os.environ)
        ref = backend.submit(plan)
        wait_for(lambda: inspect(ref.job_id)["State"]["Status"] == "exited", limit_s=LIMIT_S)
        (status,) = launcher.status([ref])
        assert status.state is JobState.FAILED
        Path(plan.home, "ballast").unlink()
        wait_for(lambda: ref.job_id not in list_names(), limit_s=LIMIT_S)
        (status,) = launcher.status([ref])
        assert status.state is JobState.FAILED
        assert not (Path(plan.home) / "job" / "secrets.json").exists()
        wait_for(lambda: not find_watchers(plan.home), limit_s=LIMIT_S)
