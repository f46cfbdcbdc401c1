from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import CheckRefused
from strop.launch.backends import open_backend
from strop.launch.container.backend import list_containers
from strop.launch.container.engine import Engine
from strop.launch.container.image import BuiltImage
from strop.launch.container.watch import START_NAME, read_container_file, start_watcher, write_container_file
from strop.launch.contract import JobRef, JobRequest, JobState, JobStatus, RolePlan
from strop.launch.launcher import Launcher
from strop.launch.logs import LogFilter
from tests.fixtures.containers import find_watchers, inspect, list_names, write_sites
from tests.fixtures.held_jobs import ENDLESS, TOLD_ONCE, gated, held, let_go, saved_step, told_once
from tests.fixtures.jobs import is_running, make_request, project, read_verdicts, role, saver, wait_for

__all__ = ["project"]
pytestmark = pytest.mark.slow
LIMIT_S = 180.0
"""For anything that comes by itself, and graces too: ample, as other work may keep the machine busy."""

# What breaks exports, job scripts and command lines, each for its own reason (LAU-4).
HOSTILE = {
    "COMMA": "a,b",
    "QUOTES": 'it\'s "quoted"',
    "SPACES": "  two words ",
    "NEWLINE": "line 1\nline 2\n",
    "DOLLAR": "$HOME ${PATH} $(id) `id`",
    "EMPTY": "",
}
CANARY = 'canary-2b7c, "it\'s" $HOME\nsecond'


def launcher_of(request: JobRequest) -> Launcher:
    return Launcher(open_backend(request.site))


def stand_of(launcher: Launcher, ref: JobRef, trial: int = 0) -> JobStatus:
    return launcher.status([ref])[trial]


def wait_for_end(launcher: Launcher, ref: JobRef) -> JobStatus:
    """Wait until a job has ended and its container has gone."""
    wait_for(lambda: all(one.state.is_terminal for one in launcher.status([ref])), limit_s=LIMIT_S)
    wait_for(lambda: ref.job_id not in list_names(), limit_s=LIMIT_S)
    return stand_of(launcher, ref)


def steps_of(home: str) -> list[int]:
    path = Path(home) / "steps"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def box(
    project: Path, image: BuiltImage, roles: list[RolePlan], *overrides: str, **options: object
) -> JobRequest:
    """Return a request for a job in a container."""
    write_sites(project, image.name)
    return make_request(project, roles, *overrides, site="box", **options)


def test_a_job_succeeds_in_a_container_and_leaves_none(project: Path, agent_image: BuiltImage) -> None:
    request = box(project, agent_image, [gated(5)])
    launcher = launcher_of(request)
    submitted = launcher.submit(request)
    facts = inspect(submitted.ref.job_id)
    let_go(submitted.ref.home)
    assert facts["HostConfig"]["NetworkMode"] == "none"
    assert facts["Config"]["Labels"]["strop"] == submitted.plan.plan_hash
    status = wait_for_end(launcher, submitted.ref)
    assert (status.state, status.source) == (JobState.SUCCEEDED, "record")
    assert steps_of(submitted.ref.home) == [1, 2, 3, 4, 5]
    lines = list(launcher.logs(submitted.ref, 0, LogFilter(role="train"), is_followed=False))
    assert [line.text for line in lines] == ["from 0", *(f"step {step}" for step in range(1, 6))]
    volumes = subprocess.run(["podman", "volume", "ls", "-q"], capture_output=True, text=True, check=True)
    assert volumes.stdout == ""
    # What was written inside is the submitting user's.
    owners = {path.lstat().st_uid for path in Path(submitted.ref.home).rglob("*")}
    assert owners == {os.getuid()}


def test_the_network_is_closed_unless_the_profile_opens_it(project: Path, agent_image: BuiltImage) -> None:
    asker = role("train", "import os; print(sorted(os.listdir('/sys/class/net')))")
    request = box(project, agent_image, [asker])
    launcher = launcher_of(request)
    ref = launcher.submit(request).ref
    wait_for_end(launcher, ref)
    lines = [line.text for line in launcher.logs(ref, 0, LogFilter(role="train"), is_followed=False)]
    assert lines == ["['lo']"]


