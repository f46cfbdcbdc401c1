"""Several tasks trained as one: by weights, or one after the other.

Every example belongs to one part and is posed, limited and judged by it. The order of an epoch is a
function of seed and epoch alone, so a resumed run goes on with the examples it would have had.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from strop.errors import DataError
from strop.rollout import Example, Split
from strop.spec.parts import MixtureSpec
from strop.tasks.task import Task, TaskLimits, TasksInOne


class Mixture(TasksInOne):
    """The parts of a mixture as one task."""

    name = "mixture"
    is_ordered = True

    def __init__(self, spec: MixtureSpec, tasks: Mapping[str, Task]) -> None:
        self._mode = spec.mode
        self._tasks = tasks
        self._parts = spec.read_parts()
        self._examples: dict[Split, tuple[Example, ...]] = {}
        self.asks_judge = any(task.asks_judge for task in tasks.values())
        limits = [task.limits for task in tasks.values()]
        self.limits = TaskLimits(
            max_reply_tokens=max(limit.max_reply_tokens for limit in limits),
            full_reply_tokens=max(limit.own_reply_tokens for limit in limits),
            max_reward=max(limit.max_reward for limit in limits),
            min_reward=min(limit.min_reward for limit in limits),
            chance=max(limit.chance for limit in limits),
            max_goldless_frac=max(limit.max_goldless_frac for limit in limits),
            verify_limit_s=max(one.verify_limit_s or 0.0 for one in limits) or None,
        )
        """The widest limits of all parts; `limits_of` has those of an example."""

    @property
    def version(self) -> str:
        """Hash over the parts' versions and how they are mixed; not over the paths of their data."""
        parts = [
            f"{label}:{self._tasks[label].version}:{part.weight}:{part.count}:{part.repeat}"
            for label, part in self._parts.items()
        ]
        return hashlib.sha256("\n".join([self.name, self._mode, *parts]).encode()).hexdigest()[:16]

    @property
    @override
    def counts(self) -> Mapping[str, int]:
        parts = self._tasks.items()
        return {f"{label}, {name}": num for label, task in parts for name, num in task.counts.items()}

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the examples of all parts, one part after the other.

        Raises: DataError if a part has too few, or as the parts do.
        """
        if split not in self._examples:
            held_out = (task.examples(split) for task in self._tasks.values())
            parts = self._train.values() if split is Split.TRAIN else held_out
            self._examples[split] = tuple(itertools.chain.from_iterable(parts))
        return self._examples[split]

    def part_of(self, example: Example) -> str:
        """Return the label of the example's part.

        Raises: DataError if it belongs to none, or two parts share an example.
        """
        label = self._labels.get(example.example_id)
        if label is None:
            raise DataError(
                f"example {example.example_id} of task {example.task} is of no part of the mixture"
            )
        return label

    @override
    def task_of(self, example: Example) -> Task:
        return self._tasks[self.part_of(example)]

    @override
    def warm_up(self) -> None:
        for task in self._tasks.values():
            task.warm_up()

    def epoch_order(self, seed: int, epoch: int) -> Sequence[int]:
        """Return the positions of an epoch, each example `repeat` times.

        'weighted' draws a part with probability proportional to its weight until all are used up;
        'sequential' goes through one part after the other.
        """
        orders, num_before = [], 0
        for label in self._parts:
            orders.append(num_before + self._part_order(label, seed, epoch))
            num_before += len(self._train[label])
        order = np.concatenate(orders)
        if self._mode == "weighted":
            weights = np.array([part.weight for part in self._parts.values()])
            random = np.random.Generator(np.random.Philox(key=[seed, 2**32 + epoch]))
            drawn = _draw([len(one) for one in orders], weights, random)
            # The examples of each part stay in their order.
            order[np.argsort(drawn, kind="stable")] = order.copy()
        positions: list[int] = order.tolist()
        return positions

    def _part_order(self, label: str, seed: int, epoch: int) -> NDArray[np.intp]:
        """Return the positions within one part, in its own order or shuffled."""
        task, size, repeat = self._tasks[label], len(self._train[label]), self._parts[label].repeat
        if task.is_ordered:
            chosen = [place for place in task.epoch_order(seed, epoch) if place < size] * repeat
            return np.array(chosen, dtype=np.intp)
        digest = hashlib.blake2b(f"{label}/{seed}".encode(), digest_size=8).digest()
        keys = ([int.from_bytes(digest, "little"), epoch * repeat + number] for number in range(repeat))
        return np.concatenate(
            [np.random.Generator(np.random.Philox(key=key)).permutation(size) for key in keys]
        )

    @cached_property
    def _train(self) -> dict[str, Sequence[Example]]:
        """The training examples of each part, as many as its settings ask for."""
        chosen: dict[str, Sequence[Example]] = {}
        for label, part in self._parts.items():
            examples = self._tasks[label].examples(Split.TRAIN)
            if part.count is not None and part.count > len(examples):
                raise DataError(
                    f"task.parts.{label}.count={part.count}",
                    allowed=f"1 to {len(examples)}, the part's training examples, or none for all",
                    next_step="lower the count, or raise task.parts.*.repeat to see examples more often",
                )
            chosen[label] = examples[: part.count]
        return chosen

    @cached_property
    def _labels(self) -> dict[str, str]:
        """The part of each example, by its id."""
        labels: dict[str, str] = {}
        for label, task in self._tasks.items():
            for example in itertools.chain.from_iterable(task.examples(split) for split in Split):
                other = labels.setdefault(example.example_id, label)
                if other != label:
                    raise DataError(
                        f"example {example.example_id} is in part {other} and in part {label}",
                        allowed="parts that share no example: it would be trained on twice, or held out"
                        " and trained on",
                        next_step=f"remove one of the two parts, or use task.parts.{other}.repeat",
                    )
        return labels


def _draw(
    sizes: Sequence[int], weights: NDArray[np.float64], random: np.random.Generator
) -> NDArray[np.intp]:
    """Return the part of each place of an epoch; a part that is used up is no longer drawn."""
    left, drawn = np.array(sizes), [np.zeros(0, dtype=np.intp)]
    while left.any():
        chances = weights * (left > 0)
        block = random.choice(len(left), size=left.sum(), p=chances / chances.sum())
        # It is valid up to the first place that uses a part up, and by its length one does.
        places = [np.flatnonzero(block == part) for part in range(len(left))]
        ends = [of[size - 1] for of, size in zip(places, left, strict=True) if len(of) >= size > 0]
        block = block[: min(ends) + 1]
        left -= np.bincount(block, minlength=len(left))
        drawn.append(block)
    return np.concatenate(drawn)
