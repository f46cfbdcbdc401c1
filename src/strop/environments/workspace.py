"""Attempts with a sandbox: a shell and files for the model, and another sandbox for grading.

    class Repair(Workspace):
        max_turns = 10
        carried = ("total.py",)                          # the only files that the grader sees

        def examples(self, split): ...
        def opening(self, example, seed): ...            # a text, or messages
        async def prepare(self, example, seed):
            await self.sandbox.upload(STARTER, ".")      # or write, exec, ...
        async def grade(self, sandbox):                  # a fresh one, with the carried files
            result = await sandbox.exec(["python3", "-c", "..."], wall_limit_s=10)
            return result.stdout == EXPECTED             # compared outside, where no code of the model runs

Its tools are `bash`, `view`, `create`, `str_replace` and `submit`; a subclass adds methods, or removes one
with `view = None`. Relative paths start in `folder`. The run file sets the kind of sandbox and the limit of a
command: task.sandbox, task.min_isolation, task.tool_limit_s.

A program's failure is reported to the model. A failure of the sandbox is owned by the machine and gives no
score; but if a program ended its own sandbox, there is nothing to grade, and the attempt earns `floor`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import posixpath
import shlex
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from strop.environments.contract import Done
from strop.environments.tools import ToolError
from strop.errors import SandboxError, SandboxLost, SandboxRefused
from strop.hardware.visible_devices import ENV_DEVICES, parse_visible_devices
from strop.rollout import Example, FailureOwner, Outcome, ToolCall
from strop.sandbox.allowlist import PREFIX
from strop.sandbox.contract import MIB, ExecKind, ExecResult, IsolationLevel, Limits, Mount, SandboxSpec
from strop.sandbox.served import ServedSandbox, ServedShell
from strop.tasks.failures import AttemptFailed
from strop.tasks.task import TaskLimits
from strop.tasks.tool_calls import write_call
from strop.tasks.user.rewards import as_outcome

FILE_ERRORS = {
    "missing": "no such file or directory",
    "directory": "it is a directory",
    "not_regular": "it is no regular file",
    "denied": "permission denied",
    "too_large": "it is too large",
    "no_space": "no space is left",
    "ended": "the shell has ended; the next command begins in a new one",
}
"""Message to the model, by the kind of the sandbox's error."""
_ENDS = {
    ExecKind.OOM: "a process was killed: out of memory",
    ExecKind.OUTPUT_FLOOD: "it was killed: too much output",
    ExecKind.OVER_LIMIT: "it was killed: too many processes, or too much on the disk",
}
_MAX_SHOWN_BYTES = 8 * MIB
_Read = Callable[[Path, tuple[str, ...]], Mapping[str, Any]]
ORDER_LIMIT_S = 600.0
"""Limit of one set-up step in a sandbox, on a large repository."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Guest:
    """The needs of a program that works in the sandbox in place of the tools."""

    endpoint: str
    """HOST:PORT of the model server on this machine."""
    paths: tuple[str, ...] = ()
    """Mounted read-only at the same path; for a virtual environment also its base Python."""

    def let_in(self, spec: SandboxSpec, backend: str) -> SandboxSpec:
        """Return a spec with access to the model server and the paths."""
        # Programs of this backend have this machine's files and network already.
        if backend == "process":
            return spec
        network = spec.network
        if network != "host":
            network = f"{PREFIX}{self.endpoint}" if network == "none" else f"{network},{self.endpoint}"
        mounts = {mount.inside_path: mount for mount in spec.mounts}
        for path in self.paths:
            shown = [os.path.abspath(os.path.expanduser(path))]
            if Path(shown[0], "pyvenv.cfg").is_file():
                shown.append(str(Path(shown[0], "bin", "python").resolve().parent.parent))
            for place in shown:
                mounts.setdefault(place, Mount(host_path=place, inside_path=place))
        return replace(spec, network=network, mounts=tuple(mounts.values()))


class Workspace:
    """One attempt in a sandbox; see the module. Subclasses define examples, `opening` and `grade`."""

    backend: str = "auto"
    min_level = IsolationLevel.NAMESPACE
    command_limit_s: float = 60.0
    """Limit of one command's wall time; it and the two before are settings of the run file."""
    guest: Guest | None = None
    spare_limit_s = 30.0
    """Time of a tool beyond the limit of a command; a sandbox that is silent for longer is lost."""
    floor: float = 0.0
    """Score of an attempt that ended its own sandbox."""
    carried: tuple[str, ...] = ()
    """Files and directories of the workspace that are copied into the grader if they exist."""
    folder: str | None = None
    """The workspace as programs see it. None: the sandbox's private directory, where relative paths begin."""
    sandbox: ServedSandbox
    """Set before `prepare`."""
    example: Example
    """Set before `prepare`."""
    _shell: ServedShell | None = None
    _is_open: bool = False
    _is_ruined: bool = False

    def opening(self, example: Example, seed: int) -> Any:
        """Return the first message or messages to the model."""
        raise NotImplementedError(f"{type(self).__name__} has no opening")

    def sandbox_for(self, example: Example) -> SandboxSpec:
        """Return the spec of the attempt's sandbox; its isolation level comes from the run file."""
        return SandboxSpec(limits=room_limits(memory_gib=1.0, disk_gib=0.25))

    async def prepare(self, example: Example, seed: int) -> None:
        """Fill the sandbox before the attempt."""

    async def grade(self, sandbox: ServedSandbox) -> Any:
        """Judge the carried files in a fresh sandbox; return a result like `score` of an environment."""
        raise NotImplementedError(f"{type(self).__name__} has no grade")

    def forgeries(self, example: Example) -> Iterator[Sequence[str]]:
        """Return attempts, each a list of replies, that must earn nothing; an audit plays them.

        Here: a carried file of Python or of a shell ends the program that runs it, with the exit code 0.
        """
        codes = {".py": "import os; os._exit(0)", ".sh": "exit 0"}
        for path in self.carried:
            if code := codes.get(posixpath.splitext(path)[1]):
                yield submitted(f"echo '{code}' > {shlex.quote(path)}")

    async def reset(self, example: Example, seed: int) -> Any:
        """Make and prepare the sandbox, and open the attempt. Raises: SandboxRefused, SandboxLost."""
        self.example = example
        self.sandbox, self._is_open = await self._create(self.sandbox_for(example), self.guest), True
        await self.prepare(example, seed)
        self._shell = await self._open_shell()
        return self.opening(example, seed)

    async def bash(self, command: str) -> str | Done:
        """Run a command in a shell that stays: its directory, variables and functions are kept."""
        if "\0" in command:
            raise ToolError("a command has no NUL")
        # One that ends between two commands is not used again.
        shell, self._shell = self._shell or await self._open_shell(), None
        limit_s = self.command_limit_s
        result = await shell.run(command, wall_limit_s=limit_s)
        self._shell = shell if result.has_shell else None
        notes = [_ENDS[result.kind]] if result.kind in _ENDS else []
        if result.timed_out:
            notes.append(f"it was ended after {limit_s:g} s")
        elif result.exit_code:
            notes.append(f"exit code {result.exit_code}")
        if not result.has_shell:
            notes.append(FILE_ERRORS["ended"])
        if result.stdout_omitted:
            notes.append(f"{result.stdout_omitted} bytes in the middle are left out")
        text = (result.stdout + result.stderr).decode(errors="replace")
        output = [text.rstrip("\n")] if text.strip() else []
        return "\n".join([*output, *(f"[{note}]" for note in notes)])

    async def view(self, path: str, first_line: int = 1, last_line: int | None = None) -> str:
        """Show a text file with line numbers."""
        data = await self.sandbox.read(self._place_of(path), max_bytes=_MAX_SHOWN_BYTES)
        lines = data.decode(errors="replace").splitlines()
        shown = enumerate(lines[max(0, first_line - 1) : last_line], max(1, first_line))
        return "\n".join(f"{number:6}\t{line}" for number, line in shown)

    async def create(self, path: str, text: str) -> str:
        """Write a file, in place of one that is there."""
        data = text.encode()
        await self.sandbox.write(self._place_of(path), data)
        return f"{path} is written: {len(data)} bytes."

    async def str_replace(self, path: str, old: str, new: str) -> str:
        """Replace a text that stands exactly once in a file."""
        place = self._place_of(path)
        old_bytes, data = old.encode(), await self.sandbox.read(place)
        number = data.count(old_bytes) if old_bytes else 0
        if number != 1:
            raise ToolError(f"the old text stands {number} times in {path}; it must stand there once")
        line = data[: data.index(old_bytes)].count(b"\n") + 1
        # Not `write`: the file keeps its mode.
        result = await self.sandbox.exec(
            ["sh", "-c", 'cat > "$1"', "sh", place],
            stdin=data.replace(old_bytes, new.encode()),
            wall_limit_s=self.command_limit_s,
        )
        if result.exit_code:
            raise ToolError(result.stderr.decode(errors="replace"))
        return f"{path} is changed at line {line}."

    def submit(self) -> Done:
        """End the attempt: the work is done, and is graded as it is."""
        return Done("submitted")

    async def run_program(
        self, argv: Sequence[str], *, stdin: bytes, env: Mapping[str, str], wall_limit_s: float
    ) -> ExecResult | None:
        """Run a program in the workspace to its end, and kill the processes that it leaves.

        None: a program ended the sandbox. Raises: SandboxLost; AttemptFailed if the sandbox is silent.
        """
        try:
            async with asyncio.timeout(wall_limit_s + self.spare_limit_s):
                result = await self.sandbox.exec(
                    argv, wall_limit_s=wall_limit_s, stdin=stdin, env=env, cwd=self.folder
                )
        except SandboxLost as error:
            self._require_own_end(error)
            return None
        except TimeoutError as error:
            detail = f"the sandbox has not answered for {self.spare_limit_s:g} s"
            raise AttemptFailed(FailureOwner.INFRA, "sandbox_silent", detail) from error
        self._is_ruined |= result.kind is ExecKind.FROM_INSIDE
        return None if self._is_ruined else result

    async def score(self) -> Outcome:
        """Kill running programs, and grade the carried files."""
        score: Any = self.floor
        if not self._is_ruined:
            try:
                if self._shell is not None:
                    await self._shell.close()
                score = await self._judge_work()
            except SandboxLost as error:
                self._require_own_end(error)
        limits = getattr(self, "limits", None)
        full_marks = limits.max_reward if isinstance(limits, TaskLimits) else 1.0
        outcome = as_outcome(score, type(self).__name__, full_marks)
        metrics = {**outcome.metrics, "ended_sandbox": 1.0} if self._is_ruined else outcome.metrics
        return replace(outcome, isolation=self.sandbox.isolation.level.word, metrics=metrics)

    async def close(self) -> None:
        """Stop the sandbox."""
        if self._is_open:
            await self.sandbox.stop()

    async def _judge_work(self) -> Any:
        async with self._open_grader(*self.carried) as sandbox:
            return await self.grade(sandbox)

    @asynccontextmanager
    async def _open_grader(self, *paths: str) -> AsyncIterator[ServedSandbox]:
        """Make a fresh sandbox with copies of the workspace's files; the model never sees it.

        Paths that are missing, too large or no regular file are skipped. Raises: SandboxRefused, SandboxLost.
        """
        async with await self._create(self.sandbox_for(self.example)) as grader:
            with tempfile.TemporaryDirectory(prefix="strop-carried-") as folder:
                for number, path in enumerate(paths):
                    await self._carry(path, Path(folder, str(number)), grader)
            yield grader

    async def _carry(self, path: str, copy: Path, grader: ServedSandbox) -> None:
        place = self._place_of(path)
        try:
            left_out = await self.sandbox.download(place, copy)
        except SandboxError as error:
            if error.kind not in FILE_ERRORS:
                raise
            return
        # A link is left out of its own download.
        if "" not in left_out:
            await grader.upload(copy, place)

    async def _order(
        self,
        sandbox: ServedSandbox,
        script: str,
        *words: str,
        stdin: bytes = b"",
        cwd: str | None = None,
        kind: str = "bad_repository",
    ) -> ExecResult:
        """Run a set-up script in `folder`, or elsewhere. Raises: AttemptFailed (of the task) if it fails."""
        argv, cwd = ["sh", "-c", script, "sh", *words], cwd or self.folder
        result = await sandbox.exec(argv, stdin=stdin, wall_limit_s=ORDER_LIMIT_S, cwd=cwd)
        if result.exit_code or result.kind is not ExecKind.EXITED:
            said = (result.stderr or result.stdout).decode(errors="replace").strip()[-400:]
            name = next(iter(self.example.fields.values()), "the task")
            raise AttemptFailed(FailureOwner.TASK, kind, f"setting up {name}: {result.kind}: {said}")
        return result

    async def _create(self, spec: SandboxSpec, guest: Guest | None = None) -> ServedSandbox:
        # Imported here: most environments have no sandbox.
        from strop.sandbox.choose import choose_backend

        backend = await choose_backend(self.backend, self.min_level)
        spec = spec if guest is None else guest.let_in(spec, backend.name)
        if not spec.gpus and backend.name not in ("process", "ray"):
            spec = replace(spec, gpus=parse_visible_devices(os.environ.get(ENV_DEVICES, ""), ENV_DEVICES).ids)
        wanted = replace(spec, min_level=self.min_level)
        return await backend.create(wanted, beside=self.sandbox if self._is_open else None)

    async def _open_shell(self) -> ServedShell:
        shell = await self.sandbox.open_shell(cwd=self.folder)
        # Both streams in one, in the order of writing.
        await shell.run("exec 2>&1", wall_limit_s=self.spare_limit_s)
        return shell

    def _place_of(self, path: str) -> str:
        if "\0" in path or not path:
            raise ToolError(f"{path!r} is no path")
        return posixpath.join(self.folder or "", path)

    def explain_error(self, error: SandboxError) -> Done | ToolError:
        """Say what a sandbox's error means to the model. Raises: the error if it is the machine's."""
        if isinstance(error, SandboxLost):
            self._require_own_end(error)
            return Done("a program ended the sandbox")
        if isinstance(error, SandboxRefused):
            raise error
        return ToolError(FILE_ERRORS.get(error.kind, f"it failed ({error.kind})"))

    def _require_own_end(self, error: SandboxLost) -> None:
        """Note that the model's program ended the sandbox. Raises: the error if it has another cause."""
        if error.kind != ExecKind.FROM_INSIDE:
            raise error
        self._is_ruined = True


