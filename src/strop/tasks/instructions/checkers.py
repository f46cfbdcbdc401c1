"""A registry of checkers: from an instruction's id and arguments to a check of a reply.

A checker is one small pure function, registered by instruction id; its keyword-only parameters are the
instruction's arguments, and their annotations define the allowed values. It may have an edit: a function
that changes a draft until the checker passes; gold replies are made by edits. An id without a checker, or an
argument that is missing, of the wrong type or unknown, is a DataError when the row is read, never a 0 when a
reply is judged (REW-6).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from strop.errors import DataError
from strop.tasks.rows.layout import bad_row

Check = Callable[..., bool]
Edit = Callable[..., str]

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


class Stage(IntEnum):
    """The order of edits, chosen so that later ones do not undo earlier ones."""

    WHOLE = 0
    """The edit replaces the whole reply."""
    LANGUAGE = 1
    LENGTH = 2
    STRUCTURE = 3
    CONTENT = 4
    OMISSION = 5
    CASE = 6
    EDGES = 7
    WRAPPING = 8


def has_substance(text: str) -> bool:
    """Whether a reply has content: three words, or twenty letters."""
    if sum(character.isalpha() for character in text[: 8 * MIN_LETTERS]) >= MIN_LETTERS:
        return True
    words = _WORD.finditer(text)
    return sum(1 for _, _ in zip(words, range(MIN_WORDS), strict=False)) >= MIN_WORDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """One instruction of one example, bound to its arguments."""

    instruction_id: str
    arguments: Mapping[str, Any]
    check: Check
    needs_substance: bool
    edit: Edit | None
    stage: Stage

    def is_met(self, text: str) -> bool:
        """Whether a reply follows the instruction; a blank reply never does."""
        if not text.strip() or (self.needs_substance and not has_substance(text)):
            return False
        return self.check(text, **self.arguments)

    def improve(self, draft: str) -> str:
        """Apply the instruction's edit, if there is one, to a draft."""
        return draft if self.edit is None else self.edit(draft, **self.arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Checker:
    check: Check
    needs_substance: bool


class Checkers:
    """The checkers of one family of instructions, by id; it includes those of the family it is built `on`."""

    def __init__(self, family: str, *, on: Checkers | None = None) -> None:
        self.family = family
        self._checkers: dict[str, _Checker] = dict(on._checkers) if on else {}
        self._edits: dict[str, tuple[Stage, Edit]] = dict(on._edits) if on else {}
        self._forms: dict[str, dict[str, TypeAdapter[Any]]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkers)

    def __contains__(self, instruction_id: object) -> bool:
        return instruction_id in self._checkers

    def __len__(self) -> int:
        return len(self._checkers)

    def check(self, *instruction_ids: str, needs_substance: bool = False) -> Callable[[Check], Check]:
        """Register a checker. `needs_substance`: an empty reply would pass it."""

        def register(check: Check) -> Check:
            for instruction_id in instruction_ids:
                assert instruction_id not in self._checkers, instruction_id
                self._checkers[instruction_id] = _Checker(check=check, needs_substance=needs_substance)
            return check

        return register

    def edit(self, *instruction_ids: str, stage: Stage) -> Callable[[Edit], Edit]:
        """Register the edit of an instruction; it takes the checker's arguments."""

        def register(edit: Edit) -> Edit:
            for instruction_id in instruction_ids:
                assert instruction_id in self._checkers, instruction_id
                self._edits[instruction_id] = (stage, edit)
            return edit

        return register

    def share(self, other: Checkers, instruction_id: str, *, as_id: str) -> None:
        """Register an instruction of another family under a new id."""
        self._checkers[as_id] = other._checkers[instruction_id]
        if instruction_id in other._edits:
            self._edits[as_id] = other._edits[instruction_id]

    def bind(self, instruction_id: object, arguments: Mapping[str, Any], *, place: str) -> Constraint:
        """Bind an instruction to its arguments; an argument of None counts as absent.

        Raises: DataError naming the `place`, if the id or an argument cannot be judged.
        """
        if not isinstance(instruction_id, str) or instruction_id not in self._checkers:
            raise DataError(
                f"{place} asks for the instruction {instruction_id!r}, which has no checker",
                allowed=f"the {len(self)} ids of {self.family}: {', '.join(sorted(self))}",
                next_step="remove the row, or correct the id",
            )
        checker = self._checkers[instruction_id]
        stage, edit = self._edits.get(instruction_id, (Stage.WHOLE, None))
        if instruction_id not in self._forms:
            hints = get_type_hints(checker.check, include_extras=True)
            names = [name for name in hints if name not in ("text", "return")]
            self._forms[instruction_id] = {name: TypeAdapter(hints[name]) for name in names}
        forms = self._forms[instruction_id]
        parameters = inspect.signature(checker.check).parameters
        present = {key: value for key, value in arguments.items() if value is not None}
        faults = [f"{key} is not known" for key in present if key not in forms]
        values: dict[str, Any] = {}
        for key, form in forms.items():
            if key in present:
                try:
                    values[key] = form.validate_python(present[key])
                except ValidationError as error:
                    faults.append(f"{key}={present[key]!r}: {error.errors()[0]['msg']}")
            elif parameters[key].default is inspect.Parameter.empty:
                faults.append(f"{key} is missing")
        if faults:
            allowed = ", ".join(f"{key} ({describe_form(form)})" for key, form in forms.items())
            raise bad_row(
                f"{place} gives {instruction_id} the arguments {present} ({'; '.join(faults)})",
                allowed=allowed or "no argument",
            )
        return Constraint(
            instruction_id=instruction_id,
            arguments=values,
            check=checker.check,
            needs_substance=checker.needs_substance,
            edit=edit,
            stage=stage,
        )


def describe_form(form: TypeAdapter[Any]) -> str:
    """Describe the allowed values of an argument in a few words."""
    schema = form.json_schema()
    if "enum" in schema:
        return " or ".join(repr(value) for value in schema["enum"])
    return {"integer": "a whole number", "array": "texts", "string": "a text"}.get(
        schema.get("type", ""), "a value"
    )


def holds(count: int, quantifier: str, bound: int, *, slack: int = 0) -> bool:
    """Compare a count with a bound; 'around' allows a difference of `slack`."""
    match quantifier:
        case "at least":
            return count >= bound
        case "at most":
            return count <= bound
        case "less than":
            return count < bound
        case "more than":
            return count > bound
        case "exactly":
            return count == bound
        case "around":
            return abs(count - bound) <= slack
    raise AssertionError(quantifier)


def nearest(count: int, quantifier: str, bound: int) -> int:
    """Return the count that is allowed and nearest to a count; for edits."""
    low = bound + 1 if quantifier == "more than" else bound
    high = bound - 1 if quantifier == "less than" else bound
    if quantifier in ("at least", "more than"):
        return max(count, low)
    return min(count, high) if quantifier in ("at most", "less than") else bound
