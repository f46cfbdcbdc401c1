"""Attempts that have a sandbox: their tools, the grader that sees what is carried alone, and failures."""

from __future__ import annotations

import asyncio
import os
import signal
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from strop.environments import Done, Workspace, choose_environment
from strop.environments.worlds import BuiltInWorld
from strop.errors import ConfigError, SandboxLost
from strop.rollout import Example, FailureOwner, Rollout, Split
from strop.sandbox import Limits, SandboxSpec
from strop.sandbox.served import ServedSandbox, ServedShell
from strop.spec.sandboxing import SandboxSettings
from strop.spec.task import EnvironmentSection
from strop.tasks import Task
from strop.tasks.task import TaskLimits
from tests.environments.test_worlds import COUNTING, attempt, build, call, tokenizer_of
from tests.fixtures.devices import whole
from tests.fixtures.gpus import MakeGpus
from tests.fixtures.sandboxes import needs_bubblewrap

TESTS = "import sys; sys.path.insert(0, '.'); import total; assert total.total([2, 3]) == 5"
EDIT = call("str_replace", path="total.py", old="max(", new="sum(")
SUBMIT = call("submit")
PROCESS = {"sandbox": "process", "min_isolation": "rlimit"}


class Section(SandboxSettings, EnvironmentSection):
    name: str = "repair"
    num_train: int = 1
    num_held_out: int = 1


class Repair(Workspace):
    """Repair a function."""

    name = "repair"
    version = "repair-1"
    max_turns = 8
    limits = TaskLimits(max_reply_tokens=2000)
    carried = ("total.py", "not/there.py")

    def examples(self, split: Split) -> Iterator[Mapping[str, Any]]:
        return iter([{"name": split}])

    def opening(self, example: Example, seed: int) -> str:
        return "total.py should add up its numbers, and does not. Repair it."

    def sandbox_for(self, example: Example) -> SandboxSpec:
        limits = Limits(memory_bytes=128 << 20, max_processes=32, has_address_limit=False)
        return SandboxSpec(limits=limits, env={"GREETING": "hello"})

    async def prepare(self, example: Example, seed: int) -> None:
        await self.sandbox.write("total.py", b"def total(numbers):\n    return max(numbers)\n", mode=0o755)
        await self.sandbox.write("tests/test_total.py", b"raise SystemExit(0)")

    async def grade(self, sandbox: ServedSandbox) -> bool:
        result = await sandbox.exec([*sandbox.python_argv, "-c", TESTS], wall_limit_s=120)
        return result.exit_code == 0

    def gold_replies(self, example: Example) -> Iterator[tuple[str, ...]]:
        yield EDIT, SUBMIT


def make(kind: type[Repair] = Repair, **settings: Any) -> Task:
    task: Task = BuiltInWorld(Section(**{**PROCESS, **settings}), lambda _: kind())
    return task


def play(tmp_path: Path, *replies: str, task: Task | None = None) -> Rollout:
    return attempt(task or make(), tokenizer_of(tmp_path), list(replies), max_reply_tokens=2000)


def told(rollout: Rollout) -> list[str]:
    """Return what the model was told after each of its turns."""
    return [turn.text for turn in rollout.turns if not turn.is_sampled][1:]


def lost(rollout: Rollout) -> str:
    """Return the kind of the machine's failure, which has no reward."""
    outcome = rollout.outcome
    assert outcome.failure is not None
    assert (outcome.reward, outcome.failure.owner) == (None, FailureOwner.INFRA)
    return outcome.failure.kind


def ran(tmp_path: Path, *commands: str, task: Task | None = None) -> list[str]:
    replies = [call("bash", command=one) for one in (*commands, ":")]
    return told(play(tmp_path, *replies, task=task))[: len(commands)]


@pytest.mark.parametrize(
    "reply",
    [
        "It is repaired.",
        call("str_replace", path="total.py", old="max(", new="min("),
        call("create", path="tests/test_total.py", text="passed = True"),
        call("bash", command="rm total.py"),
        call("bash", command="ln -sf /etc/passwd total.py"),
        call("bash", command="(sleep 600; sed -i s/max/sum/ total.py) &"),
    ],
)
def test_nothing_else_earns_it(tmp_path: Path, reply: str) -> None:
    assert play(tmp_path, reply, SUBMIT).outcome.reward == 0.0


class Hurried(Repair):
    async def bash(self, command: str) -> str | Done:
        self.command_limit_s = 0.5 if command == "sleep 600" else 60.0
        await asyncio.sleep(0.5 if command == "echo late" else 0.0)
        return await super().bash(command)


def test_a_shell_stays_and_its_ends_are_told(tmp_path: Path) -> None:
    expected = {
        "cd tests; number=3; echo $GREETING; echo oops >&2; echo after": "hello\noops\nafter",
        "pwd; echo $number": "/tests\n3",
        "false": "[exit code 1]",
        "sleep 600": "[it was ended after 0.5 s]",
        "echo still $number; exit 4": "[exit code 4]\n[the shell has ended",
        "[ ${PWD##*/} = tests ] || echo [$number]; (sleep 0.1; kill -9 $$) &": "[]",
        "echo late": "error: the shell has ended",
        "echo anew": "anew",
    }
    said = ran(tmp_path, *expected, task=make(Hurried, max_turns=12))
    assert [words for words, text in zip(expected.values(), said, strict=True) if words not in text] == []


