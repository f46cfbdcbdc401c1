"""Sandboxes of a service: what holds of this machine's holds of them, and what they cannot do they say."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.errors import SandboxError, SandboxLost, SandboxRefused
from strop.io.endpoints import RUNTIME, Endpoint, hand_over, withdraw
from strop.rollout import FailureOwner
from strop.sandbox import IsolationLevel, Limits, Mount, SandboxSpec, choose_backend, make_backend, remote
from strop.sandbox.remote import RemoteBackend
from strop.sandbox.wire import MAX_BODY_BYTES
from strop.tasks.code.judge import JudgeJob, judge_python
from strop.tasks.rows.judged_rows import ProgramSpec
from tests.fixtures.judging import judge_once
from tests.fixtures.runtime_processes import ServiceProcess, service_of
from tests.fixtures.sandboxes import appearance_of, sandbox_of, spec_of, wait_until_gone
from tests.sandbox import test_exec, test_jobs, test_shells, test_trees

BACKEND = "bubblewrap" if shutil.which("bwrap") else "process"
OF_ALL_BACKENDS: tuple[Callable[..., object], ...] = (
    test_exec.test_an_end_is_a_value,
    test_exec.test_bytes_are_exact_both_ways_and_the_middle_of_long_output_is_counted,
    test_exec.test_a_time_out_keeps_what_was_written,
    test_exec.test_eight_commands_run_at_once,
    test_exec.test_the_environment_is_clean_and_python_isolated,
    test_exec.test_files_go_in_and_out_byte_for_byte,
    test_exec.test_a_file_beyond_the_limit_is_refused_whole,
    test_exec.test_a_stopped_sandbox_says_so,
    test_exec.test_a_cancelled_command_is_killed_and_the_sandbox_lives,
    test_trees.test_a_tree_goes_in_and_comes_out_as_it_was,
    test_trees.test_what_does_not_fit_or_is_no_file_is_an_error,
    test_trees.test_files_of_a_spec_are_there_before_the_first_command,
    test_jobs.test_a_job_answers_while_it_runs,
    test_jobs.test_who_reads_late_misses_the_middle_and_learns_how_much,
    test_jobs.test_a_signal_reaches_the_program_and_its_group,
    test_jobs.test_stop_ends_all_that_a_job_started,
    test_jobs.test_a_jobs_end_is_its_programs,
    test_jobs.test_servers_inside_are_reached_from_outside,
    test_jobs.test_what_is_used_is_told,
    test_shells.test_what_a_command_sets_stays,
    test_shells.test_what_ends_a_shell_is_told,
    test_shells.test_output_of_a_shell_is_bounded_like_a_programs,
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A service, handed to this process as a run hands it over."""
    folder = tmp_path_factory.mktemp("service")
    with service_of(folder, "--backend", BACKEND) as running:
        hand_over(folder / "servers", {RUNTIME: Endpoint(url=running.url, key=running.key)})
        try:
            yield running
        finally:
            withdraw(folder / "servers", [RUNTIME])


@pytest.mark.parametrize("check", OF_ALL_BACKENDS, ids=lambda check: check.__name__.removeprefix("test_"))
@pytest.mark.usefixtures("service")
def test_it_is_as_here(check: Callable[..., object], tmp_path: Path) -> None:
    given = {
        "backend": "remote",
        "tmp_path": tmp_path,
        "program": "/bin/bash",
        "script": "echo on; : > begun; sleep 7206",
        "out": b"on\n",
    }
    ended = check(**{name: given[name] for name in inspect.signature(check).parameters})
    if inspect.iscoroutine(ended):
        asyncio.run(ended)


def refused(spec: SandboxSpec, backend: RemoteBackend | None = None) -> SandboxRefused:
    with pytest.raises(SandboxRefused) as caught:
        asyncio.run((backend or make_backend("remote")).create(spec))
    return caught.value


@pytest.mark.usefixtures("service")
def test_what_a_node_does_not_give_is_refused_with_its_word() -> None:
    spec = spec_of()
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("mounts", {"mounts": (Mount(host_path="/usr", inside_path="/usr"),)}),
        ("network", {"network": "allow:example.invalid"}),
        ("network", {"network": "host"} if BACKEND == "bubblewrap" else {"network": "all"}),
        ("image", {"image": "debian:12"}),
        ("level", {"min_level": IsolationLevel.VM}),
        ("user", {"user": 0}),
        ("limits", {"limits": Limits(memory_bytes=0)}),
        ("limits", {"limits": Limits(output_tail_bytes=1 << 40)}),
        ("capacity", {"limits": Limits(memory_bytes=1 << 50)}),
    )
    for kind, wanted in cases:
        assert refused(replace(spec, **wanted)).kind == kind, wanted


