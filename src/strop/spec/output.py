"""Where a run is written and mirrored, which store its models and data come from, and who else shows it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from strop.spec.base import Section, SpecConflict, expert


class StoreSpec(Section):
    """Where bytes are kept between machines. Not part of what was asked: not in the spec's digest."""

    uri: str | None = Field(
        default=None,
        min_length=1,
        description="Root of the store: s3://bucket/prefix, or a directory that starts with '/', '~' or '.'."
        " Models are looked for under models/ID in it, data sets under datasets/ID; `strop stage` puts them"
        " there. none = what STROP_STORE_URI says, else no store.",
    )
    order: Literal["store-first", "hub-first", "store-only"] = Field(
        default="store-first",
        description="Which source is asked first for hub ids. The other one is asked only for what the first"
        " one does not have; a store that fails is an error, and no reason to ask a hub. STROP_OFFLINE=1"
        " leaves the hub out, whatever the order.",
        json_schema_extra=expert("some sites may not ask a hub, and some must"),
    )
    mirror: Literal["auto"] | bool = Field(
        default="auto",
        description="Whether the run is mirrored to the store while it trains: checkpoints, metrics,"
        " rollouts, logs, below checkpoints/NAME, so that it can go on from there on another machine. auto ="
        " where the store, as said here or by STROP_STORE_URI, is an s3:// URI; a directory is mirrored to on"
        " true only.",
        json_schema_extra=expert("a store on a disk is not mirrored to unless asked"),
    )
    mirror_as: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$",
        max_length=200,
        description="Folder of this run below checkpoints/. none = the name of the run's directory.",
        json_schema_extra=expert("a run that moves to another machine finds its mirror by name"),
    )
    mirror_every_s: float = Field(
        default=30.0,
        gt=0.0,
        le=86_400.0,
        description="Seconds between two looks at metrics, rollouts and logs. Checkpoints are sent at once.",
        json_schema_extra=expert("requests to a store are paid for, and a machine may vanish"),
    )
    max_mb_per_s: float | None = Field(
        default=None,
        gt=0.0,
        description="Most that the mirror sends, in 10^6 bytes. none = no limit.",
        json_schema_extra=expert("a shared uplink must be left to others"),
    )
    keep_last: int = Field(
        default=2,
        ge=1,
        le=10**7,
        description="Newest checkpoints that are kept in the store; older ones that this run sent are removed"
        " once a newer one is there.",
        json_schema_extra=expert("stores have more room than disks, and are paid by it"),
    )
    keep_every: int | None = Field(
        default=None,
        ge=1,
        le=10**7,
        description="Checkpoints of every so many steps are kept as well. none = keep_last alone decides.",
        json_schema_extra=expert("a study of training wants checkpoints from all of it"),
    )
    flush_limit_s: float = Field(
        default=600.0,
        ge=0.0,
        description="Longest wait for the mirror when training has ended.",
        json_schema_extra=expert("a slow uplink needs longer for the last checkpoint"),
    )
    stop_flush_limit_s: float = Field(
        default=60.0,
        ge=0.0,
        description="Longest wait for the mirror after a signal: the newest checkpoint first.",
        json_schema_extra=expert("a scheduler kills after a grace that differs by site"),
    )


_LEVEL = "(debug|info|warning|error)"
_ROLE_LEVEL = f"(train|engine|judge)={_LEVEL}"


class OutputSpec(Section):
    """Folders and logs of the run. Not part of what was asked: they do not enter the spec's digest."""

    root: str = Field(
        default="runs",
        min_length=1,
        description="Folder that new run folders are made in. Relative to the file that names it; the"
        " default and an override are relative to the current folder.",
    )
    dir: str | None = Field(
        default=None,
        min_length=1,
        description="The run's own folder. Relative as for output.root; a folder called none is written"
        " './none'. none = a new folder under output.root, named after the run and the time.",
        json_schema_extra=expert("a run may be started again in the very directory that it left"),
    )
    log_level: str | None = Field(
        default=None,
        pattern=f"^({_LEVEL}|{_ROLE_LEVEL})(,{_ROLE_LEVEL})*$",
        description="Least serious message that the roles' logs hold: debug, info, warning or error; for"
        " single roles as in 'warning,engine=debug', of train, engine (vLLM included) and judge. none ="
        " info of engines and judges, warning of train.",
        json_schema_extra=expert("a fault is looked for in one role's log, and the others would hide it"),
    )


TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")


class TrackersSpec(Section):
    """Where a run's numbers go beside its record. Not part of what was asked: not in the spec's digest."""

    use: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Which trackers are sent the run: wandb, tensorboard, mlflow, trackio, each of them"
        " installed by pip install 'strop[NAME]'. Their keys and addresses are read from their own"
        " environment variables.",
        json_schema_extra=expert("a group that already watches its runs somewhere wants this one there"),
    )
    project: str = Field(
        default="strop",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="What the run belongs to there: the project of wandb and trackio, the experiment of"
        " MLflow. TensorBoard has none.",
        json_schema_extra=expert("runs of several studies share one account"),
    )
    offline: bool = Field(
        default=False,
        description="Whether trackers write below trackers/ in the run's directory and ask no network."
        " STROP_OFFLINE=1 has the same effect.",
        json_schema_extra=expert("nodes of many clusters reach no network"),
    )
    rollouts_every: int | None = Field(
        default=10,
        ge=1,
        le=10**7,
        description="Steps between two samples of rollouts, three of one prompt, with their texts. none = no"
        " text leaves this machine.",
        json_schema_extra=expert("prompts may be confidential, and a tracker's server is another's"),
    )

    finish_limit_s: float = Field(
        default=60.0,
        ge=0.0,
        le=86_400.0,
        description="Longest wait for the trackers when training has ended; what they lack then is said.",
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
    "trackio": ("TRACKIO_WRITE_TOKEN", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"),
}
