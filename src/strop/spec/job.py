"""Resources that a run requests when it is submitted as a job."""

from __future__ import annotations

import re
import shlex
from typing import Literal

from pydantic import Field, model_validator

from strop.spec.base import Section, SpecConflict, expert

GPU_SPLIT = ("gpus", "train_gpus", "infer_gpus", "single_gpu")
DURATION_HELP = "90s, 30m, 2h, 5d, HH:MM:SS or D-HH:MM:SS"


class JobSpec(Section):
    """Resources and policies of a job. Not part of the spec's digest."""

    nodes: int = Field(
        default=1, ge=1, le=256, description="Number of nodes, without those of job.cpu_nodes."
    )
    gpus: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="GPUs per node, each shared in turns by a learner rank and an engine. none = as"
        " train_gpus and infer_gpus say, else none: the run computes on CPUs.",
    )
    train_gpus: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="GPUs per node for the learner. none = 1 if infer_gpus is set.",
    )
    infer_gpus: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="GPUs per node for generation. none = 1 if train_gpus is set.",
    )
    infer_nodes: int = Field(
        default=0,
        ge=0,
        le=255,
        description="Number of last nodes that only generate, on all their job.gpus; the others only learn.",
        json_schema_extra=expert("weights of large models are sharded best within the nodes that learn"),
    )
    judge_gpus: int = Field(
        default=0,
        ge=0,
        le=64,
        description="GPUs of the first node for judges that the run starts (task.judge_url = 'role'), besides"
        " those for training. 0 = they share the GPUs of the run's engine.",
        json_schema_extra=expert("a judge that the run starts may need GPUs of its own"),
    )
    env_gpus: int = Field(
        default=0,
        ge=0,
        le=64,
        description="GPUs per node for environments, besides those for training. The sandboxes of workspaces"
        " and the user's task code see these alone, in rollout workers if the run has some.",
        json_schema_extra=expert("environments may train or run models themselves"),
    )
    single_gpu: bool = Field(
        default=False,
        description="Use one GPU for both learner and generation.",
        json_schema_extra=expert("a learner and an engine may share one GPU"),
    )
    cpus_per_gpu: int | None = Field(
        default=None,
        ge=1,
        le=32,
        description="Cores per GPU on a shared node. none = the site's default.",
        json_schema_extra=expert("sites bill cores by the GPU"),
    )
    cpus: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Cores of a job without GPUs. none = the site's default.",
        json_schema_extra=expert("runs without GPUs ask for cores"),
    )
    memory: str | None = Field(
        default=None,
        pattern=r"^\d+[KMGT]?$",
        description="Memory per node in SLURM's form, such as '64G'. none = the site's default.",
        json_schema_extra=expert("sites kill jobs above what they asked for"),
    )
    time_limit: str | None = Field(
        default=None,
        min_length=1,
        description=f"Wall time: {DURATION_HELP}. none = the site's default.",
    )
    max_requeue: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="How often a job that stopped with a checkpoint is requeued.",
        json_schema_extra=expert("preemptible queues end jobs often"),
    )
    grace_s: float = Field(
        default=120.0,
        ge=1.0,
        le=3600.0,
        description="Seconds before its end at which a job is signalled, so that it can save its state.",
        json_schema_extra=expert("large checkpoints need longer before the time limit"),
    )
    preflight: Literal["none", "quick", "compute"] = Field(
        default="quick",
        description="Checks on every node before the run starts. 'quick': devices, memory, disk and foreign"
        " processes; 'compute': also a product on every GPU.",
        json_schema_extra=expert("a site with bad nodes wants the longer checks"),
    )
    max_silence_s: float | None = Field(
        default=None,
        gt=0.0,
        description="Seconds without a log line of any role and without progress of the run, after which the"
        " stacks of all roles are written and the job ends. none = tripwires.max_stall_s of the run.",
        json_schema_extra=expert("a role may hang before the training loop can watch itself"),
    )
    cpu_nodes: int = Field(
        default=0,
        ge=0,
        le=256,
        description="Additional nodes without GPUs, for cpu_command, runtime.serve, or else the run's Ray.",
        json_schema_extra=expert("judges and sandboxes may need nodes without GPUs"),
    )
    cpu_command: str | None = Field(
        default=None,
        min_length=1,
        description="Command that runs on each of the cpu_nodes while the run does, split like a shell would."
        " none = no command.",
        json_schema_extra=expert("judges and sandboxes may need nodes without GPUs"),
    )

    @model_validator(mode="after")
    def _check_split(self) -> JobSpec:
        given = {f"job.{name}": getattr(self, name) for name in GPU_SPLIT if getattr(self, name)}
        split = {key: value for key, value in given.items() if key != "job.gpus"}
        if self.gpus is not None and split:
            raise SpecConflict(
                {"job.gpus": self.gpus, **split},
                "the GPUs are shared out in two ways",
                allowed="job.gpus alone, or train_gpus with infer_gpus, or single_gpu",
                next_step="keep one; `none` removes the value of a file (job.single_gpu=false)",
            )
        if self.single_gpu and max(self.train_gpus or 1, self.infer_gpus or 1) > 1:
            raise SpecConflict(
                split,
                "one GPU cannot be several",
                allowed="single_gpu with train_gpus and infer_gpus of 1, or unset",
                next_step="remove single_gpu, or the other two",
            )
        if self.infer_nodes and (split or self.judge_gpus):
            beside = {"job.judge_gpus": self.judge_gpus} if self.judge_gpus else {}
            raise SpecConflict(
                {"job.infer_nodes": self.infer_nodes, **split, **beside},
                "whole nodes generate, and a node's GPUs are shared out as well",
                allowed="job.gpus with job.infer_nodes",
                next_step="give the GPUs of a node in job.gpus",
            )
        return self

    @model_validator(mode="after")
    def _check_sidecar(self) -> JobSpec:
        try:
            shlex.split(self.cpu_command or "")
        except ValueError as error:
            raise SpecConflict(
                {"job.cpu_command": self.cpu_command},
                f"it cannot be split into words ({error})",
                allowed="words, quoted as for a shell",
                next_step="close the quotation",
            ) from error
        return self

    @model_validator(mode="after")
    def _check_time_limit(self) -> JobSpec:
        try:
            is_some = self.time_limit is None or parse_duration_s(self.time_limit) > 0.0
        except ValueError:
            is_some = False
        if not is_some:
            raise SpecConflict(
                {"job.time_limit": self.time_limit},
                "it is no length of time that a job could have",
                allowed=f"a limit above 0: {DURATION_HELP}",
                next_step="correct it, or remove it for the site's",
            )
        return self

    @property
    def gpu_roles(self) -> dict[str, int]:
        """GPUs of a node by part of training, generation first; {} for a run on CPUs."""
        if self.gpus is not None:
            return {"train": self.gpus} if self.gpus else {}
        if self.single_gpu:
            return {"train": 1}
        if self.train_gpus is None and self.infer_gpus is None:
            return {}
        return {"infer": self.infer_gpus or 1, "train": self.train_gpus or 1}

    @property
    def gpus_per_node(self) -> int:
        """GPUs that each node must have, without those of cpu_nodes."""
        return sum(self.gpu_roles.values()) + self.judge_gpus + self.env_gpus


