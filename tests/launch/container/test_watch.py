"""The watcher of a container, with an engine in words that says and does what the test wants."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from strop.launch.backends import open_backend
from strop.launch.build_request import make_plan
from strop.launch.container.engine import Engine
from strop.launch.container.watch import (
    LOG_NAME,
    START_NAME,
    STOP_NAME,
    read_container_file,
    watch,
    write_container_file,
)
from strop.launch.contract import JobPlan
from strop.launch.job_dir import job_path_of, write_plan
from tests.fixtures.containers import write_sites
from tests.fixtures.jobs import make_request, project, saver
from tests.launch.container.test_engine import install

__all__ = ["project"]
FACTS = '[{"Name": "box", "State": {"Status": "%s", "ExitCode": 137}}]'
# `state` is what the container is; it ends by KILL alone. `calls` is what the engine was asked to do.
ENGINE = """
case "$1 $2" in
"container inspect") printf '{facts}' "$(cat {folder}/state)";;
"wait box") {wait};;
"kill --signal") echo "$3" >>{folder}/calls; {kill};;
"logs box") {logs};;
"rm --force") echo removed >>{folder}/calls;;
esac
"""
ENDED_BY_KILL = 'if [ "$3" = KILL ]; then echo exited >{folder}/state; fi'


def prepare(
    project: Path, folder: Path, *, wait: str, kill: str, logs: str = ":", started_s_ago: float = 0.0
) -> JobPlan:
    """Return a job with a time limit of one second and no grace, whose container is called `box`."""
    write_sites(project, "some/image:1")
    request = make_request(project, [saver(1)], site="box")
    plan = make_plan(request, open_backend(request.site))
    plan = replace(plan, resources=replace(plan.resources, time_limit_s=1.0), grace_s=0.0)
    job_path_of(plan.home).mkdir(parents=True)
    write_plan(plan)
    (folder / "state").write_text("running")
    places = {"facts": FACTS, "folder": folder}
    text = ENGINE.format(wait=wait.format(**places), kill=kill.format(**places), logs=logs, **places)
    install(folder, "podman", f"PATH=/usr/bin:/bin\n{text}")
    engine = Engine(kind="podman", program=str(folder / "podman"), version="4.3.1")
    started_at = time.time() - started_s_ago
    start = {"engine": asdict(engine), "container": "box", "started_at": started_at}
    write_container_file(job_path_of(plan.home), START_NAME, start)
    return plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "engine"
    path.mkdir()
    monkeypatch.setenv("PATH", f"{path}{os.pathsep}/usr/bin:/bin")
    return path


def test_an_engine_that_fails_for_a_while_does_not_lift_the_time_limit(project: Path, folder: Path) -> None:
    """Incident: `podman wait` failed once, which read as an end, and the job ran without its time limit."""
    fails_once = "if [ ! -e {folder}/failed ]; then touch {folder}/failed; exit 125; fi; exec sleep 600"
    plan = prepare(project, folder, wait=fails_once, kill=ENDED_BY_KILL)
    assert watch(job_path_of(plan.home), retry_s=0.1) == 0
    assert (folder / "calls").read_text().split() == ["TERM", "KILL", "removed"]


def test_a_signal_that_the_engine_did_not_send_is_sent_again(project: Path, folder: Path) -> None:
    refuses_once = (
        "if [ ! -e {folder}/refused ] && [ $3 = KILL ]; then touch {folder}/refused; exit 125; fi; "
    )
    plan = prepare(project, folder, wait="exec sleep 600", kill=refuses_once + ENDED_BY_KILL)
    assert watch(job_path_of(plan.home), retry_s=0.1) == 0
    assert (folder / "calls").read_text().split() == ["TERM", "KILL", "KILL", "removed"]


def test_a_container_that_ended_in_time_was_not_ended_by_its_limit(project: Path, folder: Path) -> None:
    """Incident: a watcher that was started again after the limit called every end a time limit's."""
    plan = prepare(project, folder, wait="exit 0", kill=":", started_s_ago=60.0)
    (folder / "state").write_text("exited")
    assert watch(job_path_of(plan.home), retry_s=0.1) == 0
    assert (folder / "calls").read_text().split() == ["removed"]
    assert read_container_file(job_path_of(plan.home), STOP_NAME) is None


def test_a_full_disk_does_not_end_the_watcher(
    project: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: it died of the full disk that it was to wait for, and the container stayed for ever."""
    there_is_room = "[ -e $0.asked ] && rm -f $0.log; touch $0.asked; echo last words"
    plan = prepare(project, folder, wait="exit 0", kill=":", logs=there_is_room, started_s_ago=60.0)
    (folder / "state").write_text("exited")
    log_path = job_path_of(plan.home) / LOG_NAME
    # Every write to it fails for lack of room; what the engine removes at the second question.
    (folder / "podman.log").symlink_to("/dev/full")
    log_path.symlink_to(folder / "podman.log")
    code = -1
    # Its closing fails as well: what could not be written is still there.
    with suppress(OSError), open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr("sys.stderr", full)
        code = watch(job_path_of(plan.home), retry_s=0.1)
    assert code == 0
    assert log_path.read_text() == "last words\n"
    assert (folder / "calls").read_text().split() == ["removed"]
