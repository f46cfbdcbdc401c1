"""Making engines serve the learner's weights, and proving after each update that they do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from strop.cluster import Roles
from strop.engine import UpdateMode, WeightTransport, WeightUpdate
from strop.engine.canary import WeightCanary
from strop.engine.router import ReplicaCause, ReplicaEvent, Router
from strop.errors import WeightMismatch
from strop.policy.scoring import pack_given
from strop.record import EventKind
from strop.spec.run import RunSpec
from strop.train.gate_models import CANARY, PARITY_TOLERANCE_NATS

_CANARY_SPREAD = 3.0
"""Some tens of tokens may be further off than the gate's thousands: in one run vLLM's scores of the canary
were 0.061 nats off in bfloat16, where the gate had found 0.042. Weights of another model are off by whole
nats, and stale ones show in how the scores move."""


class Publishing:
    """Publishes the weights of one run."""

    def __init__(
        self, spec: RunSpec, roles: Roles, note_event: Callable[[EventKind, str, str], None]
    ) -> None:
        """`note_event` records kind, cause and detail under the step that the run is at."""
        self._roles = roles
        self._mode = UpdateMode(spec.engine.update_mode)
        self._note_event = note_event
        # A tokenizer of another model is the gate's to refuse, which comes later.
        token_ids = np.minimum(roles.tokenizer.encode(CANARY), roles.learner.shape.vocab_size - 1)
        self._canary = WeightCanary(
            token_ids[:1],
            token_ids[1:],
            tolerance_nats=_CANARY_SPREAD * PARITY_TOLERANCE_NATS[spec.model.dtype],
        )
        self._version: int | None = None
        self._proof: asyncio.Task[None] | None = None
        self.step = 0
        """Steps behind the weights that the engine serves."""
        if isinstance(roles.engine, Router):
            roles.engine.report_to(self._note_replica)

    async def publish(self, step: int) -> None:
        """Have the engine serve what `step` steps have made; nothing is sent that it serves already.

        Proven afterwards, while it samples: see `await_proof`.
        Raises: WeightMismatch if no engine serves it; StoreError if it cannot be written.
        """
        await self.await_proof()
        if self._version != self._roles.learner.version:
            update = replace(await self._roles.publisher.publish(), mode=self._mode)
            await self._send(update)
            # What shares the learner's tensors cannot serve others.
            if update.transport is not WeightTransport.SHARED:
                self._proof = asyncio.create_task(self._prove(update))
            if isinstance(self._roles.engine, Router):
                # One of several that fails is taken out, and must not have sampled anything before.
                await self.await_proof()
            self._version = update.version
        self.step = step

    async def await_proof(self) -> None:
        """Wait until the engine has shown that it computes with what it was sent last.

        Due before anything counts that it has sampled under these weights, and before the learner has
        something else to do.
        Raises: WeightMismatch if it has not.
        """
        if self._proof is not None:
            await self._proof
            self._proof = None

    async def close(self) -> None:
        """Ask for no proof any more: the run has ended."""
        if self._proof is not None:
            self._proof.cancel()
            await asyncio.wait([self._proof])
            self._proof = None

    async def _send(self, update: WeightUpdate) -> None:
        receipt = await self._roles.engine.update(update)
        if (receipt.version, receipt.digest) != (update.version, update.digest):
            raise WeightMismatch(
                f"the engine serves version {receipt.version} ({receipt.digest[:12]}) after"
                f" version {update.version} ({update.digest[:12]}) was published",
                allowed="the published version and digest",
                next_step="read the engine's log and start the run again",
            )

    async def _prove(self, update: WeightUpdate) -> None:
        """Have every replica score the canary as the learner does."""
        given = pack_given(self._canary.prompt_ids, [self._canary.reply_ids])
        (learner_T,) = await self._roles.learner.score([given], 1.0)
        await self._canary.hear(self._roles.engine, update.version, learner_T)

    def _note_replica(self, event: ReplicaEvent) -> None:
        is_good = event.cause in (ReplicaCause.JOINED, ReplicaCause.BACK)
        kind = EventKind.NOTICE if is_good else EventKind.TRIPWIRE
        detail = f"{event.replica}: {event.detail}"
        if event.num_moved:
            detail += f"; {event.num_moved} requests go to other replicas"
        self._note_event(kind, event.cause.value, detail)
