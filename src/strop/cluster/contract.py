"""The interfaces of placements and roles, and the choice of a run's placement.

Frozen models (reference, teacher) are on the learner's ranks, sharded like the learner: a teacher's hidden
states never cross processes.
"""

from __future__ import annotations

import asyncio
import shutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from strop.engine.contract import Engine, WeightUpdate
from strop.errors import ConfigError
from strop.io.atomic import explain_write_failure
from strop.rollout import FloatArray, Group
from strop.tokenizer import Tokenizer

if TYPE_CHECKING:
    from strop.cluster.local import InlinePlacement
    from strop.cluster.ray.placement import RayPlacement
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

    async def score(
        self, groups: Sequence[PackedGroup], temperature: float, role: str | None = None
    ) -> list[FloatArray]:
        """Return log-probabilities under the policy or the frozen model of a role. See `Learner.score`."""
        from strop.policy.learner import Learner

        return await self.call(Learner.score, groups, temperature, role)

    async def save_state(self, target: Path) -> None:
        """Write masters, moments and counters into an existing directory. Raises: StoreError."""
        for files in await self.call_all(save_part, target):
            await asyncio.to_thread(write_files, target.parent, files)

    async def load_state(self, source: Path) -> None:
        """Restore the files of `save_state`. Raises: CorruptRecord if a part is missing or does not fit."""
        files = {} if self.facts.sees_run else await asyncio.to_thread(read_files, source)
        await self.call(load_part, source, files)


def save_part(learner: Learner, target: Path) -> Files:
    """Write a learner's state; return its files if it does not see the run's disk."""
    if learner.sees_run:
        learner.save_state(target)
        return {}
    with TemporaryDirectory() as place:
        (own := Path(place) / target.name).mkdir()
        learner.save_state(own)
        return read_files(own)


def load_part(learner: Learner, source: Path, files: Files) -> None:
    """Restore a learner's state, from its files if it does not see the run's disk."""
    with TemporaryDirectory() as place:
        if not learner.sees_run:
            write_files(Path(place), files)
            source = Path(place) / source.name
        learner.load_state(source)


Files = Mapping[str, NDArray[np.uint8]]
"""Bytes by path. Arrays, which Ray reads where it has stored them."""


def read_files(path: Path) -> Files:
    """Return a file, or the files of a folder, by their paths beside `path`. None may be empty."""
    files = path.iterdir() if path.is_dir() else [path]
    return {
        str(file.relative_to(path.parent)): np.memmap(file, np.uint8, "r").view(np.ndarray) for file in files
    }


def write_files(folder: Path, files: Files) -> None:
    """Write the files of `read_files` into a folder. Raises: StoreError."""
    for name, content in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content.tofile(path)
        except OSError as error:
            raise explain_write_failure(error, path) from error


def keep_only(folder: Path, *kept: Path) -> None:
    """Remove all other files and folders from a folder."""
    for path in set(folder.iterdir()) - set(kept):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def call_method(learner: Learner, method: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a method as this learner has it, or a function of a learner."""
    own: Callable[..., T] = getattr(learner, method.__name__, partial(method, learner))
    return own(*args, **kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The running parts of a run, connected."""

    learner: LearnerRole
    engine: Engine
    publish: Callable[[], Awaitable[WeightUpdate]]
    """Makes the learner's weights available to engines. Raises: StoreError if they cannot be written."""
    tokenizer: Tokenizer
    run_group: Callable[[Sequence[RolloutPlan]], Awaitable[Group]] | None = None
    """Attempts one group on rollout workers. None: rollouts run in the loop's process."""
    busy: Mapping[str, BusyClock] = field(default_factory=dict)
    """The clocks of `engine-N` and the `verifier` for `run_group`; empty where that is None."""
    frozen_dirs: Mapping[str, Path] = field(default_factory=dict)
    """Model directories of reference and teacher, by role."""


def build_placement(
    spec: RunSpec, source: ModelHandle, work_dir: Path, judges: Mapping[str, ModelHandle] | None = None
) -> InlinePlacement | RayPlacement:
    """Build the placement of `spec.layout`; nothing is started yet. Its `stop` is due whatever `start` does.

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
        roles = replace(roles, frozen_dirs={**roles.frozen_dirs, role: model.path})
    return roles


def _require_same_tokens(own: Tokenizer, other: Tokenizer, role: str) -> None:
    """Refuse a tokenizer with another token for an id. Raises: ConfigError naming the first."""
    for token_id in range(max(own.vocab_size, other.vocab_size)):
        here, there = own.token_text(token_id), other.token_text(token_id)
        if here != there:
            raise ConfigError(
                f"token {token_id} is {here!r} for the policy and {there!r} for the {role}",
                allowed="the same tokenizer: log-probabilities are compared token by token",
                next_step=f"choose another {role}",
            )
