"""The built-in environment `research`: an attempt at an instance of the suite, in a workspace.

An artefact of data is judged here; source runs in the grader's sandbox and answers the judge's questions.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from strop.environments.research.contract import (
    MAX_ARTEFACT_BYTES,
    SUITE_VERSION,
    ArtefactRefused,
    Instance,
    Phase,
    profile_area,
)
from strop.environments.research.suite import TASKS, make_instance
from strop.environments.tools import ToolError
from strop.environments.workspace import Workspace, sandbox_tool
from strop.errors import ConfigError, SandboxError, SandboxLost
from strop.rollout import Example, Failure, FailureOwner, Outcome, Split
from strop.sandbox.contract import MIB, ExecKind, Limits, SandboxSpec
from strop.sandbox.following import Job
from strop.sandbox.served import ServedSandbox
from strop.spec.base import SpecConflict, Unhashed, expert
from strop.spec.sandboxing import SandboxSettings
from strop.spec.task import EnvironmentSection
from strop.tasks.contract import CEILING, TaskLimits
from strop.tasks.registry import built_in

ResearchTask = Literal[
    "tab_class",
    "tab_reg",
    "bos",
    "ipd",
    "blotto",
    "sat3",
    "glyphs",
    "mcar",
    "cpole",
    "charlm",
    "fixtrain",
]
_SOLVED_SHARE = 0.95
"""Share of the way from floor to ceiling from which an attempt counts as solved."""
_FIRST_TRAINED = 1_000_000
"""Number of the first training instance; held-out ones begin with 0."""
_EXACT = frozenset({"blotto", "sat3", "cpole"})
"""Tasks whose oracle earns exactly full marks, as the self-test requires."""
_MIN_SALT_BYTES = 16
_MAX_ANSWER_BYTES = 4 << 20
_UNREADABLE = frozenset({"missing", "directory", "not_regular", "denied", "too_large"})
"""Kinds of sandbox errors that the artefact causes."""
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
_LIMITS = Limits(
    memory_bytes=1024 * MIB,
    has_address_limit=False,
    max_processes=128,
    scratch_bytes=256 * MIB,
    file_bytes=64 * MIB,
    output_head_bytes=1 * MIB,
    max_open_files=256,
)


class ResearchSpec(SandboxSettings, EnvironmentSection):
    """Offline research tasks with sealed judges and known optima; needs no data."""

    name: Literal["research"] = "research"
    tasks: tuple[ResearchTask, ...] = Field(
        default=get_args(ResearchTask),
        strict=False,
        min_length=1,
        description="Tasks of the suite, which take turns; each has an unlimited number of instances.",
        json_schema_extra=expert("a suite is studied task by task"),
    )
    num_evaluations: int = Field(
        default=10,
        ge=0,
        le=10**4,
        description="How often an attempt may score its work on hidden development data.",
        json_schema_extra=expert("each score reveals something of the hidden data"),
    )
    salt_file: Unhashed[str | None] = Field(
        default=None,
        min_length=1,
        description="File with a secret of 16 bytes or more that seeds all draws of the instances: without"
        " it, the hidden data can be reproduced from strop's source. It is read outside of sandboxes."
        " none = the suite's own draws, the same for everybody.",
        json_schema_extra=expert("a model may have read the suite's source"),
    )
    num_train: int = Field(
        default=1100, ge=1, le=10**6, description="Instances to train on, of all tasks together."
    )
    num_held_out: int = Field(
        default=44, ge=1, le=_FIRST_TRAINED, description="Instances that are held out, of all tasks together."
    )

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        if len({*self.tasks}) < len(self.tasks):
            raise SpecConflict(
                {"task.tasks": self.tasks},
                "a task is named twice",
                allowed="each task once: all have the same number of instances",
                next_step="remove the second",
            )
        return self


@built_in(
    "research",
    ResearchSpec,
    "Offline research tasks in a sandbox, with sealed judges and known optima; needs no data.",
    rank=36,
)
class Research(Workspace):
    """One attempt: the model improves a starter, and the result is judged on hidden draws.

    Reward: 0 for the starter's score, 1 for the ceiling, down to -1.
    """

    name = "research"
    version = SUITE_VERSION
    max_turns = 20

    def __init__(self, spec: ResearchSpec) -> None:
        self._spec = spec
        self.limits = TaskLimits(max_reply_tokens=2048, min_reward=-1.0, max_goldless_frac=1.0)
        self._num_left = spec.num_evaluations
        self._dev_share: float | None = None
        """The last evaluation's score, as a share of the range from floor to ceiling."""

    @property
    def data_digest(self) -> str:
        """A hash that identifies the salt without revealing it; empty without one. Raises: ConfigError."""
        salt = _read_salt(self._spec.salt_file)
        return hmac.digest(salt, b"which salt", "sha256").hex() if salt else ""

    def _instance_of(self, example: Example) -> Instance:
        """Return an example's instance, under the run's salt. Raises: ConfigError."""
        return instance_of(example, _read_salt(self._spec.salt_file))

    def examples(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """Yield instances, the tasks taking turns. An example names a draw without its content."""
        is_held_out = split is Split.HELD_OUT
        first = 0 if is_held_out else _FIRST_TRAINED
        number = self._spec.num_held_out if is_held_out else self._spec.num_train
        tasks = self._spec.tasks
        return (
            {"task": tasks[index % len(tasks)], "instance": first + index // len(tasks)}
            for index in range(number)
        )

    def part_of(self, example: Example) -> str:
        """Return the task of the suite."""
        return str(example.fields["task"])

    def opening(self, example: Example, seed: int) -> str:
        """Return the task's summary, and the rules of an attempt."""
        summary, number = TASKS[example.fields["task"]].summary, self._spec.num_evaluations
        return (
            f"{summary} The file is there already, and is to become better; README.md says exactly what is"
            " asked. Work with the tools; Python has its standard library, and there is no network. evaluate"
            f" scores the file as it is, on hidden development data, up to {number} times. submit ends the"
            " work, and the file alone is then judged, on other hidden data."
        )

    def sandbox_for(self, example: Example) -> SandboxSpec:
        """Return a sandbox with the starter."""
        instance = self._instance_of(example)
        files = {**instance.files, "README.md": f"{instance.statement}\n".encode()}
        return SandboxSpec(limits=_LIMITS, files=files)

    def grader_for(self, example: Example) -> SandboxSpec:
        """Return an empty sandbox."""
        return SandboxSpec(limits=_LIMITS)

    async def reset(self, example: Example, seed: int) -> Any:
        """Make the instance in a thread, then reset as every workspace."""
        instance = await asyncio.to_thread(self._instance_of, example)
        self.carried = (instance.artefact,)
        self.floor = instance.marks.normalise(None)
        return await super().reset(example, seed)

    @sandbox_tool
    async def evaluate(self) -> str:
        """Score the work as it is, on hidden development data; the number of evaluations is limited."""
        if not self._num_left:
            raise ToolError("no evaluation is left")
        self._num_left -= 1
        instance = self._instance_of(self.example)
        async with self._open_grader(instance.artefact) as grader:
            try:
                artefact = await _read_artefact(instance, grader)
                score = await self._judge(instance, grader, artefact, Phase.DEV)
            except ArtefactRefused as error:
                raise ToolError(f"{error} ({self._num_left} evaluations left)") from error
        self._dev_share = instance.marks.share(score)
        better = "higher" if instance.marks.is_higher_better else "lower"
        return f"The score is {score:.3f} ({better} is better). {self._num_left} evaluations left."

    async def grade(self, sandbox: ServedSandbox) -> Outcome:
        """Judge on the sealed draws."""
        instance = self._instance_of(self.example)
        try:
            artefact = await _read_artefact(instance, sandbox)
            if artefact == instance.starter:
                # No work was done: the marks' baseline, without the luck of the draws.
                return replace(to_outcome(instance, instance.marks.baseline), format_ok=False)
            score = await self._judge(instance, sandbox, artefact, Phase.SEALED)
        except ArtefactRefused as error:
            return to_outcome(instance, None, str(error))
        outcome = to_outcome(instance, score)
        if self._dev_share is None:
            return outcome
        gap = self._dev_share - instance.marks.share(score)
        return replace(outcome, metrics={**outcome.metrics, "dev_gap": gap})

    async def _judge(
        self, instance: Instance, sandbox: ServedSandbox, artefact: bytes, phase: Phase
    ) -> float:
        """Return the score of an artefact, in the unit of the instance's marks; source runs in `sandbox`.

        Raises: ArtefactRefused; SandboxError if the sandbox fails without the program's doing.
        """
        if instance.score is not None:
            return instance.score(artefact, phase)
        try:
            return await _play(instance, sandbox, phase, self.place.command_limit_s)
        except SandboxLost as error:
            if error.kind != ExecKind.FROM_INSIDE:
                raise
            raise ArtefactRefused("the program ended its sandbox") from error

    def gold_replies(self, example: Example) -> Iterator[tuple[str, ...]]:
        """Yield the oracle's work, if it earns exactly full marks."""
        instance = self._instance_of(example)
        if instance.task in _EXACT:
            work = {"path": instance.artefact, "text": instance.oracle.decode()}
            # The artefact comes last, so that a shortened attempt earns nothing.
            calls = (("view", {"path": "README.md"}), ("create", work))
            yield tuple(
                f"```tool_call\n{json.dumps({'name': name, 'arguments': arguments})}\n```"
                for name, arguments in calls
            )


def instance_of(example: Example, salt: bytes = b"") -> Instance:
    """Return an example's instance; a salt makes one that cannot be made without it."""
    task, number = example.fields["task"], example.fields["instance"]
    if salt:
        digest = hmac.digest(salt, f"{SUITE_VERSION}/{task}/{number}".encode(), "sha256")
        number = int.from_bytes(digest, "big")
    return make_instance(task, number)


@cache
def _read_salt(path: str | None) -> bytes:
    """Read a salt file; return nothing without a path. Raises: ConfigError."""
    if path is None:
        return b""
    try:
        salt = Path(path).expanduser().read_bytes().strip()
        why = f"it has {len(salt)} bytes"
    except OSError as error:
        salt, why = b"", str(error.strerror)
    if len(salt) < _MIN_SALT_BYTES:
        raise ConfigError(
            f"task.salt_file={path}: {why}",
            allowed=f"a file with a secret of {_MIN_SALT_BYTES} bytes or more",
            next_step="write one, such as by `openssl rand -hex 32`, and keep it: it is in no record",
        )
    return salt


def to_outcome(instance: Instance, score: float | None, refusal: str | None = None) -> Outcome:
    """Return the outcome of a score; None: the artefact was refused, and earns the floor.

    A score that no honest attempt can have gives no reward and an alarm.
    """
    marks = instance.marks
    share = marks.share(score)
    if score is not None and marks.is_alarming(score):
        detail = f"{instance.task}: a score of {score:g}, and the ceiling is {marks.ceiling:g}"
        return Outcome(
            parts={},
            failure=Failure(owner=FailureOwner.TASK, kind=CEILING, detail=detail),
            metrics={"above_ceiling": 1.0},
        )
    metrics = {"range_share": share, "profile_area": profile_area(share), "refused": float(score is None)}
    if score is not None:
        metrics["raw_score"] = score
    return Outcome(
        parts={"progress": marks.normalise(score)},
        is_correct=share >= _SOLVED_SHARE,
        format_ok=score is not None,
        extracted=refusal,
        metrics=metrics,
    )


async def _read_artefact(instance: Instance, sandbox: ServedSandbox) -> bytes:
    """Read the artefact in a sandbox. Raises: ArtefactRefused if there is none; SandboxError."""
    try:
        return await sandbox.read(instance.artefact, max_bytes=MAX_ARTEFACT_BYTES)
    except SandboxError as error:
        if error.kind not in _UNREADABLE:
            raise
        raise ArtefactRefused(
            f"{instance.artefact} is no file of at most {MAX_ARTEFACT_BYTES} bytes"
        ) from error


async def _play(instance: Instance, sandbox: ServedSandbox, phase: Phase, limit_s: float) -> float:
    """Let a program answer the judge's questions; `limit_s` limits the wall time of all answers together."""
    assert instance.play is not None
    assert instance.function is not None
    # -I: other files of the directory cannot be imported.
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
    """The running function of an artefact.

    It reads questions from its standard input and answers each with a line; its own output is discarded. An
    answer can only be good or bad: this process holds opponents, labels and the score.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._unread = bytearray()

    async def ask(self, calls: list[list[Any]]) -> list[Any]:
        """Return the function's result for each list of arguments.

        Raises: ArtefactRefused if it raises, ends, takes too long, or returns a value that is not JSON.
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
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if isinstance(answer, dict) and isinstance(answer.get("raised"), str):
            raise ArtefactRefused(f"the program failed: {answer['raised'][:400]}")
        if not isinstance(answer, list) or len(answer) != len(calls):
            raise ArtefactRefused("the program answered in another form than its function's")
        return answer

    async def _refuse_end(self) -> None:
        """Raise ArtefactRefused with the way in which the program ended."""
        result = await self._job.wait()
        words = {
            ExecKind.TIMED_OUT: f"the program was ended after {result.duration_s:.0f} s",
            ExecKind.OOM: "the program ran out of memory",
        }
        raise ArtefactRefused(words.get(result.kind, f"the program ended ({result.kind.value})"))
