"""Checks by their scores that engines compute with the published weights.

A receipt proves which bytes arrived; the canary proves which ones are used. After each update every replica
scores one fixed reply. It must do so under the new version, agree with the learner's own scores, and move
when these move. A replica that fails is named (`weight_canary`) and gets no request before it has
acknowledged and passed a later update.

Shapes: T tokens of the canary's reply. Values are nats at temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strop.engine.contract import Engine, ReplyScore
from strop.engine.router import Router
from strop.errors import WeightMismatch
from strop.rollout import FloatArray, IntArray

_CLEAR = 2.0
"""A change of the learner's scores is beyond noise at so many times the gap that was there before it."""
_ALONE = "engine"
"""Name of an engine that is not one of several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryFinding:
    """A replica that does not serve what was published."""

    replica: str
    detail: str
    """The sentence for a person."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Heard:
    """Scores after one publication."""

    learner_T: FloatArray
    engine_T: FloatArray


class WeightCanary:
    """Asks every replica after every update, and remembers what it said the last time."""

    def __init__(self, prompt_ids: IntArray, reply_ids: IntArray, *, tolerance_nats: float) -> None:
        """Take the reply to score, some tens of tokens long.

        `tolerance_nats` bounds the mean gap between learner and engine, rounding included.
        """
        self.prompt_ids = prompt_ids
        self.reply_ids = reply_ids
        self._tolerance_nats = tolerance_nats
        self._last: dict[str, Heard] = {}

    async def hear(self, engine: Engine, version: int, learner_T: FloatArray) -> list[CanaryFinding]:
        """Ask all replicas; take those out that fail, and return why.

        `learner_T` are the learner's scores of `reply_ids` under the published weights.
        Raises: WeightMismatch if none passes.
        """
        if isinstance(engine, Router):
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
                self._last[name] = Heard(learner_T=learner_T, engine_T=score.logprobs)
            else:
                findings.append(CanaryFinding(replica=name, detail=f"weight_canary: {fault}"))
        if len(findings) == len(scores):
            raise WeightMismatch(
                f"no engine serves version {version}: "
                + "; ".join(f"{finding.replica}: {finding.detail}" for finding in findings),
                allowed="at least one engine that scores as the learner does",
                next_step="read the engines' logs and start the run again; it resumes",
            )
        if isinstance(engine, Router):
            for finding in findings:
                engine.condemn(finding.replica, finding.detail)
        return findings


def find_fault(
    score: ReplyScore,
    *,
    version: int,
    learner_T: FloatArray,
    last: Heard | None,
    tolerance_nats: float,
) -> str | None:
    """Say what shows that an engine does not serve the published weights; None if nothing does.

    `last` is what was heard after the publication before. A gap that is within the tolerance can still be
    told from old weights: where the learner's scores moved, an engine whose scores stayed equal to the bit
    has not moved, and one that is nearer to the old scores than to the new ones has not either, if the move
    is larger than the gap that was there before.
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
