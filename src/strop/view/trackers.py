"""Adapters of Weights & Biases, TensorBoard and MLflow, each imported at its first use.

An adapter knows nothing of runs; `strop.view.tracking` decides when to send what, in a thread, because these
packages use the network and take seconds to import. No key is read here: the packages find their own.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from strop.errors import CheckRefused
from strop.io.logins import has_wandb_key
from strop.spec import TrackersSpec
from strop.spec.display import dotted, walk_values
from strop.store.policy import is_offline

Row = Mapping[str, str | float | None]
EVENTS = "events"
"""The table of events; its rows have `is_alarm`, 1 or 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """A run, as a tracker starts it."""

    name: str
    spec: TrackersSpec
    folder: Path
    """The folder of the tracker's own files."""
    config: Mapping[str, Any]
    """The run's settings, by section."""
    first_step: int
    """Steps trained before this attempt; records of later steps were removed."""
    id: str | None
    """The tracker's id of the run; None: it has not been started there."""

    @property
    def is_offline(self) -> bool:
        """Whether no network may be asked."""
        return self.spec.offline or is_offline()


class Tracker(Protocol):
    """Receives a run, begun or resumed by its id. Calls come from one thread, in order; any may raise."""

    id: str
    """Its id of the run."""
    keeps_later: bool
    """Whether it keeps data of steps after `TrackedRun.first_step`, which are computed again."""

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step, by their names in the tracker."""

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Log rows of one kind for a step: rollouts or events."""

    def finish(self, *, cause: str) -> None:
        """Send everything and end the run. `cause`: one word, 'done' if all steps were trained."""


class WandbTracker:
    """Weights & Biases. Offline files are for `wandb sync`."""

    keeps_later = True

    def __init__(self, run: TrackedRun) -> None:
        """Begin or resume by id. Raises: as wandb, if its server refuses."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb = wandb
        self.id = run.id or uuid4().hex[:12]
        self._run = wandb.init(
            project=run.spec.project,
            name=run.name,
            id=self.id,
            resume="allow",
            config=dict(run.config),
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            mode="offline" if run.is_offline else None,
            save_code=False,
            # At its end, too, the process waits no longer for it.
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, finish_timeout=max(run.spec.finish_limit_s, 0.1)
            ),
        )
        # W&B's own step only grows: a late evaluation would be silently dropped.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a row."""
        self._run.log({"step": step, **values})

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Log a table of this step, and send an alert for each alarm."""
        columns = list(rows[0])
        data = [[row[column] for column in columns] for row in rows]
        self._run.log({"step": step, name: self._wandb.Table(columns=columns, data=data)})
        for row in rows if name == EVENTS else ():
            if row["is_alarm"]:
                self._run.alert(str(row["cause"])[:63], f"step {step}: {row['detail']}", level="WARN")

    def finish(self, *, cause: str) -> None:
        """Send the rest."""
        self._run.finish(exit_code=0 if cause == "done" else 1)


class TensorboardTracker:
    """Event files, by tensorboardX: the smallest writer that also takes text and cuts back."""

    keeps_later = False

    def __init__(self, run: TrackedRun) -> None:
        """Open a file that makes readers drop all data after the last valid step."""
        from tensorboardX import SummaryWriter

        self.id = run.name
        self._writer = SummaryWriter(str(run.folder), purge_step=run.first_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars to the file, before the step is noted as sent: a killed process writes no buffer."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Write text as an indented block, which readers of Markdown show verbatim."""
        text = json.dumps(list(rows), ensure_ascii=False, indent=1)
        self._writer.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()), step)

    def finish(self, *, cause: str) -> None:
        """Write the rest."""
        self._writer.close()