class FolderTasks(Workspace):
    """Base of tasks that lie in the folder `task.root`, of which `task.tasks` names some; read once."""

    read_tasks: _Read
    """Returns objects with a `digest` by name. Raises: ConfigError, DataError."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    @property
    def tasks(self) -> Mapping[str, Any]:
        """The tasks by name. Raises: as `read_tasks`."""
        return _read_once(self.read_tasks, Path(self.spec.root).expanduser(), self.spec.tasks)

    @property
    def data_digest(self) -> str:
        """Hash over the tasks. Raises: as `read_tasks`."""
        return " ".join(task.digest for task in self.tasks.values())

    def part_of(self, example: Example) -> str:
        """Return the name of an example's task."""
        return str(example.fields["task"])

    def task_of(self, example: Example) -> Any:
        """Return an example's task."""
        return self.tasks[self.part_of(example)]


@cache
def _read_once(read: _Read, root: Path, wanted: tuple[str, ...]) -> Mapping[str, Any]:
    return read(root, wanted)


def hash_files(files: Mapping[str, Path]) -> str:
    """Hash files by their names: executable bits and bytes."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        data = path.read_bytes()
        digest.update(f"{name}\0{path.stat().st_mode & 0o111}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def room_limits(*, memory_gib: float, disk_gib: float) -> Limits:
    """Return limits for building and testing software."""
    disk_bytes = int(disk_gib * 1024 * MIB)
    return Limits(
        memory_bytes=int(memory_gib * 1024 * MIB),
        has_address_limit=False,
        max_processes=1024,
        file_bytes=disk_bytes,
        scratch_bytes=disk_bytes,
        max_scratch_files=1_000_000,
        max_open_files=4096,
    )


def submitted(command: str) -> tuple[str, str]:
    """Return the replies of an attempt that runs one command and submits, for `gold_replies`."""
    bash = ToolCall(name="bash", arguments=json.dumps({"command": command}))
    return write_call(bash), write_call(ToolCall(name="submit"))
