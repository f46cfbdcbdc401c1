"""Judging a Python program in a fresh sandbox: `judge_python`.

What the program does to itself, to its time and to the process that judges it is a verdict, and never a
pass. What the sandbox or the judge fails to do raises, so that the reply has no score.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from strop.errors import SandboxError, SandboxLost, explain_refusal
from strop.sandbox.contract import ExecKind, ExecResult, IsolationLevel, Limits, Mount, SandboxSpec
from strop.tasks.code.python_judge.bundle import read_runner
from strop.tasks.code.python_judge.job import (
    FILE_BYTES,
    MAX_OPEN_FILES,
    MEMORY_BYTES,
    PACKAGES_DIR,
    JudgeJob,
    JudgeVerdict,
)
from strop.tasks.code.python_judge.runner import STARTED

START_LIMIT_S = 5.0
"""Wall time of the runner beside the tests: to start, and to be told apart from them when it hangs."""
_MOUNTING_BACKEND = "bubblewrap"
"""Elsewhere a program has the standard library only."""
_ENV = {"OPENBLAS_NUM_THREADS": "1"}
"""Each thread of numpy's library reserves memory, of which a program has little."""
_MAX_EXIT_CODE = 128
"""A larger exit code is a shell's or a sandbox's way to say that a signal ended the program."""


def judge_python(job: JudgeJob, *, min_isolation: str = "namespace") -> JudgeVerdict:
    """Run a program's tests in a fresh sandbox. Blocks, also where an event loop runs in this thread.

    Raises: SandboxRefused if this host has no sandbox of that level; SandboxError if it, or the judge in
    it, failed.
    """
    judging = partial(asyncio.run, _judge(job, IsolationLevel[min_isolation.upper()]))
    if not _is_loop_running():
        return judging()
    # A task's `verify` is synchronous, and some callers of it are not.
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(judging).result()


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _judge(job: JudgeJob, min_level: IsolationLevel) -> JudgeVerdict:
    from strop.sandbox import choose_backend

    limits = Limits(memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES, max_open_files=MAX_OPEN_FILES)
    backend = await choose_backend(min_level=min_level)
    mounts: tuple[Mount, ...] = ()
    if job.packages and backend.name == _MOUNTING_BACKEND:
        mounts = tuple(
            Mount(host_path=str(place), inside_path=f"{PACKAGES_DIR}/{name}")
            for name, place in job.package_dirs().items()
        )
    nonce = secrets.token_hex(16)
    spec = SandboxSpec(
        limits=limits,
        min_level=min_level,
        mounts=mounts,
        env=_ENV if mounts else {},
        python_source=read_runner(),
    )
    async with await backend.create(spec) as sandbox:
        isolation = sandbox.isolation.level.word
        try:
            result = await sandbox.run_main(
                stdin=pack_job(job, nonce), wall_limit_s=job.wall_s + START_LIMIT_S
            )
        except SandboxLost as error:
            if error.kind != ExecKind.FROM_INSIDE:
                raise
            return _silent_verdict(job, ExecKind.FROM_INSIDE, isolation)
        return read_verdict(job, nonce, result, isolation)


def pack_job(job: JudgeJob, nonce: str) -> bytes:
    """Return a job as the runner reads it. The nonce marks what the runner says as its own words."""
    return json.dumps(
        {
            "nonce": nonce,
            "mode": job.mode,
            "source": job.source,
            "names": job.names,
            "imports": job.imports,
            "definitions": job.definitions,
            "setup": job.setup,
            "tests": job.tests,
            "input_output": job.input_output,
            "limits": job.limits(),
        }
    ).encode()


def read_verdict(job: JudgeJob, nonce: str, result: ExecResult, isolation: str) -> JudgeVerdict:
    """Return what the runner said, or what follows from its silence.

    Raises: SandboxError if the silence is not the program's doing.
    """
    lines = result.stdout.decode(errors="replace").splitlines()
    verdict = _find_verdict(lines, nonce)
    if verdict is not None:
        counts = verdict["counts"]
        return JudgeVerdict(
            num_tests=verdict["total"],
            num_passed=counts.get("passed", 0),
            num_failed=counts.get("failed", 0),
            num_errored=counts.get("errored", 0),
            num_timed_out=counts.get("timed_out", 0),
            cause=verdict["cause"],
            isolation=isolation,
        )
    own_error = result.kind is ExecKind.EXITED and 0 <= (result.exit_code or 0) <= _MAX_EXIT_CODE
    if f"{STARTED} {nonce}" not in lines or own_error:
        errors = " ".join(result.stderr.decode(errors="replace").split())[-400:]
        raise SandboxError(
            explain_refusal(
                f"the judge of a program gave no verdict ({result.kind}, exit code {result.exit_code},"
                f" after {result.duration_s:.1f} s; {errors or 'no error text'})",
                allowed="a verdict for every program that was started",
                next_step="look whether this host has memory and processes to spare; the reply has no score",
            )
        )
    return _silent_verdict(job, result.kind, isolation)


def _silent_verdict(job: JudgeJob, kind: ExecKind, isolation: str) -> JudgeVerdict:
    """Return the verdict on a program that killed or stopped its judge, or took the memory of both."""
    is_late = kind is ExecKind.TIMED_OUT
    return JudgeVerdict(
        num_tests=job.num_tests,
        num_timed_out=job.num_tests if is_late else 0,
        num_errored=0 if is_late else job.num_tests,
        cause=f"the program ended its judge ({kind})",
        isolation=isolation,
    )


def _find_verdict(lines: list[str], nonce: str) -> Mapping[str, Any] | None:
    for line in lines:
        if not line.startswith("{"):
            continue
        try:
            found: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and found.get("nonce") == nonce:
            return found
    return None
