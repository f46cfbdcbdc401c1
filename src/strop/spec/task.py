"""The section of a run's task: the common base, user-defined classes, and the lookup of built-in ones.

The section of a built-in task stands beside its task, in the room `tasks`, which is above this one. So the
list of them is asked for by name (`built_in`) when a run file names a task; nothing of it is imported before.
Building the task from its section is `tasks`' business; nothing here reads data.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SerializeAsAny,
    model_validator,
)
from pydantic_core import PydanticKnownError

from strop.spec.base import Section, SpecConflict, Unhashed, check_free_table, expert
from strop.spec.built_in import built_in_tasks, import_section
from strop.spec.display import NULL_WORD
from strop.spec.sandboxing import SandboxSettings
from strop.spec.template import list_names, refuse_malformed
from strop.user_code import CodeRef, InspectedTask, find_task, inspect_task

PROMPTING = ("system_prompt", "prompt_template", "stop")
"""The settings that ask a model, or end its reply, otherwise than the task does by itself."""


class TaskSection(Section):
    """Base of all task sections."""

    name: str
    if TYPE_CHECKING:
        # Settings of most tasks, properties of the others.
        @property
        def num_train(self) -> int | None:
            """Number of training examples; None: known only from the data."""

        @property
        def num_held_out(self) -> int | None:
            """Number of held-out examples; None: known only from the data."""

    max_reply_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10**7,
        description="Most tokens sampled per reply, terminator included. A reply cut here is marked as"
        " truncated. none = the task's own limit.",
    )
    max_too_long_frac: Unhashed[float] = Field(
        default=0.01,
        ge=0.0,
        lt=1.0,
        description="Share of training prompts that may leave no room for a whole reply in the model's"
        " context. They are not attempted; above this share the run is refused.",
        json_schema_extra=expert("data sets contain a few prompts that exceed any model's context"),
    )
    thinking: Literal["off", "on", "model_default"] = Field(
        default="model_default",
        description="Whether a chat model is asked to think before it answers, if its chat template supports"
        " this. on = the reply has 8192 tokens beyond the task's own limit, and no text ends it. The text"
        " after the thinking is judged; unfinished thinking is no answer.",
    )
    system_prompt: str | None = Field(
        default=None,
        description="System message before the task's own messages; in plain text it precedes the prompt,"
        " separated by a blank line. none = no system message.",
    )
    prompt_template: str | None = Field(
        default=None,
        description="Prompt instead of the task's own wording, such as 'Solve: {question}'. A name in braces"
        " stands for the example's field of that name, '{{' and '}}' for braces. In plain text it is used"
        " verbatim. none = the task's own wording.",
        json_schema_extra=expert("published scores depend on the wording around the question"),
    )
    stop: tuple[str, ...] | None = Field(
        default=None,
        strict=False,
        description="Stop strings instead of the task's own, in a chat and in plain text; an empty list"
        " leaves only the model's terminator. none = the task's own.",
        json_schema_extra=expert("base models need a stop string that fits their prompt"),
    )
    order_file: Unhashed[str | None] = Field(
        default=None,
        min_length=1,
        description="JSONL file of example ids, or a text with one id, or one row number (from 0), on each"
        " line: the run trains on these examples only, in this order, and starts again from the first line in"
        " each epoch. `strop eval --write-order` writes such a file. none = all examples, reshuffled in"
        " each epoch.",
        json_schema_extra=expert("curricula order the examples"),
    )
    agent: Unhashed[str | None] = Field(
        default=None,
        min_length=1,
        description="Command of a program that solves the problems and may call the model over OpenAI's"
        " protocol any number of times. Its answer is judged like a reply; it works in the attempt's"
        " workspace if there is one. none = no program: the model replies directly.",
        json_schema_extra=expert("existing agents can be trained unmodified"),
    )
    agent_limit_s: Unhashed[float] = Field(
        default=600.0,
        gt=0.0,
        le=10**6,
        description="Seconds that task.agent has for a problem. Then it is killed, and an empty answer is"
        " judged, marked as truncated.",
        json_schema_extra=expert("a program may never end"),
    )
    agent_tokens: Unhashed[int] = Field(
        default=32_768,
        ge=1,
        le=10**9,
        description="Most tokens that task.agent may have sampled for a problem; then its calls are refused.",
        json_schema_extra=expert("a program may call the model a thousand times"),
    )

    @property
    def prompting(self) -> dict[str, object]:
        """The settings of `PROMPTING` that are set, by name; empty with the task's own wording."""
        found = {name: getattr(self, name) for name in PROMPTING}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def user_code(self) -> list[CodeRef]:
        """The user's code that the task consists of."""
        return []

    @property
    def runs_programs(self) -> bool:
        """Whether judging runs a program, which takes hundreds of times as long as rules."""
        return isinstance(self, CodeTaskSection)

    @model_validator(mode="after")
    def _check_prompting(self) -> Self:
        if self.system_prompt is not None and not self.system_prompt.strip():
            raise SpecConflict(
                {"task.system_prompt": self.system_prompt},
                "the model is told nothing",
                allowed="a text with more than white space, or none",
                next_step="remove the setting, or write the text",
            )
        if self.prompt_template is not None:
            refuse_malformed("task.prompt_template", self.prompt_template)
            if not list_names(self.prompt_template):
                raise SpecConflict(
                    {"task.prompt_template": self.prompt_template},
                    "no field of an example stands in it, so all would be asked alike",
                    allowed="a text with at least one field of the examples in braces, such as {question}",
                    next_step="name a field, in single braces",
                )
        if self.stop is not None and not all(self.stop):
            raise SpecConflict(
                {"task.stop": self.stop},
                "an empty text ends every reply before its first token",
                allowed="texts of one character or more",
                next_step="remove the empty text; an empty list leaves the model's own terminator alone",
            )
        if self.stop and self.thinking == "on":
            raise SpecConflict(
                {"task.stop": self.stop, "task.thinking": self.thinking},
                "a text that ends a reply may stand among its thoughts",
                allowed="texts that end a reply where the model is not told to think",
                next_step="remove task.stop, or set task.thinking=off",
            )
        return self


