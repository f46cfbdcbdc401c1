"""Judge a Python program in a fresh sandbox: `judge_python`.

A program that crashes, runs out of time or kills its judge gets a verdict, which is never a pass. A failure
of the sandbox or the judge raises, so that the reply has no score.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from strop.errors import DataError, SandboxError, SandboxLost
from strop.hardware import describe_machine
from strop.rollout import Outcome
from strop.sandbox.contract import ExecKind, ExecResult, IsolationLevel, Limits, Mount, SandboxSpec
from strop.tasks.code.runner import ERRORED, PACKAGES_DIR, PASSED, RESULTS, TIMED_OUT
from strop.tasks.task import right_or_wrong

_START_LIMIT_S = 5.0
"""Wall time (seconds) of the runner besides the tests: for its start, and to recognise that it hangs."""
_IMPORTS_NUMPY = re.compile(r"^\s*(?:from\s+|import\s(?:.*[\s,])?)numpy\b", re.MULTILINE)
_MAX_EXIT_CODE = 128
"""Shells and sandboxes use larger exit codes for programs that a signal ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeJob:
    """A program and its tests: statements over names that it defines, or a table of inputs and outputs.

    The inputs of a table are arguments of the function that `names` holds, or, without one, the program's
    standard input. A program that is tested by a table may import numpy.
    """

    num_tests: int
    source: str = ""
    """The untrusted program; of the tests alone, what must stand before it."""
    names: Sequence[str] = ()
    """Names that the tests use, the entry point first; none for whole programs."""
    setup: str = ""
    """Code of the data set that tests use, and that may use the program's names. It is run beside the tests,
    where the program cannot change it, before the first test."""
    tests: Sequence[str] = ()
    """The statements; empty if there is a table."""
    input_output: str = ""
    """The table: JSON with the lists `inputs` and `outputs`."""
    wall_s: float = 5.0
    """Limit of all tests together."""
    test_s: float = math.inf
    """Limit of one test."""


@lru_cache(maxsize=8)
def _places(loop: asyncio.AbstractEventLoop, sandbox: str) -> asyncio.Semaphore:
    """Return the places for programs that a loop judges at once: Ray's, else as many as processors here."""
    return asyncio.Semaphore(1 << 20 if sandbox == "ray" else describe_machine().num_logical_cpus)


async def judge_python(job: JudgeJob, *, min_isolation: str = "namespace", sandbox: str = "auto") -> Outcome:
    """Run a program's tests in a fresh sandbox. It is right if every test passed; `metrics` counts them.

    Raises: SandboxRefused if the backend `sandbox` has no such level, or cannot show numpy to a program that
    imports it; SandboxError if it, or the judge in it, failed; DataError if the tests pass the program what
    cannot be passed.
    """
    from strop.sandbox import choose_backend

    min_level = IsolationLevel[min_isolation.upper()]
    backend = await choose_backend(sandbox, min_level)
    needs_numpy = job.input_output and _IMPORTS_NUMPY.search(job.source)
    mounts = _numpy_mounts() if needs_numpy else ()
    # Each thread of numpy's OpenBLAS reserves memory, of which a program has little.
    env = {"OPENBLAS_NUM_THREADS": "1"} if mounts else {}
    spec = SandboxSpec(limits=Limits(), min_level=min_level, mounts=mounts, env=env)
    nonce = secrets.token_hex(16)
    stdin = json.dumps({**asdict(job), "nonce": nonce}).encode()
    loop = asyncio.get_running_loop()
    async with _places(loop, sandbox), await backend.create(spec, main_source=read_runner()) as place:
        isolation = place.isolation.level.word
        try:
            result = await place.run_main(stdin=stdin, wall_limit_s=job.wall_s + _START_LIMIT_S)
        except SandboxLost as error:
            if error.kind != ExecKind.FROM_INSIDE:
                raise
            return _to_outcome({ERRORED: job.num_tests}, isolation)
        return read_verdict(job, nonce, result, isolation)


def _numpy_mounts() -> tuple[Mount, ...]:
    """Return the mounts of numpy, with the `.libs` folder of its wheel."""
    import numpy as np

    package = Path(np.__file__).parent
    folders = [one for one in (package, Path(f"{package}.libs")) if one.is_dir()]
    return tuple(Mount(host_path=str(one), inside_path=f"{PACKAGES_DIR}/{one.name}") for one in folders)


def read_verdict(job: JudgeJob, nonce: str, result: ExecResult, isolation: str) -> Outcome:
    """Return the runner's verdict; if there is none, the verdict on a program that ended its judge.

    Raises: SandboxError if there is none and the program did not cause that; DataError like `judge_python`.
    """
    lines = result.stdout.decode(errors="replace").splitlines()
    said = [line.removeprefix(nonce) for line in lines if line.startswith(f"{nonce} ")]
    found = json.loads(said[1]) if len(said) > 1 and result.exit_code == 0 else {}
    if "fault" in found:
        raise DataError(
            f"the tests of a row cannot be judged: {found['fault']}",
            allowed="tests that pass numbers, texts, lists and other plain values to the program",
            next_step="rewrite the tests; the reply has no score",
        )
    counts = found.get("counts", {})
    if sum(counts.values()) == job.num_tests:
        return _to_outcome(counts, isolation)
    own_error = result.kind is ExecKind.EXITED and 0 <= (result.exit_code or 0) <= _MAX_EXIT_CODE
    if not said or own_error:
        errors = " ".join(result.stderr.decode(errors="replace").split())[-400:]
        raise SandboxError(
            f"the judge of a program gave no verdict ({result.kind}, exit code {result.exit_code},"
            f" after {result.duration_s:.1f} s; {errors or 'no error text'})",
            allowed="a verdict for every program that was started",
            next_step="look whether this host has memory and processes to spare; the reply has no score",
        )
    # The program killed or stopped its judge, or took the memory of both.
    ending = TIMED_OUT if result.kind is ExecKind.TIMED_OUT else ERRORED
    return _to_outcome({ending: job.num_tests}, isolation)


def _to_outcome(counts: Mapping[str, int], isolation: str) -> Outcome:
    """Return what a program is worth that so many tests ended with each result."""
    metrics = {f"tests_{name}": counts.get(name, 0) for name in RESULTS}
    passed, total = counts.get(PASSED, 0), sum(counts.values())
    return replace(
        right_or_wrong(passed == total > 0, format_ok=True),
        isolation=isolation,
        metrics={**metrics, "tests_total": total, "tests_passed_frac": passed / max(1, total)},
    )


@cache
def read_runner() -> str:
    """Return one text that defines `main`: the sandbox has no file that a candidate could change."""
    return Path(__file__).with_name("runner.py").read_text("utf-8")
