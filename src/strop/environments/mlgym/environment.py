"""MLGym's tasks as workspaces: graded in fresh sandboxes, with the checkout's own files, twice.

The model does not have the grader's script, files that are declared secret, or answers by their names; what
it changes of the files that the task brings does not reach the grader, which gets its one artefact. A script
that is ended from inside the artefact's code, or that prints more than one result, has no result.
"""

from __future__ import annotations

import csv
import io
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from strop.environments.mlgym.checkout import MlgymTask, iterate_attempts, list_tasks
from strop.environments.tools import ToolError
from strop.environments.workspace import Workspace
from strop.errors import SandboxError
from strop.rollout import Example, FailureOwner, Outcome, Split
from strop.sandbox.contract import MIB, Limits, SandboxSpec
from strop.sandbox.served import ServedSandbox
from strop.spec.base import expert
from strop.spec.sandboxing import RoomSettings
from strop.spec.task import EnvironmentSection
from strop.tasks.contract import CEILING, TaskLimits
from strop.tasks.failures import AttemptFailed
from strop.tasks.registry import built_in

_OPENING = (
    "{description}\n\nThe files are in the current directory. What counts is {artefact}; it is graded when"
    " you call submit, by a script that you do not have, on files as they were given. validate says whether"
    " {artefact} can be graded."
)
_DRIVER = """
import runpy, sys, traceback
nonce, script = sys.stdin.readline().strip(), sys.argv[1]
sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    # One that the script itself asked for; not one of the code that it called.
    if traceback.extract_tb(end.__traceback__)[-1].filename != script or end.code:
        raise
print()
print(nonce)
"""
"""Runs a grader's script to its end, and says that it came there."""


class MlgymSpec(RoomSettings, EnvironmentSection):
    """Tasks of a checkout of MLGym."""

    name: Literal["mlgym"]
    root: str = Field(
        min_length=1,
        description="Folder of a checkout of MLGym. Nothing in it is changed.",
        json_schema_extra=expert("a checkout may lie anywhere"),
    )
    tasks: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Ids of its tasks. Empty = all that can be graded fairly.",
        json_schema_extra=expert("a run may be about one of them"),
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        description="Image with python and the packages of the tasks. none = this host's Python, with its"
        " standard library only.",
        json_schema_extra=expert("tasks need numpy, pandas and more"),
    )
    raw_validate: bool = Field(
        default=False,
        description="Whether the tool `validate` returns the metrics that the attempt is graded by, as MLGym"
        " does it, in place of whether it can be graded; counted as `num_raw_validations`.",
        json_schema_extra=expert("published results were reached with the test's own metric in sight"),
    )
    num_train: int = Field(default=1000, ge=1, le=10**6, description="Attempts to train on.")
    num_held_out: int = Field(default=100, ge=1, le=10**6, description="Attempts that are held out.")