@pytest.mark.usefixtures("service")
async def test_what_it_lacks_is_refused_and_stands_in_its_record() -> None:
    async with sandbox_of("remote") as sandbox:
        isolation = sandbox.isolation
        assert (isolation.backend, isolation.lacks) == (BACKEND, ("mounts",))
        assert isolation.node == os.uname().nodename
        with pytest.raises(SandboxError, match=str(MAX_BODY_BYTES)) as caught:
            await sandbox.write("large", bytes(MAX_BODY_BYTES + 1))
        assert caught.value.kind == "too_large"
        # It goes on, and a size that is no file's is not one of a frame.
        await sandbox.write("small", b"x")
        assert await sandbox.read("small", max_bytes=1 << 40) == b"x"


def test_a_service_that_is_not_there_or_not_ours_is_refused(
    service: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PATIENCE_S", 0.0)
    wrong = RemoteBackend(Endpoint(url=service.url, key="not-the-key-of-it"))
    assert refused(spec_of(), wrong).kind == "key"
    nobody = RemoteBackend(Endpoint(url="http://127.0.0.1:9", key=service.key))
    assert refused(spec_of(), nobody).kind == "service"
    monkeypatch.delenv("STROP_ENDPOINTS")
    with pytest.raises(SandboxRefused, match="no sandbox service was handed") as caught:
        asyncio.run(choose_backend("remote"))
    assert caught.value.kind == "service"


@pytest.mark.skipif(BACKEND == "process", reason="its programs have this host's root")
@pytest.mark.usefixtures("service")
async def test_a_workspace_is_there_where_it_is_asked_for() -> None:
    async with await make_backend("remote").create(replace(spec_of(), has_workspace=True)) as sandbox:
        await sandbox.write("/workspace/file", b"x")


@pytest.mark.usefixtures("service")
def test_programs_are_judged_there() -> None:
    for source, is_right in (("def f(x): return x + 1", True), ("import os; os._exit(0)", False)):
        job = JudgeJob(
            source=source,
            names=("f",),
            tests=("assert f(1) == 2",),
            num_tests=1,
            wall_s=60.0,
        )
        verdict = asyncio.run(judge_python(job, min_isolation="rlimit", sandbox="remote"))
        assert verdict.is_correct is is_right, verdict
        assert verdict.isolation == ("namespace" if BACKEND == "bubblewrap" else "rlimit")
    with pytest.raises(SandboxRefused) as caught:
        asyncio.run(judge_python(job, min_isolation="vm", sandbox="remote"))
    assert caught.value.kind == "level"


def test_what_the_service_refuses_is_no_reward(
    service: ServiceProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"code": "def f(x): return x", "test_list": ["assert f(1) == 1"]}
    for stem, text in (("train", "Return it."), ("test", "Give it back.")):
        (tmp_path / f"{stem}.jsonl").write_text(json.dumps({**row, "text": text}), "utf-8")
    spec = ProgramSpec(name="mbpp", source=str(tmp_path), min_isolation="rlimit", sandbox="remote")
    monkeypatch.setenv("STROP_ENDPOINTS", str(tmp_path / "servers"))
    hand_over(tmp_path / "servers", {RUNTIME: Endpoint(url=service.url, key="not-the-key-of-it")})

    outcome = judge_once(spec, "```python\ndef f(x): return x\n```")
    assert outcome.reward is None
    assert outcome.failure is not None
    assert (outcome.failure.owner, outcome.failure.kind) == (FailureOwner.INFRA, "SandboxRefused")
    assert "answered 401" in (outcome.failure.detail or "")


_OWNER = """
import asyncio
from strop.sandbox import IsolationLevel, SandboxSpec, make_backend
async def main():
    sandbox = await make_backend("remote").create(SandboxSpec(min_level=IsolationLevel.RLIMIT))
    await sandbox.exec(["/bin/sh", "-c", "setsid sleep 7801 & sleep 7801"], wall_limit_s=600)
asyncio.run(main())
"""


@pytest.mark.usefixtures("service")
def test_it_ends_with_its_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER])
    try:
        asyncio.run(appearance_of("7801"))
    finally:
        owner.kill()
        owner.wait()
    wait_until_gone("7801")


@pytest.mark.slow
def test_a_service_that_dies_loses_its_sandboxes(tmp_path: Path) -> None:
    async def work(service: ServiceProcess) -> None:
        backend = RemoteBackend(Endpoint(url=service.url, key=service.key))
        first = await backend.create(spec_of())
        running = asyncio.create_task(first.exec(["/bin/sleep", "7802"], wall_limit_s=600))
        await appearance_of("7802")
        service.kill()
        for awaited in (running, first.exec(["/bin/true"], wall_limit_s=60), first.stats()):
            with pytest.raises(SandboxLost) as caught:
                await awaited
            assert caught.value.kind == "infra"
        service.start()
        async with await backend.create(spec_of()) as second:
            assert (await second.exec(["/bin/true"], wall_limit_s=60)).exit_code == 0
        await first.stop()

    with service_of(tmp_path, "--backend", BACKEND) as service:
        asyncio.run(work(service))
        wait_until_gone("7802")
