"""Tasks of a user's MLGym checkout as workspaces, graded in a fresh sandbox.

The checkout is read by its configuration files; nothing in it is imported or written.

The model does not get the grader's script, files that are declared secret, or files named like answers. The
grader takes only the artefact, so changes of the task's files do not reach it. Its process never imports the
artefact, and finds no file of it: that runs in a child, which answers calls over a pipe with plain data. A
script that the child's answers end, or that prints more than one result, has no result.
"""

from __future__ import annotations

import fnmatch
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from typing_extensions import override

from strop.environments.contract import NumberedSection
from strop.environments.mlgym_driver import DRIVER
from strop.environments.tools import read_objects
from strop.environments.workspace import FolderTasks, hash_files, room_limits
from strop.errors import ConfigError, DataError
from strop.rollout import Example, FailureOwner, Outcome, Split
from strop.sandbox.contract import SandboxSpec
from strop.sandbox.served import ServedSandbox
from strop.spec.base import Unhashed, expert
from strop.spec.sandboxing import RoomSettings
from strop.tasks.failures import AttemptFailed
from strop.tasks.task import TaskLimits

_OPENING = (
    "{description}\n\nThe files are in the current directory. What counts is {artefact}; it is graded when"
    " you call submit, by a script that you do not have, on files as they were given. validate says whether"
    " {artefact} can be graded."
)


class MlgymSpec(RoomSettings, NumberedSection):
    """Tasks of a checkout of MLGym."""

    name: Literal["mlgym"]
    root: Unhashed[str] = Field(
        min_length=1,
        description="Folder of a checkout of MLGym. Nothing in it is changed.",
        json_schema_extra=expert("a checkout may lie anywhere"),
    )
    tasks: tuple[str, ...] = Field(
        min_length=1,
        strict=False,
        description="Ids of its tasks.",
        json_schema_extra=expert("only some have their data here"),
    )
    image: str | None = Field(
        default=None,
        min_length=1,
        description="Image with Python and the tasks' packages. none = this host's Python, without packages.",
        json_schema_extra=expert("tasks need numpy, pandas and more"),
    )


ARTEFACTS: Mapping[str, tuple[str, ...]] = {
    "CSVSubmissionTasks": ("submission.csv",),
    "PythonSubmissionTasks": ("strategy.py", "target.py"),
}
"""The file that is graded, by the kind of task: the first that it has. Beside a strategy.py, target.py is the
opponent."""
_REFUSED: Mapping[str, str] = {
    "titanicSurvival": "the labels that it is graded by are a rule on the passengers' sex",
    "imageCaptioningCOCO": "the graded number is a column that the attempt writes itself",
    "3SATTime": "its data file is not in the repository",
    "ModelSubmissionTasks": "its grader unpickles files of the attempt",
    "LMSubmissionTasks": "it trains on GPUs, which sandboxes do not have",
}
_NOISE = 0.05
"""Tolerated noise of a grader, as a share of the way from the baseline to the ceiling."""
_SECRET = ("*answer*", "*truth*", "*solution*", "*gold*", "*sealed*", "*label*")
_LOWER_IS_BETTER = frozenset({"rmse", "mse", "mae", "loss", "val_loss", "time", "perplexity", "error"})


_KNOWN: Mapping[str, tuple[str, float, float]] = {
    "battleOfSexes": ("Score", 1.0227, 1.44),
    "prisonersDilemma": ("Score", 2.3716, 2.6251),
    "blotto": ("Score", -0.24797, 0.2478),
    "regressionKaggleHousePrice": ("r2", 0.87999, 1.0),
}
"""Metric, baseline and ceiling of known tasks. The ceilings are exact, except for r2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlgymTask:
    """One task of the checkout, and the scale that turns its metric into a reward."""

    task_id: str
    description: str
    """Includes the documents of its data sets."""
    artefact: str
    files: Mapping[str, Path]
    """The grader's files, by path in the workspace."""
    secret: frozenset[str]
    """Paths that the model does not get."""
    evaluation: str
    """Path of the script that prints the metrics as JSON."""
    is_csv: bool
    limit_s: float
    digest: str
    metric: str
    baseline: float
    ceiling: float | None
    """The best possible value; None if unknown."""

    def normalise(self, value: float) -> float:
        """Return the share of the way that a value has gone: from -1 to 1, or more if it cannot be."""
        way, gain = abs((self.ceiling or 0.0) - self.baseline), value - self.baseline
        gain = -gain if self.metric.lower() in _LOWER_IS_BETTER else gain
        share = gain / max(way, 1e-9)
        is_beyond = self.ceiling is not None and gain > (1.0 + _NOISE) * way
        return share if is_beyond else min(1.0, max(-1.0, share))


