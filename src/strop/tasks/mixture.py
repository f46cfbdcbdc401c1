"""What a run trains on, in which order: several tasks as one, or the examples of an order file.

A mixture: every example belongs to one part and is posed, limited and judged by it. The order of an epoch is
a function of seed and epoch alone, so a resumed run goes on with the examples it would have had.

A line of an order file is an id, a row number from 0, or a JSON object with an `example_id`. Ids are hashes
of content, so a file made with other settings or data does not match, and is refused instead of silently
shrunk (DAT-1).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from strop.errors import DataError
from strop.rollout import Example, Split
from strop.spec.parts import MixtureSpec
from strop.spec.task import TaskSpec
from strop.store.data_files import locate_named
from strop.tasks.task import Task, TaskLimits, TasksInOne, TaskWrapper

_MAX_SHOWN = 3


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
        widest = ["max_reply_tokens", "own_reply_tokens", "max_reward", "chance", "max_goldless_frac"]
        self.limits = TaskLimits(
            **{name: max(getattr(limit, name) for limit in limits) for name in widest},
            min_reward=min(limit.min_reward for limit in limits),
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
        """Return the label of the example's part. Raises: DataError if two parts share an example."""
        return self._labels[example.example_id]

    @override
    def task_of(self, example: Example) -> Task:
        return self._tasks[self.part_of(example)]

    @override
    def warm_up(self) -> None:
        self._labels  # noqa: B018  it must know an example's part
        for task in self._tasks.values():
            task.warm_up()

    def epoch_order(self, seed: int, epoch: int) -> Sequence[int]:
        """Return the positions of an epoch, each example `repeat` times.

        'weighted' draws a part with probability proportional to its weight until all are used up;
        'sequential' goes through one part after the other.
        """
        orders, times, num_before = [], [], 0
        random = np.random.default_rng([seed, epoch])
        for label, part in self._parts.items():
            orders.append(num_before + self._part_order(label, seed, epoch))
            num_before += len(self._train[label])
            # Poisson processes: the next event is that of a part with the probability of its weight.
            times.append(random.exponential(1.0 / part.weight, len(orders[-1])).cumsum())
        order = np.concatenate(orders)
        if self._mode == "weighted":
            order = order[np.argsort(np.concatenate(times), kind="stable")]
        positions: list[int] = order.tolist()
        return positions

    def _part_order(self, label: str, seed: int, epoch: int) -> NDArray[np.intp]:
        """Return the positions within one part, in its own order or shuffled."""
        task, size, repeat = self._tasks[label], len(self._train[label]), self._parts[label].repeat
        if task.is_ordered:
            chosen = [place for place in task.epoch_order(seed, epoch) if place < size] * repeat
            return np.array(chosen, dtype=np.intp)
        digest = hashlib.blake2b(f"{label}/{seed}/{epoch}".encode(), digest_size=8).digest()
        random = np.random.default_rng(int.from_bytes(digest, "little"))
        return np.concatenate([random.permutation(size) for _ in range(repeat)])

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


class Curriculum(TaskWrapper):
    """A task that trains on the examples of an order file, in its order.

    Held-out examples and the version are those of the wrapped task, so scores with and without a curriculum
    are comparable: an order changes neither prompts nor scores.
    """

    def __init__(self, task: Task, spec: TaskSpec) -> None:
        super().__init__(task)
        self.is_ordered = True
        self._spec = spec

    @override
    def examples(self, split: Split) -> Sequence[Example]:
        return self._choice[0] if split is Split.TRAIN else self._task.examples(split)

    @property
    @override
    def counts(self) -> Mapping[str, int]:
        return {**self._task.counts, **self._choice[1]}

    @override
    def epoch_order(self, seed: int, epoch: int) -> Sequence[int]:
        return range(len(self._choice[0]))

    @cached_property
    def _choice(self) -> tuple[tuple[Example, ...], dict[str, int]]:
        """The training examples, and the number of lines left out by reason."""
        path = locate_named(self._spec.order_file or "")
        lines = names = _read_names(path)
        by_id = {example.example_id: example for example in self._task.examples(Split.TRAIN)}
        if all(name.isdecimal() and name not in by_id for name in lines):
            # Rows with the same question became one example, which is trained on once per epoch.
            keys = self._task.row_keys()
            names = [*dict.fromkeys(keys.get(str(int(name))) or f"row {int(name)}" for name in lines)]
        if unmatched := [name for name in names if name not in by_id]:
            fault = f"names {len(unmatched)} ids of {len(names)} that are no training examples of the task:"
            shown = ", ".join(unmatched[:_MAX_SHOWN])
            raise _refuse(path, f"{fault} {shown}", "make it anew with this task's settings and data")
        left_out = {"of the order file, rows that ask what another row asks": len(lines) - len(names)}
        return tuple(by_id[name] for name in names), left_out


def _read_names(path: Path) -> list[str]:
    """Return ids or row numbers in order.

    Raises: DataError if the file cannot be read or is empty, a line is malformed, or an id occurs twice.
    """
    try:
        # Not `splitlines`: a text of JSON may hold other line ends, such as U+2028.
        lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise _refuse(path, f"cannot be read ({error})", "correct task.order_file") from error
    found: dict[str, None] = {}
    for number, line in enumerate(lines, start=1):
        value: Any = line.strip('"')
        with suppress(ValueError, LookupError):
            value = json.loads(line)["example_id"] if line.startswith("{") else value
        if line and (not isinstance(value, str) or not re.fullmatch(r"[^\s{\[]+", value) or value in found):
            raise _refuse(path, f"says in line {number} {line[:80]}", "mend or remove the line")
        found |= {value: None} if line else {}
    if not found:
        raise _refuse(path, "names no example", "write one a line")
    return [*found]


def _refuse(path: Path, fault: str, next_step: str) -> DataError:
    allowed = "one id, one row number, or one object with an example_id, a line; none twice, all of training"
    return DataError(f"order file {path} {fault}", allowed=f"{allowed} examples", next_step=next_step)
