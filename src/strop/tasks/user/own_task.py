"""A task class of the user, wrapped as a task.

A separate process, `python -m strop.tasks.user.own_task FD`, makes an object of the class and collects its
examples with their prompts, as JSON; the workers that judge replies load the class to verify. The training
process holds only data. The version is a hash of sources, settings and examples.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import override

from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.task import UserCodeSection, UserTaskSpec
from strop.tasks.prompt import pose_example
from strop.tasks.rows.row_task import SplitExamples
from strop.tasks.task import TURN, Task, TaskLimits
from strop.tasks.user.rewards import as_outcome, call_foreign
from strop.tasks.version import fit_limits, hash_version
from strop.user_code import CodeRef, blaming, hash_sources, load_code, run_apart
from strop.user_code.probe import answer_order, settings_class

POSE_LIMIT_S = 600.0
"""Wall time (seconds) in which the class must make its examples and render their prompts."""
OPENING_SEED = 0
"""Seed of the openings that a plan and the gate measure; rollouts have other seeds."""
_MAX_REPLY_TOKENS = 1024
_VERIFIER = "own-2"


def require_whole(name: str, example: Example) -> None:
    """Raises: DataError for an example that lost a part: most classes would judge every reply to it wrong."""
    whole = make_example(name, example.fields, example.answer)
    if not example.fields or whole.example_id != example.example_id:
        raise DataError(f"example {example.example_id} of task {name} lacks a part of what it was made with")


class OwnTask(Task):
    """The user's class: its prompts, and its verdicts.

    `verify` of the class returns an `Outcome`, or the values of a reward function: a number, true or false,
    None, or a table of them.
    """

    poser = "strop.tasks.user.own_task"
    """The module whose process collects the examples of the class."""

    def __init__(self, spec: UserCodeSection) -> None:
        """Inspect the class without loading it; no example is made.

        Raises: ConfigError if it cannot be imported, or is no task.
        """
        self._spec = spec
        self._inspected = spec.inspect()
        self._digest = hash_sources(spec.ref.path if spec.ref.is_file else self._inspected.path)
        self.name = spec.ref.name if spec.ref.is_file else spec.name

    @cached_property
    def limits(self) -> TaskLimits:  # type: ignore[override]
        """The class's limits within the run file's; judging ends at `task.judge_limit_s`."""
        own = {"max_reply_tokens": self._spec.max_reply_tokens or _MAX_REPLY_TOKENS, **self._posed["limits"]}
        if not self._posed["knows_gold"]:
            own["max_goldless_frac"] = own.get("max_goldless_frac") or 1.0
        limit_s = self._spec.judge_limit_s if isinstance(self._spec, UserTaskSpec) else None
        # JSON has no tuples.
        limits = TypeAdapter(TaskLimits).validate_python({**own, "verify_limit_s": limit_s})
        return fit_limits(limits, self._spec)

    @cached_property
    def version(self) -> str:
        """Hash over the sources, the settings and the ids of all examples with their prompts."""
        # No score depends on the path of the file, which `spec.name` holds.
        spec = self._spec.model_copy(update={"name": self.name})
        prompts = json.dumps([self._rows[id_]["messages"] for id_ in sorted(self._rows)])
        verifier = f"{_VERIFIER} {self._digest}"
        return hash_version(self.name, prompts, verifier, self.limits, spec, self._splits.digest)

    @override
    def examples(self, split: Split) -> Sequence[Example]:
        return self._splits.of(split)

    def say(self, example: Example) -> Sequence[Message]:
        """Return the messages with which the class poses an example."""
        return [Message.from_json(value) for value in self._rows[example.example_id]["messages"]]

    @override
    def render(self, example: Example) -> tuple[Message, ...]:
        return pose_example(self._spec, example, self.say(example))

    @override
    def problem_of(self, example: Example) -> str | None:
        problem = self._rows.get(example.example_id, {}).get("problem")
        return None if problem is None else f"{self.name} {problem}"

    @override
    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return tuple(self._rows[example.example_id]["gold"])

    @override
    def warm_up(self) -> None:
        self._own  # noqa: B018

    @override
    async def verify(self, example: Example, text: str) -> Outcome:
        require_whole(self.name, example)
        return self.to_outcome(await call_foreign(self._own.verify, example, text))

    def to_outcome(self, found: Any) -> Outcome:
        """Convert a verdict of the class to an outcome. Raises: TypeError or ValueError as `to_parts`."""
        # Full marks of the object itself: a worker that judges has not made the examples.
        full = getattr(getattr(self._own, "limits", None), "max_reward", 1.0)
        return as_outcome(found, f"{self._spec.ref} (line {self._inspected.line})", full)

    def make_own(self) -> Any:
        """Load the class into this process and instantiate it."""
        return make_task(load_code(self._spec.ref, self._digest), self._inspected.values)

    @cached_property
    def _own(self) -> Any:
        return self.make_own()

    @cached_property
    def _posed(self) -> dict[str, Any]:
        """What `collect` says of the class."""
        return run_apart(
            self.poser,
            self._spec.ref,
            {"values": dict(self._inspected.values), "name": self.name},
            limit_s=POSE_LIMIT_S,
            doing="asked for its examples",
            digest=self._digest,
        )

    @cached_property
    def _rows(self) -> Mapping[str, Mapping[str, Any]]:
        """What the class says of each example, by id."""
        return {id_: row for rows in self._posed["splits"].values() for id_, row in rows.items()}

    @cached_property
    def _splits(self) -> SplitExamples:
        train, held_out = (
            [make_example(self.name, row["fields"], row["answer"]) for row in [*rows.values()][:number]]
            for rows, number in zip(
                self._posed["splits"].values(), (self._spec.num_train, self._spec.num_held_out), strict=True
            )
        )
        if shared := {one.example_id for one in train} & {one.example_id for one in held_out}:
            raise DataError(
                f"{len(shared)} held-out examples of {self._spec.ref} are training examples too",
                allowed="no example in both splits: its score would measure memory",
                next_step="make examples(split) return others for each split",
            )
        return SplitExamples(train=tuple(train), held_out=tuple(held_out))


# In the process of its own.


def make_task(kind: Any, values: Mapping[str, Any]) -> Any:
    """Instantiate the user's class with its settings."""
    settings = settings_class(kind)
    return kind() if settings is None else kind(TypeAdapter(settings).validate_python(dict(values)))


