"""The interfaces of placements and roles, and the choice of a run's placement.

Frozen models (reference, teacher) are on the learner's ranks, sharded like the learner: a teacher's hidden
states never cross processes.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from strop.engine.contract import Engine, WeightUpdate
from strop.errors import ConfigError
from strop.io.atomic import explain_write_failure
from strop.rollout import FloatArray, Group
from strop.tokenizer import Tokenizer

if TYPE_CHECKING:
    from strop.environments import RolloutPlan
    from strop.hardware.busy_clock import BusyClock
    from strop.policy.language_model import ModelShape
    from strop.policy.learner import Learner
    from strop.policy.packing import PackedGroup
    from strop.spec.run import RunSpec
    from strop.store import ModelHandle


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerFacts:
    """Facts about a learner, or one rank of it, that never change."""

    shape: ModelShape
    device: str
    """Kind of its device: 'cpu' or 'cuda'."""
    recomputes: bool
    """Whether it recomputes activations instead of keeping them."""
    sees_run: bool = True
    """Whether it sees the disk of the run's process."""

    @classmethod
    def of(cls, learner: Learner) -> LearnerFacts:
        """Read the facts of a learner."""
        model, sees_run = learner.model, learner.sees_run
        return cls(
            shape=model.shape, device=model.device.type, recomputes=model.recomputes, sees_run=sees_run
        )


class LearnerRole(ABC):
    """The trained policy: one `Learner`, in this process or as an actor on every rank.

    A method of `Learner` is called by itself: `await role.call(Learner.export, target, tokenizer_dir)`.
    """

    def __init__(self, facts: LearnerFacts, *, is_async: bool) -> None:
        self.facts = facts
        self.is_async = is_async
        """Whether the event loop runs during a call."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Batches that have moved the weights."""

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        return self.facts.shape

    async def call(
        self, method: Callable[Concatenate[Learner, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call a method of `Learner`, or a function of one, on every rank; return what the first one returns.

        One call runs at a time. Raises: what the method raises; EngineLost if a rank ended.
        """
        return (await self.call_all(method, *args, **kwargs))[0]

    @abstractmethod
    async def call_all(
        self, method: Callable[Concatenate[Learner, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call like `call`; return what every rank returns."""

    @abstractmethod
    async def begin(
        self, method: Callable[Concatenate[Learner, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Begin to call like `call`, and return at once. The next call waits for its end."""

    async def save_state(self, target: Path) -> None:
        """Write masters, moments and counters into an existing directory. Raises: StoreError."""
        for files in await self.call_all(save_part, target):
            for name, content in files.items():
                try:
                    await asyncio.to_thread((target / name).write_bytes, content)
                except OSError as error:
                    raise explain_write_failure(error, target) from error

    async def load_state(self, source: Path) -> None:
        """Restore the files of `save_state`. Raises: CorruptRecord if a part is missing or does not fit."""
        files = {} if self.facts.sees_run else await asyncio.to_thread(_read_files, source)
        await self.call(load_part, source, files)


def save_part(learner: Learner, target: Path) -> dict[str, bytes]:
    """Write a learner's state; return nothing, or the files by name if it does not see the run's disk."""
    if learner.sees_run:
        learner.save_state(target)
        return {}
    with TemporaryDirectory() as place:
        learner.save_state(Path(place))
        return _read_files(Path(place))


def load_part(learner: Learner, source: Path, files: Mapping[str, bytes]) -> None:
    """Restore a learner's state, from the files by name if it does not see the run's disk."""
    if learner.sees_run:
        learner.load_state(source)
        return
    with TemporaryDirectory() as place:
        for name, content in files.items():
            (Path(place) / name).write_bytes(content)
        learner.load_state(Path(place))


def _read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def call_method(learner: Learner, method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a method as the learner's own class has it, or a function of a learner."""
    own: Callable[..., T] | None = getattr(learner, method.__name__, None)
    return method(learner, *args, **kwargs) if own is None else own(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Scorer:
    """The policy, or the frozen model of a role beside it, as a judge of replies."""

    learner: LearnerRole
    role: str | None = None

    async def score(self, groups: Sequence[PackedGroup], temperature: float) -> list[FloatArray]:
        """Return the log-probability (nats) of the scored tokens of each reply, in order of the groups."""
        from strop.policy.learner import Learner

        return await self.learner.call(Learner.score, groups, temperature, self.role)


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

    @property
    def policy(self) -> Scorer:
        """The policy as a judge of replies."""
        return Scorer(self.learner)


class Placement(Protocol):
    """Starts the roles and stops them all."""

    async def start(self) -> Roles:
        """Start every role and wait until each answers. Whatever comes of it, `stop` is due.

        Raises: EngineError if a role cannot be started; its last log lines are in the message.
        """
        ...

    async def stop(self) -> None:
        """End all roles. May be called at any time, and twice."""
        ...


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
    # Here, because this module imports no torch.
    from strop.cluster.local import load_frozen

    for role, uri in spec.frozen_models.items():
        model = source if uri is None else fetch(uri)
        if model.path != source.path:
            _require_same_tokens(Tokenizer.load(source.path), Tokenizer.load(model.path), role)
        # Ranks may have another working directory.
        await roles.learner.call(load_frozen, role, replace(model, path=model.path.absolute()))
        scorer = Scorer(roles.learner, role)
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
