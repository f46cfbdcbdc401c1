from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError
from strop.hardware import Gpu
from strop.launch.build_request import list_roles
from strop.launch.contract import JobRef, JobState, JobStatus
from strop.launch.launcher import Launcher, watch
from strop.launch.local.backend import LocalBackend
from strop.launch.local.supervisor_files import order_end, read_identity
from strop.launch.logs import LogFilter
from tests.fixtures.drill import preempt
from tests.fixtures.held_jobs import HELD, held, let_go, saved_step, told_once
from tests.fixtures.jobs import is_running, make_request, project, read_verdicts, role, saver, wait_for
from tests.fixtures.nvml import install_fake_nvml, use_nvml

__all__ = ["project"]
pytestmark = pytest.mark.slow
LIMIT_S = 180.0
"""For anything that comes by itself, and graces too: ample, as other work may keep the machine busy."""


@pytest.fixture
def launcher() -> Launcher:
    return Launcher(LocalBackend())


def stand_of(launcher: Launcher, ref: JobRef, trial: int = 0) -> JobStatus:
    return launcher.status([ref])[trial]


def wait_for_end(launcher: Launcher, ref: JobRef) -> JobStatus:
    """Wait until a job has ended and its supervisor with it."""
    wait_for(lambda: all(one.state.is_terminal for one in launcher.status([ref])), limit_s=LIMIT_S)
    wait_for(lambda: not is_supervised(ref), limit_s=LIMIT_S)
    return stand_of(launcher, ref)


def is_supervised(ref: JobRef) -> bool:
    supervisor = read_identity(Path(ref.home) / "job")
    return supervisor is not None and supervisor.process.is_alive()


def steps_of(home: str) -> list[int]:
    path = Path(home) / "steps"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_job_outlives_its_submitter_and_succeeds_by_its_own_record(
    project: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Submitted by a run, it is not ended with that run.
    monkeypatch.setenv("STROP_LEASE", "the-outer-one")
    roles = [saver(5), role("lease", "import os; print('lease', os.environ['STROP_LEASE'])")]
    submitted = launcher.submit(make_request(project, roles))
    assert submitted.is_new
    # A submitter that was killed before it noted the job has submitted once.
    (Path(submitted.ref.home) / "job" / "ref.json").unlink()
    again = launcher.submit(make_request(project, roles))
    assert (again.ref.job_id, again.is_new) == (submitted.ref.job_id, False)
    status = wait_for_end(launcher, submitted.ref)
    assert (status.state, status.source) == (JobState.SUCCEEDED, "record")
    assert steps_of(submitted.ref.home) == [1, 2, 3, 4, 5]
    lines = list(launcher.logs(submitted.ref, 0, LogFilter(role="train"), is_followed=False))
    assert [line.text for line in lines] == ["from 0", *(f"step {step}" for step in range(1, 6))]
    assert {(line.node, line.role) for line in lines} == {("0", "train")}
    assert read_role_log(submitted.ref.home, "lease").startswith("lease ")
    assert "the-outer-one" not in read_role_log(submitted.ref.home, "lease")


def test_a_preempted_job_goes_on_and_who_waits_submits_none(project: Path, launcher: Launcher) -> None:
    ref = launcher.submit(make_request(project, [told_once()])).ref
    said: list[str] = []

    def pause(duration_s: float) -> None:
        # Of this machine it is asked every second, not every quarter of a minute.
        assert 1.0 <= duration_s <= 1.25
        time.sleep(0.05)
        if len(steps_of(ref.home)) >= 3 and not told:
            preempt(launcher.backend, ref)
            told.append(True)

    told: list[bool] = []
    watch(launcher, Path(ref.home), said.append, pause=pause)
    assert said[-1] == f"{ref.job_id}: succeeded"
    assert steps_of(ref.home) == list(range(1, saved_step(ref.home) + 1))
    wait_for_end(launcher, ref)
    verdicts = read_verdicts(Path(ref.home))
    assert [(one["number"], one["exit_code"], one["signal"]) for one in verdicts] == [
        *((0, 75, "SIGUSR2"), (1, 0, ""))
    ]
    stopper = role("train", "import sys; sys.exit(75)")
    last = launcher.submit(make_request(project, [stopper], "name=other", "job.max_requeue=1")).ref
    with pytest.raises(CheckRefused, match=r"ended as failed \(requeue budget: attempt 1"):
        watch(launcher, Path(last.home), said.append, pause=lambda _: time.sleep(0.05))
    wait_for_end(launcher, last)
    assert [one["exit_code"] for one in read_verdicts(Path(last.home))] == [75, 75]


def test_a_failure_names_role_code_and_last_lines_and_is_not_repeated(
    project: Path, launcher: Launcher
) -> None:
    failing = role("train", "print('all was well until now'); raise SystemExit(3)")
    ref = launcher.submit(make_request(project, [failing])).ref
    status = wait_for_end(launcher, ref)
    assert status.state is JobState.FAILED
    assert "role train ended with exit code 3; its last lines:\nall was well until now" in status.reason
    assert len(read_verdicts(Path(ref.home))) == 1


def test_a_cancelled_job_is_cancelled_and_says_what_ended_it(project: Path, launcher: Launcher) -> None:
    ref = launcher.submit(make_request(project, [saver(10_000)])).ref
    wait_for(lambda: stand_of(launcher, ref).state is JobState.RUNNING)
    wait_for(lambda: steps_of(ref.home))
    outcome = launcher.cancel(ref, grace_s=LIMIT_S)
    assert outcome.ended_by == "TERM"
    assert stand_of(launcher, ref).state is JobState.CANCELLED
    assert launcher.cancel(ref, grace_s=20.0).ended_by == "it had ended"


@pytest.mark.parametrize(
    ("overrides", "grace_s", "ended_by"),
    # The agent's own grace of a second is shorter; the one who cancels has less patience than the job's.
    [(("job.grace_s=1.0",), LIMIT_S, "TERM"), ((), 1.0, "KILL")],
)
def test_what_ignores_the_end_is_killed_with_all_that_it_started(
    project: Path, launcher: Launcher, overrides: tuple[str, ...], grace_s: float, ended_by: str
) -> None:
    marker = f"survivor-{os.getpid()}-{ended_by}"
    # A role that ignores TERM, and a grandchild in a session of its own that does too.
    stubborn = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code, {marker!r}], start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""
    ref = launcher.submit(make_request(project, [role("train", stubborn)], *overrides)).ref
    wait_for(lambda: is_running(marker) and "started" in read_role_log(ref.home))
    assert launcher.cancel(ref, grace_s=grace_s).ended_by == ended_by
    if ended_by == "TERM":
        assert "train did not end within the grace after SIGTERM" in read_cause(ref.home)
    else:
        assert stand_of(launcher, ref).state is JobState.FAILED
    wait_for(lambda: not is_running(marker))