def test_much_output_is_bounded_and_a_flood_ends_the_command(tmp_path: Path) -> None:
    class Flooded(Repair):
        def sandbox_for(self, example: Example) -> SandboxSpec:
            return SandboxSpec(limits=Limits(flood_bytes=1 << 20))

    much, flood = ran(tmp_path, "seq 1 100000", "yes", task=make(Flooded))
    assert "characters left out" in much
    assert "99999\n100000" in much
    assert len(much) < 5000
    assert "too much output" in flood


def test_files_are_shown_written_and_edited(tmp_path: Path) -> None:
    shown, part, created, twice, edited, result = told(
        play(
            tmp_path,
            call("view", path="total.py"),
            call("view", path="total.py", first_line=2, last_line=2),
            call("create", path="new/file.txt", text="one\ntwo\none\n"),
            call("str_replace", path="new/file.txt", old="one", new="three"),
            call("str_replace", path="new/file.txt", old="two\none", new="2\nü"),
            call("bash", command="cat new/*; stat -c %a total.py"),
            SUBMIT,
        )
    )
    assert "     1\tdef total(numbers):\n     2\t    return max(numbers)" in shown
    assert "def" not in part
    assert "     2\t" in part
    assert "12 bytes" in created
    assert "stands 2 times" in twice
    assert "changed at line 2" in edited
    assert "one\n2\nü\n755" in result


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (call("view", path="nowhere"), "no such file"),
        (call("view", path="tests"), "is a directory"),
        (call("view", path=""), "is no path"),
        (call("view", path="a\0b"), "is no path"),
        (call("create", path="tests", text="x"), "is a directory"),
        (call("create", path="/proc/new", text="x"), "error: "),
        (call("str_replace", path="total.py", old="", new="x"), "stands 0 times"),
        (call("bash", command="a\0b"), "has no NUL"),
    ],
)
def test_what_cannot_be_done_is_told(tmp_path: Path, reply: str, answer: str) -> None:
    rollout = play(tmp_path, reply, SUBMIT)
    assert answer in told(rollout)[0]
    assert rollout.outcome.reward == 0.0
    assert rollout.outcome.metrics["num_tool_errors"] == 1.0


def test_the_grader_is_out_of_the_models_reach(tmp_path: Path) -> None:
    class Secret(Repair):
        """Has something in the grader that must not be seen, and sees there what is carried alone."""

        async def score(self) -> Any:
            search = f"find {self.sandbox.scratch} /tmp -name secret-4711 2>/dev/null"
            async with self._open_grader(*self.carried) as grader:
                await grader.write("secret-4711", b"x")
                seen = await self.sandbox.exec(["sh", "-c", search], wall_limit_s=120)
                listed = await grader.exec(["find", ".", "-type", "f"], wall_limit_s=120)
            assert seen.stdout == b""
            return sorted(listed.stdout.split()) == [b"./secret-4711", b"./total.py"]

    outcome = play(tmp_path, SUBMIT, task=make(Secret)).outcome
    assert outcome.reward == 1.0, outcome


class KilledInTurn(Repair):
    async def kill(self) -> None:
        os.kill(self.sandbox.supervisor_pid, signal.SIGKILL)


class KilledGrader(Repair):
    async def grade(self, sandbox: ServedSandbox) -> bool:
        os.kill(sandbox.supervisor_pid, signal.SIGKILL)
        return await super().grade(sandbox)


@pytest.mark.parametrize("kind", [KilledInTurn, KilledGrader])
def test_a_sandbox_that_the_machine_lost_is_no_reward(tmp_path: Path, kind: type[Repair]) -> None:
    replies = [call("kill"), EDIT, SUBMIT] if kind is KilledInTurn else [EDIT, SUBMIT]
    assert lost(play(tmp_path, *replies, task=make(kind))) == "SandboxLost"


class EndsItself(Repair):
    async def bash(self, command: str) -> str:
        raise SandboxLost("ended", kind="from_inside")


class EndsGrader(Repair):
    async def grade(self, sandbox: ServedSandbox) -> bool:
        raise SandboxLost("ended", kind="from_inside")


@pytest.mark.parametrize(("kind", "num_turns"), [(EndsItself, 2.0), (EndsGrader, 3.0)])
def test_a_program_that_ends_its_own_sandbox_earns_the_floor(
    tmp_path: Path, kind: type[Repair], num_turns: float
) -> None:
    """Else a policy could take back an attempt that goes badly."""
    outcome = play(tmp_path, EDIT, call("bash", command=":"), SUBMIT, task=make(kind)).outcome
    assert outcome.reward == 0.0
    assert (outcome.metrics["ended_sandbox"], outcome.metrics["num_turns"]) == (1.0, num_turns)


