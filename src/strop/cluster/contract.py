"""The interfaces of placements and roles, and the choice of a run's placement.

Frozen models (reference, teacher) are on the learner's ranks, sharded like the learner: a teacher's hidden
states never cross processes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from strop.engine.contract import Engine, WeightUpdate
from strop.errors import ConfigError
from strop.rollout import FloatArray, Group
from strop.tokenizer import Tokenizer

if TYPE_CHECKING:
    from strop.environments import RolloutPlan
    from strop.hardware.busy_clock import BusyClock
    from strop.policy.device_wires import Wire
    from strop.policy.language_model import ModelShape
    from strop.policy.learner import Term
    from strop.policy.optimizer import StepPlan, StepReport
    from strop.policy.packing import PackedGroup
    from strop.spec.run import RunSpec
    from strop.store import ModelHandle


T = TypeVar("T")


class LearnerRole(Protocol):
    """The trained policy, on any ranks."""

    @property
    def version(self) -> int:
        """Batches that have moved the weights."""
        ...

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        ...

    @property
    def device(self) -> str:
        """Kind of its device: 'cpu' or 'cuda'."""
        ...

    @property
    def recomputes(self) -> bool:
        """Whether it recomputes activations instead of keeping them."""
        ...

    @property
    def is_async(self) -> bool:
        """Whether the event loop runs during a step."""
        ...

    async def step_terms(self, terms: Sequence[Term], plan: StepPlan | None = None) -> StepReport:
        """Take one optimizer step over the complete batches of all terms. See `Learner.step_terms`.

        Raises: LearnerError if the loss or gradient is not finite; weights and moments stay.
        """
        ...

    async def score(self, groups: Sequence[PackedGroup], temperature: float) -> list[FloatArray]:
        """Return the log-probability (nats) of the scored tokens of each reply, in order of the groups."""
        ...

    async def digest_tensors(self, role: str | None = None) -> dict[str, str]:
        """Return type, shape and SHA-256 of each tensor by name, without adapters.

        `role`: of this frozen model; None: of the policy.
        """
        ...

    async def add_frozen(self, role: str, source: ModelHandle) -> Scorer:
        """Load a frozen model beside the policy, on its devices and in its type.

        `role` is "reference" or "teacher"; distillation compares with the teacher.
        Raises: ConfigError if it cannot be loaded or has another vocabulary.
        """
        ...

    async def write_weights(self, path: Path) -> str:
        """Write the compute copies to one safetensors file. Returns their digest.

        Raises: StoreError if the file cannot be written.
        """
        ...

    async def offer_weights(self, wire: Wire, host: str, num_receivers: int) -> tuple[str, str]:
        """Begin to send the compute copies from device to device; return their address and digest at once.

        The learner's next call waits until they are sent. See `strop.policy.device_wires`.
        Raises: StoreError if `host` is no address of this machine.
        """
        ...

    async def weights_digest(self) -> str:
        """Return the digest of the compute copies, adapters merged, the same as from `write_weights`."""
        ...

    async def write_adapter(self, target: Path) -> str:
        """Write the trained adapters in peft's form. Returns the digest of their tensors.

        Raises: StoreError if a file cannot be written.
        """
        ...

    async def export(self, target: Path, tokenizer_dir: Path) -> str:
        """Write a Hugging Face model directory. Returns the digest of its tensors, that of `weights_digest`.

        Raises: StoreError if it is not the live policy.
        """
        ...

    async def save_state(self, target: Path) -> None:
        """Write masters, moments and counters into an existing directory."""
        ...

    async def load_state(self, source: Path) -> None:
        """Restore the files of `save_state`. Raises: CorruptRecord if a part is missing or does not fit."""
        ...


class Scorer(Protocol):
    """A frozen model that scores replies."""

    async def score(self, groups: Sequence[PackedGroup], temperature: float) -> list[FloatArray]:
        """Return the log-probability (nats) of the scored tokens of each reply, in order of the groups."""
        ...


class Publisher(Protocol):
    """Makes the learner's weights available to engines."""

    async def publish(self) -> WeightUpdate:
        """Publish the current weights under the learner's version.

        Raises: StoreError if they cannot be written.
        """
        ...

    async def close(self) -> None:
        """End all sending, and remove every publication. May be called twice.

        Raises: StoreError if a store refuses to remove one.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The running parts of a run, connected."""

    learner: LearnerRole
    engine: Engine
    publisher: Publisher
    tokenizer: Tokenizer
    run_group: Callable[[Sequence[RolloutPlan]], Awaitable[Group]] | None = None
    """Attempts one group on rollout workers. None: rollouts run in the loop's process."""
    reference: Scorer | None = None
    teacher: Scorer | None = None
    busy: Mapping[str, BusyClock] = field(default_factory=dict)
    """The clocks of `engine-N` and the `verifier` for `run_group`; empty where that is None."""
    frozen_dirs: Mapping[str, Path] = field(default_factory=dict)
    """Model directories of reference and teacher, by role."""


