"""The learner's ranks as actors, and the `LearnerRole` that speaks for them from the loop's process.

One rank holds everything; several are FSDP2 ranks of one process group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from strop.cluster.contract import LearnerFacts, LearnerRole, call_method
from strop.cluster.ray.deaths import DeathWatch
from strop.cluster.ray.roles import RayRole
from strop.hardware.tuning import importing
from strop.spec.run import RunSpec
from strop.store import ModelHandle

if TYPE_CHECKING:
    from strop.policy.learner import Learner

P = ParamSpec("P")
T = TypeVar("T")
GROUP_LIMIT_S = 600.0
"""Limit of a rank's wait for others in a collective."""


class LearnerRank(RayRole):
    """One rank. Every call is made to all ranks, in the same order."""

    _learner: Learner

    def load(self, spec: RunSpec, rank: int, num_ranks: int, rendezvous: tuple[str, int]) -> LearnerFacts:
        """Load the model, or this rank's rows of it. `rendezvous`: host and port of the ranks' TCP store.

        Raises: ConfigError if the model cannot be loaded.
        """
        with importing():
            from strop.cluster.local import build_learner

        if num_ranks > 1:
            import torch
            import torch.distributed as dist
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            limit = timedelta(seconds=GROUP_LIMIT_S)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                store=TCPStore(*rendezvous, is_master=False, timeout=limit),
                rank=rank,
                world_size=num_ranks,
                timeout=limit,
            )
        self._learner = build_learner(spec, self._source, num_ranks=num_ranks)
        self._learner.sees_run = self.sees_run
        return LearnerFacts.of(self._learner)

    def call(self, call: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]) -> tuple[Any, int]:
        """Call a method of the learner with its arguments; return its answer, and the learner's version.

        A model is found on this machine, or fetched to it.
        """
        method, given, named = call
        args = [self.bring_model(one) if isinstance(one, ModelHandle) else one for one in given]
        return call_method(self._learner, method, *args, **named), self._learner.version


class RayLearner(LearnerRole):
    """A learner on ranks in other processes, so a call does not block the event loop."""

    def __init__(self, ranks: Sequence[Any], watch: DeathWatch, facts: Sequence[LearnerFacts]) -> None:
        """`ranks` are actors of `LearnerRank` that have loaded, with their facts."""
        sees_run = all(each.sees_run for each in facts)
        super().__init__(replace(facts[0], sees_run=sees_run), is_async=True)
        self._ranks = ranks
        self._watch = watch
        self._version = 0
        self._begun: list[Any] = []

    @property
    def version(self) -> int:
        """Batches that have moved the weights."""
        return self._version

    async def call_all(
        self, method: Callable[Concatenate[Learner, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call a method on every rank; return their answers. See `LearnerRole.call`."""
        calls = asyncio.gather(*self._send(method, *args, **kwargs))
        answers = await self._watch.guard(calls)
        self._version = answers[0][1]
        return [answer for answer, _ in answers]

    def begin(self, method: Callable[Concatenate[Learner, P], T], *args: P.args, **kwargs: P.kwargs) -> None:
        """Begin to call like `call`, and return at once. The next call waits for its end."""
        # A rank processes one call after the other, so the next call waits.
        self._begun = self._send(method, *args, **kwargs)

    def _send(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        import ray

        # Stored once on each node, however many ranks read it there.
        stored = ray.put((method, args, kwargs))
        return [rank.call.remote(stored) for rank in self._ranks]
