"""A task class of the user, wrapped as a task.

A separate process (`posing`) instantiates the class and collects its examples; the workers that judge
replies load it to verify. The training process holds only data. The version is a hash of sources, settings
and examples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import override

from strop.errors import DataError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.task import UserCodeSection, UserTaskSpec
from strop.tasks.prompt import pose
from strop.tasks.rows.row_task import SplitExamples
from strop.tasks.task import Task, TaskLimits
from strop.tasks.user import posing
from strop.tasks.user.rewards import as_outcome, call_foreign
from strop.tasks.version import fit_limits, hash_version
from strop.user_code import hash_sources, load_code, run_apart

POSE_LIMIT_S = 600.0
"""Wall time (seconds) in which the class must make its examples and render their prompts."""
_MAX_REPLY_TOKENS = 1024
_VERIFIER = "own-2"


def require_whole(name: str, example: Example) -> None:
    """Refuse an example that has lost a field: most classes would judge every reply to it wrong.

    Raises: DataError.
    """
    whole = make_example(name, example.fields, example.answer)
    if not example.fields or whole.example_id != example.example_id:
        raise DataError(f"example {example.example_id} of task {name} lacks a part of what it was made with")


class OwnTask(Task):
    """The user's class: its prompts, and its verdicts.

    `verify` of the class returns an `Outcome`, or the values of a reward function: a number, true or false,
    None, or a table of them.
    """

    poser = posing.__name__
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

    @override
    def render(self, example: Example) -> tuple[Message, ...]:
        messages = [Message.from_json(value) for value in self._rows[example.example_id]["messages"]]
        return pose(messages, self._spec.thinking)

    @override
    def problem_of(self, example: Example) -> str | None:
        problem: str | None = self._rows.get(example.example_id, {}).get("problem")
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
        return posing.make_task(load_code(self._spec.ref, self._digest), self._inspected.values)

    @cached_property
    def _own(self) -> Any:
        return self.make_own()

    @cached_property
    def _posed(self) -> dict[str, Any]:
        """The class's limits and examples with prompts, as JSON values."""
        return run_apart(
            self.poser,
            self._spec.ref,
            {"values": dict(self._inspected.values)},
            limit_s=POSE_LIMIT_S,
            doing="asked for its examples",
            digest=self._digest,
        )

    @cached_property
    def _made(self) -> Mapping[Split, Mapping[str, tuple[Example, Mapping[str, Any]]]]:
        """The distinct examples of each split by id, with what the class said of each."""
        made: dict[Split, dict[str, tuple[Example, Mapping[str, Any]]]] = {split: {} for split in Split}
        for split in Split:
            for row in self._posed["splits"][split.value]:
                example = make_example(self.name, row["fields"], row["answer"])
                made[split][example.example_id] = example, row
        return made

    @cached_property
    def _rows(self) -> Mapping[str, Mapping[str, Any]]:
        """Messages, gold replies and problem of each example, by id."""
        return {id_: row for made in self._made.values() for id_, (_, row) in made.items()}

    @cached_property
    def _splits(self) -> SplitExamples:
        numbers = (self._spec.num_train, self._spec.num_held_out)
        train, held_out = (
            tuple(example for example, _ in made.values())[:number]
            for made, number in zip(self._made.values(), numbers, strict=True)
        )
        if shared := {one.example_id for one in train} & {one.example_id for one in held_out}:
            raise DataError(
                f"{len(shared)} held-out examples of {self._spec.ref} are training examples too",
                allowed="no example in both splits: its score would measure memory",
                next_step="make examples(split) return others for each split",
            )
        return SplitExamples(train=train, held_out=held_out)
