"""A task class of the user, wrapped as a task.

The version is a hash of sources, settings and examples. Workers that judge replies load the class as well.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import override

from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.task import UserCodeSection, UserTaskSpec
from strop.tasks.prompt import pose_example
from strop.tasks.rows.row_task import SplitExamples
from strop.tasks.task import TURN, Task, TaskLimits, fit_limits, hash_version
from strop.tasks.user.rewards import as_outcome, call_foreign
from strop.user_code import blaming, hash_sources, load_code
from strop.user_code.probe import settings_class

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

    def __init__(self, spec: UserCodeSection) -> None:
        """Inspect the class without loading it; no example is made.

        Raises: ConfigError if it cannot be imported, or is no task.
        """
        self._spec = spec
        self._inspected = spec.inspect()
        self._digest = hash_sources(spec.ref.path if spec.ref.is_file else self._inspected.path)
        self.name = spec.ref.name if spec.ref.is_file else spec.name
        self._said: dict[str, tuple[Message, ...]] = {}

    @contextmanager
    def asking(self, doing: str) -> Iterator[None]:
        """Ask the class something. Raises: ConfigError naming file and line if it fails."""
        # What it prints is no output of a command.
        with blaming(self._spec.ref, doing), redirect_stdout(sys.stderr):
            yield

    @cached_property
    def limits(self) -> TaskLimits:  # type: ignore[override]
        """The class's limits within the run file's; judging ends at `task.judge_limit_s`."""
        told = getattr(self._own, "limits", None)
        own = {} if told is None else dataclasses.asdict(told)
        own.setdefault("max_reply_tokens", self._spec.max_reply_tokens or _MAX_REPLY_TOKENS)
        if not hasattr(self._own, "gold_replies"):
            own["max_goldless_frac"] = own.get("max_goldless_frac") or 1.0
        limit_s = self._spec.judge_limit_s if isinstance(self._spec, UserTaskSpec) else None
        limits = TypeAdapter(TaskLimits).validate_python({**own, "verify_limit_s": limit_s})
        return fit_limits(limits, self._spec)

    @cached_property
    def version(self) -> str:
        """Hash over the sources, the settings and the ids of all examples with their prompts."""
        # No score depends on the path of the file, which `spec.name` holds.
        spec = self._spec.model_copy(update={"name": self.name})
        said = {one.example_id: self.say(one) for split in Split for one in self._splits.of(split)}
        prompts = json.dumps([[one.to_json() for one in said[id_]] for id_ in sorted(said)])
        verifier = f"{_VERIFIER} {self._digest}"
        return hash_version(self.name, prompts, verifier, self.limits, spec, self._splits.digest)

    @override
    def examples(self, split: Split) -> Sequence[Example]:
        return self._splits.of(split)

    def say(self, example: Example) -> Sequence[Message]:
        """Return the messages with which the class poses an example."""
        if example.example_id not in self._said:
            with self.asking(f"pose {dict(example.fields)!r:.80}"):
                self._said[example.example_id] = to_messages(self.open(example))
        return self._said[example.example_id]

    def open(self, example: Example) -> Any:
        """Return the text or the messages that the class renders."""
        return self._own.render(example)

    @override
    def render(self, example: Example) -> tuple[Message, ...]:
        return pose_example(self._spec, example, self.say(example))

    @override
    def problem_of(self, example: Example) -> str | None:
        with self.asking(f"pose {dict(example.fields)!r:.80}"):
            problem = self._own.problem_of(example) if hasattr(self._own, "problem_of") else None
        return None if problem is None else f"{self.name} {problem}"

    @override
    def gold_replies(self, example: Example) -> tuple[str, ...]:
        with self.asking(f"pose {dict(example.fields)!r:.80}"):
            replies = self._own.gold_replies(example) if hasattr(self._own, "gold_replies") else ()
            return tuple(one if isinstance(one, str) else TURN.join(one) for one in replies)

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
        with redirect_stdout(sys.stderr):
            kind = load_code(self._spec.ref, self._digest)
        with self.asking("be made with its settings"):
            settings, values = settings_class(kind), dict(self._inspected.values)
            return kind() if settings is None else kind(TypeAdapter(settings).validate_python(values))

    @cached_property
    def _own(self) -> Any:
        return self.make_own()

    @cached_property
    def _splits(self) -> SplitExamples:
        kept = []
        for split, number in zip(Split, (self._spec.num_train, self._spec.num_held_out), strict=True):
            with self.asking(f"give its examples of {split.value}"):
                made = [_read_example(value, self.name) for value in self._own.examples(split)]
                if not made:
                    raise ValueError("it has none, and each split needs one")
            kept.append([*{one.example_id: one for one in made}.values()][:number])
        train, held_out = kept
        if shared := {one.example_id for one in train} & {one.example_id for one in held_out}:
            raise DataError(
                f"{len(shared)} held-out examples of {self._spec.ref} are training examples too",
                allowed="no example in both splits: its score would measure memory",
                next_step="make examples(split) return others for each split",
            )
        return SplitExamples(train=tuple(train), held_out=tuple(held_out))


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
    parts = said if isinstance(said, Iterable) and not isinstance(said, str | Message | Mapping) else [said]
    messages = [Message(role="user", content=part) if isinstance(part, str) else part for part in parts]
    messages = [one if isinstance(one, Message) else Message.from_json(one) for one in messages]
    if not messages or not all(one.role and (one.text or one.tool_calls) for one in messages):
        raise DataError(
            f"the code says {said!r:.80}",
            allowed="a text, or messages with role and content",
            next_step="correct its render, reset or step",
        )
    return tuple(messages)
