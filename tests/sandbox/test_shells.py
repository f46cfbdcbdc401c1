"""Shells that stay open: what stays, what a command's end is, and what ends one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from strop.errors import SandboxError
from strop.sandbox import ExecKind, Limits, Shell, served
from strop.sandbox.served import ServedSandbox
from tests.fixtures.sandboxes import (
    appearance_of,
    needs_bubblewrap,
    needs_podman,
    on_every_backend,
    processes_with,
    sandbox_of,
)

in_both_shells = pytest.mark.parametrize(
    ("backend", "program"),
    [
        ("process", "/bin/bash"),
        ("process", "/bin/sh"),
        pytest.param("bubblewrap", "/bin/bash", marks=needs_bubblewrap),
        pytest.param("podman", "/bin/sh", marks=[needs_podman, pytest.mark.slow]),
    ],
)


@pytest.fixture(autouse=True)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer the shell that a test names, and no other."""
    program = getattr(request.node, "callspec", None) and request.node.callspec.params.get("program")
    offered = tuple(one for one in served._SHELLS if program in (None, one[0][0]))
    monkeypatch.setattr(served, "_SHELLS", offered)


@asynccontextmanager
async def shell_of(
    backend: str, *, limits: Limits | None = None
) -> AsyncIterator[tuple[Shell, ServedSandbox]]:
    async with (
        sandbox_of(backend, limits=limits) as sandbox,
        await sandbox.open_shell(env={"GIVEN": "given"}) as shell,
    ):
        yield shell, sandbox


async def say(shell: Shell, command: str) -> str:
    result = await shell.run(command, wall_limit_s=60)
    assert (result.kind, result.has_shell, result.stderr) == (ExecKind.EXITED, True, b"")
    return result.stdout.decode()


@in_both_shells
async def test_what_a_command_sets_stays(backend: str, program: str) -> None:
    async with shell_of(backend) as (shell, sandbox):
        assert (
            await say(shell, "mkdir d; cd d; word='a  b'; f() { echo \"$word of $1\"; }; export OUT=x") == ""
        )
        assert await say(shell, 'pwd; f me; sh -c "echo $OUT $GIVEN"; cat') == (
            f"{sandbox.scratch}/d\na  b of me\nx given\n"
        )
        names = (await say(shell, "env | cut -d= -f1 | sort")).split()
        assert not {"PS1", "PS2", "HISTFILE"} & set(names)
        result = await shell.run("(exit 7)", wall_limit_s=60)
        assert (result.exit_code, result.signal, result.has_shell) == (7, None, True)
        assert (await shell.run("sh -c 'kill -9 $$'", wall_limit_s=60)).exit_code == 137
        # Several lines, quotes, a document, an exclamation mark, no end of line.
        script = "for i in 1 2; do\n  echo \"it's $i!\"\ndone\ncat <<'E'\n$word\nE\nprintf end"
        assert await say(shell, script) == "it's 1!\nit's 2!\n$word\nend"


@in_both_shells
async def test_errors_and_interrupts_do_not_end_it(backend: str, program: str) -> None:
    async with shell_of(backend) as (shell, _):
        await say(shell, "kept=1")
        for wrong in ("if then", "echo 'open", "echo ${unset?none}", "readonly R=1; R=2", "/no/such/program"):
            result = await shell.run(wrong, wall_limit_s=60)
            assert (result.kind, result.has_shell) == (ExecKind.EXITED, True), wrong
            assert result.exit_code, wrong
            assert result.stderr, wrong
        assert await say(shell, "echo $kept") == "1\n"


