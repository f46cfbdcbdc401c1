"""The seam to placement: what a run needs started, and what it gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from strop.engine.contract import Engine, WeightUpdate
from strop.tokenizer import Tokenizer

if TYPE_CHECKING:
    from strop.policy.learner import Learner


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """The model directory that the roles load."""

    path: Path
    digest: str
    """As the store computed it; recorded, and checked where a role loads elsewhere."""


class Publisher(Protocol):
    """Makes the learner's weights available to engines."""

    async def publish(self, learner: Learner) -> WeightUpdate:
        """Publish the current weights under the learner's version.

        Raises: StoreError if they cannot be written.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The running parts of a run, connected."""

    learner: Learner
    engine: Engine
    publisher: Publisher
    tokenizer: Tokenizer


class Placement(Protocol):
    """Starts the roles and stops them all."""

    async def start(self) -> Roles:
        """Start every role and wait until each answers.

        Raises: EngineError if a role cannot be started; its last log lines are in the message.
        """
        ...

    async def stop(self) -> None:
        """End every role that `start` started. May be called at any time, and twice."""
        ...
