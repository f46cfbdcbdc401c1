"""Sandboxes by Ray: what holds of this machine's holds of them; they wait for room, and leave nothing."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.cluster.ray.runtime import RayHead
from strop.errors import SandboxError, SandboxRefused
from strop.rollout import FailureOwner
from strop.sandbox import ExecKind, IsolationLevel, Limits, Mount, janitor, make_backend
from strop.sandbox.hosts import SandboxHost
from strop.tasks.code.judge import JudgeJob, judge_python
from strop.tasks.rows.judged_rows import ProgramSpec
from tests.fixtures.judging import judge_once
from tests.fixtures.ray_traces import needs_ray, wait_until
from tests.fixtures.sandboxes import appearance_of, needs_bubblewrap, sandbox_of, spec_of, wait_until_gone
from tests.sandbox import test_exec, test_jobs, test_shells, test_trees

pytestmark = [pytest.mark.slow, needs_ray, needs_bubblewrap]

OF_ALL_BACKENDS: tuple[Callable[..., object], ...] = (
    test_exec.test_an_end_is_a_value,
    test_exec.test_bytes_are_exact_both_ways_and_the_middle_of_long_output_is_counted,
    test_exec.test_a_time_out_keeps_what_was_written,
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
    test_jobs.test_what_is_used_is_told,
    test_shells.test_what_a_command_sets_stays,
    test_shells.test_what_ends_a_shell_is_told,
    test_shells.test_output_of_a_shell_is_bounded_like_a_programs,
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray cluster of one node, with this process in it; its address. Nothing of sandboxes is left."""
    before = scratch_folders()
    folder = tmp_path_factory.mktemp("ray")
    head = RayHead(folder, 1, folder / "ray.token")
    with asyncio.Runner() as runner:
        try:
            yield runner.run(head.start())
        finally:
            runner.run(head.stop())
    assert scratch_folders() <= before


def scratch_folders() -> set[Path]:
    """Return the private directories of sandboxes whose clients have ended."""
    return {path for folder in janitor._find_dead() for path in folder.glob("[0-9]*")}


@pytest.mark.parametrize("check", OF_ALL_BACKENDS, ids=lambda check: check.__name__.removeprefix("test_"))
@pytest.mark.usefixtures("cluster")
def test_it_is_as_here(check: Callable[..., object], tmp_path: Path) -> None:
    given = {
        "backend": "ray",
        "tmp_path": tmp_path,
        "program": "/bin/bash",
        "script": "echo on; : > begun; sleep 7206",
        "out": b"on\n",
    }
    ended = check(**{name: given[name] for name in inspect.signature(check).parameters})
    if inspect.iscoroutine(ended):
        asyncio.run(ended)


@pytest.mark.usefixtures("cluster")
def test_what_no_node_gives_is_refused_with_its_word() -> None:
    spec = spec_of()
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("mounts", {"mounts": (Mount(host_path="/usr", inside_path="/usr"),)}),
        ("gpus", {"gpus": ("0",)}),
        ("network", {"network": "all"}),
        ("level", {"min_level": IsolationLevel.VM}),
        ("capacity", {"limits": Limits(memory_bytes=1 << 50)}),
        ("capacity", {"limits": Limits(cpus=4096.0)}),
    )
    for kind, wanted in cases:
        with pytest.raises(SandboxRefused) as caught:
            asyncio.run(make_backend("ray").create(replace(spec, **wanted)))
        assert caught.value.kind == kind, wanted


@pytest.mark.usefixtures("cluster")
async def test_its_record_has_its_node_and_what_it_lacks() -> None:
    async with await make_backend("ray").create(replace(spec_of(), has_workspace=True)) as sandbox:
        isolation = sandbox.isolation
        assert (isolation.backend, isolation.level) == ("bubblewrap", IsolationLevel.NAMESPACE)
        assert (isolation.node, isolation.lacks) == (os.uname().nodename, ("mounts", "servers"))
        with pytest.raises(SandboxError) as caught:
            await sandbox.connect(8000)
        assert caught.value.kind == "servers"
        # More than Ray passes within a message.
        await sandbox.write("/workspace/file", bytes(1 << 22))
        assert await sandbox.read("/workspace/file") == bytes(1 << 22)