def list_tasks(root: Path, wanted: tuple[str, ...]) -> dict[str, MlgymTask]:
    """Read tasks of a checkout by id.

    Raises: ConfigError if one is missing; DataError for one that is not whole, or cannot be graded fairly.
    """
    import yaml

    folder = root / "configs" / "tasks"
    tasks: dict[str, MlgymTask] = {}
    for path in sorted(folder.glob("*.yaml")):
        config = yaml.safe_load(path.read_text("utf-8")) or {}
        if {str(config.get("id")), path.stem} & set(wanted):
            tasks[str(config["id"])] = _read_task(root, path, config)
    if len(wanted) > len(tasks):
        names = ", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) or "none"
        raise ConfigError(
            f"task.tasks={list(wanted)}, of which {len(tasks)} are in {folder}",
            allowed=f"a checkout of MLGym, with configs/tasks/*.yaml, and ids of its tasks; files: {names}",
            next_step="correct task.root or the names",
        )
    return tasks


def _read_task(root: Path, path: Path, config: Mapping[str, Any]) -> MlgymTask:
    import yaml

    kind = str(config.get("task_entrypoint"))
    why = _REFUSED.get(str(config["id"])) or _REFUSED.get(kind)
    if why is not None or kind not in ARTEFACTS:
        raise _malformed(path, why or f"task_entrypoint {kind!r} is of no known kind")
    files: dict[str, Path] = {}
    for source in config.get("starter_code") or ():
        files |= _files_of(root, source, Path(source).name, path)
    documents = ""
    for name in config.get("dataset_configs") or ():
        source = root / "configs" / name
        if not source.is_file():
            raise _malformed(path, f"its data set {name} is not there")
        data = yaml.safe_load(source.read_text("utf-8")) or {}
        documents += f"{str(data.get('name')).upper()}:\n{data.get('description')}\n\n"
        # Otherwise the image may have it.
        if data.get("is_local"):
            files |= _files_of(root, data["data_path"], "data", path)
    evaluation = next(iter(config.get("evaluation_paths") or ()), None)
    if evaluation not in files:
        raise _malformed(path, f"evaluation_paths {evaluation!r} is not among its starter_code")
    declared = set(map(str, config.get("secret_files") or ()))
    secret = {evaluation, *(name for name in files if {name, Path(name).name} & declared)}
    # The sample submission is shown.
    telling = (name for name in files if any(fnmatch.fnmatch(Path(name).name.lower(), p) for p in _SECRET))
    secret.update(name for name in telling if "sample" not in name)
    scores = (config.get("baseline_scores") or [{}])[0]
    known = [_KNOWN[config["id"]]] if config["id"] in _KNOWN else [(*one, None) for one in scores.items()]
    if not known:
        raise _malformed(path, "it has no baseline_scores, and none is computed here")
    metric, baseline, ceiling = known[0]
    return MlgymTask(
        task_id=str(config["id"]),
        # Not `format`: these texts contain other braces.
        description=str(config.get("description", "")).replace("{dataset_docs}", documents),
        artefact=next((name for name in ARTEFACTS[kind] if name in files), ARTEFACTS[kind][-1]),
        files=files,
        secret=frozenset(secret),
        evaluation=evaluation,
        is_csv=kind == "CSVSubmissionTasks",
        limit_s=float(config.get("training_timeout") or 3600.0),
        digest=hash_files({"": path, **files}),
        metric=metric,
        baseline=baseline,
        ceiling=ceiling,
    )


def _files_of(root: Path, source: str, name: str, path: Path) -> dict[str, Path]:
    """Return a file, or all files of a folder of the checkout, by path in the workspace."""
    place = (root / source).resolve()
    if not place.is_relative_to(root.resolve()) or not place.exists():
        raise _malformed(path, f"{source} is not in the checkout")
    if place.is_file():
        return {name: place}
    return {f"{name}/{file.relative_to(place)}": file for file in sorted(place.rglob("*")) if file.is_file()}


def _malformed(path: Path, problem: str) -> DataError:
    return DataError(
        f"{path}: {problem}",
        allowed="tasks of CSVSubmissionTasks and PythonSubmissionTasks, graded fairly, files in the checkout",
        next_step="correct it, or leave it out of task.tasks",
    )


