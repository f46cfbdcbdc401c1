"""What a plan says, as data: for the command line, for programs, and for what is measured against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.plan.estimate import Assumption, TimeEstimate
from strop.plan.roles import Part, RoleMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedValue:
    """A value that takes effect, and where it comes from."""

    name: str
    value: Any
    origin: str
    """'default', 'run.toml:7', 'override', or in words from what it is derived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPrompt:
    """The first training prompt, exactly as the model will be asked."""

    text: str
    num_tokens: int
    prompt_format: str
    stops: tuple[str, ...]
    """Terminators and stop strings."""
    example_id: str
    num_measured: int
    tokens_mean: float
    tokens_max: int
    """Mean and longest of the measured training prompts."""
    counts: str = ""
    """What reading the task's data counted, for people."""
    num_too_long: int | None
    """Measured prompts that leave no room for a reply; None where the model is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How much is trained, evaluated and kept."""

    steps: int
    steps_per_batch: int
    """Optimizer steps of each."""
    prompts_per_step: int
    rollouts_per_step: int
    num_train_examples: int | None
    num_epochs: float | None
    """Passes over the training examples. None: their number is unknown, or they are not trained on."""
    given_kind: str
    """'demonstrations' or 'pairs'; '' where nothing is given."""
    given_per_step: int
    """Demonstrations or pairs in a step."""
    given: str | None
    """How many there are, and what became of the others. None: not known or not asked for."""
    num_given_epochs: float | None
    """Passes over them."""
    num_evals: int
    num_eval_examples: int | None
    num_checkpoints: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What is needed of memory or disk, and what there is."""

    parts: tuple[Part, ...]
    needed_bytes: float
    available_bytes: int | None
    """None: unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run before it runs. None stands where `unknown` says why."""

    name: str
    model_uri: str
    model_path: str | None
    num_params: int | None
    prompt: PlannedPrompt | None
    limits: tuple[PlannedValue, ...]
    schedule: Schedule
    algorithm: tuple[PlannedValue, ...]
    optimizer: tuple[PlannedValue, ...]
    memory: Room | None
    """Of the machine, where its roles share it; the host's where they have accelerators."""
    roles: tuple[RoleMemory, ...]
    """One process of each role at its peak; () where the model is not known."""
    hardware: str
    """What it is planned for."""
    disk: Room | None
    time: TimeEstimate | None
    assumptions: tuple[Assumption, ...]
    warnings: tuple[str, ...]
    """What the gate would refuse."""
    unknown: tuple[str, ...]
    notices: tuple[str, ...]
