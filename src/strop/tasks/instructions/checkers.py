"""A registry of checkers: from an instruction's id and arguments to a check of a reply.

A checker is one small pure function; its keyword-only parameters are the instruction's arguments, and their
annotations the allowed values. An id without a checker, or an argument that is missing, of the wrong type or
unknown, is a DataError when the row is read, never a 0 when a reply is judged (REW-6).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, validate_call

from strop.errors import DataError
from strop.tasks.rows.layout import bad_row

Check = Callable[..., bool]

Count = Annotated[int, Field(ge=0, le=10**6)]
Position = Annotated[int, Field(ge=1, le=10**6)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(min_length=1)]
Relation = Literal["less than", "at least"]
Quantifier = Literal["at least", "at most", "around", "exactly", "less than", "more than"]

MIN_WORDS = 3
MIN_LETTERS = 20
"""Checkers that only forbid something require one of these minima; some scripts have no spaces."""
_WORD = re.compile(r"\w+")


def has_substance(text: str) -> bool:
    """Whether a reply has content: three words, or twenty letters."""
    if sum(character.isalpha() for character in text[: 8 * MIN_LETTERS]) >= MIN_LETTERS:
        return True
    words = _WORD.finditer(text)
    return sum(1 for _, _ in zip(words, range(MIN_WORDS), strict=False)) >= MIN_WORDS


class Checkers(dict[str, Check]):
    """The checkers of one family of instructions, by id; it includes those of the family it is built `on`."""

    def __init__(self, family: str, on: Mapping[str, Check] | None = None) -> None:
        super().__init__(on or {})
        self.family = family

    def check(self, *instruction_ids: str, needs_substance: bool = False) -> Callable[[Check], Check]:
        """Register a checker. `needs_substance`: an empty reply would pass it. A blank one never does."""

        def register(check: Check) -> Check:
            validated = validate_call(check)

            def is_met(text: str, **arguments: Any) -> bool:
                is_followed = validated(text, **arguments)
                return is_followed and bool(text.strip()) and (not needs_substance or has_substance(text))

            for instruction_id in instruction_ids:
                assert instruction_id not in self, instruction_id
                self[instruction_id] = is_met
            return check

        return register

    def bind(self, instruction_id: object, arguments: Mapping[str, Any], *, place: str) -> Check:
        """Return whether a reply follows an instruction; an argument of None counts as absent.

        Raises: DataError naming the `place`, if the id or an argument cannot be judged.
        """
        if not isinstance(instruction_id, str) or instruction_id not in self:
            raise DataError(
                f"{place} asks for the instruction {instruction_id!r}, which has no checker",
                allowed=f"the {len(self)} ids of {self.family}: {', '.join(sorted(self))}",
                next_step="remove the row, or correct the id",
            )
        present = {key: value for key, value in arguments.items() if value is not None}
        is_met = partial(self[instruction_id], **present)
        try:
            is_met("")
        except ValidationError as error:
            faults = "; ".join(f"{one['loc'][0]}: {one['msg']}" for one in error.errors())
            raise bad_row(
                f"{place} gives {instruction_id} the arguments {present} ({faults})",
                allowed="the arguments of the instruction, each of its type",
            ) from error
        return is_met


def holds(count: int, quantifier: str, bound: int, *, slack: int = 0) -> bool:
    """Compare a count with a bound; 'around' allows a difference of `slack`."""
    return {
        "at least": count >= bound,
        "at most": count <= bound,
        "less than": count < bound,
        "more than": count > bound,
        "exactly": count == bound,
        "around": abs(count - bound) <= slack,
    }[quantifier]
