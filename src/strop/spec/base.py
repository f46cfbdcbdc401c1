"""Base of all sections of a run spec: frozen, strict, and closed to unknown keys.

Not for reading files (`reader.py`) and not for wording of single settings (their own section).
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue, ValidationInfo
from pydantic.config import JsonDict

from strop.errors import format_error
from strop.spec.display import KeyPath, dotted, show_value

DEFAULT = "default"
"""Origin of a value that no source gave."""
NOT_HASHED = "not hashed"
_Value = TypeVar("_Value")
Unhashed = Annotated[_Value, NOT_HASHED]
"""Type of a task's setting that its version leaves out: a path, a service, what is hashed by its content."""


class Section(BaseModel):
    """Base of all sections. Strict: '8' is not 8, and true is not 1; an integer is a number."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )


def to_name(text: str) -> str:
    """Return a text as the name of a run, for folders and jobs; empty if it has no letter and no digit."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")


def expert(why: str) -> JsonDict:
    """Mark a setting as expert: shown with `--all` alone. For `Field(json_schema_extra=expert("..."))`.

    `why` is the reason why the setting exists, in a sentence that follows "It exists because".
    """
    return {"expert": why}


class SpecConflict(ValueError):
    """Raised by a section whose settings are valid alone and contradict each other.

    Never leaves the models as it is: pydantic wraps it, and the reader turns it into a ConfigError
    that also says where each value was written.
    """

    def __init__(self, given: Mapping[str, Any], why: str, *, allowed: str, next_step: str) -> None:
        super().__init__(_conflict_message(given, why, allowed, next_step, None))
        self.given = given
        """Dotted setting and its value, in the order of the sentence."""
        self.why = why
        """Follows the values behind a colon."""
        self.allowed = allowed
        self.next_step = next_step

    def located(self, origins: Mapping[str, str]) -> str:
        """Return the message with the origin of every value behind it."""
        return _conflict_message(self.given, self.why, self.allowed, self.next_step, origins)


def _conflict_message(
    given: Mapping[str, Any], why: str, allowed: str, next_step: str, origins: Mapping[str, str] | None
) -> str:
    shown = [
        f"{key}={show_value(value)}" + ("" if origins is None else f" ({origins.get(key, DEFAULT)})")
        for key, value in given.items()
    ]
    listed = " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
    return format_error(f"{listed}: {why}", allowed=allowed, next_step=next_step)


# Tables that strop hands on without knowing their keys: `task.config`, `task.parts`.
MAX_DEPTH = 16
"""Tables and lists inside each other, at most; far above any real data set."""
MAX_INTEGER_BITS = 63
"""Beside the sign; what every reader of TOML and JSON can hold."""


def check_free_table(path: KeyPath, value: Any) -> None:
    """Refuse values that TOML cannot represent: null, odd numbers, dates, other objects.

    `path` is the table, then the key at fault; what is nested deeper is refused under that key.
    Raises: SpecConflict naming the key.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            check_free_table((*path, str(name))[:3], item)
    elif isinstance(value, list):
        for item in value:
            check_free_table(path, item)
    elif not _is_plain(value):
        advice = "correct the value"
        if value is None:
            advice = "leave the key out to get the data set's own default"
        elif isinstance(value, dt.date | dt.time):
            advice = "write the date in quotes"
        raise SpecConflict(
            {dotted(path): value},
            "this value cannot be handed on",
            allowed="texts, finite numbers, integers of 63 bits, true, false, lists and tables",
            next_step=advice,
        )


def _check_setting(value: Any, info: ValidationInfo) -> Any:
    # Before the type check, whose findings inside free values are hard to read.
    check_free_table(("task", info.field_name or ""), value)
    return value


FreeTable = Annotated[dict[str, JsonValue], BeforeValidator(_check_setting)]
"""A setting of a task that is handed on as it stands, and must be what a TOML file can hold."""


def _is_plain(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= MAX_INTEGER_BITS
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str)
