"""Python that a sandbox runs in a fork of an interpreter outside: as clean and as bounded as one inside."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from strop.sandbox import ExecKind, ExecResult, Limits, SandboxSpec, make_backend
from strop.sandbox.contract import MIB
from strop.sandbox.ground import python_candidates
from strop.sandbox.served import ServedSandbox
from tests.fixtures.sandboxes import needs_bubblewrap, on_every_backend, processes_with, spec_of

T = TypeVar("T")


def with_source(
    backend: str,
    source: str,
    work: Callable[[ServedSandbox], Awaitable[T]],
    *,
    limits: Limits | None = None,
    env: dict[str, str] | None = None,
) -> T:
    """Do some work in a fresh sandbox that has a Python source."""

    async def run() -> T:
        spec = SandboxSpec(limits=limits or Limits(), env=env or {}, min_level=spec_of().min_level)
        async with await make_backend(backend).create(spec, main_source=source) as sandbox:
            return await work(sandbox)

    return asyncio.run(run())


def run_main(backend: str, source: str, stdin: bytes = b"", **more: Any) -> ExecResult:
    """Run a source's main as the first command of a fresh sandbox."""
    return with_source(
        backend, source, lambda sandbox: sandbox.run_main(stdin=stdin, wall_limit_s=60), **more
    )


ABOUT_ITSELF = r"""
import json, os, sys
LOADED_BY = os.getpid()
def main():
    print(json.dumps({
        "stdin": sys.stdin.read(),
        "argv": sys.argv,
        "path": sys.path,
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "fds": len(os.listdir("/proc/self/fd")),
        "is_fork": LOADED_BY != os.getpid(),
        "executable": sys.executable,
        "depth": depth(),
    }))
    sys.stderr.write("said")
def depth(n=0):
    try:
        return depth(n + 1)
    except RecursionError:
        return n
"""


@on_every_backend
def test_a_fork_is_as_an_interpreter_that_was_started_inside(backend: str) -> None:
    async def work(sandbox: ServedSandbox) -> None:
        found = []
        for _ in range(2):
            result = await sandbox.run_main(stdin=b"given", wall_limit_s=60)
            assert (result.kind, result.exit_code, result.stderr) == (ExecKind.EXITED, 0, b"said")
            found.append(json.loads(result.stdout))
        first, second = found
        assert first["env"]["ADDED"] == "yes"
        assert first["cwd"] == sandbox.scratch
        # Three streams and the listing itself.
        assert first["fds"] == 4
        assert first["executable"] == sandbox.python_argv[0]
        # Only a sandbox's first process may be a fork; what comes later knows of what was asked before.
        assert not second.pop("is_fork")
        # And only where its Python is the daemon's, which other users may not reach.
        assert first.pop("is_fork") is (sandbox.python_argv[0] == python_candidates()[0])
        # Where the count of frames above differs by the few of `-c`.
        assert abs(first.pop("depth") - second.pop("depth")) <= 5
        assert first == second

    with_source(backend, ABOUT_ITSELF, work, env={"ADDED": "yes"})


@on_every_backend
def test_what_one_source_loads_another_does_not_find(backend: str) -> None:
    """Or it would find modules that it may not see, or load twice what can be loaded once."""
    look = "import sys\ndef main(): print('colorsys' in sys.modules)"
    with_both = run_main(backend, f"import colorsys\n{look}")
    assert with_both.stdout == b"True\n"
    assert run_main(backend, look).stdout == b"False\n"


FIND = r"""
import sys
def main():
    word, found, num_bytes = bytes.fromhex(sys.stdin.read()), 0, 0
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps:
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
            if "rw" in line.split()[1]:
                memory.seek(start)
                block = memory.read(end - start)
                num_bytes += len(block)
                found += block.count(word)
    print(found, num_bytes)
"""


@needs_bubblewrap
def test_a_fork_has_nothing_of_other_sandboxes_in_its_memory() -> None:
    canary, own = "canary-81f3c6", "own-31d8aa"

    async def run() -> tuple[str, str]:
        backend = make_backend("bubblewrap")
        other = SandboxSpec(min_level=spec_of().min_level, env={"SECRET": canary})
        mine = SandboxSpec(min_level=spec_of().min_level, env={"OWN": own})
        async with await backend.create(other, main_source=FIND) as before:
            await before.exec(["/bin/echo", canary], stdin=canary.encode(), wall_limit_s=60)
            await before.write("file", canary.encode())
            async with (
                await backend.create(mine, main_source=FIND) as sandbox,
                await backend.create(mine, main_source=FIND) as control,
            ):
                result = await sandbox.run_main(stdin=canary.encode().hex().encode(), wall_limit_s=60)
                # It would find what is there.
                positive = await control.run_main(stdin=own.encode().hex().encode(), wall_limit_s=60)
                return result.stdout.decode(), positive.stdout.decode()

    words, positive_words = (text.split() for text in asyncio.run(run()))
    # The word that was looked for is there itself, in the one object that it was made into.
    assert int(words[1]) > MIB
    assert int(words[0]) <= int(positive_words[0]) - 1
    assert int(words[0]) <= 1


@on_every_backend
def test_a_fork_has_the_limits_of_a_program(backend: str) -> None:
    source = """
import os, resource, subprocess
def main():
    subprocess.Popen(["/bin/sleep", "7306"], start_new_session=True)
    try:
        bytearray(200 << 20)
    except MemoryError:
        print("memory", flush=True)
    print(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CPU), flush=True)
    with open("large", "wb") as file:
        try:
            file.truncate(1 << 40)
        except OSError as error:
            print(error.errno, flush=True)
    os.kill(os.getpid(), 9)
"""
    result = run_main(backend, source, limits=Limits(memory_bytes=128 * MIB))
    # 27 is EFBIG; the processor limit is the wall limit and a second.
    assert result.stdout == b"memory\n(64, 64) (61, 61)\n27\n", result.stderr
    assert (result.kind, result.signal) == (ExecKind.SIGNALED, 9)
    assert processes_with("7306") == []


@on_every_backend
def test_a_command_in_progress_is_given_the_end_of_its_input(backend: str) -> None:
    """Incident: a command forked meanwhile held the other end of it."""
    data = bytes(300_000)

    async def work(sandbox: ServedSandbox) -> None:
        script = "until [ -e begun ]; do sleep 0.05; done; wc -c"
        reader = asyncio.create_task(sandbox.exec(["/bin/sh", "-c", script], stdin=data, wall_limit_s=120))
        # The reader's request is sent, and so is the first.
        await asyncio.sleep(0)
        script = ": > begun; exec sleep 7307"
        sleeper = asyncio.create_task(sandbox.exec(["/bin/sh", "-c", script], wall_limit_s=600))
        # While the other one lives, which is longer than the time of this one.
        result = await reader
        assert (int(result.stdout), result.kind) == (300_000, ExecKind.EXITED)
        assert not sleeper.done()
        sleeper.cancel()

    with_source(backend, "", work)