class Placement(Protocol):
    """Starts the roles and stops them all."""

    async def start(self) -> Roles:
        """Start every role and wait until each answers.

        Raises: EngineError if a role cannot be started; its last log lines are in the message.
        """
        ...

    async def stop(self) -> None:
        """End all roles. May be called at any time, and twice."""
        ...


async def start_all(start: Callable[[], Awaitable[T]], stop: Callable[[], Awaitable[None]]) -> T:
    """Start all roles. If `start` fails or is cancelled, `stop` runs first."""
    async with AsyncExitStack() as undo:
        undo.push_async_callback(stop)
        started = await start()
        undo.pop_all()
    return started


def build_placement(
    spec: RunSpec, source: ModelHandle, work_dir: Path, judges: Mapping[str, ModelHandle] | None = None
) -> Placement:
    """Build the placement of `spec.layout`; nothing is started yet.

    The placement keeps logs and other files in `work_dir`, which need not exist. `judges` are the models of
    the judges that the run starts, by name.
    """
    # Imported inside the branches: both import torch, and Ray is an extra.
    if spec.layout.kind == "ray":
        from strop.cluster.ray.placement import RayPlacement

        return RayPlacement(spec, source, work_dir, judges=judges)
    from strop.cluster.local import InlinePlacement

    return InlinePlacement(spec, source)


async def with_frozen(
    roles: Roles, spec: RunSpec, source: ModelHandle, fetch: Callable[[str], ModelHandle]
) -> Roles:
    """Add the run's reference and teacher to the roles, if it has any.

    `source` is the model that the run starts from, `fetch` finds another by its URI.

    Raises: ConfigError if a model has another vocabulary or tokenizer.
    """
    for role, uri in spec.frozen_models.items():
        model = source if uri is None else fetch(uri)
        if model.path != source.path:
            _require_same_tokens(Tokenizer.load(source.path), Tokenizer.load(model.path), role)
        scorer = await roles.learner.add_frozen(role, model)
        roles = replace(roles, reference=scorer) if role == "reference" else replace(roles, teacher=scorer)
        roles = replace(roles, frozen_dirs={**roles.frozen_dirs, role: model.path})
    return roles


def _require_same_tokens(own: Tokenizer, other: Tokenizer, role: str) -> None:
    """Refuse a tokenizer with another token for an id. Raises: ConfigError naming the first."""
    num_own, num_other = own.vocab_size, other.vocab_size
    differing = [i for i in range(min(num_own, num_other)) if own.token_text(i) != other.token_text(i)]
    if num_own == num_other and not differing:
        return
    first = f"; token {differing[0]} is {own.token_text(differing[0])!r} here and" if differing else ""
    shown = f"{first} {other.token_text(differing[0])!r} there" if differing else ""
    raise ConfigError(
        f"the {role}'s tokenizer has {num_other} tokens and the policy's {num_own}{shown}",
        allowed="the same tokenizer: log-probabilities are compared token by token",
        next_step=f"choose another {role}",
    )
