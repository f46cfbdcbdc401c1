"""What of a reply is judged, how leniently, and replies that follow all instructions of an example."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from strop.tasks.instructions.checkers import Constraint, has_substance
from strop.tasks.instructions.drafts import BASE_DRAFT, FILLER
from strop.tasks.thinking import text_after_thinking

_ANSWER_TAGS = ("<answer>", "</answer>")
_NUM_ROUNDS = 3
_NUM_SHUFFLES = 8
_DRAFTS = (BASE_DRAFT, FILLER[4], "We go home. You stay here.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Which of an example's instructions a reply follows, in the order of the example."""

    strict: tuple[bool, ...]
    loose: tuple[bool, ...]
    """Whether the reply or a variant of it follows each; equal to `strict` where nobody asked."""


def judged_text(reply: str) -> str | None:
    """Return what stands behind the reasoning, or None if the reasoning has no end."""
    text = text_after_thinking(reply)
    # Spaces at the start belong to the gap behind the reasoning, where there was one.
    return text if text is None or text == reply else text.lstrip()


def without_answer_tags(text: str) -> str:
    """Remove <answer> and </answer>, which some prompts ask for."""
    for tag in _ANSWER_TAGS:
        text = text.replace(tag, "")
    return text.strip()


def is_echo(text: str, prompt: str) -> bool:
    """Whether a reply says the whole prompt and next to nothing besides."""
    said, asked = " ".join(text.split()), " ".join(prompt.split())
    return said.startswith(asked) and not has_substance(said[len(asked) :])


def variants(text: str) -> list[str]:
    """Return the eight texts of which one must follow an instruction in loose mode, each once.

    The text; without its first line; without its last line; without both; and these four without
    asterisks. Source: arXiv:2311.07911, section 2.3.
    """
    split = text.split("\n")
    shortened = ("\n".join(part).strip() for part in (split[1:], split[:-1], split[1:-1]))
    kept = [text, *shortened]
    return list(dict.fromkeys([*kept, *(variant.replace("*", "") for variant in kept)]))


def judge_instructions(constraints: Sequence[Constraint], text: str, *, with_loose: bool) -> Verdict:
    """Ask every checker about a reply. An exception of a checker passes: nobody knows the verdict then."""
    strict = tuple(constraint.is_met(text) for constraint in constraints)
    if not with_loose or all(strict):
        return Verdict(strict=strict, loose=strict)
    others = variants(text)[1:]
    loose = tuple(
        is_met or any(constraint.is_met(other) for other in others)
        for constraint, is_met in zip(constraints, strict, strict=True)
    )
    return Verdict(strict=strict, loose=loose)


def write_replies(constraints: Sequence[Constraint]) -> tuple[str, ...]:
    """Return a reply that follows all instructions, or none if the edits do not lead to one.

    Edits are made in the order of their stages, and again where a later one undid an earlier one; then
    in other orders, which are the same for equal instructions.
    """
    staged = sorted(constraints, key=lambda constraint: constraint.stage)
    shuffler = random.Random(0)
    orders = [staged, *(shuffler.sample(staged, len(staged)) for _ in range(_NUM_SHUFFLES))]
    for order in orders if len(staged) > 1 else orders[:1]:
        for draft in _DRAFTS:
            reply = _edit(order, draft)
            if reply is not None:
                return (reply,)
    return ()


def _edit(order: Sequence[Constraint], draft: str) -> str | None:
    for _ in range(_NUM_ROUNDS):
        for constraint in order:
            if not constraint.is_met(draft):
                draft = constraint.improve(draft)
        if all(constraint.is_met(draft) for constraint in order):
            return draft
    return None
