"""Which examples each step trains on: an order per epoch, without state.

Where the task has no order of its own, an epoch is a seeded permutation.

The order follows from the seed and the number of examples alone, so a resumed run needs only its
step count. Every example is used once per epoch; nothing is dropped where the number of examples is
not a multiple of the step's. A step that spans two epochs never gets the same example twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from strop.errors import DataError
from strop.rollout import Example, Split
from strop.spec.run import RunSpec
from strop.tasks import Task, epoch_order_of
from strop.tasks.traits import require_written
from strop.train.data.demonstrations import Demonstration, Demonstrations, require_enough

Item = TypeVar("Item")


class ExampleSchedule(Generic[Item]):
    """Serves the examples of any step, or other rows that are drawn in the same way."""

    def __init__(
        self,
        examples: Sequence[Item],
        *,
        seed: int,
        prompts_per_step: int,
        epoch_order: Callable[[int, int], Sequence[int]] | None = None,
    ) -> None:
        if len(examples) < prompts_per_step:
            raise DataError(
                f"the task has {len(examples)} training examples and a step asks for {prompts_per_step}",
                allowed=f"train.prompts_per_step from 1 to {len(examples)}",
                next_step="lower train.prompts_per_step or give the task more data",
            )
        self._examples = examples
        self._seed = seed
        self._prompts_per_step = prompts_per_step
        self._epoch_order = epoch_order or self._permute
        self._steps: list[list[int]] = []
        self._waiting: deque[int] = deque()
        self._num_epochs = 0

    def examples(self, step: int) -> list[Item]:
        """Return the examples of the step that follows `step` completed ones.

        Raises: DataError if the task's own order names too few different examples to fill a step.
        """
        return [self._examples[index] for index in self._places(step)]

    def numbered(self, number: int) -> Item:
        """Return the example of the group with a number, counted over all steps from 0."""
        step, place = divmod(number, self._prompts_per_step)
        return self._examples[self._places(step)[place]]

    def _places(self, step: int) -> list[int]:
        while len(self._steps) <= step:
            self._append_step()
        return self._steps[step]

    def _append_step(self) -> None:
        """Take the next positions; one that the step has already waits for the step after."""
        chosen: dict[int, None] = {}
        deferred: list[int] = []
        while len(chosen) < self._prompts_per_step:
            if not self._waiting:
                self._waiting.extend(self._next_epoch())
            index = self._waiting.popleft()
            if index in chosen:
                deferred.append(index)
            else:
                chosen[index] = None
        self._waiting.extendleft(reversed(deferred))
        self._steps.append(list(chosen))

    def _next_epoch(self) -> list[int]:
        order = list(self._epoch_order(self._seed, self._num_epochs))
        self._num_epochs += 1
        num_different = len(set(order))
        if num_different < self._prompts_per_step:
            raise DataError(
                f"an epoch of the task's own order has {num_different} different examples and a step asks"
                f" for {self._prompts_per_step}",
                allowed=f"train.prompts_per_step from 1 to {num_different}",
                next_step="lower train.prompts_per_step or widen the order",
            )
        return order

    def _permute(self, seed: int, epoch: int) -> list[int]:
        generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
        return [int(index) for index in generator.permutation(len(self._examples))]


def schedule_examples(spec: RunSpec, task: Task) -> ExampleSchedule[Example] | None:
    """Return which examples are attempted when, or None in a run without rollouts.

    Raises: DataError if there are fewer examples than a step takes; ConfigError if their replies are chosen.
    """
    require_written(task)
    if not spec.train.has_rl:
        return None
    wanted = spec.train.prompts_per_step
    return ExampleSchedule(
        task.examples(Split.TRAIN),
        seed=spec.seed,
        prompts_per_step=wanted,
        epoch_order=epoch_order_of(task),
    )


def schedule_demonstrations(
    spec: RunSpec, demonstrations: Demonstrations | None
) -> ExampleSchedule[Demonstration] | None:
    """Return which demonstrations each step trains on, or None where there are none.

    Raises: DataError if there are fewer demonstrations than a step takes.
    """
    if demonstrations is None:
        return None
    wanted = spec.sft.rows_per_step
    require_enough(demonstrations, wanted)
    return ExampleSchedule(demonstrations.members, seed=spec.seed, prompts_per_step=wanted)
