"""Judging a Python program in a fresh sandbox: `judge_python`.

What the program does to itself, to its time and to the process that judges it is a verdict, and never a
pass. What the sandbox or the judge fails to do raises, so that the reply has no score.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import secrets
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from strop.errors import SandboxError, SandboxLost, SandboxRefused
from strop.sandbox.contract import ExecKind, ExecResult, IsolationLevel, Limits, Mount, SandboxSpec
from strop.spec.task import CodeTaskSection
from strop.tasks.code.python_judge.runner import STARTED

START_LIMIT_S = 5.0
"""Wall time of the runner beside the tests: to start, and so that a hang of its own is recognized."""
_NOT_MOUNTING = ("process", "remote")
"""There a program has the standard library only."""
_ENV = {"OPENBLAS_NUM_THREADS": "1"}
"""Each thread of numpy's library reserves memory, of which a program has little."""
_MAX_EXIT_CODE = 128
"""A larger exit code is a shell's or a sandbox's way to say that a signal ended the program."""
MAX_OPEN_FILES = 64
MEMORY_BYTES = 512 << 20
FILE_BYTES = 16 << 20
PACKAGES_DIR = "/packages"
"""Where a sandbox shows the packages that a task allows; nothing else lies there."""


class JudgeMode(StrEnum):
    """How a program is tested; the words of the job."""

    STATEMENTS = "statements"
    """Tests are Python statements over names that the program defines."""
    CALLS = "calls"
    """Tests are arguments of one function and the value that it returns."""
    PROGRAMS = "programs"
    """Tests are what a program reads and what it prints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeJob:
    """A program and its tests."""

    source: str
    """The untrusted program."""
    mode: JudgeMode
    num_tests: int
    names: tuple[str, ...] = ()
    """Names that the program is tested by, the entry point first; none for whole programs."""
    imports: tuple[str, ...] = ()
    """Import statements of the tests. They run before the program, which may lean on them."""
    definitions: str = ""
    """Code of the data set that the tests use, run where the program cannot change it."""
    setup: str = ""
    """Code of the data set that uses the program's names, run before each test's first use of them."""
    tests: tuple[str, ...] = ()
    """The statements; empty in the other modes."""
    input_output: str = ""
    """JSON with the lists `inputs` and `outputs`; empty for statements."""
    wall_s: float = 5.0
    """For all tests together."""
    test_s: float = math.inf
    """For one test."""
    packages: tuple[str, ...] = ()
    """What the program may import beside the standard library, if this installation has it."""

    def package_dirs(self) -> dict[str, Path]:
        """Return the allowed packages' directories by name, with the libraries that wheels put beside."""
        found: dict[str, Path] = {}
        for package in self.packages:
            spec = find_spec(package)
            for folder in map(Path, spec.submodule_search_locations or ()) if spec else ():
                libraries = folder.with_name(f"{folder.name}.libs")
                found |= {place.name: place for place in (folder, libraries) if place.is_dir()}
        return found

    def limits(self) -> dict[str, float | int | str]:
        """Return the limits as the runner reads them; the candidate finds its packages among them."""
        return {
            "wall_s": self.wall_s,
            "test_s": min(self.test_s, self.wall_s),
            "memory_bytes": MEMORY_BYTES,
            "file_bytes": FILE_BYTES,
            "max_open_files": MAX_OPEN_FILES,
            "cpu_s": math.ceil(self.wall_s) + 1,
            "packages_dir": PACKAGES_DIR if self.packages else "",
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeVerdict:
    """What became of the tests."""

    num_tests: int
    num_passed: int = 0
    num_failed: int = 0
    """Of those that gave another answer than the expected one."""
    num_errored: int = 0
    """Of those that raised, crashed or could not begin."""
    num_timed_out: int = 0
    cause: str = ""
    """Why the first test that did not pass did not; without what was expected."""
    isolation: str
    """Level of the sandbox, in the words of run files."""

    @property
    def is_right(self) -> bool:
        """Whether every test passed."""
        return self.num_passed == self.num_tests > 0

    @property
    def timed_out(self) -> bool:
        """Whether the program used up the time of a test."""
        return self.num_timed_out > 0


def judge_for(spec: CodeTaskSection, job: JudgeJob) -> JudgeVerdict:
    """Run a program's tests where a task's settings say. Raises: as `judge_python`."""
    return judge_python(job, min_isolation=spec.min_isolation, sandbox=spec.sandbox)


def judge_python(job: JudgeJob, *, min_isolation: str = "namespace", sandbox: str = "auto") -> JudgeVerdict:
    """Run a program's tests in a fresh sandbox. Blocks, also where an event loop runs in this thread.

    Raises: SandboxRefused if `sandbox` makes none of that level, or does not show an allowed package that the
    program imports; SandboxError if it, or the judge in it, failed.
    """
    judging = partial(asyncio.run, _judge(job, IsolationLevel[min_isolation.upper()], sandbox))
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return judging()
    # A task's `verify` is synchronous, and some callers of it are not.
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(judging).result()


async def _judge(job: JudgeJob, min_level: IsolationLevel, wanted: str) -> JudgeVerdict:
    from strop.sandbox import choose_backend

    limits = Limits(memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES, max_open_files=MAX_OPEN_FILES)
    backend = await choose_backend(wanted, min_level)
    shown = job.package_dirs() if backend.name not in _NOT_MOUNTING else {}
    unseen = set(job.packages) - shown.keys()
    if unseen and (missing := _find_imports(job.source) & unseen):
        raise SandboxRefused(
            f"the program imports {', '.join(sorted(missing))}, which {backend.name} does not show",
            allowed="sandboxes of bubblewrap or podman, where this installation has the package",
            next_step="choose one of them in task.sandbox, or install the package; the reply has no score",
            kind="packages",
        )
    mounts = tuple(
        Mount(host_path=str(place), inside_path=f"{PACKAGES_DIR}/{name}") for name, place in shown.items()
    )
    nonce = secrets.token_hex(16)
    spec = SandboxSpec(
        limits=limits,
        min_level=min_level,
        mounts=mounts,
        env=_ENV if mounts else {},
    )
    async with await backend.create(spec, main_source=read_runner()) as sandbox:
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


def _find_imports(source: str) -> set[str]:
    """Return the packages that a program's import statements name; of what is no Python, none."""
    try:
        with warnings.catch_warnings():
            # About escapes in its texts.
            warnings.simplefilter("ignore")
            nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


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
    """Return the runner's verdict, or what follows where it gave none.

    Raises: SandboxError if the program did not cause that.
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
            f"the judge of a program gave no verdict ({result.kind}, exit code {result.exit_code},"
            f" after {result.duration_s:.1f} s; {errors or 'no error text'})",
            allowed="a verdict for every program that was started",
            next_step="look whether this host has memory and processes to spare; the reply has no score",
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


# The runner is one text that defines `main`: the sandbox holds no file that a candidate could change.

_PACKAGE = "strop.tasks.code.python_judge"
_MODULES = ("channel", "candidate", "remote", "runner")
"""In the order of their imports."""
_LOADER = """\
import sys, types
def load(name, text):
    made = sys.modules[name] = types.ModuleType(name)
    made.__path__ = []
    exec(compile(text, name, "exec"), made.__dict__)
    return made
parts = {package!r}.split(".")
for length in range(1, len(parts) + 1):
    if ".".join(parts[:length]) not in sys.modules:
        load(".".join(parts[:length]), "")
for name, text in {texts!r}:
    main = load(name, text).__dict__.get("main")
"""


@cache
def read_runner() -> str:
    """Return the text of the runner: its modules, and the names that they import each other by."""
    folder = Path(__file__).parent
    texts = [(f"{_PACKAGE}.{name}", (folder / f"{name}.py").read_text("utf-8")) for name in _MODULES]
    return _LOADER.format(package=_PACKAGE, texts=texts)
