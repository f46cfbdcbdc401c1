"""Which programs of others show a run: Weights & Biases, TensorBoard, MLflow, trackio."""

from __future__ import annotations

from pydantic import Field, field_validator

from strop.spec.base import Section, SpecConflict, expert

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