def test_variables_arrive_as_they_are_and_secrets_stand_nowhere_else(
    project: Path, agent_image: BuiltImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**HOSTILE, "JUDGE_TOKEN": CANARY}.items():
        monkeypatch.setenv(name, value)
    names = [*HOSTILE, "JUDGE_TOKEN"]
    shower = role(
        "train",
        "import json, os, sys, time\nfrom pathlib import Path\n"
        f"found = {{name: os.environ.get(name) for name in {names!r}}}\n"
        f"print(json.dumps({{name: found[name] for name in {list(HOSTILE)!r}}}))\n"
        "print('canary', len(found['JUDGE_TOKEN']), flush=True)\n"
        "while not Path(sys.argv[1], 'go').exists():\n    time.sleep(0.05)\n",
        "{run}",
    )
    request = box(project, agent_image, [shower], variables=tuple(names))
    launcher = launcher_of(request)
    ref = launcher.submit(request).ref
    wait_for(lambda: stand_of(launcher, ref).state is JobState.RUNNING)
    wait_for(lambda: any(Path(ref.home).glob("attempts/*/0/train.log")), limit_s=LIMIT_S)
    spread = canary_forms()
    # While it runs: what the engine shows to everybody on the machine, and every command line.
    shown = json.dumps(inspect(ref.job_id)) + "".join(read_command_lines())
    let_go(ref.home)
    assert not [form for form in spread if form in shown]
    assert wait_for_end(launcher, ref).state is JobState.SUCCEEDED
    lines = [line.text for line in launcher.logs(ref, 0, LogFilter(role="train"), is_followed=False)]
    assert json.loads(lines[0]) == HOSTILE
    assert lines[1] == f"canary {len(CANARY)}"
    # Afterwards: nothing in the job's directory.
    kept = "".join(
        path.read_bytes().decode(errors="replace") for path in Path(ref.home).rglob("*") if path.is_file()
    )
    assert not [form for form in spread if form in kept]


def canary_forms() -> list[str]:
    return ["canary-2b7c", json.dumps(CANARY)[1:-1]]


def read_command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


def test_a_preempted_job_saves_its_state_and_lives_again_in_its_container(
    project: Path, agent_image: BuiltImage
) -> None:
    request = box(project, agent_image, [told_once()])
    launcher = launcher_of(request)
    ref = launcher.submit(request).ref
    wait_for(lambda: len(steps_of(ref.home)) >= 3, limit_s=LIMIT_S)
    assert launcher.backend.preempt(ref, 0) == "SIGUSR2"
    assert wait_for_end(launcher, ref).state is JobState.SUCCEEDED
    assert steps_of(ref.home) == list(range(1, saved_step(ref.home) + 1))
    verdicts = read_verdicts(Path(ref.home))
    assert [(one["exit_code"], one["signal"]) for one in verdicts] == [(75, "SIGUSR2"), (0, "")]


def test_a_cancelled_job_saves_its_state_and_is_cancelled(project: Path, agent_image: BuiltImage) -> None:
    request = box(project, agent_image, [saver(10_000)])
    launcher = launcher_of(request)
    ref = launcher.submit(request).ref
    wait_for(lambda: len(steps_of(ref.home)) >= 3, limit_s=LIMIT_S)
    outcome = launcher.cancel(ref, grace_s=LIMIT_S)
    assert outcome.ended_by == "TERM"
    assert wait_for_end(launcher, ref).state is JobState.CANCELLED
    # Its role was told and saved: 75, and no second life.
    assert [one["exit_code"] for one in read_verdicts(Path(ref.home))] == [75]
    assert (Path(ref.home) / "state").read_text() == str(steps_of(ref.home)[-1])


