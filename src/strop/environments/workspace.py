"""Attempts that have a sandbox: a shell and files for the model, and another sandbox in which it is graded.

    class Repair(Workspace):
        max_turns = 10
        carried = ("total.py",)                          # all that the grader gets to see

        def examples(self, split): ...
        def opening(self, example, seed): ...            # a text, or messages
        async def prepare(self, example, seed):
            await self.sandbox.upload(STARTER, ".")      # or write, exec, ...
        async def grade(self, sandbox):                  # a fresh one, with what is carried
            result = await sandbox.exec(["python3", "-c", TESTS], wall_limit_s=10)
            return result.exit_code == 0

Its tools are `bash`, `view`, `create`, `str_replace` and `submit`; a subclass adds methods, or takes one away
by `view = None`. Relative paths start in `folder`. Which sandboxes are made, and how long a command may take,
the run file says: task.sandbox, task.min_isolation, task.tool_limit_s.

What a program does is told to the model. What the sandbox fails at is the machine's failure, and gives no
score; but where a program ended its own sandbox nothing is left to be graded, and the attempt earns `floor`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import posixpath
import tempfile
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from strop.environments.contract import Done, Kept
from strop.environments.tools import ToolError
from strop.errors import ConfigError, SandboxError, SandboxLost, SandboxRefused
from strop.rollout import Example, FailureOwner, Outcome, ToolCall
from strop.sandbox.allowlist import PREFIX
from strop.sandbox.contract import MIB, ExecKind, ExecResult, IsolationLevel, Limits, Mount, SandboxSpec
from strop.sandbox.following import Shell, ShellResult
from strop.sandbox.served import ServedSandbox
from strop.spec.sandboxing import RoomSettings, SandboxSettings
from strop.tasks.contract import TaskLimits
from strop.tasks.failures import AttemptFailed
from strop.tasks.user.rewards import as_outcome
from strop.tool_calls import write_call

T = TypeVar("T")

GRACE_S = 30.0
"""A sandbox that says nothing for so long behind the limit of a command is lost."""
_TOOL_LIMITS = Limits(
    memory_bytes=1024 * MIB,
    has_address_limit=False,
    max_processes=256,
    file_bytes=256 * MIB,
    scratch_bytes=256 * MIB,
    max_open_files=512,
)
_WHY = {
    "missing": "no such file or directory",
    "directory": "it is a directory",
    "not_regular": "it is no regular file",
    "denied": "permission denied",
    "too_large": "it is too large",
    "no_space": "no space is left",
}
"""What is said of a file, by the kind of the sandbox's error."""
_ENDS = {
    ExecKind.OOM: "a process was killed: out of memory",
    ExecKind.OUTPUT_FLOOD: "it was killed: too much output",
    ExecKind.OVER_LIMIT: "it was killed: too many processes, or too much on the disk",
}
_MAX_SHOWN_BYTES = 8 * MIB
_SHELL_STATE = ".strop-shell"
"""Where the state of a shell is kept beside the files, until another has read it."""
_TELL_STATE = 'shopt -p; declare -p; declare -f; alias -p; printf "cd -- %q\\n" "$PWD"; umask -p; set +o'
"""Options of a shell come last: with some of them a line that fails ends the shell."""
_NOT_COPIED = ("sandbox", "_shell", "example", "place", "_sandbox_spec")


@dataclass(frozen=True, kw_only=True, slots=True)
class Guest:
    """A program that works in the sandbox in place of the tools: what it must find there."""

    endpoint: str
    """HOST:PORT of this machine where it asks the model."""
    paths: tuple[str, ...] = ()
    """Shown read-only, where they are here; of a virtual environment also the Python that it is of."""

    def let_in(self, spec: SandboxSpec, backend: str) -> SandboxSpec:
        """Return a spec with the way to the model, and with what is shown."""
        # Its programs have this machine's files and network.
        if backend == "process":
            return spec
        network = spec.network
        if network != "host":
            network = f"{PREFIX}{self.endpoint}" if network == "none" else f"{network},{self.endpoint}"
        known = {mount.inside_path for mount in spec.mounts}
        shown = dict.fromkeys(path for given in self.paths for path in _with_base(given))
        mounts = tuple(Mount(host_path=path, inside_path=path) for path in shown if path not in known)
        return replace(spec, network=network, mounts=spec.mounts + mounts)


