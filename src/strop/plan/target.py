"""Where a run is planned for, if not this machine: the hardware of a site, and what an hour of it costs."""

from __future__ import annotations

from dataclasses import dataclass

from strop.hardware import Machine
from strop.hardware.accelerators import Accelerator
from strop.plan.estimate import TimeEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """What a job is paid by."""

    num_gpus: int
    """That are paid for, of all nodes together."""
    usd_per_gpu_hour: float | None
    """None: nobody said."""
    time_limit_s: float | None
    """After which the job is ended; None: there is no limit."""

    @property
    def usd_per_hour(self) -> float | None:
        """Of the whole job."""
        return None if self.usd_per_gpu_hour is None else self.num_gpus * self.usd_per_gpu_hour


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The hardware of a job on a site."""

    site: str
    machine: Machine
    """One node."""
    accelerator: Accelerator | None
    """That each learner rank and engine replica has; None: `machine` as it is."""
    unknown: str
    """Why neither memory nor time can be said, and `accelerator` is but a name; '' where both can."""
    free_disk_bytes: int | None
    """Where the run's directory is; None: unknown."""
    is_here: bool
    """Whether it is this machine, whose measured speeds hold."""
    rate: Rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a run costs on a site. None stands for what is not known."""

    num_gpus: int
    usd_per_gpu_hour: float
    step_usd: float | None
    run_usd: float | None
    """All steps and evaluations; start, loading and checkpoints are left out."""
    limit_usd: float | None
    """At most, by the job's time limit."""


def price_run(rate: Rate, time: TimeEstimate | None) -> Price | None:
    """Return what a run costs; None where no price is known, or none is asked for by the GPU."""
    per_hour = rate.usd_per_hour
    if rate.usd_per_gpu_hour is None or per_hour is None or not rate.num_gpus:
        return None

    def of(seconds: float | None) -> float | None:
        return None if seconds is None else per_hour * seconds / 3600.0

    return Price(
        num_gpus=rate.num_gpus,
        usd_per_gpu_hour=rate.usd_per_gpu_hour,
        step_usd=of(time.step_s if time else None),
        run_usd=of(time.total_s if time else None),
        limit_usd=of(rate.time_limit_s),
    )