SOURCE_HELP = (
    "Source of the problems: a hub id such as {}, or a folder or file of Parquet or JSONL. A text that"
    " starts with '/', '~' or '.', or ends in .parquet, .jsonl or .json, is a path; a relative one is"
    " relative to the file that names it."
)


class TrainingRows(TaskSection):
    """Base of tasks with rows. A data set for evaluation alone refuses training, whatever the settings."""

    num_train: int | None = Field(
        default=None, ge=1, le=10**7, description="Number of training problems, from the first. none = all."
    )
    num_held_out: int | None = Field(
        default=None, ge=1, le=10**7, description="Held-out problems. none = all, or of unsplit data a tenth."
    )


class CodeTaskSection(SandboxSettings, TrainingRows):
    """Base of tasks that run model-written code."""


class EnvironmentSection(TaskSection):
    """Base of environments, whose attempts may have several turns: `[environment]`."""

    max_turns: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Most replies in an attempt; then it is scored. none = the environment's own limit.",
        json_schema_extra=expert("longer attempts cost more, and may earn more"),
    )
    max_attempt_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Most tokens sampled in all turns of an attempt; then it is scored as it is, and marked"
        " as truncated. none = only turns and replies are limited.",
        json_schema_extra=expert("the length of attempts may differ by orders of magnitude"),
    )
    max_observation_chars: int = Field(
        default=4000,
        ge=100,
        le=10**8,
        description="Most characters of a turn's or a tool's result that the model sees: beginning and end"
        " are kept, with a note of what is omitted.",
        json_schema_extra=expert("a tool may print a gigabyte"),
    )
    tool_limit_s: float = Field(
        default=60.0,
        gt=0.0,
        le=86_400.0,
        description="Seconds that a waiting tool may take. Then the attempt is unscored.",
        json_schema_extra=expert("a tool may wait forever"),
    )
    mcp_servers: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="MCP servers whose tools are added to the environment's own: URLs, or commands that are"
        " started for each attempt.",
        json_schema_extra=expert("many tools exist as MCP servers"),
    )

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if self.prompt_template is not None:
            raise SpecConflict(
                {"task.prompt_template": self.prompt_template},
                "an environment opens each attempt in its own words",
                allowed="prompt_template with tasks of one turn",
                next_step="remove it, or word the opening in the environment's reset",
            )
        return self


USER_TASK = "FILE.py:CLASS"
"""Stands for the name of a user's task where all tasks are listed."""
USER_ENVIRONMENT = "FILE.py:ENVIRONMENT"
"""Stands for that of a user's environment."""


