"""Texts with placeholders, such as 'Solve: {question}': checked with the run file, filled for each example.

A place is a name in braces and nothing else: no part of a value is reached through it, and a value's own
braces stay text. '{{' and '}}' stand for braces.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter

from strop.spec.base import SpecConflict


def list_names(template: str) -> list[str]:
    """Return the placeholders' names in order, each once.

    Raises: ValueError saying what is wrong: a brace alone, a place without a name, or more than a name in it.
    """
    names: list[str] = []
    for _, name, form, conversion in Formatter().parse(template):
        if name == "":
            raise ValueError("a place has no name")
        if form or conversion:
            raise ValueError(f"the place of {name} holds more than a name")
        if name is not None and name not in names:
            names.append(name)
    return names


def refuse_malformed(key: str, template: str) -> None:
    """Raises: SpecConflict naming the setting, if the template cannot be read."""
    try:
        list_names(template)
    except ValueError as error:
        raise SpecConflict(
            {key: template},
            str(error),
            allowed="braces with a name in them, such as {question}; '{{' and '}}' stand for braces",
            next_step="correct the name, or write the braces twice",
        ) from error


def fill(template: str, values: Mapping[str, object]) -> str:
    """Return the text with every placeholder filled. Raises: KeyError for a name without a value."""
    return "".join(
        literal + ("" if name is None else str(values[name]))
        for literal, name, _, _ in Formatter().parse(template)
    )
