"""The learner's ranks as actors, and the one `LearnerRole` that speaks for them.

One rank holds everything; several are FSDP2 ranks of one process group. Each gets its own share of a step,
in the columns of `policy.batch_wire`; the rest of a term crosses pickled.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cluster.contract import ModelSource, Scorer
from strop.cluster.ray.deaths import DeathWatch
from strop.cluster.ray.roles import RayRole, RoleStart
from strop.cluster.ray.staging import StagedState, fetch_files, send_files
from strop.errors import EngineLost
from strop.hardware.tuning import importing
from strop.rollout import FloatArray
from strop.spec.run import RunSpec

if TYPE_CHECKING:
    from strop.policy.balancing import PositionCost
    from strop.policy.device_wires import DeviceSender, Wire
    from strop.policy.language_model import ModelShape
    from strop.policy.learner import Learner, Term
    from strop.policy.optimizer import StepPlan, StepReport
    from strop.policy.packing import PackedGroup
    from strop.policy.scoring import FrozenModel

CALL_LIMIT_S = 3600.0
"""A step, a score or a write takes no longer."""
LOAD_LIMIT_S = 900.0
GROUP_LIMIT_S = 600.0
"""A rank that waits longer for another one in a collective gives up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerFacts:
    """What the loop may ask of a learner without waiting."""

    version: int
    shape: ModelShape
    device: str
    recomputes: bool
    max_positions: int
    """Of a micro-batch."""
    cost: PositionCost
    """By which a step's work is split over the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TermShare:
    """One rank's share of a term of the loss, as it crosses."""

    term: bytes
    """Pickled, without its groups."""
    groups: bytes
    """In columns."""


