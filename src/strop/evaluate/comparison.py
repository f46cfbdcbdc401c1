"""What changed between two results of one protocol, and what of it is form.

A policy may come to be right more often because it can do more, or because it has learned the form
that the verifier reads. So three changes are given beside each other: of accuracy, of the form, and of
accuracy where the form was right on both sides (REW-7, EVA-6). The reward's change stands beside them.

Every interval is over problems, of one seed each: what another training seed would change is not in it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from strop.errors import CheckRefused
from strop.evaluate.result import PROTOCOL_FIELDS, EvalPlan, EvalResult, ExampleScore, Score, refuse_invalid
from strop.evaluate.statistics import Interval, paired_difference, sign_test

_Read = Callable[[ExampleScore], float | None]
_SPOKEN_FIELDS = ("stop_strings", "part_reply_tokens", "first_prompt")
_CONTEXT_CHARS = 40
"""Of long texts, what is shown before and behind the place where they part."""
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Change(Interval):
    """By how much accuracy changed, and what it is made of. Examples unscored on a side are left out."""

    format_ok: Interval | None
    """Change of the share in the asked form; None where the task cannot tell."""
    in_format: Interval | None
    """Change of accuracy among replies in the asked form, over the examples that have such replies on
    both sides; None where there are none."""
    reward: Interval | None
    num_examples: int
    """Examples that are compared."""
    num_in_format: int
    """Examples behind `in_format`."""
    num_gained: int
    """Examples solved more often than before."""
    num_lost: int
    """Examples solved less often."""
    p_value: float
    """How probable so uneven a split of gained and lost problems is if nothing changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What changed on the same examples; None where a side has no score."""

    greedy: Change | None
    sampled: Change | None
    parts: Mapping[str, Comparison] = field(default_factory=dict)
    """The same of each part of a mixture, by label."""
    num_seeds: int = 1
    """Training seeds behind each side: what another seed would change is in no interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A setting in which two runs or results differ, or a fact about them."""

    key: str
    before: Any
    after: Any


def compare_results(before: EvalResult, after: EvalResult) -> Comparison:
    """Say by how much accuracy changed between two results of one protocol.

    Units: differences of shares in [-1, 1], with a 95 % interval over problems (`paired_difference`).
    Raises: CheckRefused if one result is invalid, or if their protocols differ.
    """
    refuse_invalid(before)
    refuse_invalid(after)
    _refuse_other_protocol(before, after)
    parts = {label: _compare(before, after, part.example_ids) for label, part in before.parts.items()}
    return replace(_compare(before, after, tuple(before.greedy.by_example)), parts=parts)


def _compare(before: EvalResult, after: EvalResult, example_ids: Collection[str]) -> Comparison:
    return Comparison(
        greedy=_change(before.greedy, after.greedy, example_ids),
        sampled=_change(before.sampled, after.sampled, example_ids),
    )


def list_plan_differences(before: EvalPlan, after: EvalPlan) -> tuple[Difference, ...]:
    """Return the fields in which two plans differ: what was evaluated, and how."""
    one, other = before.identity.model_dump(mode="json"), after.identity.model_dump(mode="json")
    return tuple(
        Difference(key=name, before=one[name], after=other[name])
        for name in EvalPlan.model_fields
        if one[name] != other[name]
    )


def describe_difference(found: Difference, word: str, words: tuple[str, str] = ("", "")) -> str:
    """Say a difference in one line; of long texts only where they begin to differ."""
    before, after = found.before, found.after
    if isinstance(before, str) and isinstance(after, str):
        pairs = enumerate(zip(before, after, strict=False))
        parting = next((i for i, (one, other) in pairs if one != other), min(len(before), len(after)))
        start = max(parting - _CONTEXT_CHARS, 0)
        before, after = (text[start : start + 2 * _CONTEXT_CHARS] for text in (before, after))
    return f"{found.key} {before!r}{words[0]} {word} {after!r}{words[1]}"


def _refuse_other_protocol(before: EvalResult, after: EvalResult) -> None:
    differences = {found.key: found for found in list_plan_differences(before, after)}
    different = [differences[name] for name in PROTOCOL_FIELDS if name in differences]
    if different:
        # What a digest cannot say: which texts end a reply, and how a problem is put.
        different += [differences[name] for name in _SPOKEN_FIELDS if name in differences]
        shown = "; ".join(describe_difference(found, "and") for found in different)
        raise CheckRefused(
            f"two results were measured by different protocols: {shown}",
            allowed="results that agree in " + ", ".join(PROTOCOL_FIELDS),
            next_step="evaluate both models with the same task, split and sampling",
        )


def _change(before: Score | None, after: Score | None, example_ids: Collection[str]) -> Change | None:
    if before is None or after is None:
        return None
    pairs = {name: (before.by_example[name], after.by_example[name]) for name in sorted(example_ids)}
    solved = _read_both(pairs, lambda example: example.solved_frac)
    if not solved.problems:
        return None
    in_format = _read_both(pairs, lambda example: example.in_format_solved_frac)
    reward = _read_both(pairs, lambda example: example.reward_mean)
    accuracy = _difference(solved)
    assert accuracy is not None
    return Change(
        estimate=accuracy.estimate,
        low=accuracy.low,
        high=accuracy.high,
        format_ok=_difference(_read_both(pairs, lambda example: example.format_ok_frac)),
        in_format=_difference(in_format),
        reward=_difference(reward, full_scale=_find_scale(reward)),
        num_examples=len(solved.problems),
        num_in_format=len(in_format.problems),
        num_gained=sum(later > earlier for earlier, later in solved.values),
        num_lost=sum(later < earlier for earlier, later in solved.values),
        p_value=_test_signs(solved),
    )


class _Both(NamedTuple):
    """A number of some examples before and after, and the problem that each of them poses."""

    problems: list[str]
    values: list[tuple[float, float]]


def _read_both(pairs: Mapping[str, tuple[ExampleScore, ExampleScore]], read: _Read) -> _Both:
    """Return a number of each example before and after, where both sides have it."""
    both = _Both([], [])
    for name, (before, after) in pairs.items():
        one, other = read(before), read(after)
        if one is not None and other is not None:
            both.problems.append(before.problem or name)
            both.values.append((one, other))
    return both


def _difference(found: _Both, full_scale: float = 1.0) -> Interval | None:
    if not found.values:
        return None
    before_P, after_P = zip(*found.values, strict=True)
    return paired_difference(before_P, after_P, found.problems, full_scale=full_scale)


def _find_scale(rewards: _Both) -> float:
    """Return the width of the rewards that were seen, 0 and 1 among them: most are shares of full marks."""
    seen = [0.0, 1.0, *itertools.chain.from_iterable(rewards.values)]
    return max(seen) - min(seen)


def _test_signs(solved: _Both) -> float:
    """Return the p-value over problems: several examples of one are no independent changes."""
    changes: dict[str, float] = defaultdict(float)
    for problem, (earlier, later) in zip(solved.problems, solved.values, strict=True):
        changes[problem] += later - earlier
    moved = [change for change in changes.values() if abs(change) > _ROUNDING]
    num_up = sum(change > 0.0 for change in moved)
    return sign_test(num_up, len(moved) - num_up)