class Mlgym(FolderTasks):
    """The reward is the share of the way from the task's baseline to its ceiling, from -1 to 1.

    Without a ceiling it is the gain as a share of the baseline. An artefact that cannot be graded earns -1. A
    value beyond the ceiling is a failure of the task.
    """

    name = "mlgym"
    version = "mlgym-4"
    max_turns = 50
    floor = -1.0
    limits = TaskLimits(max_reply_tokens=4096, max_reward=1.0, min_reward=-1.0, max_goldless_frac=1.0)

    read_tasks = staticmethod(list_tasks)

    def examples(self, split: Split) -> Iterator[Mapping[str, Any]]:
        """Yield attempts, the tasks taking turns. Raises: DataError, ConfigError as `read_tasks`."""
        tasks = list(self.tasks.values())
        for number in self.spec.numbers_of(split):
            task = tasks[number % len(tasks)]
            yield {"task": task.task_id, "attempt": number, "digest": task.digest}

    @override
    def opening(self, example: Example, seed: int) -> str:
        task = self.task_of(example)
        return _OPENING.format(description=task.description.strip(), artefact=task.artefact)

    @override
    def sandbox_for(self, example: Example) -> SandboxSpec:
        limits = room_limits(memory_gib=self.spec.memory_gib, disk_gib=self.spec.disk_gib)
        return SandboxSpec(limits=limits, image=self.spec.image)

    @override
    async def prepare(self, example: Example, seed: int) -> None:
        task = self.task_of(example)
        self.command_limit_s, self.carried = min(self.command_limit_s, task.limit_s), (task.artefact,)
        shown = {name: path for name, path in task.files.items() if name not in task.secret}
        await _bring(self.sandbox, shown)

    async def validate(self) -> str:
        """Say whether what is there can be graded."""
        task = self.task_of(self.example)
        found, _ = await self._measure(replace(task, limit_s=self.command_limit_s))
        return f"{task.artefact} {'cannot' if found is None else 'can'} be graded."

    @override
    async def _judge_work(self) -> Outcome:
        task = self.task_of(self.example)
        found, _ = await self._measure(task)
        value = (found or {}).get(task.metric)
        if not isinstance(value, int | float):
            await self._require_grader(task)
            return Outcome(parts={"improvement": -1.0}, is_correct=False, metrics={"not_graded": 1.0})
        # Above 1, where a value is beyond the ceiling, it is a failure of the task.
        reward, metrics = task.normalise(value), {"metric": float(value)}
        return Outcome(parts={"improvement": reward}, is_correct=reward > 0.0, metrics=metrics)

    async def _require_grader(self, task: MlgymTask) -> None:
        """Raise AttemptFailed if the checkout's own artefact cannot be graded either."""
        shipped = task.files.get(task.artefact) or task.files.get("sample_submission.csv")
        metrics, said = ({}, "") if shipped is None else await self._measure(task, shipped)
        if metrics is None:
            detail = f"{task.evaluation} of {task.task_id} prints no result for its own artefact: {said}"
            raise AttemptFailed(FailureOwner.TASK, "grader_broken", detail)

    async def _measure(
        self, task: MlgymTask, shipped: Path | None = None
    ) -> tuple[dict[str, Any] | None, str]:
        """Grade the artefact, or one of the checkout, in a fresh sandbox: the result and the last message."""
        async with self._open_grader(*(self.carried if shipped is None else ())) as sandbox:
            others = {name: path for name, path in task.files.items() if name != task.artefact}
            await _bring(sandbox, others if shipped is None else {**others, task.artefact: shipped})
            nonce = secrets.token_hex(16)
            words = ["--submission_file", task.artefact] if task.is_csv else []
            python = ("python",) if self.spec.image else sandbox.python_argv
            result = await sandbox.exec(
                [*python, "-c", DRIVER, task.evaluation, task.artefact, *words],
                stdin=f"{nonce}\n".encode(),
                wall_limit_s=task.limit_s,
            )
        output = result.stdout.decode(errors="replace")
        is_whole = result.exit_code == 0 and output.split()[-1:] == [nonce]
        # One object, on one line or several; two are no result.
        objects = list(read_objects(output.rpartition(nonce)[0]))
        said = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return objects[0] if is_whole and len(objects) == 1 else None, said


async def _bring(sandbox: ServedSandbox, files: Mapping[str, Path]) -> None:
    for name, path in files.items():
        await sandbox.upload(path, name)
