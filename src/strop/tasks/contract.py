"""The task contract: one object for training, evaluation and sampling.

A task renders the prompt, ends and limits the reply, and judges it. Nothing else in strop knows how a problem
is worded or scored, so training and evaluation cannot drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from strop.errors import format_error
from strop.rollout import Example, Failure, FailureOwner, Message, Outcome, Split

TURN = "\x1e"
"""Separates the replies of a multi-turn attempt where they are one text, as gold replies and probes are:
ASCII's record separator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskLimits:
    """Limits of a reply, and the range of its reward."""

    max_reply_tokens: int
    """Tokens that a reply may use: the most that a full solution needs, or less where a run says so."""
    full_reply_tokens: int | None = None
    """The task's own budget if a run lowered `max_reply_tokens`, else None."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a reply, in addition to the model's own terminator."""
    base_stop_strings: tuple[str, ...] = ()
    """Additional ones for prompts in plain text: base models write them when they go on to invent another
    problem. In a chat they would cut replies that may contain them."""
    max_reward: float = 1.0
    """Reward of a right reply. Rewards lie in [min_reward, max_reward]; another value is a failure."""
    min_reward: float = 0.0
    """Reward of the worst reply; below 0 where a task gives negative marks."""
    chance: float = 0.0
    """Share of full marks that a reply without work earns, for example 0.25 with four choices."""
    max_goldless_frac: float = 0.0
    """Share of examples for which no right reply may be known. 0: the task promises one for each."""
    verify_limit_s: float | None = None
    """Wall time (seconds) of one judgement, enforced by killing its process. None: the verifier's time is
    bounded by the text, and it runs in the caller's process."""
    verify_keeps_time: bool = False
    """Whether the verifier ends in time by itself, for example because a sandbox ends its work. Then a slow
    judgement keeps its slot, and at most one per core runs: the sandbox's limits are wall time too."""

    def stops(self, *, is_base: bool) -> tuple[str, ...]:
        """Return the texts that end a reply to a prompt of this form."""
        return self.stop_strings + self.base_stop_strings if is_base else self.stop_strings

    @property
    def own_reply_tokens(self) -> int:
        """The task's own budget, before a run lowered it."""
        return self.full_reply_tokens or self.max_reply_tokens


def right_or_wrong(is_correct: bool, *, format_ok: bool, extracted: str | None = None) -> Outcome:
    """Return the outcome of a reply that is either right or wrong."""
    parts: dict[str, float | None] = {"correct": float(is_correct)}
    return Outcome(parts=parts, is_correct=is_correct, format_ok=format_ok, extracted=extracted)


class Task(Protocol):
    """One verifiable task."""

    @property
    def name(self) -> str:
        """Registry name, for example 'arithmetic'."""
        ...

    @property
    def version(self) -> str:
        """Hash over everything that changes prompts or scores; stored with every result.

        Raises: DataError like `examples`, if the version covers the data.
        """
        ...

    @property
    def limits(self) -> TaskLimits:
        """Reply budget, stop strings and full marks."""
        ...

    def examples(self, split: Split) -> Sequence[Example]:
        """Return all examples of a split, in a fixed order. The two splits share no id.

        Raises: DataError if the data is missing, empty, malformed or the splits overlap.
        """
        ...

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the messages that pose the example."""
        ...

    def verify(self, example: Example, text: str) -> Outcome:
        """Judge a reply. `text` ends before its terminator or stop string."""
        ...

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return replies that deserve full marks, the form that the prompt asks for first.

        Empty if no answer is known. The self-test judges all of them.
        """
        ...


class GroupVerifier(Protocol):
    """Judges replies to one example beside each other. `verify` of its task judges a group of one."""

    def verify_member(self, example: Example, text: str) -> Outcome:
        """Judge what of a reply depends on no other one; without a reward where something does."""
        ...

    def verify_group(
        self, example: Example, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Complete the outcomes of `verify_member`, in their order.

        Raises: any exception of the verifier; then no reply of the group has a score.
        """
        ...


# Impossible scores: above the task's full marks, below its lowest marks, or not finite. Such a grader is
# broken, so the rollout has no score, the task owns the failure, and the record keeps the score.

CEILING = "ceiling"
"""Kind of failure: a score above full marks."""
IMPOSSIBLE = "impossible_value"
"""Kind of failure: a score below the lowest marks, or not a number."""
_SLACK = 1e-6
"""Tolerance as a share of full marks: rewards are often sums in float32."""


def is_within(reward: float, limits: TaskLimits) -> bool:
    """Whether a task with these limits can give a reward. Infinities and NaN: no."""
    slack = _SLACK * limits.max_reward
    return limits.min_reward - slack <= reward <= limits.max_reward + slack


def within_bounds(outcome: Outcome, limits: TaskLimits) -> Outcome:
    """Return an outcome unchanged, or as a failure without a score if the score is impossible.

    Rounding beyond the bounds is allowed.
    """
    scores = [value for value in outcome.parts.values() if value is not None]
    if outcome.failure is not None or not scores:
        return outcome
    if not all(math.isfinite(value) for value in scores):
        # Records hold finite numbers only.
        parts = {
            name: None if value is not None and not math.isfinite(value) else value
            for name, value in outcome.parts.items()
        }
        return replace(outcome, parts=parts, is_correct=None, failure=_fail(outcome, math.nan, limits))
    reward = outcome.reward
    if reward is None or is_within(reward, limits):
        return outcome
    return replace(outcome, is_correct=None, failure=_fail(outcome, reward, limits))


def _fail(outcome: Outcome, reward: float, limits: TaskLimits) -> Failure:
    scores = ", ".join(f"{name} {value:g}" for name, value in outcome.parts.items() if value is not None)
    bounds = f"{limits.min_reward:g} to {limits.max_reward:g}"
    return Failure(
        owner=FailureOwner.TASK,
        kind=CEILING if reward > limits.max_reward else IMPOSSIBLE,
        detail=format_error(
            f"a score of {reward:g} ({scores})",
            allowed=f"{bounds}, what the task says that a reply can earn; the rollout is masked",
            next_step="mend the grader, or correct the task's max_reward and min_reward",
        ),
    )