@in_both_shells
async def test_a_wall_limit_ends_the_command_and_keeps_the_shell(backend: str, program: str) -> None:
    async with shell_of(backend) as (shell, sandbox):
        # Bash tells of the first; the second loses its parent.
        begun = await shell.run("kept=1; sleep 7702 & (sleep 7702 &); sleep 0", wall_limit_s=60)
        assert (begun.exit_code, begun.has_shell) == (0, True)
        deadline = time.monotonic() + 60
        while len(servers := sorted(processes_with("7702"))) < 2 and time.monotonic() < deadline:
            await sandbox.stats()
        assert len(servers) == 2
        attacks = (
            "echo before; setsid sleep 7703 & sleep 7703; echo after",
            "(setsid sh -c \"trap '' TERM INT; sleep 7703; sleep 7703\" &); while :; do sleep 7703; done",
            "while :; do :; done",
        )
        for attack in attacks:
            result = await shell.run(attack, wall_limit_s=0.4)
            assert (result.kind, result.has_shell) == (ExecKind.TIMED_OUT, True), attack
            assert b"after" not in result.stdout
            assert processes_with("7703") == [], attack
        # What an earlier command left running goes on, and so does the shell.
        assert sorted(processes_with("7702")) == servers
        assert await say(shell, "echo $kept") == "1\n"
        cancelled = asyncio.create_task(shell.run("sleep 7704", wall_limit_s=600))
        await appearance_of("7704")
        cancelled.cancel()
        assert await say(shell, "echo $kept") == "1\n"
        assert processes_with("7704") == []
    assert processes_with("7702") == []


@in_both_shells
async def test_what_ends_a_shell_is_told(backend: str, program: str) -> None:
    async with shell_of(backend) as (shell, sandbox):
        result = await shell.run("echo last; exit 3", wall_limit_s=60)
        assert (result.kind, result.exit_code, result.has_shell) == (ExecKind.EXITED, 3, False)
        assert result.stdout == b"last\n"
        with pytest.raises(SandboxError, match="the shell has ended") as caught:
            await shell.run("true", wall_limit_s=60)
        assert caught.value.kind == "ended"
        await shell.close()
        async with await sandbox.open_shell() as other:
            result = await other.run("trap '' INT; while :; do :; done", wall_limit_s=0.2)
            assert (result.kind, result.has_shell) == (ExecKind.TIMED_OUT, False)
        async with await sandbox.open_shell() as other:
            result = await other.run("exec sh -c 'echo became; exit 5'", wall_limit_s=60)
            assert (result.stdout, result.exit_code, result.has_shell) == (b"became\n", 5, False)
        async with await sandbox.open_shell() as other:
            with pytest.raises(SandboxError) as caught:
                await other.run("echo \0", wall_limit_s=60)
            assert caught.value.kind == "command"


@on_every_backend
async def test_output_of_a_shell_is_bounded_like_a_programs(backend: str) -> None:
    async with shell_of(
        backend, limits=Limits(output_head_bytes=100, output_tail_bytes=50, flood_bytes=1 << 20)
    ) as (shell, sandbox):
        result = await shell.run("head -c 5000 /dev/zero; echo e >&2", wall_limit_s=60)
        assert (len(result.stdout), result.stdout_total, result.stderr) == (150, 5000, b"e\n")
        result = await shell.run("yes", wall_limit_s=60)
        assert (result.kind, result.has_shell) == (ExecKind.OUTPUT_FLOOD, True)
        assert (await shell.run("echo on", wall_limit_s=60)).stdout == b"on\n"
        stats = await sandbox.stats()
        # With the one that prepared it.
        assert stats.commands == 4


FORGE = """
import os
for descriptor in range(3, 64):
    try:
        os.write(descriptor, b"0\\n" * 9)
    except OSError:
        pass
os._exit(9)
"""


@on_every_backend
async def test_no_program_can_tell_the_status(backend: str) -> None:
    async with shell_of(backend) as (shell, sandbox):
        await sandbox.write("forge.py", FORGE.encode())
        result = await shell.run(" ".join((*sandbox.python_argv, "forge.py")), wall_limit_s=60)
        assert (result.kind, result.exit_code, result.has_shell) == (ExecKind.EXITED, 9, True)


@on_every_backend
async def test_where_no_shell_starts_that_is_told(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "_SHELLS", ((("/no/such/shell", "-i"), ":"), (("/bin/false",), ":")))

    async with sandbox_of(backend) as sandbox:
        with pytest.raises(SandboxError, match="no shell answers") as caught:
            await sandbox.open_shell()
        assert caught.value.kind == "shell"
