"""Where an attempt stands, as what others go on from.

A world that can be copied is (`Snapshotting`); any other is played again, with the same seed and the same
replies, and must tell the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

from strop.environments.contract import Environment, Kept
from strop.environments.rollout import Attempt
from strop.rollout import FailureOwner, Message
from strop.tasks.failures import AttemptFailed


async def take_snapshot(
    attempt: Attempt, make_environment: Callable[[], Environment]
) -> Kept[Environment] | None:
    """Keep where an attempt's world stands; None where that is not possible yet."""
    # As `Snapshotting` says.
    take = getattr(attempt.environment, "snapshot", None)
    kept: Kept[Environment] | None = _play_again(attempt, make_environment) if take is None else await take()
    return kept


def _play_again(attempt: Attempt, make_environment: Callable[[], Environment]) -> Kept[Environment]:
    """Keep what was said and told up to now, to come to the same place by it."""
    example, seed = attempt.plan.example, attempt.world_seed
    actions, expected = tuple(attempt.actions), tuple(attempt.told)

    async def restore() -> Environment:
        environment = make_environment()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(environment.close)
            _require_equal(0, await environment.reset(example, seed), expected[0])
            for number, action in enumerate(actions, start=1):
                _require_equal(number, (await environment.step(action)).messages, expected[number])
            stack.pop_all()
        return environment

    async def close() -> None:
        """Hold nothing, release nothing."""

    return Kept(restore, close)


def _require_equal(number: int, told: tuple[Message, ...], expected: tuple[Message, ...]) -> None:
    """Refuse a world that says anything else when it is played again. Raises: AttemptFailed, the task's."""
    if tuple(told) != expected:
        detail = f"after {number} equal replies the world says {told!r:.200}, and said {expected!r:.200}"
        raise AttemptFailed(FailureOwner.TASK, "snapshot_mismatch", detail)
