"""A task with the run file's own system prompt and prompt template, so that no task can forget them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strop.errors import ConfigError, DataError
from strop.rollout import Example, Message, Split
from strop.spec.task import TaskSpec
from strop.spec.template import fill, list_names
from strop.tasks.prompt import SYSTEM, PosedMessage, Thinking
from strop.tasks.task import Task, TaskWrapper


class Prompted(TaskWrapper):
    """A task that is asked in the words of its section; the verifier does not change."""

    def __init__(self, task: Task, spec: TaskSpec) -> None:
        super().__init__(task)
        self._spec = spec
        self._checked: set[Split] = set()

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the task's examples, after a check that each can be rendered.

        Raises: DataError as the task does, and like `render`; ConfigError like `render`.
        """
        examples = self._task.examples(split)
        if split not in self._checked:
            for example in examples:
                self.render(example)
            self._checked.add(split)
        return examples

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the example with the run's template and system prompt.

        Raises: ConfigError if the template names a field that the example lacks; DataError if both the
            example and the run have a system message.
        """
        messages, template = self._task.render(example), self._spec.prompt_template
        if template is not None:
            fields = self._task.prompt_fields(example).items()
            known = {name: value for name, value in fields if isinstance(value, str | int | float)}
            if missing := [name for name in list_names(template) if name not in known]:
                raise ConfigError(
                    f"task.prompt_template names {{{missing[0]}}}, which example {example.example_id} of task"
                    f" {self.name} does not have",
                    allowed=f"texts and numbers of the example: {', '.join(sorted(known)) or 'it has none'}",
                    next_step="correct the name; '{{' and '}}' stand for braces",
                )
            text, last = fill(template, known), messages[-1]
            thinking = last.thinking if isinstance(last, PosedMessage) else Thinking.MODEL_DEFAULT
            messages = (PosedMessage(role=last.role, content=text, base=text, thinking=thinking),)
        return with_system(messages, self._spec.system_prompt, example)


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