@pytest.mark.usefixtures("cluster")
async def test_messages_take_their_turns_in_whatever_order_they_come() -> None:
    from ray.util.placement_group import placement_group, remove_placement_group

    host, group = SandboxHost(), placement_group([{"CPU": 0.1}])
    await host.create("cat", group, spec_of(), "")
    order: dict[str, Any] = {"op": "start", "argv": ["/bin/cat"], "cwd": None, "env": {}, "wall_limit_s": 9}
    closing = asyncio.create_task(host.pass_on("cat", 1, {"op": "input_end", "job": 1 << 32}, b""))
    await asyncio.sleep(0.1)
    ended, _ = await host.pass_on("cat", 0, {"id": 1 << 32, "has_stdin": True, **order}, b"")
    assert (ended["kind"], await closing) == (ExecKind.EXITED, ({}, b""))
    assert await host.end("cat")
    remove_placement_group(group)


@pytest.mark.usefixtures("cluster")
def test_more_than_there_is_room_for_wait_and_all_end_well() -> None:
    async def work(number: int) -> bytes:
        async with sandbox_of("ray", limits=Limits(cpus=0.75)) as sandbox:
            # A wait that is given up leaves the place to another one.
            ran = await sandbox.exec(["/bin/sh", "-c", f"sleep 0.1; echo {number}"], wall_limit_s=60)
            return ran.stdout

    async def act() -> list[bytes]:
        given_up = [asyncio.create_task(work(-1)) for _ in range(4)]
        rest = [asyncio.create_task(work(number)) for number in range(24)]
        await asyncio.sleep(0.3)
        for task in given_up:
            task.cancel()
        return await asyncio.gather(*rest)

    assert asyncio.run(act()) == [f"{number}\n".encode() for number in range(24)]
    import ray

    total = ray.cluster_resources()["CPU"]
    wait_until(lambda: ray.available_resources().get("CPU", 0.0) == total, 30.0)


@pytest.mark.usefixtures("cluster")
def test_programs_are_judged_there(tmp_path: Path) -> None:
    for source, is_right in (("def f(x): return x + 1", True), ("import os; os._exit(0)", False)):
        job = JudgeJob(source=source, names=("f",), tests=("assert f(1) == 2",), num_tests=1, wall_s=60.0)
        verdict = asyncio.run(judge_python(job, sandbox="ray"))
        assert (verdict.is_correct, verdict.isolation) == (is_right, "namespace")
    row = {"code": "def f(x): return x", "test_list": ["assert f(1) == 1"]}
    for stem, text in (("train", "Return it."), ("test", "Give it back.")):
        (tmp_path / f"{stem}.jsonl").write_text(json.dumps({**row, "text": text}), "utf-8")
    spec = ProgramSpec(name="mbpp", source=str(tmp_path), min_isolation="vm", sandbox="ray")
    outcome = judge_once(spec, "```python\ndef f(x): return x\n```")
    assert (outcome.reward, outcome.failure and outcome.failure.owner) == (None, FailureOwner.INFRA)


_OWNER = """
import asyncio, sys
from strop.cluster.ray.runtime import connect_to
from strop.sandbox import IsolationLevel, SandboxSpec, make_backend
async def main():
    await connect_to(sys.argv[1], "strop")
    sandbox = await make_backend("ray").create(SandboxSpec(min_level=IsolationLevel.RLIMIT))
    await sandbox.exec(["/bin/sh", "-c", "setsid sleep 7801 & sleep 7801"], wall_limit_s=600)
asyncio.run(main())
"""


def test_it_ends_with_its_owner(cluster: str) -> None:
    with asyncio.Runner() as runner:
        # The host is this process's, and goes on.
        beside = runner.run(make_backend("ray").create(spec_of()))
        owner = subprocess.Popen([sys.executable, "-c", _OWNER, cluster])
        try:
            runner.run(appearance_of("7801"))
        finally:
            owner.kill()
            owner.wait()
        wait_until_gone("7801")
        assert runner.run(beside.exec(["/bin/true"], wall_limit_s=60)).exit_code == 0
        runner.run(beside.stop())
