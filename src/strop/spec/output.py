"""Where a run is written and mirrored, its store of models and data, and its trackers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from strop.spec.base import Section, SpecConflict, expert


class StoreSpec(Section):
    """Storage shared between machines. Not part of the spec's digest."""

    uri: str | None = Field(
        default=None,
        min_length=1,
        description="Root of the store: s3://bucket/prefix, or a directory that starts with '/', '~' or '.'."
        " Models are under models/ID, data sets under datasets/ID; `strop stage` uploads them. none = the"
        " value of STROP_STORE_URI, else no store.",
    )
    order: Literal["store-first", "hub-first", "store-only"] = Field(
        default="store-first",
        description="Which source is asked first for hub ids. The other one is asked only if the first does"
        " not have the id; a failing store is an error, and no reason to ask a hub. STROP_OFFLINE=1 excludes"
        " the hub, whatever the order.",
        json_schema_extra=expert("some sites must not contact a hub, and others must"),
    )
    mirror: Literal["auto"] | bool = Field(
        default="auto",
        description="Whether the run is mirrored to the store while it trains (checkpoints, metrics,"
        " rollouts, logs, under checkpoints/NAME), so that it can resume from there on another machine. auto"
        " = if the store, here or by STROP_STORE_URI, is an s3:// URI; a directory only with true.",
        json_schema_extra=expert("a store on a disk is not mirrored to unless asked"),
    )
    mirror_as: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$",
        max_length=200,
        description="Folder of this run in checkpoints/. none = the name of the run's directory.",
        json_schema_extra=expert("a run that moves to another machine finds its mirror by name"),
    )
    keep_last: int = Field(
        default=2,
        ge=1,
        le=10**7,
        description="Number of newest checkpoints to keep in the store; older ones that this run uploaded are"
        " removed once a newer one is there.",
        json_schema_extra=expert("storage is paid for by size"),
    )


_LEVEL = "(debug|info|warning|error)"
_ROLE_LEVEL = f"(train|engine|judge)={_LEVEL}"


class OutputSpec(Section):
    """Folders and logs of the run. Not part of the spec's digest."""

    root: str = Field(
        default="runs",
        min_length=1,
        description="Folder for new run directories. Relative to the file that names it; the default and an"
        " override are relative to the current folder.",
    )
    dir: str | None = Field(
        default=None,
        min_length=1,
        description="The run's directory. Relative as for output.root; write a folder called none as"
        " './none'. none = a new folder in output.root, named after the run and the time.",
        json_schema_extra=expert("a run may be restarted in its own directory"),
    )
    log_level: str | None = Field(
        default=None,
        pattern=f"^({_LEVEL}|{_ROLE_LEVEL})(,{_ROLE_LEVEL})*$",
        description="Lowest level in the roles' logs: debug, info, warning or error; per role as in"
        " 'warning,engine=debug', for train, engine (vLLM included) and judge. none = info for engines and"
        " judges, warning for train.",
        json_schema_extra=expert("debugging one role needs its log without the noise of the others"),
    )


TRACKERS = ("wandb", "tensorboard", "mlflow")


class TrackersSpec(Section):
    """Trackers that a run is sent to. Not part of the spec's digest."""

    use: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Trackers that the run is sent to: wandb, tensorboard, mlflow; install each with"
        " pip install 'strop[NAME]'. Keys and addresses come from the trackers' own environment variables.",
        json_schema_extra=expert("a group may already watch its runs in a tracker"),
    )
    project: str = Field(
        default="strop",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Project in wandb, experiment in MLflow. TensorBoard has none.",
        json_schema_extra=expert("runs of several studies share one account"),
    )
    offline: bool = Field(
        default=False,
        description="Whether trackers write to trackers/ in the run's directory and use no network."
        " STROP_OFFLINE=1 has the same effect.",
        json_schema_extra=expert("nodes of many clusters reach no network"),
    )
    rollouts_every: int | None = Field(
        default=10,
        ge=1,
        le=10**7,
        description="Steps between two samples of rollouts with their texts, three of one prompt. none = no"
        " text leaves this machine.",
        json_schema_extra=expert("prompts may be confidential, and a tracker's server may belong to others"),
    )

    finish_limit_s: float = Field(
        default=60.0,
        ge=0.0,
        le=86_400.0,
        description="Longest wait for the trackers after training has ended; missing data is reported.",
        json_schema_extra=expert("a slow uplink needs longer for the last tables"),
    )

    @field_validator("use")
    @classmethod
    def _check_use(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in names if name not in TRACKERS]
        if unknown or len(set(names)) < len(names):
            why = "strop knows no such tracker" if unknown else "a tracker is named twice"
            raise SpecConflict(
                {"trackers.use": unknown[0] if unknown else ", ".join(names)},
                why,
                allowed=f"a list of {', '.join(TRACKERS)}, each once",
                next_step="correct it, or remove it: the record and the page need no tracker",
            )
        return names

    def variables(self) -> tuple[str, ...]:
        """Return the environment variables that the used trackers read, keys first."""
        return tuple(name for tracker in self.use for name in _VARIABLES[tracker])


_VARIABLES: dict[str, tuple[str, ...]] = {
    "wandb": ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE"),
    "tensorboard": (),
    "mlflow": (
        *("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
        "MLFLOW_TRACKING_URI",
    ),
}
