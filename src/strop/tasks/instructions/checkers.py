"""A registry of checkers: from an instruction's id and arguments to a check of a reply.

A checker is one small pure function, registered by instruction id; its keyword-only parameters are the
instruction's arguments, and their annotations define the allowed values. An id without a checker, or an
argument that is missing, of the wrong type or unknown, is a DataError when the row is read, never a 0 when a
reply is judged (REW-6).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

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


@dataclass(frozen=True, kw_only=True)
class Checker:
    """A check, and whether a reply needs content besides, because an empty one would pass."""

    check: Check
    needs_substance: bool

    @cached_property
    def forms(self) -> Mapping[str, TypeAdapter[Any]]:
        """The allowed values of each argument."""
        hints = get_type_hints(self.check, include_extras=True)
        return {name: TypeAdapter(hint) for name, hint in hints.items() if name not in ("text", "return")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """One instruction of one example, bound to its arguments."""

    instruction_id: str
    arguments: Mapping[str, Any]
    checker: Checker

    def is_met(self, text: str) -> bool:
        """Whether a reply follows the instruction; a blank reply never does."""
        if not text.strip() or (self.checker.needs_substance and not has_substance(text)):
            return False
        return self.checker.check(text, **self.arguments)


class Checkers(dict[str, Checker]):
    """The checkers of one family of instructions, by id; it includes those of the family it is built `on`."""

    def __init__(self, family: str, on: Mapping[str, Checker] | None = None) -> None:
        super().__init__(on or {})
        self.family = family

    def check(self, *instruction_ids: str, needs_substance: bool = False) -> Callable[[Check], Check]:
        """Register a checker. `needs_substance`: an empty reply would pass it."""

        def register(check: Check) -> Check:
            for instruction_id in instruction_ids:
                assert instruction_id not in self, instruction_id
                self[instruction_id] = Checker(check=check, needs_substance=needs_substance)
            return check

        return register

    def bind(self, instruction_id: object, arguments: Mapping[str, Any], *, place: str) -> Constraint:
        """Bind an instruction to its arguments; an argument of None counts as absent.

        Raises: DataError naming the `place`, if the id or an argument cannot be judged.
        """
        if not isinstance(instruction_id, str) or instruction_id not in self:
            raise DataError(
                f"{place} asks for the instruction {instruction_id!r}, which has no checker",
                allowed=f"the {len(self)} ids of {self.family}: {', '.join(sorted(self))}",
                next_step="remove the row, or correct the id",
            )
        checker = self[instruction_id]
        parameters = inspect.signature(checker.check).parameters
        present = {key: value for key, value in arguments.items() if value is not None}
        faults = [f"{key} is not known" for key in present if key not in checker.forms]
        values: dict[str, Any] = {}
        for key, form in checker.forms.items():
            if key in present:
                try:
                    values[key] = form.validate_python(present[key])
                except ValidationError as error:
                    faults.append(f"{key}={present[key]!r}: {error.errors()[0]['msg']}")
            elif parameters[key].default is inspect.Parameter.empty:
                faults.append(f"{key} is missing")
        if faults:
            allowed = ", ".join(f"{key} ({_describe(form)})" for key, form in checker.forms.items())
            raise bad_row(
                f"{place} gives {instruction_id} the arguments {present} ({'; '.join(faults)})",
                allowed=allowed or "no argument",
            )
        return Constraint(instruction_id=instruction_id, arguments=values, checker=checker)


def _describe(form: TypeAdapter[Any]) -> str:
    """Describe the allowed values of an argument in a few words."""
    schema = form.json_schema()
    if "enum" in schema:
        return " or ".join(repr(value) for value in schema["enum"])
    names = {"integer": "a whole number", "array": "texts", "string": "a text"}
    return names.get(schema.get("type", ""), "a value")


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