def _with_base(path: str) -> tuple[str, ...]:
    """Return a path, and where a virtual environment has its Python."""
    whole = os.path.abspath(os.path.expanduser(path))
    python = Path(whole, "bin", "python")
    is_virtual = Path(whole, "pyvenv.cfg").is_file()
    return (whole, str(python.resolve().parent.parent)) if is_virtual else (whole,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What the run file says of an attempt's sandboxes."""

    backend: str = "auto"
    min_level: IsolationLevel = IsolationLevel.NAMESPACE
    command_limit_s: float = 60.0
    """Wall time of one command of the model's."""
    guest: Guest | None = None
    gpus: tuple[str, ...] = ()
    """Those that the attempt has while it lasts; its grader sees them, too."""

    @classmethod
    def of(cls, section: object, command_limit_s: float, gpus: tuple[str, ...] = ()) -> Place:
        """Read a section, which may say nothing of sandboxes."""
        if not isinstance(section, SandboxSettings):
            return cls(command_limit_s=command_limit_s)
        level = IsolationLevel[section.min_isolation.upper()]
        return cls(backend=section.sandbox, min_level=level, command_limit_s=command_limit_s, gpus=gpus)


class Workspace:
    """One attempt in a sandbox; see the module. Subclasses give examples, `opening` and `grade`."""

    place = Place()
    spare_limit_s = 2 * GRACE_S
    """What a tool may take beyond the limit of a command."""
    floor: float = 0.0
    """What an attempt earns that ended its own sandbox."""
    carried: tuple[str, ...] = ()
    """Files and directories of the workspace that are copied into the grader; those that are there."""
    folder: str | None = None
    """The workspace as programs see it. None: the sandbox's private directory, where relative paths begin."""
    sandbox: ServedSandbox
    """Since `prepare`."""
    _sandbox_spec: SandboxSpec
    example: Example
    """Since `prepare`."""
    _shell: Shell | None = None
    _head_bytes = 0
    _is_open: bool = False
    _is_ruined: bool = False
    _num_idle_processes = 0
    """In the sandbox while no program of the model's runs."""

    def opening(self, example: Example, seed: int) -> Any:
        """Return what the model is told first: a text, or messages. No sandbox is there yet."""
        raise NotImplementedError(f"{type(self).__name__} has no opening")

    def sandbox_for(self, example: Example) -> SandboxSpec:
        """Return what the attempt's sandbox is like; its level is the run file's."""
        return SandboxSpec(limits=_TOOL_LIMITS)

    def grader_for(self, example: Example) -> SandboxSpec:
        """Return what the grader's sandbox is like."""
        return self.sandbox_for(example)

    async def prepare(self, example: Example, seed: int) -> None:
        """Put into the sandbox what the model begins with."""

    async def grade(self, sandbox: ServedSandbox) -> Any:
        """Judge what was carried into a fresh sandbox; return what `score` of an environment may."""
        raise NotImplementedError(f"{type(self).__name__} has no grade")

    async def reset(self, example: Example, seed: int) -> Any:
        """Make the sandbox, have it prepared, and open the attempt. Raises: SandboxRefused, SandboxLost."""
        self.example, spec = example, self.sandbox_for(example)
        self.sandbox, self._is_open = await self._create(spec, self.place.guest), True
        self._head_bytes = spec.limits.output_head_bytes
        self._sandbox_spec = spec
        await self.prepare(example, seed)
        self._shell = await self._open_shell()
        return self.opening(example, seed)

    async def bash(self, command: str) -> str | Done:
        """Run a command in a shell that stays: its directory, variables and functions are kept."""
        return await self._tell(self._run(command))

    async def view(self, path: str, first_line: int = 1, last_line: int | None = None) -> str | Done:
        """Show a text file with line numbers, or what is in a directory."""
        return await self._tell(self._view(path, first_line, last_line))

    async def create(self, path: str, text: str) -> str | Done:
        """Write a file, in place of one that is there."""
        return await self._tell(self._create_file(path, text))

    async def str_replace(self, path: str, old: str, new: str) -> str | Done:
        """Replace a text that stands exactly once in a file."""
        return await self._tell(self._replace(path, old, new))

    def submit(self) -> Done:
        """End the attempt: the work is done, and is graded as it is."""
        return Done("submitted")

    async def run_program(
        self, argv: Sequence[str], *, stdin: bytes, env: Mapping[str, str], wall_limit_s: float
    ) -> ExecResult | None:
        """Run a program in the workspace to its end; then nothing that it started is left.

        None: a program ended the sandbox. Raises: SandboxLost; AttemptFailed if there is no answer.
        """
        doing = self.sandbox.exec(argv, wall_limit_s=wall_limit_s, stdin=stdin, env=env, cwd=self.folder)
        try:
            result = await self._ask(doing, wall_limit_s)
        except SandboxLost as error:
            self._require_own_end(error)
            return None
        self._is_ruined |= result.kind is ExecKind.FROM_INSIDE
        return None if self._is_ruined else result

    async def score(self) -> Outcome:
        """Have what is carried graded; what programs left running is killed before."""
        found: Any = self.floor
        if not self._is_ruined:
            try:
                await self._close_shell()
                found = await self._judge_work()
            except SandboxLost as error:
                self._require_own_end(error)
        limits = getattr(self, "limits", None)
        full_marks = limits.max_reward if isinstance(limits, TaskLimits) else 1.0
        outcome = as_outcome(found, type(self).__name__, full_marks)
        metrics = {**outcome.metrics, "ended_sandbox": 1.0} if self._is_ruined else outcome.metrics
        return replace(outcome, isolation=self.sandbox.isolation.level.word, metrics=metrics)

    async def close(self) -> None:
        """Stop the sandbox."""
        if self._is_open:
            await self.sandbox.stop()

    async def _snapshot(self) -> Kept[Workspace] | None:
        """Keep the files, the shell's state and the object's own; None while programs run.

        Raises: ConfigError if the sandbox's shell or backend cannot be kept.
        """
        self._shell = self._shell or await self._open_shell()
        if (await self.sandbox.stats()).processes > self._num_idle_processes:
            return None
        state = posixpath.join(self.sandbox.scratch, _SHELL_STATE)
        told = await self._shell.run(
            f'[ -n "$BASH_VERSION" ] && {{ {_TELL_STATE}; }} >{state}', wall_limit_s=GRACE_S
        )
        isolation = self.sandbox.isolation
        if told.exit_code or "snapshots" in isolation.lacks or isolation.backend == "process":
            # Of `process` each private directory has a name of its own, which the model has been told.
            why = "no bash" if told.exit_code else "nothing to begin others with"
            raise ConfigError(
                f"train.branches with a sandbox of {isolation.backend} that has {why}",
                allowed="a sandbox with snapshots and bash: bubblewrap, podman or docker",
                next_step="set task.sandbox, or remove train.branches",
            )
        files = await self.sandbox.snapshot()
        # What it changes later, such as when it is closed, is not in it.
        kept = self._copy()

        async def restore() -> Workspace:
            made = kept._copy()
            spec = replace(self._sandbox_spec, files={}, snapshot=files)
            made.sandbox, made._is_open = await made._create(spec), True
            async with AsyncExitStack() as stack:
                stack.push_async_callback(made.close)
                made._shell = await made._open_shell()
                await made._shell.run(f". {state} 2>/dev/null; rm -f {state}", wall_limit_s=GRACE_S)
                stack.pop_all()
            return made

        return Kept(restore, files.close)

    def _copy(self) -> Workspace:
        """Return an object with copies of this one's attributes, and without a sandbox."""
        made = copy.copy(self)
        own = {name: one for name, one in vars(self).items() if name not in _NOT_COPIED}
        vars(made).update(copy.deepcopy(own), _shell=None, _is_open=False)
        return made

    async def _judge_work(self) -> Any:
        async with self._open_grader(*self.carried) as sandbox:
            return await self.grade(sandbox)

    @asynccontextmanager
    async def _open_grader(self, *paths: str) -> AsyncIterator[ServedSandbox]:
        """Make a fresh sandbox with copies of the workspace's files; the model never sees it.

        What is missing, too large or no file is not carried. Raises: SandboxRefused, SandboxLost.
        """
        async with await self._create(self.grader_for(self.example)) as grader:
            with tempfile.TemporaryDirectory(prefix="strop-carried-") as folder:
                for number, path in enumerate(paths):
                    await self._carry(path, Path(folder, str(number)), grader)
            yield grader

    async def _carry(self, path: str, copy: Path, grader: ServedSandbox) -> None:
        place = self._place_of(path)
        try:
            left_out = await self.sandbox.download(place, copy)
        except SandboxError as error:
            if error.kind not in _WHY:
                raise
            return
        # Not a link, of which nothing came.
        if "" not in left_out:
            await grader.upload(copy, place)

    async def _create(self, spec: SandboxSpec, guest: Guest | None = None) -> ServedSandbox:
        # Here: most environments have no sandbox.
        from strop.sandbox.choose import choose_backend

        backend = await choose_backend(self.place.backend, self.place.min_level)
        spec = spec if guest is None else guest.let_in(spec, backend.name)
        gpus = self.place.gpus or spec.gpus
        return await backend.create(replace(spec, min_level=self.place.min_level, gpus=gpus))

    async def _open_shell(self) -> Shell:
        shell = await self.sandbox.open_shell(cwd=self.folder)
        # In the order in which they were written.
        await shell.run("exec 2>&1", wall_limit_s=GRACE_S)
        self._num_idle_processes = self._num_idle_processes or (await self.sandbox.stats()).processes
        return shell

    async def _close_shell(self) -> None:
        shell, self._shell = self._shell, None
        if shell is not None:
            await shell.close()

    def _place_of(self, path: str) -> str:
        if "\0" in path or not path:
            raise ToolError(f"{path!r} is no path")
        return posixpath.join(self.folder or "", path)

    async def _tell(self, doing: Awaitable[str]) -> str | Done:
        """Return what the model is told; what goes wrong with the sandbox is the machine's.

        Raises: ToolError; SandboxLost; AttemptFailed if there is no answer.
        """
        try:
            return await self._ask(doing, self.place.command_limit_s)
        except SandboxLost as error:
            self._require_own_end(error)
            return Done("a program ended the sandbox")
        except SandboxRefused:
            raise
        except SandboxError as error:
            raise ToolError(_WHY.get(error.kind, f"it failed ({error.kind})")) from error

    async def _ask(self, doing: Awaitable[T], limit_s: float) -> T:
        """Wait for the sandbox. Raises: AttemptFailed if it is silent behind the limit of a command."""
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                return await doing
        except TimeoutError as error:
            detail = f"the sandbox has not answered for {GRACE_S:g} s"
            raise AttemptFailed(FailureOwner.INFRA, "sandbox_silent", detail) from error

    def _require_own_end(self, error: SandboxLost) -> None:
        """Note that a program of the model's ended the sandbox. Raises: the error if it was nothing of it."""
        if error.kind != ExecKind.FROM_INSIDE:
            raise error
        self._is_ruined = True

    async def _run(self, command: str) -> str:
        if "\0" in command:
            raise ToolError("a command has no NUL")
        self._shell = self._shell or await self._open_shell()
        limit_s = self.place.command_limit_s
        result = await self._shell.run(command, wall_limit_s=limit_s)
        notes = [_ENDS[result.kind]] if result.kind in _ENDS else []
        if result.timed_out:
            notes.append(f"it was ended after {limit_s:g} s")
        elif result.exit_code:
            notes.append(f"exit code {result.exit_code}")
        if not result.has_shell:
            notes.append("the shell has ended; the next command begins in a new one")
            await self._close_shell()
        text = _read_output(result, self._head_bytes)
        said = [text.rstrip("\n")] if text.strip() else []
        return "\n".join([*said, *(f"[{note}]" for note in notes)])

    async def _view(self, path: str, first_line: int, last_line: int | None) -> str:
        place = self._place_of(path)
        try:
            data = await self.sandbox.read(place, max_bytes=_MAX_SHOWN_BYTES)
        except SandboxError as error:
            if error.kind != "directory":
                raise
            # `--`: a name may begin with a dash.
            argv = ["ls", "-1Ap", "--", place]
            result = await self.sandbox.exec(argv, wall_limit_s=self.place.command_limit_s)
            return result.stdout.decode(errors="replace") or result.stderr.decode(errors="replace")
        lines = data.decode(errors="replace").splitlines()
        shown = enumerate(lines[max(0, first_line - 1) : last_line], max(1, first_line))
        return "\n".join(f"{number:6}\t{line}" for number, line in shown)

    async def _create_file(self, path: str, text: str) -> str:
        data = text.encode()
        await self.sandbox.write(self._place_of(path), data)
        return f"{path} is written: {len(data)} bytes."

    async def _replace(self, path: str, old: str, new: str) -> str:
        place = self._place_of(path)
        wanted, data = old.encode(), await self.sandbox.read(place)
        number = data.count(wanted) if wanted else 0
        if number != 1:
            raise ToolError(f"the old text stands {number} times in {path}; it must stand there once")
        line = data[: data.index(wanted)].count(b"\n") + 1
        # Not `write`: the file keeps its mode.
        result = await self.sandbox.exec(
            ["sh", "-c", 'cat > "$1"', "sh", place],
            stdin=data.replace(wanted, new.encode()),
            wall_limit_s=self.place.command_limit_s,
        )
        if result.exit_code:
            raise ToolError(result.stderr.decode(errors="replace"))
        return f"{path} is changed at line {line}."


def room_limits(room: RoomSettings) -> Limits:
    """Return the limits of a sandbox in which software is built and tested, with the room of the run file."""
    disk_bytes = int(room.disk_gib * 1024 * MIB)
    return Limits(
        memory_bytes=int(room.memory_gib * 1024 * MIB),
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


def _read_output(result: ShellResult, head_bytes: int) -> str:
    """Return both streams, with a note where the middle was left out."""
    text = result.stdout.decode(errors="replace")
    if result.stdout_omitted:
        head, tail = result.stdout[:head_bytes], result.stdout[head_bytes:]
        note = f"\n[... {result.stdout_omitted} bytes left out ...]\n"
        text = head.decode(errors="replace") + note + tail.decode(errors="replace")
    return text + result.stderr.decode(errors="replace")
