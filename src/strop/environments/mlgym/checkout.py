"""A checkout of MLGym as its tasks' configurations describe it; nothing of it is imported, or written to."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import ConfigError, DataError

ARTEFACTS: Mapping[str, str] = {"CSVSubmissionTasks": "submission.csv", "PythonSubmissionTasks": "target.py"}
"""What an attempt hands in, by the kind of task."""
_REFUSED: Mapping[str, str] = {
    "titanic": "the labels that it is graded by are a rule on the passengers' sex",
    "titanicSurvival": "the labels that it is graded by are a rule on the passengers' sex",
    "imageCaptioningCOCO": "the graded number is a column that the attempt writes itself",
    "3SATTime": "its data file is not in the repository",
}
_REFUSED_KINDS: Mapping[str, str] = {
    "ModelSubmissionTasks": "its grader unpickles files of the attempt",
    "LMSubmissionTasks": "it trains on GPUs, which sandboxes do not have",
}
_SECRET = ("*answer*", "*truth*", "*solution*", "*gold*", "*sealed*", "*label*")
_LOWER_IS_BETTER = frozenset({"rmse", "mse", "mae", "loss", "val_loss", "time", "perplexity", "error"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """How a metric becomes a reward."""

    metric: str
    baseline: float
    ceiling: float | None = None
    """What nothing can beat; None where nobody knows."""
    is_lower_better: bool = False

    def normalise(self, value: float) -> float:
        """Return the share of the way from the baseline to the ceiling, or of the baseline; -1 to 1."""
        scale = abs(self.baseline if self.ceiling is None else self.ceiling - self.baseline)
        gain = self.baseline - value if self.is_lower_better else value - self.baseline
        return min(1.0, max(-1.0, gain / max(scale, 1e-9)))

    @property
    def slack(self) -> float:
        """What may be noise of the grader's: a twentieth of the way, or of the baseline."""
        return 0.05 * abs(self.baseline if self.ceiling is None else self.ceiling - self.baseline)

    def is_impossible(self, value: float) -> bool:
        """Whether a value lies beyond the ceiling and the grader's noise."""
        if self.ceiling is None:
            return False
        above = self.ceiling - value if self.is_lower_better else value - self.ceiling
        return above > self.slack


