"""Several tasks trained as one: by weights, by their sizes, or one after the other.

Every example belongs to one part and is posed, limited and judged by it. The order of an epoch is a
function of seed and epoch alone, so a resumed run goes on with the examples it would have had.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, JsonValue, model_validator

from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, Split
from strop.spec.base import SpecConflict, expert
from strop.spec.parts import PartedSection, TaskPart, read_part, refuse_same_names
from strop.tasks.task import ProgramForm, Task, TaskLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    label: str
    task: Task
    settings: MixturePart


class MixturePart(TaskPart):
    """One part of a mixture: a task, and how much of it."""

    weight: float = Field(
        default=1.0, gt=0.0, le=1e6, description="Share of its draws, relative to the other parts'."
    )
    count: int | None = Field(
        default=None, ge=1, le=10**7, description="Training examples used, from the first. none = all."
    )
    repeat: int = Field(default=1, ge=1, le=1000, description="How often each comes in an epoch.")


class MixtureSpec(PartedSection):
    """Several tasks trained as one."""

    name: Literal["mixture"]
    mode: Literal["weighted", "proportional", "sequential"] = Field(
        default="weighted",
        description="How the parts' examples follow each other in an epoch: drawn by weight until all are"
        " used up, drawn by the parts' sizes, or one part after the other.",
        json_schema_extra=expert("tasks are mixed in several ways, and a curriculum needs an order"),
    )
    parts: dict[str, dict[str, JsonValue]] = Field(
        default={},
        description="The parts by label, each a table [task.parts.LABEL] with the settings of a task (name"
        " and its own), and: weight (1) of its draws, count (all) of its training examples, repeat (1)"
        " times in an epoch.",
    )

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        if not self.parts:
            raise SpecConflict(
                {"task.parts": self.parts},
                "a mixture of nothing",
                allowed="one part or more, each a table [task.parts.LABEL] with the name of a task",
                next_step="add the parts",
            )
        if self.max_reply_tokens is not None:
            raise SpecConflict(
                {"task.max_reply_tokens": self.max_reply_tokens},
                "each part has its own limit",
                allowed="task.parts.LABEL.max_reply_tokens",
                next_step="move the setting into the parts",
            )
        refuse_same_names({label: part.task for label, part in self.read_parts().items()})
        return self

    def read_parts(self) -> dict[str, MixturePart]:
        """Return the parts by label, checked.

        Raises: SpecConflict naming the setting that is wrong.
        """
        return {label: read_part(MixturePart, label, table) for label, table in self.parts.items()}


class Mixture(Task):
    """The parts of a mixture as one task."""

    name = "mixture"
    is_ordered = True

    def __init__(self, spec: MixtureSpec, tasks: Mapping[str, Task]) -> None:
        self._spec = spec
        self._parts = [
            _Part(label=label, task=tasks[label], settings=settings)
            for label, settings in spec.read_parts().items()
        ]
        self._examples: dict[Split, tuple[Example, ...]] = {}
        limits = [part.task.limits for part in self._parts]
        verify_limits_s = [limit.verify_limit_s for limit in limits if limit.verify_limit_s is not None]
        self.is_costly = any(part.task.is_costly for part in self._parts)
        self.limits = TaskLimits(
            max_reply_tokens=max(limit.max_reply_tokens for limit in limits),
            full_reply_tokens=max(limit.own_reply_tokens for limit in limits),
            max_reward=max(limit.max_reward for limit in limits),
            min_reward=min(limit.min_reward for limit in limits),
            chance=max(limit.chance for limit in limits),
            max_goldless_frac=max(limit.max_goldless_frac for limit in limits),
            verify_limit_s=max(verify_limits_s, default=None),
        )
        """The widest limits of all parts; `limits_of` has those of an example."""

    @property
    def version(self) -> str:
        """Hash over the parts' versions and how they are mixed; not over the paths of their data."""
        parts = [
            f"{part.label}:{part.task.version}:{part.settings.weight}:{part.settings.count}"
            f":{part.settings.repeat}"
            for part in self._parts
        ]
        return hashlib.sha256("\n".join([self.name, self._spec.mode, *parts]).encode()).hexdigest()[:16]

    @property
    def judge_digests(self) -> Sequence[str]:
        """Hashes of the models that judge the parts."""
        return [digest for part in self._parts for digest in part.task.judge_digests]

    @property
    def counts(self) -> Mapping[str, int]:
        """The counts of all parts, by label."""
        return {
            f"{part.label}, {name}": count for part in self._parts for name, count in part.task.counts.items()
        }

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the examples of all parts, one part after the other.

        Raises: DataError if two parts hold the same example, or as the parts do.
        """
        if split not in self._examples:
            held_out = (part.task.examples(split) for part in self._parts)
            parts = self._part_examples if split is Split.TRAIN else held_out
            self._examples[split] = tuple(itertools.chain.from_iterable(parts))
        return self._examples[split]

    def limits_of(self, example: Example) -> TaskLimits:
        """Return the example's limits in its part."""
        return self._owner(example).limits_of(example)

    def part_of(self, example: Example) -> str:
        """Return the label of the example's part.

        Raises: DataError if it belongs to none.
        """
        return self._owning_part(example).label

    def problem_of(self, example: Example) -> str | None:
        """Return the problem that the part counts the example to."""
        return self._owner(example).problem_of(example)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the example as its part does."""
        return self._owner(example).render(example)

    async def verify(self, example: Example, text: str) -> Outcome:
        """Judge as the example's part does."""
        return await self._owner(example).verify(example, text)

    async def verify_member(self, example: Example, text: str) -> Outcome:
        """Judge as the example's part does."""
        return await self._owner(example).verify_member(example, text)

    async def verify_group(
        self, example: Example, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Judge as the example's part does."""
        return await self._owner(example).verify_group(example, texts, outcomes)

    async def verify_here(
        self, example: Example, texts: Sequence[str], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Judge as the example's part does."""
        return await self._owner(example).verify_here(example, texts, outcomes)

    def compares(self, example: Example) -> bool:
        """Whether the example's part compares replies."""
        return self._owner(example).compares(example)

    def program_form(self, example: Example) -> ProgramForm | None:
        """Return how the part uses the program of a reply."""
        return self._owner(example).program_form(example)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return the gold replies of the example's part."""
        return self._owner(example).gold_replies(example)

    def epoch_order(self, seed: int, epoch: int) -> Sequence[int]:
        """Return the positions of an epoch, each example `repeat` times.

        'weighted' draws a part with probability proportional to its weight until all are used up;
        'proportional' does so with weights that are the parts' sizes; 'sequential' goes through one part
        after the other.
        """
        orders = [self._part_order(index, seed, epoch) for index in range(len(self._parts))]
        order = np.concatenate(orders)
        if self._spec.mode != "sequential":
            sizes = [len(one) for one in orders]
            weights = [part.settings.weight for part in self._parts]
            given = np.array(sizes if self._spec.mode == "proportional" else weights, dtype=float)
            random = np.random.Generator(np.random.Philox(key=[seed, 2**32 + epoch]))
            # The examples of each part stay in their order.
            order[np.argsort(_draw(sizes, given, random), kind="stable")] = order.copy()
        positions: list[int] = order.tolist()
        return positions

    def _part_order(self, index: int, seed: int, epoch: int) -> NDArray[np.intp]:
        """Return the positions of one part, in its own order or shuffled."""
        part, size = self._parts[index], len(self._part_examples[index])
        first, repeat = sum(map(len, self._part_examples[:index])), part.settings.repeat
        if part.task.is_ordered:
            chosen = [place for place in part.task.epoch_order(seed, epoch) if place < size] * repeat
            return first + np.array(chosen, dtype=np.intp)
        digest = hashlib.blake2b(f"{part.label}/{seed}".encode(), digest_size=8).digest()
        keys = ([int.from_bytes(digest, "little"), epoch * repeat + number] for number in range(repeat))
        shuffled = [np.random.Generator(np.random.Philox(key=key)).permutation(size) for key in keys]
        return first + np.concatenate(shuffled)

    def _owner(self, example: Example) -> Task:
        return self._owning_part(example).task

    def _owning_part(self, example: Example) -> _Part:
        part = self._owners.get(example.example_id)
        if part is None:
            raise DataError(
                f"example {example.example_id} of task {example.task} is of no part of the mixture"
            )
        return part

    @cached_property
    def _part_examples(self) -> list[Sequence[Example]]:
        """The training examples of each part, as many as its settings ask for."""
        chosen = []
        for part in self._parts:
            examples, count = part.task.examples(Split.TRAIN), part.settings.count
            if count is not None and count > len(examples):
                raise DataError(
                    f"task.parts.{part.label}.count={count}",
                    allowed=f"1 to {len(examples)}, the part's training examples, or none for all",
                    next_step="lower the count, or raise task.parts.*.repeat to see examples more often",
                )
            chosen.append(examples[:count])
        return chosen

    @cached_property
    def _owners(self) -> dict[str, _Part]:
        owners: dict[str, _Part] = {}
        for part in self._parts:
            for split in Split:
                for example in part.task.examples(split):
                    owner = owners.setdefault(example.example_id, part)
                    if owner is not part:
                        raise DataError(
                            f"example {example.example_id} is in part {owner.label} and in part {part.label}",
                            allowed="parts that share no example: it would be trained on twice, or held out"
                            " and trained on",
                            next_step=f"remove one of the two parts, or use task.parts.{owner.label}.repeat",
                        )
        return owners


def _draw(
    sizes: Sequence[int], weights: NDArray[np.float64], random: np.random.Generator
) -> NDArray[np.intp]:
    """Return the part of each place of an epoch; a part that is used up is no longer drawn."""
    left, drawn = np.array(sizes), [np.zeros(0, dtype=np.intp)]
    while left.any():
        chances = weights * (left > 0)
        block = random.choice(len(left), size=left.sum(), p=chances / chances.sum())
        places = [np.flatnonzero(block == part) for part in np.flatnonzero(left)]
        # It is valid up to the first place that uses a part up, and by its length one does.
        ends = [
            of_part[size - 1]
            for of_part, size in zip(places, left[left > 0], strict=True)
            if len(of_part) >= size
        ]
        block = block[: min(ends) + 1]
        left -= np.bincount(block, minlength=len(left))
        drawn.append(block)
    return np.concatenate(drawn)
