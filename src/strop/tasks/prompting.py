"""A task with the run file's own system prompt, prompt template and stop strings.

They are applied to the rendered messages and the limits of any task, so that no task can forget a setting.
The verifier does not change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from strop.errors import ConfigError, DataError
from strop.rollout import Example, Message, Split
from strop.spec.task import TaskSection, TaskSpec
from strop.spec.template import fill, list_names
from strop.tasks.prompt import SYSTEM, PosedMessage, Thinking
from strop.tasks.task import Task, TaskLimits, TaskWrapper


class Prompted(TaskWrapper):
    """A task with the settings `PROMPTING` of its section applied; at least one is set."""

    def __init__(self, task: Task, spec: TaskSpec) -> None:
        super().__init__(task)
        self._spec = spec
        self.limits = with_stops(task.limits, spec.stop)
        self._checked: dict[Split, Sequence[Example]] = {}

    @cached_property
    def version(self) -> str:
        """Hash over the task's version and the settings; reads the data if the task's version does."""
        return hash_prompting(self._task.version, self._spec)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the task's examples, after a check that each can be rendered.

        Raises: DataError as the task does, and like `render`; ConfigError like `render`.
        """
        if split not in self._checked:
            examples = self._task.examples(split)
            for example in examples:
                self.render(example)
            self._checked[split] = examples
        return self._checked[split]

    def limits_of(self, example: Example) -> TaskLimits:
        """Return the example's limits with the run's stop strings."""
        return with_stops(self._task.limits_of(example), self._spec.stop)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the example with the run's template and system prompt.

        Raises: ConfigError if the template names a field that the example lacks; DataError if both the
            example and the run have a system message.
        """
        template = self._spec.prompt_template
        *before, last = self._task.render(example)
        if template is not None:
            known = {
                name: value
                for name, value in self._task.prompt_fields(example).items()
                if isinstance(value, str | int | float)
            }
            missing = [name for name in list_names(template) if name not in known]
            if missing:
                raise ConfigError(
                    f"task.prompt_template names {{{missing[0]}}}, which example {example.example_id} of task"
                    f" {self.name} does not have",
                    allowed=f"texts and numbers of the example: {', '.join(sorted(known)) or 'it has none'}",
                    next_step="correct the name; '{{' and '}}' stand for braces",
                )
            text = fill(template, known)
            thinking = last.thinking if isinstance(last, PosedMessage) else Thinking.MODEL_DEFAULT
            before, last = [], PosedMessage(role=last.role, content=text, base=text, thinking=thinking)
        return with_system((*before, last), self._spec.system_prompt, example)


def hash_prompting(version: str, spec: TaskSection) -> str:
    """Return the version of a task with the prompting settings of a section, at least one of which is set."""
    parts = json.dumps([version, spec.prompting], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def with_system(messages: tuple[Message, ...], system: str | None, example: Example) -> tuple[Message, ...]:
    """Put the run's system message, if any, before the messages of an example.

    Raises: DataError if these have a system message already.
    """
    if system is None:
        return messages
    *before, last = messages
    if any(message.role == SYSTEM for message in before):
        raise DataError(
            f"example {example.example_id} of task {example.task} has a system message of its own,"
            " beside task.system_prompt",
            allowed="one of the two",
            next_step="leave out task.system_prompt, or take the system messages out of the data",
        )
    if isinstance(last, PosedMessage) and last.base is not None:
        last = replace(last, base=f"{system}\n\n{last.base}")
    return (Message(role=SYSTEM, content=system), *before, last)


def with_stops(limits: TaskLimits, stop: tuple[str, ...] | None) -> TaskLimits:
    """Replace the stop strings of a task by those of the run, if it has any."""
    return limits if stop is None else replace(limits, stop_strings=stop, base_stop_strings=())