def test_a_job_that_is_cancelled_in_its_first_moment_ends(project: Path, agent_image: BuiltImage) -> None:
    request = box(project, agent_image, [saver(10_000)])
    launcher = launcher_of(request)
    ref = launcher.submit(request).ref
    launcher.backend.stop(ref, None, grace_s=LIMIT_S)
    wait_for(lambda: ref.job_id not in list_names(), limit_s=LIMIT_S)
    assert stand_of(launcher, ref).state is JobState.CANCELLED


def test_a_container_that_is_stopped_by_hand_is_cancelled(project: Path, agent_image: BuiltImage) -> None:
    request = box(project, agent_image, [saver(10_000)])
    launcher = launcher_of(request)
    ref = launcher.submit(request).ref
    wait_for(lambda: len(steps_of(ref.home)) >= 3, limit_s=LIMIT_S)
    subprocess.run(["podman", "stop", "--time", "180", ref.job_id], check=True, capture_output=True)
    status = wait_for_end(launcher, ref)
    assert (status.state, status.reason) == (JobState.CANCELLED, "cancelled by SIGTERM")


def test_a_killed_container_is_a_failure_that_can_be_resumed(
    project: Path, agent_image: BuiltImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", CANARY)
    marker = f"orphan-{os.getpid()}"
    body = f"""
import os, subprocess, sys
assert "canary" in os.environ["JUDGE_TOKEN"]
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code, {marker!r}], start_new_session=True)
"""
    # Saves at every step: what a kill leaves is the last one.
    save = '    (run / "part").write_text(str(step)); os.replace(run / "part", state)'
    saving = TOLD_ONCE.replace("    if told:", f"{save}\n    if told:")
    counting = role("train", body + saving, "{run}", ENDLESS, 0.05)
    request = box(project, agent_image, [counting], variables=("JUDGE_TOKEN",))
    launcher = launcher_of(request)
    ref = launcher.submit(request).ref
    wait_for(lambda: len(steps_of(ref.home)) >= 3, limit_s=LIMIT_S)
    assert is_running(marker)
    subprocess.run(["podman", "kill", "--signal", "KILL", ref.job_id], check=True, capture_output=True)
    status = wait_for_end(launcher, ref)
    assert (status.state, status.reason) == (JobState.FAILED, "killed by SIGKILL")
    assert not is_running(marker)
    assert not (Path(ref.home) / "job" / "secrets.json").exists()
    again = box(project, agent_image, [counting], variables=("JUDGE_TOKEN",))
    resumed = launcher.resume(Path(ref.home), again).ref
    assert wait_for_end(launcher, resumed).state is JobState.SUCCEEDED
    assert steps_of(ref.home)[-1] == saved_step(ref.home)
    # The second life began where the first had saved, not at 1.
    assert steps_of(ref.home).count(1) == 1
    assert [one["number"] for one in read_verdicts(Path(ref.home))] == [0, 1]


def test_a_submitter_that_is_killed_after_the_start_has_submitted_once(
    project: Path, agent_image: BuiltImage
) -> None:
    request = box(project, agent_image, [saver(20)])
    launcher = launcher_of(request)
    ref = launcher.submit(request).ref
    (Path(ref.home) / "job" / "ref.json").unlink()
    again = launcher.submit(box(project, agent_image, [saver(20)]))
    assert (again.ref.job_id, again.is_new) == (ref.job_id, False)
    wait_for_end(launcher, ref)
    # And once more, when the container has gone.
    (Path(ref.home) / "job" / "ref.json").unlink()
    later = launcher.submit(box(project, agent_image, [saver(20)]))
    assert (later.ref.job_id, later.is_new) == (ref.job_id, False)
    assert len(read_verdicts(Path(ref.home))) == 1


def test_an_ended_container_that_nobody_watched_is_found_by_its_label(
    project: Path, agent_image: BuiltImage, engine: Engine
) -> None:
    request = box(project, agent_image, [held()])
    launcher = launcher_of(request)
    ref = launcher.submit(request).ref
    wait_for(lambda: steps_of(ref.home), limit_s=LIMIT_S)
    (watcher,) = find_watchers(ref.home)
    os.kill(watcher, signal.SIGKILL)
    let_go(ref.home)
    wait_for(lambda: inspect(ref.job_id)["State"]["Status"] == "exited", limit_s=LIMIT_S)
    assert stand_of(launcher, ref).state is JobState.SUCCEEDED
    tagged = {one.job_id: one for one in launcher.backend.list_tagged()}
    assert (tagged[ref.job_id].home, tagged[ref.job_id].plan_hash) == (ref.home, ref.plan_hash)
    other = launcher.submit(box(project, agent_image, [saver(1)], "name=other")).ref
    assert ref.job_id not in list_names()
    wait_for_end(launcher, other)
    assert list_containers(engine, "label=strop.user") == {}


def test_a_time_limit_ends_the_job_with_its_state_saved(project: Path, agent_image: BuiltImage) -> None:
    request = box(project, agent_image, [saver(10_000)], 'job.time_limit="1h"', "job.grace_s=180")
    launcher = launcher_of(request)
    before = time.time()
    ref = launcher.submit(request).ref
    wait_for(lambda: len(steps_of(ref.home)) >= 3, limit_s=LIMIT_S)
    # The watcher is started again as if the job had begun so long ago that only the grace is left.
    (watcher,) = find_watchers(ref.home)
    os.kill(watcher, signal.SIGKILL)
    job_path = Path(ref.home) / "job"
    start = read_container_file(job_path, START_NAME)
    assert start is not None
    assert before <= start["started_at"] <= time.time()
    write_container_file(job_path, START_NAME, {**start, "started_at": time.time() - 3600.0 + 180.0})
    start_watcher(job_path)
    status = wait_for_end(launcher, ref)
    assert (status.state, status.reason) == (JobState.TIMEOUT, "its time limit ended it")
    assert [one["exit_code"] for one in read_verdicts(Path(ref.home))] == [75]


def test_a_job_that_nobody_can_watch_is_refused_and_does_not_run(
    project: Path, agent_image: BuiltImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: without room for its watcher a job was refused, lost its secrets, and ran without an end."""

    def fail(job_path: Path) -> None:
        raise CheckRefused("no room for one more process")

    monkeypatch.setattr("strop.launch.container.backend.start_watcher", fail)
    before = set(list_names())
    request = box(project, agent_image, [saver(10_000)])
    with pytest.raises(CheckRefused, match="no room for one more process"):
        launcher_of(request).submit(request)
    assert set(list_names()) == before


def test_a_job_with_more_memory_than_allowed_is_killed_and_says_so(
    project: Path, agent_image: BuiltImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "desk").mkdir()
    monkeypatch.chdir(tmp_path / "desk")
    hog = role("train", "x = bytearray(400 << 20); x[::4096] = b'1' * len(x[::4096]); print('had it')")
    request = box(project, agent_image, [hog], 'job.memory="256M"')
    launcher = launcher_of(request)
    ref = launcher.submit(request).ref
    status = wait_for_end(launcher, ref)
    assert status.state is JobState.FAILED
    assert "had it" not in "".join(path.read_text() for path in Path(ref.home).glob("attempts/*/0/train.log"))
    # Incident: podman's monitor left a file `oom` in the folder of whoever submitted.
    assert not list((tmp_path / "desk").iterdir())


def test_trials_of_a_sweep_live_one_after_the_other(project: Path, agent_image: BuiltImage) -> None:
    reader = role(
        "train",
        "import sys; print([l.split()[2] for l in open(sys.argv[1]) if l.startswith('lr =')])",
        "{run}/job/spec.toml",
    )
    request = box(project, agent_image, [reader], sweep=("optimizer.lr=0.001,0.002",))
    launcher = launcher_of(request)
    ref = launcher.submit(request).ref
    wait_for_end(launcher, ref)
    assert [one.state for one in launcher.status([ref])] == [JobState.SUCCEEDED, JobState.SUCCEEDED]
    texts = [
        line.text
        for trial in (0, 1)
        for line in launcher.logs(ref, trial, LogFilter(role="train"), is_followed=False)
    ]
    assert texts == ["['0.001']", "['0.002']"]


def test_one_trial_of_a_sweep_ends_alone(project: Path, agent_image: BuiltImage) -> None:
    request = box(project, agent_image, [held()], sweep=("optimizer.lr=0.001,0.002,0.003",))
    launcher = launcher_of(request)
    ref = launcher.submit(request).ref
    wait_for(lambda: stand_of(launcher, ref).state is JobState.RUNNING)
    for trial in (2, 0):
        outcome = launcher.cancel(ref, trial=trial, grace_s=LIMIT_S)
        assert [(one.trial, one.state) for one in outcome.statuses] == [(trial, JobState.CANCELLED)]
    let_go(Path(ref.home) / "members" / "1")
    wait_for_end(launcher, ref)
    states = [one.state for one in launcher.status([ref])]
    assert states == [JobState.CANCELLED, JobState.SUCCEEDED, JobState.CANCELLED]


def test_a_wrong_image_is_refused_with_those_that_there_are(project: Path, agent_image: BuiltImage) -> None:
    write_sites(project, "localhost/absent:tag")
    request = make_request(project, [saver(1)], site="box")
    with pytest.raises(CheckRefused, match=r"podman has no image 'localhost/absent:tag'") as caught:
        launcher_of(request).submit(request)
    assert agent_image.name in str(caught.value)
    assert not list((project.parent / "runs").glob("*/job"))


def test_an_image_without_strop_is_refused_before_anything_starts(
    project: Path, engine: Engine, tmp_path: Path, agent_image: BuiltImage
) -> None:
    (tmp_path / "Containerfile").write_text(
        f'FROM {agent_image.name}\nRUN ["rm", "-r", "{Path(os.__file__).parent}"]\n'
    )
    words = ("build", "--network", "none", "--tag", "localhost/broken:1", str(tmp_path))
    built = engine.ask(*words, limit_s=600.0)
    assert built.returncode == 0, built.stderr
    write_sites(project, "localhost/broken:1")
    request = make_request(project, [saver(1)], site="box")
    with pytest.raises(CheckRefused, match=r"python of image 'localhost/broken:1' cannot be the supervisor"):
        launcher_of(request).submit(request)


def test_folders_of_the_profile_are_shown_and_read_only_ones_stay_as_they_are(
    project: Path, agent_image: BuiltImage
) -> None:
    shared = project.parent / 'shared, "folder" $x'
    shared.mkdir()
    (shared / "file").write_text("content")
    code = (
        "from pathlib import Path\nprint(Path('/data/file').read_text())\n"
        "try:\n    Path('/data/new').write_text('x')\nexcept OSError as error:\n    print(error.strerror)"
    )
    write_sites(project, agent_image.name, f"mounts = [{json.dumps(f'{shared}:/data:ro')}]")
    request = make_request(project, [role("train", code)], site="box")
    launcher = launcher_of(request)
    ref = launcher.submit(request).ref
    wait_for_end(launcher, ref)
    lines = [line.text for line in launcher.logs(ref, 0, LogFilter(role="train"), is_followed=False)]
    assert lines == ["content", "Read-only file system"]


def test_a_home_with_every_odd_character_works(project: Path, agent_image: BuiltImage) -> None:
    home = project.parent / 'odd, it\'s: "$HOME" {image} `id`'
    request = replace(box(project, agent_image, [saver(2)]), home=str(home))
    launcher = launcher_of(request)
    ref = launcher.submit(request).ref
    assert ref.home == str(home)
    assert wait_for_end(launcher, ref).state is JobState.SUCCEEDED