_KNOWN: Mapping[str, Marks] = {
    "battleOfSexes": Marks(metric="Score", baseline=1.0227, ceiling=1.44),
    "prisonersDilemma": Marks(metric="Score", baseline=2.3716, ceiling=2.6251),
    "blotto": Marks(metric="Score", baseline=-0.24797, ceiling=0.2478),
    "regressionKaggleHousePrice": Marks(metric="r2", baseline=0.87999, ceiling=1.0),
}
"""Ceilings are exact, but for r2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlgymTask:
    """One task."""

    task_id: str
    description: str
    """With the documents of its data sets."""
    artefact: str
    files: Mapping[str, Path]
    """What the grader has, by path in the workspace."""
    secret: frozenset[str]
    """Paths that the model does not have."""
    evaluation: str
    """Path of the script that prints the metrics as JSON."""
    is_csv: bool
    limit_s: float
    marks: Marks
    digest: str


def list_tasks(root: Path, wanted: tuple[str, ...]) -> dict[str, MlgymTask]:
    """Read the tasks of a checkout by their ids: those that are wanted, or all that can be graded fairly.

    Raises: DataError if there is no checkout; ConfigError for a wanted task that is not there, or is refused.
    """
    import yaml

    folder = root / "configs" / "tasks"
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise DataError(
            f"{folder} has no tasks",
            allowed="a checkout of MLGym, with configs/tasks/*.yaml",
            next_step="name its folder in task.root",
        )
    found: dict[str, MlgymTask] = {}
    seen = []
    for path in paths:
        config = yaml.safe_load(path.read_text("utf-8")) or {}
        names = {str(config.get("id")), path.stem}
        seen.append(path.stem)
        if wanted and not names & set(wanted):
            continue
        why = _why_refused(config, names)
        if why is None:
            found[str(config["id"])] = _read_task(root, path, config)
        elif wanted:
            raise ConfigError(
                f"the MLGym task {path.stem} is refused: {why}",
                allowed="tasks of CSVSubmissionTasks and PythonSubmissionTasks that can be graded fairly",
                next_step="remove it from task.tasks",
            )
    missing = len(wanted) > len(found)
    if missing or not found:
        raise ConfigError(
            f"task.tasks={list(wanted)}, of which {len(found)} are in {folder}",
            allowed=f"ids of its tasks; files: {', '.join(seen)}",
            next_step="correct the names",
        )
    return found


def _why_refused(config: Mapping[str, Any], names: set[str]) -> str | None:
    why = next((_REFUSED[name] for name in sorted(names) if name in _REFUSED), None)
    kind = str(config.get("task_entrypoint"))
    if why is None and kind not in ARTEFACTS:
        why = _REFUSED_KINDS.get(kind, f"task_entrypoint {kind!r} is of no known kind")
    return why


def _read_task(root: Path, path: Path, config: Mapping[str, Any]) -> MlgymTask:
    kind = str(config["task_entrypoint"])
    files: dict[str, Path] = {}
    for one in config.get("starter_code") or ():
        files |= _files_of(root, one, Path(one).name, path)
    documents = ""
    for one in config.get("dataset_configs") or ():
        data = _read_data_set(root, one, path)
        documents += f"{str(data.get('name')).upper()}:\n{data.get('description')}\n\n"
        if data.get("is_local"):
            files |= _files_of(root, data["data_path"], "data", path)
    evaluation = next(iter(config.get("evaluation_paths") or ()), None)
    if evaluation not in files:
        raise _malformed(path, f"evaluation_paths {evaluation!r} is not among its starter_code")
    declared = {str(one) for one in config.get("secret_files") or ()}
    names = {name for name in files if any(fnmatch.fnmatch(Path(name).name.lower(), p) for p in _SECRET)}
    secret = {
        evaluation,
        *(name for name in files if name in declared or Path(name).name in declared),
        *names,
    }
    return MlgymTask(
        task_id=str(config["id"]),
        # Not `format`: other braces stand in these texts too.
        description=str(config.get("description", "")).replace("{dataset_docs}", documents),
        artefact=ARTEFACTS[kind],
        files=files,
        # A sample of what is to be handed in is shown.
        secret=frozenset(secret - {name for name in names if "sample" in name}),
        evaluation=evaluation,
        is_csv=kind == "CSVSubmissionTasks",
        limit_s=float(config.get("training_timeout") or 3600.0),
        marks=_marks_of(config, path),
        digest=_digest(path, files),
    )


def _marks_of(config: Mapping[str, Any], path: Path) -> Marks:
    known = _KNOWN.get(str(config["id"]))
    scores = config.get("baseline_scores") or []
    if known is not None:
        return known
    if not scores or not isinstance(scores[0], dict) or not scores[0]:
        raise _malformed(path, "it has no baseline_scores, and none is computed here")
    metric, baseline = next(iter(scores[0].items()))
    return Marks(
        metric=str(metric), baseline=float(baseline), is_lower_better=str(metric).lower() in _LOWER_IS_BETTER
    )


def _read_data_set(root: Path, name: str, path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        found = yaml.safe_load((root / "configs" / name).read_text("utf-8"))
    except OSError as error:
        raise _malformed(path, f"its data set {name} cannot be read: {error.strerror}") from error
    return found if isinstance(found, dict) else {}


def _files_of(root: Path, source: str, name: str, path: Path) -> dict[str, Path]:
    """Return a file, or all files of a folder, by path in the workspace; relative to the checkout's root."""
    place = (root / source).resolve()
    if not place.is_relative_to(root.resolve()) or not place.exists():
        raise _malformed(path, f"{source} is not in the checkout")
    if place.is_file():
        return {name: place}
    return {f"{name}/{one.relative_to(place)}": one for one in sorted(place.rglob("*")) if one.is_file()}


def _digest(config: Path, files: Mapping[str, Path]) -> str:
    made = hashlib.sha256(config.read_bytes())
    for name, path in sorted(files.items()):
        made.update(f"{name} {path.stat().st_size}".encode())
        # Scripts decide; data sets may be large.
        made.update(path.read_bytes() if path.suffix == ".py" else b"")
    return made.hexdigest()


def _malformed(path: Path, what: str) -> DataError:
    return DataError(
        f"{path}: {what}",
        allowed="a task as MLGym's own are written, its files in the checkout",
        next_step="correct it, or leave it out of task.tasks",
    )


def iterate_attempts(tasks: Mapping[str, MlgymTask], first: int, number: int) -> Iterator[Mapping[str, Any]]:
    """Yield attempts: the tasks one after the other, each with a number of its own."""
    names = sorted(tasks)
    for index in range(first, first + number):
        task = tasks[names[index % len(names)]]
        yield {"task": task.task_id, "attempt": index, "digest": task.digest}