class MlflowTracker:
    """MLflow: the server of MLFLOW_TRACKING_URI, else files that `mlflow ui` shows."""

    keeps_later = True

    def __init__(self, run: TrackedRun) -> None:
        """Begin a run of the experiment, or resume one. Raises: MlflowException."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        uri = None if run.is_offline else os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            # Without this MLflow wants a database, which its small package cannot open.
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = client = MlflowClient(tracking_uri=uri or run.folder.absolute().as_uri())
        if run.id is not None:
            self.id = run.id
            client.update_run(self.id, status="RUNNING")
            return
        experiment = client.get_experiment_by_name(run.spec.project)
        number = experiment.experiment_id if experiment else client.create_experiment(run.spec.project)
        self.id = str(client.create_run(number, run_name=run.name).info.run_id)
        values = ((dotted(path), str(value)) for path, value in walk_values(run.config))
        params = [Param(key, text[:500]) for key, text in values if text]
        for at in range(0, len(params), 100):
            client.log_batch(self.id, params=params[at : at + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers."""
        now_ms = round(time.time() * 1000)
        self._client.log_batch(self.id, [self._metric(key, v, now_ms, step) for key, v in values.items()])

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Write an artifact in the format of MLflow's tables."""
        columns = list(rows[0])
        content = {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
        # Events of one step may come in several calls, and a file replaces another of its name.
        part = f"-{time.time_ns()}" if name == EVENTS else ""
        self._client.log_dict(self.id, content, f"{name}/step-{step:06d}{part}.json")

    def finish(self, *, cause: str) -> None:
        """Set the run's final status."""
        status = {"done": "FINISHED", "Interrupted": "KILLED"}.get(cause, "FAILED")
        self._client.set_terminated(self.id, status)


KINDS: Mapping[str, tuple[type[Tracker], str]] = {
    "wandb": (WandbTracker, "wandb"),
    "tensorboard": (TensorboardTracker, "tensorboardX"),
    "mlflow": (MlflowTracker, "mlflow"),
}
"""Adapter and package by the names of `trackers.use`, which are also the names of the extras."""


def require_trackers(spec: TrackersSpec) -> None:
    """Check that the trackers of a run can start here, without imports or network.

    Raises: CheckRefused for a package that is not installed, or a missing key of W&B.
    """
    for name in spec.use:
        if find_spec(KINDS[name][1]) is None:
            raise CheckRefused(
                f"trackers.use names {name}, and this Python has no package {KINDS[name][1]}",
                allowed="trackers whose packages are installed",
                next_step=f"pip install 'strop[{name}]'",
            )
    needs_key = "wandb" in spec.use and not (spec.offline or is_offline())
    if needs_key and not has_wandb_key(os.environ):
        raise CheckRefused(
            "trackers.use names wandb, and there is no key for it",
            allowed="WANDB_API_KEY, a login by `wandb login`, or files for later: trackers.offline = true",
            next_step="export WANDB_API_KEY, or set trackers.offline=true",
        )


# Groups of the record's metrics, as users of trackers expect: `time/seconds_step`; all others are in `train`.
ROLLOUTS = "rollouts"
_GROUPS = {
    "time": re.compile(r"seconds_\w+|\w+_per_s|loop_(lag_s|late_frac)"),
    "system": re.compile(r"(peak_)?memory_bytes"),
    ROLLOUTS: re.compile(
        r"(truncated|timed_out|failed|prompt_too_long|format_ok|refilled)_frac.*|reply_tokens_mean.*|judge_\w+"
        r"|(duplicate|common_reply|distinct_reply|runaway|prefix_break|wasted_token)_frac|used_length_ratio"
        r"|prompt_dependence|staleness_\w+|num_groups_ahead|num_\w+_groups"
    ),
}
_ODD = re.compile(r"[^A-Za-z0-9_./ -]")


def name_metric(name: str) -> str:
    """Return the name of a metric in trackers. Characters that one of them refuses become '_'."""
    group = next((group for group, pattern in _GROUPS.items() if pattern.fullmatch(name)), "train")
    return f"{group}/{_ODD.sub('_', name)}"
