"""Making engines serve the learner's weights, and proving after each update that they do.

A receipt proves which bytes arrived; the canary proves which ones are used. After each update every replica
scores one fixed reply. It must do so under the new version, agree with the learner's own scores, and move
when these move. A replica that fails is named (`weight_canary`) and gets no request before it has
acknowledged and passed a later update.

Shapes: T tokens of the canary's reply. Values are nats at temperature 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from strop.cluster import Roles
from strop.engine import UpdateMode, WeightTransport, WeightUpdate
from strop.engine.contract import Engine, ReplyScore
from strop.engine.pool import EnginePool, ReplicaCause, ReplicaEvent
from strop.errors import WeightMismatch
from strop.policy.scoring import pack_given
from strop.record import EventKind
from strop.rollout import FloatArray, IntArray
from strop.spec.run import RunSpec
from strop.train.gate_models import CANARY, PARITY_TOLERANCE_NATS

_CLEAR = 2.0
"""A change of the learner's scores is beyond noise at so many times the gap before it."""
_ALONE = "engine"
"""Name of a single engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryFinding:
    """A replica that does not serve what was published."""

    replica: str
    detail: str
    """The sentence for a person."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CanaryScores:
    """Scores of the canary after one publication."""

    learner_T: FloatArray
    engine_T: FloatArray


class WeightCanary:
    """Has every replica score the canary after every update, and keeps the scores until the next one."""

    def __init__(self, prompt_ids: IntArray, reply_ids: IntArray, *, tolerance_nats: float) -> None:
        """The reply is some tens of tokens long; `tolerance_nats` bounds its mean gap, rounding included."""
        self.prompt_ids = prompt_ids
        self.reply_ids = reply_ids
        self._tolerance_nats = tolerance_nats
        self._last: dict[str, CanaryScores] = {}

    async def check(self, engine: Engine, version: int, learner_T: FloatArray) -> list[CanaryFinding]:
        """Have all replicas score the canary; take out those that fail, and return why.

        `learner_T` are the learner's scores of `reply_ids` under the published weights.
        Raises: WeightMismatch if none passes.
        """
        if isinstance(engine, EnginePool):
            scores = await engine.score_each(self.prompt_ids, self.reply_ids, 1.0)
        else:
            scores = {_ALONE: await engine.score(self.prompt_ids, self.reply_ids, 1.0)}
        findings = []
        for name, score in scores.items():
            fault = find_fault(
                score,
                version=version,
                learner_T=learner_T,
                last=self._last.get(name),
                tolerance_nats=self._tolerance_nats,
            )
            if fault is None:
                self._last[name] = CanaryScores(learner_T=learner_T, engine_T=score.logprobs)
            else:
                findings.append(CanaryFinding(replica=name, detail=f"weight_canary: {fault}"))
        if len(findings) == len(scores):
            raise WeightMismatch(
                f"no engine serves version {version}: "
                + "; ".join(f"{finding.replica}: {finding.detail}" for finding in findings),
                allowed="at least one engine that scores as the learner does",
                next_step="read the engines' logs and start the run again; it resumes",
            )
        if isinstance(engine, EnginePool):
            for finding in findings:
                engine.condemn(finding.replica, finding.detail)
        return findings


def find_fault(
    score: ReplyScore,
    *,
    version: int,
    learner_T: FloatArray,
    last: CanaryScores | None,
    tolerance_nats: float,
) -> str | None:
    """Describe the evidence that an engine does not serve the published weights; None if there is none.

    `last` are the scores after the previous publication. Old weights can show even within the tolerance:
    where the learner's scores moved, an engine whose scores stayed equal to the bit has the old weights, and
    so has one that is nearer to the old scores than to the new ones, if the move is larger than the gap
    before it.
    """
    engine_T = score.logprobs
    if score.policy_version != version:
        return f"it answered under version {score.policy_version} after version {version} was published"
    gap_nats = _mean_gap(engine_T, learner_T)
    if not gap_nats <= tolerance_nats:
        return (
            f"its scores are {gap_nats:.3g} nats from the learner's on average, at most {tolerance_nats:g}"
            " is allowed"
        )
    if last is None or np.array_equal(learner_T, last.learner_T):
        return None
    moved_nats = _mean_gap(learner_T, last.learner_T)
    if np.array_equal(engine_T, last.engine_T):
        return f"its scores did not change at all while the learner's moved by {moved_nats:.3g} nats"
    is_clear = moved_nats > _CLEAR * _mean_gap(last.engine_T, last.learner_T)
    if is_clear and gap_nats > _mean_gap(engine_T, last.learner_T):
        return (
            f"its scores are nearer to the learner's before the update, which moved by {moved_nats:.3g} nats"
        )
    return None


def _mean_gap(left_T: FloatArray, right_T: FloatArray) -> float:
    """Return the mean absolute difference in nats; NaN if any value is not finite."""
    return float(np.abs(left_T.astype(np.float64) - right_T).mean())


_CANARY_SPREAD = 3.0
"""Some tens of tokens may be further off than the gate's thousands: in one run vLLM's scores of the canary
were 0.061 nats off in bfloat16, where the gate had measured 0.042. Weights of another model are off by whole
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
        # Clipped: a tokenizer of another model is refused by the gate, which comes later.
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
        if isinstance(roles.engine, EnginePool):
            roles.engine.report_to(self._note_replica)

    async def publish(self, step: int) -> None:
        """Have the engine serve the weights after `step` steps; nothing is sent if it does already.

        The proof runs while the engine samples: see `await_proof`.
        Raises: WeightMismatch if no engine serves it; StoreError if it cannot be written.
        """
        await self.await_proof()
        if self._version != self._roles.learner.version:
            update = replace(await self._roles.publish(), mode=self._mode)
            receipt = await self._roles.engine.update(update)
            if (receipt.version, receipt.digest) != (update.version, update.digest):
                raise WeightMismatch(
                    f"the engine serves version {receipt.version} ({receipt.digest[:12]}) after"
                    f" version {update.version} ({update.digest[:12]}) was published",
                    allowed="the published version and digest",
                    next_step="read the engine's log and start the run again",
                )
            # An engine that shares the learner's tensors cannot serve other ones.
            if update.transport is not WeightTransport.SHARED:
                self._proof = asyncio.create_task(self._prove(update))
            if isinstance(self._roles.engine, EnginePool):
                # A replica that fails is taken out, and must not have sampled anything before.
                await self.await_proof()
            self._version = update.version
        self.step = step

    async def await_proof(self) -> None:
        """Wait until the engine has shown that it computes with the last update.

        Due before any rollout of these weights counts, and before the learner gets other work.
        Raises: WeightMismatch if it has not.
        """
        if self._proof is not None:
            await self._proof
            self._proof = None

    async def close(self) -> None:
        """Cancel a running proof: the run has ended."""
        if self._proof is not None:
            self._proof.cancel()
            await asyncio.wait([self._proof])
            self._proof = None

    async def _prove(self, update: WeightUpdate) -> None:
        packed = pack_given(self._canary.prompt_ids, [self._canary.reply_ids])
        (learner_T,) = await self._roles.learner.score([packed], 1.0)
        await self._canary.check(self._roles.engine, update.version, learner_T)

    def _note_replica(self, event: ReplicaEvent) -> None:
        kind = EventKind.NOTICE if event.cause is ReplicaCause.BACK else EventKind.TRIPWIRE
        self._note_event(kind, event.cause.value, f"{event.replica}: {event.detail}")
