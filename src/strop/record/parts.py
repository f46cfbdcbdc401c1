"""What a run is made of: digests of its parts, in run.json and each checkpoint, compared when it goes on.

A curve over two models, two data sets or two references says nothing of either. The names are words for
people: they stand in the refusal.
"""

from __future__ import annotations

from collections.abc import Mapping

from strop.errors import CheckRefused, explain_refusal

PARTS_FACT = "made_of"
"""The fact of run.json that holds them."""
_SHOWN_CHARS = 12


def find_changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what has another digest than before, by name. What only one of the two states is unknown."""
    return sorted(name for name in before.keys() & now.keys() if before[name] != now[name])


def require_same_parts(place: object, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Refuse to go on with other parts than those that `place` was made of.

    Raises: CheckRefused naming each that changed, with both digests.
    """
    changed = find_changed(before, now)
    if not changed:
        return
    told = "; another ".join(
        f"{name} ({before[name][:_SHOWN_CHARS]} then, {now[name][:_SHOWN_CHARS]} now)" for name in changed
    )
    raise CheckRefused(
        explain_refusal(
            f"{place} began with another {told}",
            allowed="the very parts that the run began with: a curve over two says nothing of either",
            next_step="restore what has changed, or start a new run with --new",
        )
    )
