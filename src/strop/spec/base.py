"""What every section of a run spec shares: frozen, strict, and closed to unknown keys.

Not for reading files (`reader.py`) and not for wording of single settings (their own section).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from strop.errors import explain_refusal
from strop.spec.display import show_value

DEFAULT = "default"
"""Origin of a value that no source gave."""


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


class SpecConflict(ValueError):
    """Raised by a section when its settings are fine alone and impossible together.

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
    return explain_refusal(f"{listed}: {why}", allowed=allowed, next_step=next_step)
