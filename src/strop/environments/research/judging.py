"""The judging of an artefact: data here, source as a program in the grader's sandbox that answers questions.

The program is asked over its standard input and answers a line for each; what it prints goes nowhere. All
that an answer can do is to be a good or a bad one: the judge holds opponents, labels and the score.
"""

from __future__ import annotations

import json
from typing import Any

from strop.environments.research.contract import (
    MAX_ARTEFACT_BYTES,
    ArtefactRefused,
    Instance,
    Phase,
)
from strop.errors import SandboxError, SandboxLost
from strop.sandbox.contract import ExecKind
from strop.sandbox.following import Job
from strop.sandbox.served import ServedSandbox

_MAX_ANSWER_BYTES = 4 << 20
_UNREADABLE = frozenset({"missing", "directory", "not_regular", "denied", "too_large"})
"""Kinds of a sandbox's errors that say something of the artefact."""
_DRIVER = """
import json, os, sys

def main():
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    path, name = sys.argv[1:]

    def answer(found):
        answers.write(json.dumps(found).encode() + b"\\n")
        answers.flush()

    try:
        with open(path, "rb") as file:
            source = file.read()
        names = {"__name__": "artefact"}
        exec(compile(source, path, "exec"), names)
        function = names[name]
        for question in questions:
            answer([function(*arguments) for arguments in json.loads(question)])
    except BaseException as error:
        answer({"raised": f"{type(error).__name__}: {error}"[:400]})

main()
"""


async def read_artefact(instance: Instance, sandbox: ServedSandbox) -> bytes:
    """Return the artefact that lies in a sandbox. Raises: ArtefactRefused if none does; SandboxError."""
    try:
        return await sandbox.read(instance.artefact, max_bytes=MAX_ARTEFACT_BYTES)
    except SandboxError as error:
        if error.kind not in _UNREADABLE:
            raise
        raise ArtefactRefused(
            f"{instance.artefact} is no file of at most {MAX_ARTEFACT_BYTES} bytes"
        ) from error


async def judge_artefact(
    instance: Instance, sandbox: ServedSandbox, artefact: bytes, phase: Phase, limit_s: float
) -> float:
    """Return the score of an artefact, in the unit of the instance's marks; source runs in its sandbox.

    `limit_s`: wall time of a program, with all that it is asked.
    Raises: ArtefactRefused; SandboxError if the sandbox fails and no program had it do so.
    """
    if instance.score is not None:
        return instance.score(artefact, phase)
    try:
        return await _play(instance, sandbox, phase, limit_s)
    except SandboxLost as error:
        if error.kind != ExecKind.FROM_INSIDE:
            raise
        raise ArtefactRefused("the program ended its sandbox") from error


async def _play(instance: Instance, sandbox: ServedSandbox, phase: Phase, limit_s: float) -> float:
    assert instance.play is not None
    assert instance.function is not None
    # -I: what else lies in the directory is no module.
    argv = [*sandbox.python_argv, "-I", "-c", _DRIVER, instance.artefact, instance.function]
    job = await sandbox.start(argv, wall_limit_s=limit_s, has_stdin=True)
    program, play = _Program(job), instance.play(phase)
    try:
        calls = next(play)
        while True:
            calls = play.send(await program.ask(calls))
    except StopIteration as end:
        return float(end.value)
    finally:
        play.close()
        await job.stop()


class _Program:
    """The function of an artefact, where it runs."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._unread = bytearray()

    async def ask(self, calls: list[list[Any]]) -> list[Any]:
        """Return what the function returns for each list of arguments.

        Raises: ArtefactRefused if it raises, ends, takes too long, or returns what JSON has no form for.
        """
        if not await self._job.write(json.dumps(calls).encode() + b"\n"):
            await self._refuse_end()
        while b"\n" not in self._unread:
            output = await self._job.read()
            if output is None:
                await self._refuse_end()
            elif output.stdout_omitted or len(self._unread) > _MAX_ANSWER_BYTES:
                raise ArtefactRefused("the answers of the program are too long")
            else:
                self._unread += output.stdout
        line, _, rest = bytes(self._unread).partition(b"\n")
        self._unread[:] = rest
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and isinstance(found.get("raised"), str):
            raise ArtefactRefused(f"the program failed: {found['raised'][:400]}")
        if not isinstance(found, list) or len(found) != len(calls):
            raise ArtefactRefused("the program answered in another form than its function's")
        return found

    async def _refuse_end(self) -> None:
        """Say how the program ended. Raises: ArtefactRefused."""
        result = await self._job.wait()
        words = {
            ExecKind.TIMED_OUT: f"the program was ended after {result.duration_s:.0f} s",
            ExecKind.OOM: "the program ran out of memory",
        }
        raise ArtefactRefused(words.get(result.kind, f"the program ended ({result.kind.value})"))
