"""Adapters of Weights & Biases, TensorBoard, MLflow and trackio, each imported at its first use.

An adapter has four calls and knows nothing of runs; `strop.view.tracking` decides when to send which data, in
a separate process, because these packages print, use the network, register exit handlers, and take seconds to
import. No key is read here: the packages find their own.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from strop.errors import CheckRefused
from strop.io.logins import has_wandb_key
from strop.record.run_dir import step_of
from strop.spec import TrackersSpec
from strop.store.policy import is_offline

Row = Mapping[str, str | float | None]
EVENTS = "events"
"""The table of events; its rows have `is_alarm`, 1 or 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """A run, as a tracker starts it."""

    name: str
    project: str
    folder: Path
    """The folder of the tracker's own files."""
    config: Mapping[str, Any]
    """The run's settings, by section."""
    first_step: int
    """Steps trained before this attempt; records of later steps were removed."""
    is_offline: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A tracker's progress with a run, saved so that a resumed run is not sent twice."""

    id: str | None = None
    """The tracker's id of the run; None: it has not been started there."""
    step: int = 0
    """The last step whose metrics were sent."""
    rollouts_step: int = 0
    at: float = 0.0
    """Unix seconds of the last event that was sent."""
    evaluations: tuple[str, ...] = ()
    """Names of the evaluation files that were sent."""

    def cut_after(self, step: int) -> Sent:
        """Drop everything after a step, for a tracker that drops it too."""
        kept = tuple(name for name in self.evaluations if (step_of(Path(name)) or 0) <= step)
        return replace(
            self,
            step=min(self.step, step),
            rollouts_step=min(self.rollouts_step, step),
            evaluations=kept,
        )


