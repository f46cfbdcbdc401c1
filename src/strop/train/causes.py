"""Why rollouts were lost, on record and shown: each cause once, with its traceback, and not each rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strop.record import Event, EventKind
from strop.rollout import PROMPT_TOO_LONG, Group
from strop.tasks.failures import FailureCause, describe_failure


class CauseLog:
    """Publishes what made rollouts fail; a cause that was told before is not told again."""

    def __init__(self, publish: Callable[[Event], None]) -> None:
        self._publish = publish
        self._told: set[tuple[str, str, str | None]] = set()

    def note(self, step: int, causes: Sequence[FailureCause]) -> None:
        """Tell of the causes that are new."""
        for cause in causes:
            if cause.key in self._told:
                continue
            self._told.add(cause.key)
            self._publish(
                Event(
                    kind=EventKind.ROLLOUT_LOST,
                    step=step,
                    cause=cause.failure.kind,
                    detail=f"{describe_failure(cause.failure)}; {cause.num} times until now",
                    trace=cause.failure.detail,
                )
            )

    def note_too_long(self, step: int, groups: Sequence[Group]) -> int:
        """Tell of the examples whose prompts left no room for a reply; return how many were attempted."""
        too_long = [group for group in groups if all(r.outcome.is_too_long for r in group.rollouts)]
        if too_long:
            ids = tuple(group.example.example_id for group in too_long)
            failure = too_long[0].rollouts[0].outcome.failure
            detail = f"{len(ids)} examples were not attempted: {failure.detail if failure else ''}"
            self._publish(
                Event(
                    kind=EventKind.ROLLOUT_LOST,
                    step=step,
                    cause=PROMPT_TOO_LONG,
                    detail=detail,
                    example_ids=ids,
                )
            )
        return len(groups) - len(too_long)
