"""Which examples each step trains on: a seeded permutation per epoch, without state.

The order follows from the seed and the number of examples alone, so a resumed run needs only its
step count. Every example is used once per epoch; nothing is dropped where the number of examples is
not a multiple of the step's. A step that spans two epochs never gets the same example twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strop.errors import DataError, explain_refusal
from strop.rollout import Example


class ExampleSchedule:
    """Serves the examples of any step."""

    def __init__(self, examples: Sequence[Example], *, seed: int, prompts_per_step: int) -> None:
        if len(examples) < prompts_per_step:
            raise DataError(
                explain_refusal(
                    f"the task has {len(examples)} training examples and a step asks for {prompts_per_step}",
                    allowed=f"train.prompts_per_step from 1 to {len(examples)}",
                    next_step="lower train.prompts_per_step or give the task more data",
                )
            )
        self._examples = examples
        self._seed = seed
        self._prompts_per_step = prompts_per_step
        self._order: list[int] = []
        self._num_epochs = 0

    def examples(self, step: int) -> list[Example]:
        """Return the examples of the step that follows `step` completed ones."""
        start = step * self._prompts_per_step
        while len(self._order) < start + self._prompts_per_step:
            self._append_epoch()
        return [self._examples[index] for index in self._order[start : start + self._prompts_per_step]]

    def _append_epoch(self) -> None:
        """Append one permutation; examples of the step it completes move behind the seam."""
        generator = np.random.Generator(np.random.Philox(key=[self._seed, self._num_epochs]))
        permutation = [int(index) for index in generator.permutation(len(self._examples))]
        num_begun = len(self._order) % self._prompts_per_step
        begun = set(self._order[len(self._order) - num_begun :]) if num_begun else set()
        num_missing = self._prompts_per_step - num_begun if num_begun else 0
        head = [index for index in permutation if index not in begun][:num_missing]
        chosen = set(head)
        self._order += head + [index for index in permutation if index not in chosen]
        self._num_epochs += 1