# Lengths of time: `90s`, `30m`, `2h`, `5d`, `2:30:00`, `1-12:00:00`.
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
DURATION_PATTERN = rf"^(?:{_WITH_UNIT.pattern}|{_CLOCK.pattern})$"


def parse_duration_s(text: str) -> float:
    """Parse a duration into seconds.

    A bare number is refused: for one program it is minutes, for another seconds, and 10:00 likewise.
    Raises: ValueError if it is of no such form.
    """
    if match := _WITH_UNIT.fullmatch(text):
        return float(match[1]) * _UNITS_S[match[2]]
    if match := _CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(days * 86400 + hours * 3600 + minutes * 60 + seconds)
    raise ValueError(f"{text!r} is no length of time; allowed: {DURATION_HELP}")


def parse_memory_bytes(text: str) -> int:
    """Return the bytes of `JobSpec.memory`: '64G', or '100' in MiB, as SLURM reads it."""
    powers = {"K": 10, "M": 20, "G": 30, "T": 40}
    power = powers.get(text[-1:])
    return int(text) << 20 if power is None else int(text[:-1]) << power


def format_duration(duration_s: float) -> str:
    """Return whole seconds, rounded up, as D-HH:MM:SS or HH:MM:SS, the form of schedulers."""
    whole = -int(-duration_s // 1)
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