class UserCodeSection(TrainingRows):
    """A user-defined class, in a file or announced by an installed package, with its own settings."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    name: str
    """'FILE.py:CLASS', or a name that an installed package announces as an entry point of strop.tasks."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        """Let the class check and complete its settings; unchanged if the class is not on this machine."""
        for key, value in self.__pydantic_extra__.items():
            check_free_table(("task", key), value)
        if not self.ref.is_here:
            missing = [key for key, value in self.__pydantic_extra__.items() if value == NULL_WORD]
            self.__pydantic_extra__.update(dict.fromkeys(missing))
            return self
        found = self.inspect()
        if shadowed := sorted(found.values.keys() & type(self).model_fields.keys()):
            raise SpecConflict(
                {f"task.{shadowed[0]}": getattr(self, shadowed[0])},
                f"{self.ref} has a setting of this name, which is one of strop's",
                allowed="settings of a class under names of their own",
                next_step=f"rename it; line {found.line} of {self.ref.place} says what it takes",
            )
        if not found.mistakes:
            self.__pydantic_extra__.update(found.values)
            return self
        name, why = found.mistakes[0]
        names = ", ".join(found.schema.get("properties", {}))
        raise SpecConflict(
            {f"task.{name}": self.__pydantic_extra__.get(name.partition(".")[0])},
            why or f"{self.ref} has no such setting",
            allowed=f"its settings {names}" if names else "no settings: its __init__ takes none",
            next_step=f"correct it; line {found.line} of {self.ref.place} says what it takes",
        )

    @property
    def ref(self) -> CodeRef:
        """The class's location."""
        found = find_task(self.name)
        assert found is not None
        return found

    @property
    def user_code(self) -> list[CodeRef]:
        """The class's file, unless a package announces it."""
        return [*([self.ref] if self.ref.is_file else []), *super().user_code]

    def inspect(self) -> InspectedTask:
        """Inspect the class and complete these settings.

        Raises: ConfigError like `inspect_task`.
        """
        given = dict(self.__pydantic_extra__)
        if NULL_WORD in given.values():
            properties = inspect_task(self.ref, {}).schema.get("properties", {})
            given = {
                key: None if value == NULL_WORD and is_nullable(properties.get(key, {})) else value
                for key, value in given.items()
            }
        return inspect_task(self.ref, given)


class JudgedByUser(TaskSection):
    """Base of tasks whose replies the user's code judges."""

    judge_limit_s: float = Field(
        default=10.0,
        gt=0.0,
        le=3600.0,
        description="Seconds that the user's code may take to judge a reply. Then its process is killed, and"
        " a second attempt has four times as long.",
        json_schema_extra=expert("user-defined verifiers may be slow"),
    )


class UserTaskSpec(UserCodeSection, JudgedByUser):
    """A class of the user's, in a file or announced by an installed package, with settings of its own."""

    # The second base has the usual one.
    model_config = ConfigDict(extra="allow")


class UserEnvironmentSpec(UserCodeSection, SandboxSettings, EnvironmentSection):
    """A user-defined environment: a class with `reset`, and `step` or tools."""

    # The second base has the usual one.
    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _check_sandbox(self) -> Self:
        given = {f"task.{name}": getattr(self, name) for name in SandboxSettings.model_fields}
        usual = [type(self).model_fields[name].default for name in SandboxSettings.model_fields]
        if [*given.values()] != usual and self.ref.is_here and not self.inspect().has_sandbox:
            raise SpecConflict(
                given,
                f"attempts at {self.ref} have no sandbox",
                allowed="these settings with a strop.environments.Workspace",
                next_step="remove them, or derive the class from strop.environments.Workspace",
            )
        return self


USER_SECTIONS: Mapping[str, type[UserCodeSection]] = MappingProxyType(
    {USER_TASK: UserTaskSpec, USER_ENVIRONMENT: UserEnvironmentSpec}
)
"""The sections of classes of the user's, by the word that stands for their names."""


def is_nullable(schema: dict[str, Any]) -> bool:
    """Whether a JSON Schema allows null."""
    return any(one.get("type") == "null" for one in schema.get("anyOf", ()))


def find_section(name: str) -> type[TaskSection] | None:
    """Return the section of a task by its name, also for user-defined tasks; None for an unknown task.

    Raises: ConfigError like `find_task`.
    """
    if (ref := find_task(name)) is not None:
        # Where the class is not, its settings stand as they are, whatever it is.
        is_environment = ref.is_here and inspect_task(ref, {}).is_environment
        return UserEnvironmentSpec if is_environment else UserTaskSpec
    return import_section(name) if name in built_in_tasks() else None


def _read(value: Any) -> Any:
    """Return the section for a table, chosen by its `name`."""
    if not isinstance(value, dict):
        return value
    if "name" not in value:
        raise PydanticKnownError("union_tag_not_found", {"discriminator": "name"})
    name = value["name"]
    kind = find_section(name) if isinstance(name, str) else None
    if kind is None:
        expected = ", ".join(map(repr, built_in_tasks()))
        raise PydanticKnownError(
            "union_tag_invalid", {"discriminator": "'name'", "tag": str(name), "expected_tags": expected}
        )
    return kind.model_validate(value)


TaskSpec = Annotated[SerializeAsAny[TaskSection], BeforeValidator(_read)]
"""Any task section; its `name` says which."""