@built_in("mlgym", MlgymSpec, "Machine-learning research: the tasks of a checkout of MLGym.", rank=146)
class Mlgym(Workspace):
    """The reward is the share of the way from the task's baseline to its ceiling, from -1 to 1.

    Without a ceiling it is the gain as a share of the baseline. Nothing that can be graded: -1. A value
    beyond the ceiling, and two gradings that differ by more than a twentieth of the way, are the task's
    failure.
    """

    name = "mlgym"
    version = "mlgym-1"
    max_turns = 50
    floor = -1.0
    limits = TaskLimits(max_reply_tokens=4096, max_reward=1.0, min_reward=-1.0, max_goldless_frac=1.0)
    _num_raw = 0

    def __init__(self, spec: MlgymSpec) -> None:
        self._spec = spec

    @property
    def data_digest(self) -> str:
        """Hash over the tasks. Raises: DataError, ConfigError as `list_tasks`."""
        return " ".join(task.digest for _, task in sorted(self._tasks().items()))

    def examples(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """Yield attempts. Raises: DataError, ConfigError as `list_tasks`."""
        spec = self._spec
        is_held_out = split is Split.HELD_OUT
        first, number = (0, spec.num_held_out) if is_held_out else (spec.num_held_out, spec.num_train)
        return iterate_attempts(self._tasks(), first, number)

    def opening(self, example: Example, seed: int) -> str:
        """Tell the task."""
        task = self._task_of(example)
        return _OPENING.format(description=task.description.strip(), artefact=task.artefact)

    def gold_replies(self, example: Example) -> Iterator[tuple[str, ...]]:
        """Yield nothing: no right attempts are known."""
        return iter(())

    def sandbox_for(self, example: Example) -> SandboxSpec:
        """Return a sandbox for training."""
        disk_bytes = int(self._spec.disk_gib * 1024 * MIB)
        limits = Limits(
            memory_bytes=int(self._spec.memory_gib * 1024 * MIB),
            has_address_limit=False,
            max_processes=1024,
            file_bytes=disk_bytes,
            scratch_bytes=disk_bytes,
            max_scratch_files=200_000,
            max_open_files=4096,
        )
        return SandboxSpec(limits=limits, image=self._spec.image)

    async def prepare(self, example: Example, seed: int) -> None:
        """Bring what the model may have; a command ends at the task's limit, or before at the run's."""
        task = self._task_of(example)
        limit_s = min(self.place.command_limit_s, task.limit_s)
        self.place = replace(self.place, command_limit_s=limit_s)
        self.carried = (task.artefact,)
        await _bring(
            self.sandbox, {name: path for name, path in task.files.items() if name not in task.secret}
        )

    async def validate(self) -> str:
        """Say whether what is there can be graded."""
        task = self._task_of(self.example)
        if self._spec.raw_validate:
            self._num_raw += 1
            metrics = await self._measure(task)
            return "It cannot be graded." if metrics is None else json.dumps(metrics)
        try:
            data = await self.sandbox.read(task.artefact)
        except SandboxError as error:
            raise ToolError(f"{task.artefact} cannot be read ({error.kind})") from error
        fault = _find_fault(task, data) if task.is_csv else await self._compile(task)
        return fault or f"{task.artefact} can be graded."

    async def _compile(self, task: MlgymTask) -> str:
        """Say why an artefact is no Python; empty where it is."""
        argv = [*self._python(self.sandbox), "-m", "py_compile", task.artefact]
        result = await self.sandbox.exec(argv, wall_limit_s=self.place.command_limit_s)
        return "" if result.exit_code == 0 else result.stderr.decode(errors="replace") or "it is no Python"

    def _python(self, sandbox: ServedSandbox) -> tuple[str, ...]:
        return ("python",) if self._spec.image else sandbox.python_argv

    async def _judge_work(self) -> Outcome:
        task = self._task_of(self.example)
        counts = {"num_raw_validations": float(self._num_raw)} if self._spec.raw_validate else {}
        measured = [await self._measure(task) for _ in range(2)]
        values = [one.get(task.marks.metric) for one in measured if one is not None]
        found = [float(value) for value in values if isinstance(value, int | float)]
        if len(found) < 2:
            await self._require_grader(task)
            metrics = {"not_graded": 1.0, **counts}
            return Outcome(parts={"improvement": -1.0}, is_correct=False, metrics=metrics)
        value, spread = sum(found) / 2, abs(found[0] - found[1])
        if spread > task.marks.slack:
            detail = f"two gradings of {task.task_id} say {found[0]:g} and {found[1]:g}"
            raise AttemptFailed(FailureOwner.TASK, "unstable", detail)
        if task.marks.is_impossible(value):
            marks = task.marks
            detail = f"{task.task_id}: a {marks.metric} of {value:g}, where {marks.ceiling:g} is the best"
            raise AttemptFailed(FailureOwner.TASK, CEILING, detail)
        reward = task.marks.normalise(value)
        metrics = {"metric": value, **counts}
        return Outcome(parts={"improvement": reward}, is_correct=reward > 0.0, metrics=metrics)

    async def _require_grader(self, task: MlgymTask) -> None:
        """Raise AttemptFailed if what the checkout itself would hand in cannot be graded either."""
        shipped = task.files.get(task.artefact) or task.files.get("sample_submission.csv")
        if shipped is not None and await self._measure(task, shipped) is None:
            detail = (
                f"{task.evaluation} of {task.task_id} prints no result for {shipped.name} of the checkout"
            )
            raise AttemptFailed(FailureOwner.TASK, "grader_broken", detail)

    async def _measure(self, task: MlgymTask, shipped: Path | None = None) -> dict[str, Any] | None:
        """Grade the artefact, or one of the checkout, in a fresh sandbox; None if there is no result."""
        async with self._open_grader(*(self.carried if shipped is None else ())) as sandbox:
            others = {name: path for name, path in task.files.items() if name != task.artefact}
            await _bring(sandbox, others if shipped is None else {**others, task.artefact: shipped})
            nonce = secrets.token_hex(16)
            words = ["--submission_file", task.artefact] if task.is_csv else []
            result = await sandbox.exec(
                [*self._python(sandbox), "-c", _DRIVER, task.evaluation, *words],
                stdin=f"{nonce}\n".encode(),
                wall_limit_s=task.limit_s,
            )
        output = result.stdout.decode(errors="replace")
        is_whole = result.exit_code == 0 and output.split()[-1:] == [nonce]
        return _read_metrics(output.rpartition(nonce)[0]) if is_whole else None

    def _task_of(self, example: Example) -> MlgymTask:
        return self._tasks()[example.fields["task"]]

    def _tasks(self) -> dict[str, MlgymTask]:
        return _read_checkout(self._spec.root, self._spec.tasks)


@cache
def _read_checkout(root: str, wanted: tuple[str, ...]) -> dict[str, MlgymTask]:
    return list_tasks(Path(root).expanduser(), wanted)


async def _bring(sandbox: ServedSandbox, files: Mapping[str, Path]) -> None:
    for name, path in files.items():
        await sandbox.upload(path, name)


def _read_metrics(output: str) -> dict[str, Any] | None:
    """Return the one JSON object that a script printed, over one line or several."""
    found, place = [], 0
    decoder = json.JSONDecoder()
    while (start := output.find("{", place)) >= 0:
        try:
            value, place = decoder.raw_decode(output, start)
        except ValueError:
            place = start + 1
            continue
        found.append(value)
    return found[0] if len(found) == 1 and isinstance(found[0], dict) else None


def _find_fault(task: MlgymTask, data: bytes) -> str | None:
    """Say why a table cannot be graded, as far as its form shows it."""
    sample_path = next((path for name, path in task.files.items() if name == "sample_submission.csv"), None)
    if sample_path is None:
        return None
    try:
        sample, given = _read_table(sample_path.read_bytes()), _read_table(data)
    except csv.Error as error:
        return f"it is no table: {error}"
    if given[:1] != sample[:1]:
        return f"its columns are {given[:1]}, and must be {sample[:1]}"
    return None if len(given) == len(sample) else f"it has {len(given)} lines, and must have {len(sample)}"


def _read_table(data: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode(errors="replace"))))