class Tracker(Protocol):
    """Receives a run. Calls come from one thread, in order; any may raise and end the process."""

    def start(self, run: TrackedRun, sent: Sent) -> Sent:
        """Begin the run, or resume the one of `sent`; return the tracker's progress with its id."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step, by their names in the tracker."""
        ...

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Log rows of one kind for a step: rollouts or events."""
        ...

    def finish(self, *, cause: str) -> None:
        """Send everything and end the run. `cause`: one word, 'done' if all steps were trained."""
        ...


class WandbTracker:
    """Weights & Biases. Offline files are for `wandb sync`."""

    def start(self, run: TrackedRun, sent: Sent) -> Sent:
        """Begin or resume by id. Raises: as wandb, if its server refuses."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb = wandb
        sent = replace(sent, id=sent.id or uuid4().hex[:12])
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=sent.id,
            resume="allow",
            config=dict(run.config),
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            mode="offline" if run.is_offline else None,
            save_code=False,
            # The system charts show the training process.
            settings=wandb.Settings(silent=True, console="off", disable_git=True, x_stats_pid=os.getppid()),
        )
        # W&B's own step only grows: a late evaluation would be silently dropped.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return sent

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

    def start(self, run: TrackedRun, sent: Sent) -> Sent:
        """Open a file that makes readers drop all data after the last valid step."""
        from tensorboardX import SummaryWriter

        sent = replace(sent, id=sent.id or run.name).cut_after(run.first_step)
        self._writer = SummaryWriter(str(run.folder), purge_step=sent.step + 1, flush_secs=2)
        return sent

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Write text as an indented block, which readers of Markdown show verbatim."""
        text = json.dumps(list(rows), ensure_ascii=False, indent=1)
        self._writer.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()), step)

    def finish(self, *, cause: str) -> None:
        """Write the rest."""
        self._writer.close()


_MLFLOW_STATUS = {"done": "FINISHED", "Interrupted": "KILLED"}
_MARK = "time/seconds_step"
"""A metric of every step, whose history in MLflow shows the last step that was sent."""


class MlflowTracker:
    """MLflow: the server of MLFLOW_TRACKING_URI, else files that `mlflow ui` shows."""

    def start(self, run: TrackedRun, sent: Sent) -> Sent:
        """Begin a run of the experiment, or go on with one. Raises: MlflowException."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        uri = None if run.is_offline else os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            # Without this MLflow wants a database, which its small package cannot open.
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = client = MlflowClient(tracking_uri=uri or run.folder.absolute().as_uri())
        if sent.id is not None:
            self._id = sent.id
            client.update_run(self._id, status="RUNNING")
            steps = [metric.step for metric in client.get_metric_history(self._id, _MARK)]
            return replace(sent, step=max(steps, default=0))
        experiment = client.get_experiment_by_name(run.project)
        try:
            number = experiment.experiment_id if experiment else client.create_experiment(run.project)
        except MlflowException:  # Another run has just made it.
            number = client.get_experiment_by_name(run.project).experiment_id
        self._id = str(client.create_run(number, run_name=run.name).info.run_id)
        params = [Param(key, text[:500]) for key, text in flatten(run.config) if text]
        for at in range(0, len(params), 100):
            client.log_batch(self._id, params=params[at : at + 100])
        return replace(sent, id=self._id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers, the mark last."""
        now_ms = round(time.time() * 1000)
        ordered = sorted(values.items(), key=lambda item: item[0] == _MARK)
        self._client.log_batch(self._id, metrics=[self._metric(key, v, now_ms, step) for key, v in ordered])

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Write an artifact in the format of MLflow's tables."""
        columns = list(rows[0])
        content = {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
        # Events of one step may come in several calls, and a file replaces another of its name.
        part = f"-{time.time_ns()}" if name == EVENTS else ""
        self._client.log_dict(self._id, content, f"{name}/step-{step:06d}{part}.json")

    def finish(self, *, cause: str) -> None:
        """Set the run's final status."""
        self._client.set_terminated(self._id, _MLFLOW_STATUS.get(cause, "FAILED"))


class TrackioTracker:
    """trackio: a Space or server if its variables name one, else a database for `trackio show`."""

    def start(self, run: TrackedRun, sent: Sent) -> Sent:
        """Begin a run, or resume it by its name."""
        os.environ.setdefault("TRACKIO_DIR", str(run.folder))
        if run.is_offline:
            os.environ["HF_HUB_OFFLINE"] = "1"
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL"):
                os.environ.pop(name, None)
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            run.project,
            run.name,
            config=dict(run.config),
            resume="never" if sent.id is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # It sends twice a second: a killed process may not have sent the last steps that it took.
        last_step = max(self._run._next_step - 1, 0)
        return replace(sent, id=self._run.id, step=min(sent.step, last_step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log a row."""
        self._run.log(dict(values), step=step)

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Log each rollout as a trace, and events as alerts and a table."""
        if name == EVENTS:
            self._run.log({name: self._trackio.Table(data=[dict(row) for row in rows])}, step=step)
            for row in rows:
                if row["is_alarm"]:
                    self._run.alert(str(row["cause"]), str(row["detail"]), step=step)
            return
        for row in rows:
            roles = {"prompt": "user", "reply": "assistant"}
            messages = [{"role": role, "content": row[key]} for key, role in roles.items()]
            facts = {key: value for key, value in row.items() if key not in roles}
            self._run.log({name: self._trackio.Trace(messages, facts)}, step=step)

    def finish(self, *, cause: str) -> None:
        """Send the rest."""
        self._run.finish()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerKind:
    """A tracker's adapter and package."""

    adapter: type[Tracker]
    module: str
    """Import name of its package."""


KINDS: Mapping[str, TrackerKind] = {
    "wandb": TrackerKind(adapter=WandbTracker, module="wandb"),
    "tensorboard": TrackerKind(adapter=TensorboardTracker, module="tensorboardX"),
    "mlflow": TrackerKind(adapter=MlflowTracker, module="mlflow"),
    "trackio": TrackerKind(adapter=TrackioTracker, module="trackio"),
}
"""Trackers by the names of `trackers.use`, which are also the names of the extras."""


def require_trackers(spec: TrackersSpec) -> None:
    """Check that the trackers of a run can start here, without imports or network.

    Raises: CheckRefused for a package that is not installed, or a missing key of W&B.
    """
    for name in spec.use:
        if find_spec(KINDS[name].module) is None:
            raise CheckRefused(
                f"trackers.use names {name}, and this Python has no package {KINDS[name].module}",
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


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of a tree of settings as dotted names and texts."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


# Groups of the record's metrics, as users of trackers expect: `train/reward_mean`, `time/seconds_step`.
TRAIN, ROLLOUTS, TIME, SYSTEM = "train", "rollouts", "time", "system"
GROUPS: tuple[tuple[str, str], ...] = (
    (TIME, r"seconds_\w+|\w+_per_s|loop_(lag_s|late_frac)"),
    (SYSTEM, r"(peak_)?memory_bytes"),
    # Sampling.
    (ROLLOUTS, r"(truncated|timed_out|failed|prompt_too_long|format_ok|refilled|branched)_frac(_.+)?"),
    (ROLLOUTS, r"(duplicate|common_reply|distinct_reply|runaway|prefix_break|wasted_token)_frac"),
    (ROLLOUTS, r"reply_tokens_mean(_.+)?|used_length_ratio|prompt_dependence|dev_gap|judge_\w+"),
    (ROLLOUTS, r"staleness_(mean|max)|num_groups_ahead|num_\w+_groups"),
    # Learning, and the change of the policy.
    (TRAIN, r"reward_(mean|part)(_.+)?|accuracy(_.+)?|unearned_reward_mean|zero_variance_frac"),
    (TRAIN, r"(loss|grad_norm)(_.+)?|lr|grad_cosine|update_ratio|(master_)?changed_frac"),
    (TRAIN, r"(policy_)?entropy_nats|\w+_kl_nats|(drift|offpolicy|mismatch)_\w+_nats"),
    (TRAIN, r"ratio_p\d\d|clip_(low|high)_frac|correction_\w+|effective_sample_frac"),
    (TRAIN, r"pair_\w+|num_(pairs|pair_tokens|sft_rows|sft_tokens)"),
    (TRAIN, r"num_(scored_tokens|signal_tokens|forwarded|positions|optimizer_steps)"),
    (TRAIN, r"num_refused_steps|policy_version"),
)
"""Group and pattern of the whole name; the first match counts. Other metrics are in `train`."""
_PATTERNS = [(group, re.compile(pattern)) for group, pattern in GROUPS]
_ODD = re.compile(r"[^A-Za-z0-9_./ -]")


def group_of(name: str) -> str | None:
    """Return the group of a metric of the record; None for a metric that strop does not measure."""
    return next((group for group, pattern in _PATTERNS if pattern.fullmatch(name)), None)


def name_metric(name: str) -> str:
    """Return the name of a metric in trackers. Characters that one of them refuses become '_'."""
    return f"{group_of(name) or TRAIN}/{_ODD.sub('_', name)}"