def read_role_log(home: str, role_name: str = "train") -> str:
    return "".join(path.read_text() for path in Path(home).glob(f"attempts/*/0/{role_name}.log"))


def read_cause(home: str) -> str:
    return "".join(path.read_text() for path in Path(home).glob("attempts/*/end-0.json"))


@pytest.mark.parametrize("victim", ["role", "agent", "supervisor"])
def test_kill_9_of_anything_leaves_nothing_and_loses_nothing(
    project: Path, launcher: Launcher, victim: str
) -> None:
    marker = f"orphan-{victim}-{os.getpid()}"
    body = f"""
import subprocess, sys
code = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code, {marker!r}], start_new_session=True)
"""
    counting = role("train", body + HELD, "{run}", 30, 0.05)
    request = make_request(project, [counting])
    ref = launcher.submit(request).ref
    wait_for(lambda: len(steps_of(ref.home)) >= 2)
    counter = find_process(ref, "role")
    os.kill(find_process(ref, victim), signal.SIGKILL)
    wait_for(lambda: not is_alive(counter), limit_s=LIMIT_S)
    # It cannot have ended by itself; the next life may.
    let_go(ref.home)
    if victim == "agent":
        # As a lost node: the supervisor lets it live again by itself.
        assert wait_for_end(launcher, ref).state is JobState.SUCCEEDED
    else:
        assert wait_for_end(launcher, ref).state is JobState.FAILED
        ref = launcher.resume(Path(ref.home), make_request(project, [counting])).ref
        assert wait_for_end(launcher, ref).state is JobState.SUCCEEDED
    assert steps_of(ref.home)[-1] == 30
    wait_for(lambda: not is_running(marker))


def find_process(ref: JobRef, victim: str) -> int:
    """Return the process of a job's role, agent or supervisor."""
    supervisor = read_identity(Path(ref.home) / "job")
    assert supervisor is not None
    if victim == "supervisor":
        return supervisor.process.pid
    (agent,) = children_of(supervisor.process.pid)
    if victim == "agent":
        return agent
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children_of(agent)}
    return next(pid for pid, line in words.items() if b"wanted, pause" in line)


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in path.read_text().split()]
    return found