def collect(kind: Any, order: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits of a class and, by split and id, its examples with prompts, as JSON values.

    Raises: ConfigError naming file and line if the class fails.
    """
    ref = CodeRef(**order["ref"])
    with blaming(ref, "be made with its settings"):
        task = make_task(kind, order["values"])
        limits = getattr(task, "limits", None)
        told = {} if limits is None else dataclasses.asdict(limits)
    render = getattr(task, "render", None) or partial(_open, partial(make_task, kind, order["values"]))
    gold, problem_of = getattr(task, "gold_replies", None), getattr(task, "problem_of", None)
    splits: dict[str, dict[str, Any]] = {split.value: {} for split in Split}
    for split, rows in splits.items():
        with blaming(ref, f"give its examples of {split}"):
            examples = [_read_example(value, order["name"]) for value in task.examples(Split(split))]
            if not examples:
                raise ValueError("it has none, and each split needs one")
        for example in examples:
            with blaming(ref, f"pose {dict(example.fields)!r:.80}"):
                replies, problem = gold(example) if gold else (), problem_of(example) if problem_of else None
                rows[example.example_id] = {
                    "fields": dict(example.fields),
                    "answer": example.answer,
                    "messages": [one.to_json() for one in to_messages(render(example))],
                    "gold": [one if isinstance(one, str) else TURN.join(one) for one in replies],
                    "problem": None if problem is None else str(problem),
                }
    return {"limits": told, "knows_gold": gold is not None, "splits": splits}


def _open(make: Callable[[], Any], example: Example) -> Any:
    """Return an environment's opening of an example. Raises: ValueError if it varies with equal seeds."""
    first, second = (
        asyncio.run(call_foreign(opening_of(world), example, OPENING_SEED)) for world in (make(), make())
    )
    if first != second:
        raise ValueError(f"its reset returns for the same seed {first!r:.80}, then {second!r:.80}")
    return first


def opening_of(world: Any) -> Any:
    """Return the method that opens an attempt: `opening`, which has no other effect, else `reset`."""
    return getattr(world, "opening", world.reset)


def _read_example(value: Any, name: str) -> Example:
    """Return an example of a class: a table of fields, or an `Example`. Raises: TypeError for others."""
    if isinstance(value, Example):
        return make_example(name, value.fields, value.answer)
    if not isinstance(value, Mapping):
        raise TypeError(f"an example {value!r:.80} is no table of fields, perhaps with an answer")
    fields, answer = {key: one for key, one in value.items() if key != "answer"}, value.get("answer")
    return make_example(name, fields, None if answer is None else str(answer))


def to_messages(said: Any) -> tuple[Message, ...]:
    """Convert an author's text or messages to messages. Raises: DataError for anything else, or nothing."""
    parts = [said] if isinstance(said, str | Message) else [*(said or ())]
    messages = [Message(role="user", content=part) if isinstance(part, str) else part for part in parts]
    messages = [one if isinstance(one, Message) else Message.from_json(one) for one in messages]
    if not messages or not all(one.role and (one.text or one.tool_calls) for one in messages):
        raise DataError(
            f"the code says {said!r:.80}",
            allowed="a text, or messages with role and content",
            next_step="correct its render, reset or step",
        )
    return tuple(messages)


if __name__ == "__main__":
    answer_order(int(sys.argv[1]), collect)
