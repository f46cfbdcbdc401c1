"""The one `LearnerRole` that speaks for all ranks (`ranks`), from the loop's process."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cluster.contract import Scorer
from strop.cluster.ray.deaths import DeathWatch
from strop.cluster.ray.ranks import PIECE_BYTES, LearnerFacts, append_piece
from strop.errors import EngineLost
from strop.rollout import FloatArray
from strop.store import ModelHandle

if TYPE_CHECKING:
    from strop.policy.device_wires import Wire
    from strop.policy.language_model import ModelShape
    from strop.policy.learner import Term
    from strop.policy.optimizer import StepPlan, StepReport
    from strop.policy.packing import PackedGroup

CALL_LIMIT_S = 3600.0
"""Limit of a step, a score or a write."""


class RayLearner:
    """A `LearnerRole` over all ranks."""

    def __init__(
        self,
        ranks: Sequence[Any],
        watch: DeathWatch,
        facts: LearnerFacts,
        *,
        apart: Mapping[int, int] | None = None,
    ) -> None:
        """`ranks` are actors of `LearnerRank` that have loaded.

        `apart`: ranks that do not see this process's disk, with their nodes.
        """
        self._apart = dict(apart or {})
        self._ranks = ranks
        self._watch = watch
        self._facts = facts
        self._version = facts.version
        self._num_offers = count()
        self._sending: list[Any] = []

    @property
    def version(self) -> int:
        """Batches that have moved the weights."""
        return self._version

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        return self._facts.shape

    @property
    def is_async(self) -> bool:
        """True: ranks are other processes, so a step does not block the event loop."""
        return True

    @property
    def device(self) -> str:
        """Kind of its device."""
        return self._facts.device

    @property
    def recomputes(self) -> bool:
        """Whether every rank recomputes activations."""
        return self._facts.recomputes

    async def step_terms(self, terms: Sequence[Term], plan: StepPlan | None = None) -> StepReport:
        """Take one optimizer step. See `LearnerRole.step_terms`."""
        from strop.policy.learner import LossTerm
        from strop.policy.objective import Scope

        shares_R: list[list[bytes]] = [[] for _ in self._ranks]
        for term in terms:
            keeps_groups = isinstance(term, LossTerm) and term.scope is Scope.GROUP
            for rank, groups in enumerate(self._split(term.groups, keeps_groups=keeps_groups)):
                shares_R[rank].append(pickle.dumps(replace(term, groups=tuple(groups)), protocol=5))
        calls = [
            rank.step_terms.remote(shares, plan) for rank, shares in zip(self._ranks, shares_R, strict=True)
        ]
        answers: list[tuple[StepReport, int]] = await self._gather(calls)
        report, self._version = answers[0]
        return report

    async def score(self, groups: Sequence[PackedGroup], temperature: float) -> list[FloatArray]:
        """Return the log-probability of each reply's scored tokens. See `LearnerRole.score`."""
        return await self._score(groups, lambda rank, share: rank.score.remote(share, temperature))

    async def digest_tensors(self, role: str | None = None) -> dict[str, str]:
        """Return the digest of each tensor. See `LearnerRole.digest_tensors`."""
        return dict(await self._ask_all("digest_tensors", role))

    async def add_frozen(self, role: str, source: ModelHandle) -> Scorer:
        """Load a frozen model on all ranks. See `LearnerRole.add_frozen`."""
        # Ranks may have another working directory.
        await self._ask_all("add_frozen", role, replace(source, path=source.path.absolute()))
        return _RayScorer(self, role)

    async def score_frozen(
        self, role: str, groups: Sequence[PackedGroup], temperature: float
    ) -> list[FloatArray]:
        """Return the scores of the frozen model of a role; each rank scores its share."""
        return await self._score(
            groups, lambda rank, share: rank.score_frozen.remote(role, share, temperature)
        )

    async def write_weights(self, path: Path) -> str:
        """Write the compute copies. See `LearnerRole.write_weights`."""
        return str(await self._ask_all("write_weights", path))

    async def offer_weights(self, wire: Wire, host: str, num_receivers: int) -> tuple[str, str]:
        """Begin to send. See `LearnerRole.offer_weights`."""
        digest = str(await self._ask_all("device_digest"))
        place = await self._ask(self._ranks[0].open_sender.remote(host))
        if wire == "ipc":
            # Each rank has receivers on its GPU.
            port = int(place.rstrip("/").rpartition(":")[2])
            await self._gather([rank.open_sender.remote(host, port) for rank in self._ranks[1:]])
        name = f"v{self.version:06d}-{next(self._num_offers)}"
        # A rank processes one call after the other, so the next call waits.
        self._sending = [rank.send_weights.remote(wire, name, num_receivers) for rank in self._ranks]
        return f"{wire}://{place}{name}", digest

    async def write_adapter(self, target: Path) -> str:
        """Write the adapters. See `LearnerRole.write_adapter`."""
        return str(await self._ask_all("write_adapter", target))

    async def weights_digest(self) -> str:
        """Return the digest of the compute copies. See `LearnerRole.weights_digest`."""
        return str(await self._ask_all("weights_digest"))

    async def export(self, target: Path, tokenizer_dir: Path) -> str:
        """Write a Hugging Face model directory. See `LearnerRole.export`."""
        return str(await self._ask_all("export", target, tokenizer_dir))

    async def save_state(self, target: Path) -> None:
        """Write masters, moments and counters. See `LearnerRole.save_state`."""
        calls = [
            rank.stage_state.remote() if index in self._apart else rank.save_state.remote(target)
            for index, rank in enumerate(self._ranks)
        ]
        try:
            answers = await self._gather(calls)
            for index in self._apart:
                for name, num_bytes in answers[index].items():
                    for offset in range(0, num_bytes, PIECE_BYTES):
                        piece = await self._ask(self._ranks[index].read_staged.remote(name, offset))
                        await asyncio.to_thread(append_piece, target / name, piece)
        finally:
            await self._clear_staged(self._apart)

    async def load_state(self, source: Path) -> None:
        """Restore the files of `save_state`. See `LearnerRole.load_state`."""
        # One rank of a machine receives the files for all of its ranks.
        takers = {node: index for index, node in reversed(self._apart.items())}
        places = dict.fromkeys(range(len(self._ranks)), source)
        try:
            for node, taker in takers.items():
                staged = await self._stage_files(self._ranks[taker], source)
                places |= {index: staged for index in self._apart if self._apart[index] == node}
            calls = [rank.load_state.remote(places[index]) for index, rank in enumerate(self._ranks)]
            self._version = (await self._gather(calls))[0]
        finally:
            await self._clear_staged(takers.values())

    async def _stage_files(self, rank: Any, source: Path) -> Path:
        """Copy a folder's files to the machine of a rank; return their folder there."""
        staged: Path = await self._ask(rank.open_staged.remote())
        for path in await asyncio.to_thread(lambda: sorted(source.iterdir())):
            with path.open("rb") as file:
                while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                    await self._ask(rank.append_staged.remote(path.name, piece))
        return staged

    async def _clear_staged(self, indices: Iterable[int]) -> None:
        # If a role has ended, its files go with the attempt's folder.
        with suppress(EngineLost):
            await self._gather([self._ranks[index].clear_staged.remote() for index in indices])

    async def _ask(self, call: Awaitable[Any]) -> Any:
        return await self._watch.guard(call, CALL_LIMIT_S)

    async def _ask_all(self, method: str, *arguments: Any) -> Any:
        """Call a method of all ranks, and return the first one's answer."""
        answers = await self._gather([getattr(rank, method).remote(*arguments) for rank in self._ranks])
        return answers[0]

    async def _score(
        self, groups: Sequence[PackedGroup], ask: Callable[[Any, bytes], Any]
    ) -> list[FloatArray]:
        """Call every rank with its share; return the results in the order of the groups' replies."""
        from strop.policy.balancing import restore_order

        shares_R = self._split(groups)
        calls = [
            ask(rank, pickle.dumps(share, protocol=5))
            for rank, share in zip(self._ranks, shares_R, strict=True)
        ]
        return restore_order(groups, shares_R, await self._gather(calls))

    def _split(self, groups: Sequence[PackedGroup], *, keeps_groups: bool = False) -> list[list[PackedGroup]]:
        """Return each rank's groups."""
        from strop.policy.balancing import shard_groups

        return shard_groups(
            groups,
            len(self._ranks),
            cost=self._facts.cost,
            keeps_groups=keeps_groups,
        )

    async def _gather(self, calls: Sequence[Any]) -> list[Any]:
        return list(await self._ask(asyncio.gather(*calls)))


class _RayScorer:
    """A `Scorer` on the learner's ranks."""

    def __init__(self, learner: RayLearner, role: str) -> None:
        self._learner = learner
        self._role = role

    async def score(self, groups: Sequence[PackedGroup], temperature: float) -> list[FloatArray]:
        """Return the log-probability of each reply's scored tokens. See `Scorer.score`."""
        return await self._learner.score_frozen(self._role, groups, temperature)