def test_one_trial_of_a_sweep_ends_alone(project: Path, launcher: Launcher) -> None:
    sweep = ("optimizer.lr=0.001,0.002,0.003,0.004",)
    ref = launcher.submit(make_request(project, [held(20)], sweep=sweep)).ref
    homes = [Path(ref.home, "members", str(index)) for index in range(4)]
    wait_for(lambda: len(steps_of(str(homes[0]))) >= 2)
    # One that has not begun never will, and that is known at once.
    outcome = launcher.cancel(ref, trial=2, grace_s=LIMIT_S)
    assert [(one.trial, one.state) for one in outcome.statuses] == [(2, JobState.CANCELLED)]
    assert stand_of(launcher, ref).state is JobState.RUNNING
    # One that lives saves its state, and lives no second time.
    outcome = launcher.cancel(ref, trial=0, grace_s=LIMIT_S)
    assert ([one.state for one in outcome.statuses], outcome.ended_by) == ([JobState.CANCELLED], "TERM")
    assert [one["exit_code"] for one in read_verdicts(homes[0])] == [75]
    wait_for(lambda: len(steps_of(str(homes[1]))) >= 2)
    # Without a grace it is killed, as the whole job would be.
    order_end(Path(ref.home) / "job", 1, grace_s=0.0)
    let_go(homes[3])
    wait_for_end(launcher, ref)
    assert [one["exit_code"] for one in read_verdicts(homes[1])] == [137]
    assert not list(homes[2].glob("attempts/*"))
    assert steps_of(str(homes[3]))[-1] == 20
    cancelled = [JobState.CANCELLED] * 3
    assert [one.state for one in launcher.status([ref])] == [*cancelled, JobState.SUCCEEDED]
    assert not is_running(ref.home)


def test_an_interpreter_that_is_not_there_is_refused_and_nothing_is_started(
    project: Path, launcher: Launcher
) -> None:
    (project / "strop-sites.toml").write_text(
        '[sites.desk]\nbackend = "local"\npython = "/nowhere/bin/python"\n'
    )
    with pytest.raises(CheckRefused, match=r"/nowhere/bin/python is no program of this machine"):
        launcher.submit(make_request(project, [saver(1)], site="desk"))
    assert not list((project.parent / "runs").glob("*/job"))


SEEN = """
import os, pathlib, sys
names = ("CUDA_VISIBLE_DEVICES", "STROP_INFER_DEVICES", "STROP_ENV_DEVICES")
pathlib.Path(sys.argv[1], "seen").write_text(" ".join(os.environ.get(name, "-") for name in names))
"""


@pytest.mark.parametrize(
    ("devices", "seen"),
    [("2,0,1", "0 2 1"), ("GPU-2,GPU-1,GPU-0", "GPU-1 GPU-2 GPU-0")],
    ids=["indices", "uuids"],
)
def test_gpus_that_are_named_are_those_that_each_part_sees(
    project: Path,
    launcher: Launcher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: str,
    seen: str,
) -> None:
    folder = use_nvml(tmp_path / "bin", monkeypatch)
    gpus = [
        Gpu(index=str(n), uuid=f"GPU-{n}", name="FAKE", memory_bytes=80 << 30, free_memory_bytes=79 << 30)
        for n in range(4)
    ]
    install_fake_nvml(folder, gpus)
    asked = (
        *("job.train_gpus=1", "job.infer_gpus=1", "job.env_gpus=1", "job.preflight=none"),
        "environment.name=guess-number",
    )
    named = f"site.devices={devices}"
    request = make_request(project, [], *asked, named)
    # Of the roles that the run file makes, a program in the place of the training.
    (train,) = list_roles("train", request.resolved.spec, sys.executable, request.site)
    shown = role("train", SEEN, "{run}", gpus=train.gpus)
    submitted = launcher.submit(replace(request, roles=(shown,)))
    assert wait_for_end(launcher, submitted.ref).state is JobState.SUCCEEDED
    assert (Path(submitted.ref.home) / "seen").read_text() == seen
    # What the run does not ask for would be idle.
    with pytest.raises(ConfigError, match="2 would be idle"):
        make_request(project, [], "job.gpus=1", named)


def test_several_nodes_are_not_one_machine(project: Path, launcher: Launcher) -> None:
    with pytest.raises(ConfigError, match=r"job\.nodes=2 at local, which is one machine"):
        launcher.plan(make_request(project, [saver(1)], "job.nodes=2"))