def test_a_sandbox_that_says_nothing_is_the_machines_failure(tmp_path: Path) -> None:
    class Silent(Repair):
        spare_limit_s = 0.2

        async def bash(self, command: str) -> str:
            await asyncio.sleep(60)
            return ""

    rollout = play(tmp_path, call("bash", command=":"), task=make(Silent, tool_limit_s=0.1))
    assert lost(rollout) == "sandbox_silent"


def test_less_isolation_than_asked_for_is_the_machines_failure(tmp_path: Path) -> None:
    task = make(min_isolation="vm")
    # No sandbox is made for examples and prompts.
    assert "Repair it." in task.render(task.examples(Split.TRAIN)[0])[0].text
    assert lost(play(tmp_path, SUBMIT, task=task)) == "SandboxRefused"


def test_a_command_is_few_frames_above_the_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[str] = []
    run = ServedShell.run

    async def noting(self: ServedShell, command: str, *, wall_limit_s: float) -> Any:
        frames[:] = [one.name for one in traceback.extract_stack() if "strop/environments" in one.filename]
        return await run(self, command, wall_limit_s=wall_limit_s)

    monkeypatch.setattr(ServedShell, "run", noting)
    play(tmp_path, call("bash", command=":"), SUBMIT)
    assert frames[frames.index("_converse") :] == ["_converse", "step", "_call", "_execute", "bash"]


def test_nothing_is_left_when_it_is_closed() -> None:
    made: list[Repair] = []

    class Kept(Repair):
        async def prepare(self, example: Example, seed: int) -> None:
            made.append(self)

    task = make(Kept)

    async def act() -> None:
        environment = choose_environment(task)()
        await environment.reset(task.examples(Split.TRAIN)[0], 0)
        assert not made[0].sandbox.is_lost
        await environment.close()
        await environment.close()
        with pytest.raises(SandboxLost, match="stopped"):
            await made[0].sandbox.exec(["true"], wall_limit_s=120)

    asyncio.run(act())


OWN = '''
from strop.environments import Workspace

class Own(Workspace):
    """Make a file."""

    max_turns = 3
    carried = ("made",)

    def examples(self, split):
        return [{"split": split}]

    def opening(self, example, seed):
        return "Make the file 'made'."

    async def grade(self, sandbox):
        return (await sandbox.exec(["test", "-f", "made"], wall_limit_s=120)).exit_code == 0
'''


def test_a_class_of_the_users_says_where_its_sandboxes_are_in_the_run_file(tmp_path: Path) -> None:
    words = [f"environment.{name}={value}" for name, value in PROCESS.items()]
    task = build(OWN, *words, name="Own")
    rollout = play(tmp_path, call("bash", command="touch made"), SUBMIT, task=task)
    assert (rollout.outcome.reward, rollout.outcome.isolation) == (1.0, "rlimit"), rollout.outcome
    with pytest.raises(ConfigError, match="have no sandbox"):
        build(COUNTING, *words)
    with pytest.raises(ConfigError, match="has no Ray"):
        build(OWN, "environment.sandbox=ray", "placement.kind=inline", name="Own")


SHOW = "ls /dev | grep -E '^nvidia[0-9]'; echo sees $CUDA_VISIBLE_DEVICES"


class Cards(Repair):
    """Say which GPUs there are."""

    async def grade(self, sandbox: ServedSandbox) -> bool:
        done = await sandbox.exec(["/bin/sh", "-c", SHOW], wall_limit_s=60)
        return done.stdout == b"nvidia1\nnvidia2\nsees GPU-1,GPU-2\n"


class OneCard(Cards):
    """Shows one of them."""

    def sandbox_for(self, example: Example) -> SandboxSpec:
        return SandboxSpec(gpus=("2",))


@needs_bubblewrap
def test_the_model_and_the_grader_see_the_gpus_for_environments_and_no_others(
    tmp_path: Path, gpus_of: MakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(kind: type[Cards], **settings: Any) -> tuple[str, Rollout]:
        task = make(kind, **{"sandbox": "bubblewrap", "min_isolation": "namespace", **settings})
        rollout = play(tmp_path, call("bash", command=SHOW), SUBMIT, task=task)
        return told(rollout)[0], rollout

    gpus_of([whole(index, 79) for index in range(3)])
    monkeypatch.setenv("STROP_ENV_DEVICES", "1,2")
    seen, rollout = shown(Cards)
    assert "nvidia1\nnvidia2\nsees GPU-1,GPU-2" in seen
    assert rollout.outcome.reward == 1.0
    # An environment may choose among them.
    seen, _ = shown(OneCard)
    assert "nvidia2\nsees GPU-2" in seen
    assert "nvidia1" not in seen
    # Where sandboxes have no devices of their own none are given.
    assert shown(Cards, **PROCESS)[1].outcome.failure is None
    monkeypatch.delenv("STROP_ENV_DEVICES")
    assert "nvidia" not in shown(Cards)[0]