class LearnerRank(RayRole):
    """One rank. Every call is made to all ranks, in the same order."""

    _learner: Learner

    def __init__(self, start: RoleStart) -> None:
        super().__init__(start)
        self._staged = StagedState()
        self._sender: DeviceSender | None = None

    def open_rendezvous(self, host: str, num_ranks: int) -> int:
        """Listen where all ranks meet; return the port. Only the first rank does this."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore(
            host,
            0,
            num_ranks,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=GROUP_LIMIT_S),
        )
        return int(self._store.port)

    def load(
        self, spec: RunSpec, source: ModelSource, rank: int, num_ranks: int, rendezvous: tuple[str, int]
    ) -> LearnerFacts:
        """Load the model, or this rank's rows of it. `rendezvous`: where the ranks meet.

        Raises: ConfigError if the model cannot be loaded.
        """
        with importing():
            from strop.cluster.local import build_learner, build_rank
            from strop.policy.balancing import PositionCost
            from strop.policy.footprint import read_model_size

        self._num_ranks = num_ranks
        self._frozen: dict[str, FrozenModel] = {}
        if num_ranks == 1:
            self._learner = build_learner(spec, source)
        else:
            import torch
            import torch.distributed as dist
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            limit = timedelta(seconds=GROUP_LIMIT_S)
            store = self._store if rank == 0 else TCPStore(*rendezvous, num_ranks, timeout=limit)
            device = "cuda" if torch.cuda.is_available() else "cpu"
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=num_ranks,
                timeout=limit,
            )
            self._learner = build_rank(spec, source, num_ranks=num_ranks)
        model = self._learner.model
        return LearnerFacts(
            version=self._learner.version,
            shape=model.shape,
            device=model.device.type,
            recomputes=model.recomputes,
            max_positions=self._learner.max_positions,
            cost=PositionCost.of_model(read_model_size(source.path)),
        )

    def step_terms(self, shares: Sequence[TermShare], plan: StepPlan | None) -> tuple[StepReport, int]:
        """Take one optimizer step; return the report and the version that it made."""
        from strop.policy.batch_wire import decode_groups

        # From our own loop, over a connection that carries the run's token.
        terms = [replace(pickle.loads(one.term), groups=decode_groups(one.groups)) for one in shares]
        return self._learner.step_terms(terms, plan), self._learner.version

    def hold(self) -> None:
        """Keep the weights as they are now."""
        self._learner.hold()

    def score(self, groups: bytes, temperature: float, is_held: bool) -> list[FloatArray]:
        """Return the log-probabilities of this rank's share."""
        from strop.policy.batch_wire import decode_groups

        return self._learner.score(decode_groups(groups), temperature, is_held=is_held)

    def place_tokens(self, groups: bytes, temperature: float) -> list[FloatArray]:
        """Return where the tokens of this rank's share stand in their distributions."""
        from strop.policy.batch_wire import decode_groups
        from strop.policy.head import token_places

        return self._learner.score(decode_groups(groups), temperature, token_places)

    def digest_tensors(self, role: str | None) -> dict[str, str]:
        """Return the digest of each tensor, on the first rank."""
        return (self._learner if role is None else self._frozen[role]).digest_tensors()

    def add_frozen(self, role: str, source: ModelSource) -> None:
        """Load a model beside the policy, or this rank's rows of it.

        Raises: ConfigError if it cannot be loaded or has another vocabulary.
        """
        from strop.cluster.local import load_frozen

        here = self.bring_model(source)
        self._frozen[role] = load_frozen(self._learner, role, here, num_ranks=self._num_ranks)

    def score_frozen(self, role: str, groups: bytes, temperature: float) -> list[FloatArray]:
        """Return what the model of a role says of this rank's share."""
        from strop.policy.batch_wire import decode_groups

        return self._frozen[role].score(decode_groups(groups), temperature)

    def write_weights(self, path: Path) -> str:
        """Write the compute copies; return the digest."""
        return self._learner.write_weights(path)

    def device_digest(self) -> str:
        """Return the digest of the compute copies as `device_wires` has it."""
        from strop.policy.device_wires import device_digest

        return device_digest(self._learner.compute_copies())

    def open_sender(self, host: str, port: int = 0) -> str:
        """Open the place of all receivers, or join it at a port, once; return the address of names."""
        from strop.policy.device_wires import DeviceSender

        self._sender = self._sender or DeviceSender(host, port)
        return self._sender.address("nccl", "").removeprefix("nccl://")

    def send_weights(self, wire: Wire, name: str, num_receivers: int) -> None:
        """Send the compute copies from device to device."""
        from strop.policy.device_wires import send_copies

        send_copies(self._sender, wire, name, self._learner.compute_copies(), num_receivers)

    def write_adapter(self, target: Path) -> str:
        """Write the adapters; return the digest."""
        return self._learner.write_adapter(target)

    def weights_digest(self) -> str:
        """Return the digest of the compute copies."""
        return self._learner.weights_digest()

    def export(self, target: Path, tokenizer_dir: Path) -> str:
        """Write a Hugging Face model directory; return the digest of its tensors."""
        return self._learner.export(target, tokenizer_dir)

    def save_state(self, target: Path) -> None:
        """Write masters, moments and counters."""
        self._learner.save_state(target)

    def load_state(self, source: Path) -> int:
        """Restore what `save_state` wrote; return its version."""
        self._learner.load_state(source)
        return self._learner.version

    def stage_state(self) -> dict[str, int]:
        """Write masters, moments and counters on this machine; return names and sizes of the files."""
        self._learner.save_state(self._staged.open())
        return self._staged.list_files()

    def open_staged(self) -> Path:
        """Make room for the files of a state; return where. See `StagedState`."""
        return self._staged.open()

    def read_staged(self, name: str, offset: int) -> bytes:
        """Return a piece of what was written."""
        return self._staged.read(name, offset)

    def append_staged(self, name: str, piece: bytes) -> None:
        """Take a piece of what is to be restored."""
        self._staged.append(name, piece)

    def clear_staged(self) -> None:
        """Remove what was staged."""
        self._staged.clear()


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

        `apart`: ranks that do not see this process's disk, and the node of each.
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
        """Whether a step leaves the event loop free: ranks are in processes of their own."""
        return True

    @property
    def device(self) -> str:
        """Kind of device that it computes on."""
        return self._facts.device

    @property
    def recomputes(self) -> bool:
        """Whether every rank computes activations again."""
        return self._facts.recomputes

    async def step_terms(self, terms: Sequence[Term], plan: StepPlan | None = None) -> StepReport:
        """Take one optimizer step. See `LearnerRole.step_terms`."""
        from strop.policy.batch_wire import encode_groups
        from strop.policy.learner import LossTerm
        from strop.policy.objective import Scope

        shares_R: list[list[TermShare]] = [[] for _ in self._ranks]
        for term in terms:
            bare = pickle.dumps(replace(term, groups=()))
            keeps_groups = isinstance(term, LossTerm) and term.scope is Scope.GROUP
            for rank, groups in enumerate(self._split(term.groups, keeps_groups=keeps_groups)):
                shares_R[rank].append(TermShare(term=bare, groups=encode_groups(groups)))
        calls = [
            rank.step_terms.remote(shares, plan) for rank, shares in zip(self._ranks, shares_R, strict=True)
        ]
        answers: list[tuple[StepReport, int]] = await self._gather(calls)
        report, self._version = answers[0]
        return report

    async def hold(self) -> None:
        """Keep the weights as they are now. See `LearnerRole.hold`."""
        await self._ask_all("hold")

    async def score(
        self, groups: Sequence[PackedGroup], temperature: float, *, is_held: bool = False
    ) -> list[FloatArray]:
        """Return the log-probability of each reply's scored tokens. See `LearnerRole.score`."""
        return await self._score(groups, lambda rank, share: rank.score.remote(share, temperature, is_held))

    async def place_tokens(self, groups: Sequence[PackedGroup], temperature: float) -> list[FloatArray]:
        """Return where scored tokens stand. See `LearnerRole.place_tokens`."""
        return await self._score(groups, lambda rank, share: rank.place_tokens.remote(share, temperature))

    async def digest_tensors(self, role: str | None = None) -> dict[str, str]:
        """Return the digest of each tensor. See `LearnerRole.digest_tensors`."""
        return dict(await self._ask_all("digest_tensors", role))

    async def add_frozen(self, role: str, source: ModelSource) -> Scorer:
        """Load a model that never learns on all ranks. See `LearnerRole.add_frozen`."""
        # Ranks may run elsewhere than in the folder of the run.
        found = replace(source, path=source.path.absolute())
        await self._ask_all("add_frozen", role, found)
        return _RayScorer(self, role)

    async def score_frozen(
        self, role: str, groups: Sequence[PackedGroup], temperature: float
    ) -> list[FloatArray]:
        """Return what the model of a role says, each rank of its share."""
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
            # Each rank has receivers on its own GPU.
            port = int(place.rstrip("/").rpartition(":")[2])
            await self._gather([rank.open_sender.remote(host, port) for rank in self._ranks[1:]])
        name = f"v{self.version:06d}-{next(self._num_offers)}"
        # A rank answers one call after the other: what comes next waits.
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
                await fetch_files(self._ranks[index], answers[index], target, self._ask)
        finally:
            await self._clear_staged(self._apart)

    async def load_state(self, source: Path) -> None:
        """Restore what `save_state` wrote. See `LearnerRole.load_state`."""
        # One rank of a machine takes the files for all of them.
        takers = {node: index for index, node in reversed(self._apart.items())}
        places = dict.fromkeys(range(len(self._ranks)), source)
        try:
            for node, taker in takers.items():
                staged = await self._ask(self._ranks[taker].open_staged.remote())
                await send_files(source, self._ranks[taker], self._ask)
                places |= {index: staged for index in self._apart if self._apart[index] == node}
            calls = [rank.load_state.remote(places[index]) for index, rank in enumerate(self._ranks)]
            self._version = (await self._gather(calls))[0]
        finally:
            await self._clear_staged(takers.values())

    async def _clear_staged(self, indices: Iterable[int]) -> None:
        # Where a role has ended, the attempt's folder goes with the attempt.
        with suppress(EngineLost):
            await self._gather([self._ranks[index].clear_staged.remote() for index in indices])

    async def _ask(self, call: Awaitable[Any]) -> Any:
        return await self._watch.guard(call, CALL_LIMIT_S)

    async def _ask_all(self, method: str, *arguments: Any) -> Any:
        """Have all ranks do the same, and return what the first one says."""
        answers = await self._gather([getattr(rank, method).remote(*arguments) for rank in self._ranks])
        return answers[0]

    async def _score(
        self, groups: Sequence[PackedGroup], ask: Callable[[Any, bytes], Any]
    ) -> list[FloatArray]:
        """Ask every rank about its share; return the answers in the order of the groups' replies."""
        from strop.policy.balancing import restore_order
        from strop.policy.batch_wire import encode_groups

        shares_R = self._split(groups)
        calls = [ask(rank, encode_groups(share)) for rank, share in zip(self._ranks, shares_R, strict=True)]
        return restore_order(groups, shares_R, await self._gather(calls))

    def _split(self, groups: Sequence[PackedGroup], *, keeps_groups: bool = False) -> list[list[PackedGroup]]:
        """Return each rank's groups."""
        from strop.policy.balancing import shard_groups

        return shard_groups(
            groups,
            len(self._ranks),
            max_positions=self._facts.max_positions,
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
