"""What every section of a run spec shares: frozen, strict, and closed to unknown keys.

Not for reading files (`reader.py`) and not for wording of single settings (their own section).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from strop.errors import ConfigError, explain_refusal
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


class SpecConflict(ConfigError):
    """Raised by a section when its settings are fine alone and impossible together.

    Keeps the parts of its message, so that the reader can add where each value was written.
    """

    def __init__(
        self,
        message: str,
        *,
        given: Mapping[str, Any] | None = None,
        why: str = "",
        allowed: str = "",
        next_step: str = "",
    ) -> None:
        super().__init__(message)
        self.given = dict(given or {})
        """Dotted setting and its value, in the order of the sentence."""
        self.why = why
        self.allowed = allowed
        self.next_step = next_step

    def located(self, origins: Mapping[str, str]) -> str:
        """Return the message with the origin of every value behind it."""
        if not self.given:
            return str(self)
        return _conflict_message(self.given, self.why, self.allowed, self.next_step, origins)


def conflict(given: Mapping[str, Any], why: str, *, allowed: str, next_step: str) -> SpecConflict:
    """Build the refusal of settings that cannot stand together.

    `given` maps dotted settings to values; `why` follows them behind a colon.
    """
    message = _conflict_message(given, why, allowed, next_step, None)
    return SpecConflict(message, given=given, why=why, allowed=allowed, next_step=next_step)


def _conflict_message(
    given: Mapping[str, Any], why: str, allowed: str, next_step: str, origins: Mapping[str, str] | None
) -> str:
    shown = [
        f"{key}={show_value(value)}" + ("" if origins is None else f" ({origins.get(key, DEFAULT)})")
        for key, value in given.items()
    ]
    listed = " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
    return explain_refusal(f"{listed}: {why}", allowed=allowed, next_step=next_step)
