"""Judge a Python program in a fresh sandbox: `judge_python`.

A program that crashes, runs out of time or kills its judge gets a verdict, which is never a pass. A failure
of the sandbox or the judge raises, so that the reply has no score.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import secrets
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
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
"""Wall time (seconds) of the runner besides the tests: for its start, and to recognise that it hangs."""
_NOT_MOUNTING = ("process", "remote")
"""Backends in which a program has the standard library only."""
_ENV = {"OPENBLAS_NUM_THREADS": "1"}
"""Each thread of numpy's OpenBLAS reserves memory, of which a program has little."""
_MAX_EXIT_CODE = 128
"""Shells and sandboxes use larger exit codes for programs that a signal ended."""
MAX_OPEN_FILES = 64
MEMORY_BYTES = 512 << 20
FILE_BYTES = 16 << 20
PACKAGES_DIR = "/packages"
"""Mount point in the sandbox of the packages that a task allows; it holds nothing else."""


class JudgeMode(StrEnum):
    """How a program is tested; the words of the job."""

    STATEMENTS = "statements"
    """Tests are Python statements over names that the program defines."""
    CALLS = "calls"
    """Tests are arguments of one function and the value that it returns."""
    PROGRAMS = "programs"
    """Tests are the input and the output of a program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeJob:
    """A program and its tests."""

    source: str
    """The untrusted program."""
    mode: JudgeMode
    num_tests: int
    names: tuple[str, ...] = ()
    """Names that the tests use, the entry point first; none for whole programs."""
    imports: tuple[str, ...] = ()
    """Import statements of the tests. They run before the program, which may rely on them."""
    definitions: str = ""
    """Code of the data set that the tests use, run in the runner, where the program cannot change it."""
    setup: str = ""
    """Code of the data set that uses the program's names, run before each test's first use of them."""
    tests: tuple[str, ...] = ()
    """The statements; empty in the other modes."""
    input_output: str = ""
    """JSON with the lists `inputs` and `outputs`; empty for statements."""
    wall_s: float = 5.0
    """Limit of all tests together."""
    test_s: float = math.inf
    """Limit of one test."""
    packages: tuple[str, ...] = ()
    """Packages that the program may import besides the standard library, if they are installed here."""

    def package_dirs(self) -> dict[str, Path]:
        """Return the allowed packages' directories by name, with the `.libs` folders of their wheels."""
        dirs: dict[str, Path] = {}
        for package in self.packages:
            spec = find_spec(package)
            for folder in map(Path, spec.submodule_search_locations or ()) if spec else ():
                libraries = folder.with_name(f"{folder.name}.libs")
                dirs |= {path.name: path for path in (folder, libraries) if path.is_dir()}
        return dirs

    def limits(self) -> dict[str, float | int | str]:
        """Return the runner's limits, with the candidate's directory of packages."""
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
    """The results of the tests."""

    num_tests: int
    num_passed: int = 0
    num_failed: int = 0
    """Tests with a wrong answer."""
    num_errored: int = 0
    """Tests that raised, crashed or could not begin."""
    num_timed_out: int = 0
    cause: str = ""
    """Cause of the first test that did not pass, without the expected value."""
    isolation: str
    """Level of the sandbox, as in run files."""

    @property
    def is_right(self) -> bool:
        """Whether every test passed."""
        return self.num_passed == self.num_tests > 0

    @property
    def timed_out(self) -> bool:
        """Whether a test timed out."""
        return self.num_timed_out > 0


def judge_for(spec: CodeTaskSection, job: JudgeJob) -> JudgeVerdict:
    """Run a program's tests in the sandbox of a task's settings. Raises: like `judge_python`."""
    return judge_python(job, min_isolation=spec.min_isolation, sandbox=spec.sandbox)


def judge_python(job: JudgeJob, *, min_isolation: str = "namespace", sandbox: str = "auto") -> JudgeVerdict:
    """Run a program's tests in a fresh sandbox. Blocks, even if an event loop runs in this thread.

    Raises: SandboxRefused if the backend `sandbox` has no such level, or cannot mount an allowed package that
    the program imports; SandboxError if it, or the judge in it, failed.
    """
    judging = partial(asyncio.run, _judge(job, IsolationLevel[min_isolation.upper()], sandbox))
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return judging()
    # A task's `verify` is synchronous, and some callers of it are not.
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(judging).result()


async def _judge(job: JudgeJob, min_level: IsolationLevel, sandbox_name: str) -> JudgeVerdict:
    from strop.sandbox import choose_backend

    limits = Limits(memory_bytes=MEMORY_BYTES, file_bytes=FILE_BYTES, max_open_files=MAX_OPEN_FILES)
    backend = await choose_backend(sandbox_name, min_level)
    mounted = job.package_dirs() if backend.name not in _NOT_MOUNTING else {}
    absent = set(job.packages) - mounted.keys()
    if absent and (missing := _find_imports(job.source) & absent):
        raise SandboxRefused(
            f"the program imports {', '.join(sorted(missing))}, which {backend.name} does not show",
            allowed="sandboxes of bubblewrap or podman, where this installation has the package",
            next_step="choose one of them in task.sandbox, or install the package; the reply has no score",
            kind="packages",
        )
    mounts = tuple(
        Mount(host_path=str(path), inside_path=f"{PACKAGES_DIR}/{name}") for name, path in mounted.items()
    )
    nonce = secrets.token_hex(16)
    spec = SandboxSpec(limits=limits, min_level=min_level, mounts=mounts, env=_ENV if mounts else {})
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
    """Return the packages in a program's import statements; none if it is no Python."""
    try:
        with warnings.catch_warnings():
            # About invalid escapes in its string literals.
            warnings.simplefilter("ignore")
            nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def pack_job(job: JudgeJob, nonce: str) -> bytes:
    """Return a job as bytes for the runner. The nonce marks the runner's own output."""
    return json.dumps({**asdict(job), "nonce": nonce, "limits": job.limits()}).encode()


def read_verdict(job: JudgeJob, nonce: str, result: ExecResult, isolation: str) -> JudgeVerdict:
    """Return the runner's verdict; if there is none, the verdict on a program that ended its judge.

    Raises: SandboxError if there is none and the program did not cause that.
    """
    lines = result.stdout.decode(errors="replace").splitlines()
    for line in lines:
        verdict: Any = None
        with suppress(ValueError):
            verdict = json.loads(line) if line.startswith("{") else None
        if not isinstance(verdict, dict) or verdict.get("nonce") != nonce:
            continue
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


# The runner is one text that defines `main`: the sandbox has no file that a candidate could change.

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
    """Return the text of the runner: its modules, under the names of their imports."""
    folder = Path(__file__).parent
    texts = [(f"{_PACKAGE}.{name}", (folder / f"{name}.py").read_text("utf-8")) for name in _MODULES]
    return _LOADER.format(package=_PACKAGE, texts=texts)
