"""The sections of tasks on the user's own data: rows, demonstrations, prompts for a judge, the user's class.

The settings of a class are those that it takes, and it checks them itself.
"""

from __future__ import annotations

from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, JsonValue, field_validator, model_validator

from strop.spec.base import SpecConflict, check_free_table, expert
from strop.spec.builtin_tasks import CodeTaskSection
from strop.spec.display import NULL_WORD
from strop.spec.task_base import SOURCE_HELP, TrainingRows
from strop.spec.template import refuse_malformed
from strop.user_code import CodeRef, InspectedTask, find_task, inspect_task, is_code

BUILT_IN_REWARDS = ("exact", "contains", "math", "json-schema", "python-tests")


class RowsSpec(CodeTaskSection, TrainingRows):
    """The rows of a file, with a reward function of the user's own or a built-in one."""

    name: Literal["rows"] = Field(description="Which task: the user's own rows and reward.")
    source: str = Field(
        min_length=1,
        description=SOURCE_HELP.format("openai/gsm8k").replace("Parquet or JSONL", "Parquet, JSONL or CSV")
        + " An s3:// URI is fetched. Files named train* and test* or validation* are the splits; one row in"
        " ten of anything else is held out.",
    )
    prompt: str = Field(
        min_length=1,
        description="What is asked: a column of texts or of chat messages, or a template of columns such as"
        " 'Solve: {question}'.",
    )
    answer: str | None = Field(
        default=None,
        min_length=1,
        description="Column of the right answer. none = no answer is known; the reward function needs none.",
        json_schema_extra=expert("data sets name their answer differently"),
    )
    reward: tuple[str, ...] = Field(
        strict=False,
        min_length=1,
        description="How a reply is judged: a function such as 'reward.py:score', called with reply, answer"
        " and the row's columns by name, or one written for TRL, or a built-in one: "
        + ", ".join(BUILT_IN_REWARDS)
        + ". A list of several is added up.",
    )
    reward_weights: tuple[float, ...] = Field(
        default=(),
        strict=False,
        description="One factor for each reward. Empty = all 1.",
        json_schema_extra=expert("several rewards are added up by weight"),
    )
    max_reward: float = Field(
        default=1.0,
        gt=0.0,
        le=1e6,
        description="What a right reply earns from all rewards together. A score above it is an error of the"
        " reward's, and nothing is trained on it.",
        json_schema_extra=expert("rewards of one's own may have another scale"),
    )
    min_reward: float = Field(
        default=0.0,
        ge=-1e6,
        le=0.0,
        description="What the worst reply earns from all rewards together: below 0 where one takes marks off."
        " A score below it is an error of the reward's, and nothing is trained on it.",
        json_schema_extra=expert("rewards of one's own may be negative"),
    )
    reward_limit_s: float = Field(
        default=10.0,
        gt=0.0,
        le=3600.0,
        description="Seconds that the user's functions may take for a reply. Then their process is killed,"
        " and a second attempt has four times as long.",
        json_schema_extra=expert("rewards of one's own may be slow"),
    )
    gold: str | None = Field(
        default=None,
        min_length=1,
        description="How a right reply looks, for the self-test before training: a template of columns, for"
        " example '#### {answer}'. none = the answer, as the first reward reads it.",
        json_schema_extra=expert("the audit and the gate try the verifier with a right reply"),
    )

    @field_validator("reward", mode="before")
    @classmethod
    def _read_one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_wording(self) -> Self:
        for key, template in (("task.prompt", self.prompt), ("task.gold", self.gold)):
            refuse_malformed(key, template or "")
        if self.prompt_template is not None:
            raise SpecConflict(
                {"task.prompt_template": self.prompt_template, "task.prompt": self.prompt},
                "both word the question",
                allowed="task.prompt, which takes a template of columns",
                next_step="move the template into task.prompt",
            )
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        unknown = [name for name in self.reward if name not in BUILT_IN_REWARDS and not is_code(name)]
        if unknown:
            raise SpecConflict(
                {"task.reward": unknown[0]},
                "there is no such reward",
                allowed=f"FILE.py:FUNCTION, {', '.join(BUILT_IN_REWARDS)}",
                next_step="name the file and its function, for example reward.py:score",
            )
        if self.answer is None and any(name in BUILT_IN_REWARDS for name in self.reward):
            raise SpecConflict(
                {"task.reward": list(self.reward), "task.answer": self.answer},
                "a built-in reward compares with an answer, and no column has one",
                allowed="task.answer with the column of the right answers",
                next_step="name it, or write a function that needs none",
            )
        if len(set(self.reward)) < len(self.reward):
            raise SpecConflict(
                {"task.reward": list(self.reward)},
                "one reward stands twice",
                allowed="each once",
                next_step="remove one, and give the other a weight in task.reward_weights",
            )
        if self.reward_weights and len(self.reward_weights) != len(self.reward):
            raise SpecConflict(
                {"task.reward_weights": list(self.reward_weights), "task.reward": list(self.reward)},
                f"{len(self.reward_weights)} weights for {len(self.reward)} rewards",
                allowed="one weight for each reward, in their order",
                next_step="correct the weights, or leave them out",
            )
        return self


class SftJsonlSpec(TrainingRows):
    """Prompts with demonstrations and gold answers, in the rows that `sft.source` takes."""

    name: Literal["sft-jsonl"] = Field(description="Which task: demonstrations whose answers are known.")
    source: str = Field(
        min_length=1,
        description="Where the rows are: a file of JSONL or Parquet, or a folder with train* and test* files."
        " Rows without the key gold are left out and counted.",
    )
    subset: str | None = Field(
        default=None,
        min_length=1,
        description="Use only the rows whose key `source` is this text; the others are counted."
        " none = all rows.",
        json_schema_extra=expert("a file may hold several sources"),
    )
    train_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="What of a row is imitated where the row does not say, as in sft.train_on.",
        json_schema_extra=expert("chat data differ in which turns are worth imitating"),
    )
    answer: Literal["number", "formula", "text"] = Field(
        default="number",
        description="How a reply is compared with gold. 'number': the number that answers, as gsm8k finds it;"
        " 'formula': the final answer, by spelling and value, as math with strictness 'standard'; 'text': the"
        " last line that is not empty, but for case and white space.",
        json_schema_extra=expert("data sets name their answer differently"),
    )

    @model_validator(mode="after")
    def _check_wording(self) -> Self:
        if self.prompt_template is not None:
            raise SpecConflict(
                {"task.prompt_template": self.prompt_template},
                "a row is a conversation, and asked as it stands",
                allowed="the wording of the rows",
                next_step="write the wording into the rows, which sft.source imitates too",
            )
        return self


ROLE = "role"
"""Stands for the address of a judge that the run starts itself."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_this_machine(url: str) -> bool:
    """Whether an address leads to a server on this machine."""
    return urlsplit(url).hostname in _LOOPBACK


MAX_ANSWER_TOKENS = 512
"""Of a judge, at most."""


class LlmJudgeSpec(TrainingRows):
    """Open questions, in the columns `prompt` and, if known, `gold`; a model behind HTTP judges replies."""

    name: Literal["llm-judge"] = Field(description="Which task: questions whose replies a model judges.")
    source: str | None = Field(
        default=None,
        min_length=1,
        description=SOURCE_HELP.format("some/prompts") + " none = only where it judges a part of a blend.",
    )
    rubric: str = Field(
        default="quality",
        min_length=1,
        description="What is judged: 'quality', 'correctness' (compares with the column gold), or a text file"
        " (.txt, .md, or marked as a path) with the places {{prompt}} and {{reply}}, and {{gold}} or any"
        " other column of the rows.",
        json_schema_extra=expert("what a judge looks at is a text of one's own"),
    )
    judge_url: str = Field(
        pattern=r"^(role|https?://[^\s@?#]+)$",
        description="Where the judge answers the OpenAI protocol, such as http://127.0.0.1:8000/v1. 'role' ="
        " the run starts task.judge_model itself, in a process of its own.",
        json_schema_extra=expert("a judge is served somewhere"),
    )
    judge_model: str = Field(
        min_length=1,
        max_length=300,
        description="Name that the judge is asked for by.",
        json_schema_extra=expert("a judge is asked for by name"),
    )
    judge_revision: str = Field(
        min_length=1,
        max_length=300,
        description="Which weights that is: a commit, a digest or a date. Part of the task's version. Of a"
        " 'role', the beginning of the model's digest.",
        json_schema_extra=expert("verdicts of two judges are not comparable"),
    )
    judge_engine: Literal["native", "vllm"] = Field(
        default="native",
        description="What generates for a judge that is a 'role'.",
        json_schema_extra=expert("a judge that the run starts is served by one of two engines"),
    )
    judge_devices: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9,/-]+$",
        description="GPUs that a judge which is a 'role' has for itself, as CUDA_VISIBLE_DEVICES names them."
        " none = those that the run's engine sees.",
        json_schema_extra=expert("a judge that the run starts needs devices of its own"),
    )
    judge_key_env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable that holds the judge's key, which is sent as a bearer token."
        " none = no key.",
        json_schema_extra=expert("a served judge may ask for a key"),
    )
    judge_concurrency: int = Field(
        default=8,
        ge=1,
        le=256,
        description="Calls under way at once, at most.",
        json_schema_extra=expert("servers limit calls at once"),
    )
    judge_calls_per_s: float | None = Field(
        default=None,
        gt=0.0,
        le=1e4,
        description="Calls begun per second, at most. none = as fast as it goes.",
        json_schema_extra=expert("servers limit calls a second"),
    )
    max_judge_calls: int = Field(
        default=100_000,
        ge=1,
        le=10**9,
        description="Calls that one start of a run, evaluation or audit may make; replies beyond it have no"
        " score. Cached judgements cost none.",
        json_schema_extra=expert("calls of a served judge cost money"),
    )
    pass_score: float = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="A reply of this score or more counts as solved.",
        json_schema_extra=expert("what counts as right is a threshold on the judge's score"),
    )
    calibration: str | None = Field(
        default=None,
        min_length=1,
        description="File of at least 50 replies that people judged, with the columns prompt, reply, label"
        " (true or false) and, if known, gold. The gate refuses a judge whose Cohen's kappa with them is"
        " below 0.6. none = the judge is not compared with people.",
        json_schema_extra=expert("a judge is compared with people before it is trusted"),
    )
    can_judge_itself: bool = Field(
        default=False,
        description="Whether the judge may be the model that is trained or evaluated.",
        json_schema_extra=expert("a model that judges itself drifts, and is only meant in a study of that"),
    )

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        own = {
            "task.judge_engine": None if self.judge_engine == "native" else self.judge_engine,
            "task.judge_devices": self.judge_devices,
        }
        given = {name: value for name, value in own.items() if value is not None}
        other = {} if self.judge_key_env is None else {"task.judge_key_env": self.judge_key_env}
        wrong = other if self.judge_url == ROLE else given
        if wrong:
            raise SpecConflict(
                {"task.judge_url": self.judge_url, **wrong},
                "the run makes the key of a judge that it starts, and chooses the engine of no other",
                allowed="judge_engine and judge_devices with 'role', judge_key_env with an address",
                next_step=f"remove {', '.join(wrong)}",
            )
        return self

    @model_validator(mode="after")
    def _check_key_is_safe(self) -> Self:
        is_plain = urlsplit(self.judge_url).scheme == "http"
        if self.judge_key_env is not None and is_plain and not is_this_machine(self.judge_url):
            raise SpecConflict(
                {"task.judge_url": self.judge_url, "task.judge_key_env": self.judge_key_env},
                "the key would cross the network in plain text",
                allowed="https for a judge on another machine, http on this one",
                next_step="write the address with https",
            )
        return self


BUILT_IN, USER_TASK = "built-in", "FILE.py:CLASS"
"""The two kinds of task; the second stands for its name where all tasks are listed."""


class UserTaskSpec(TrainingRows):
    """A class of the user's, in a file or announced by an installed package, with settings of its own."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, JsonValue]

    name: str = Field(
        description="Which task: 'FILE.py:CLASS', or a name that an installed package announces as an entry"
        " point of the group strop.tasks."
    )
    judge_limit_s: float = Field(
        default=10.0,
        gt=0.0,
        le=3600.0,
        description="Seconds that judging a reply may take. Then its process is killed, and a second attempt"
        " has four times as long.",
        json_schema_extra=expert("verifiers of one's own may be slow"),
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        """Have the class check and complete its settings; they stand as they are where it is not here."""
        for key, value in self.__pydantic_extra__.items():
            check_free_table(("task", key), value)
        if not self.ref.is_here:
            missing = [key for key, value in self.__pydantic_extra__.items() if value == NULL_WORD]
            self.__pydantic_extra__.update(dict.fromkeys(missing))
            return self
        found = self.inspect()
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
        """Where the class is."""
        found = find_task(self.name)
        assert found is not None
        return found

    def inspect(self) -> InspectedTask:
        """Return what the class is and how it completes these settings.

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


def is_nullable(schema: dict[str, Any]) -> bool:
    """Whether a setting of JSON Schema may be without a value."""
    return any(one.get("type") == "null" for one in schema.get("anyOf", ()))


def tell_apart(value: Any) -> str:
    """Return which kind of task a section is, read or unread."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return USER_TASK if isinstance(name, str) and find_task(name) is not None else BUILT_IN
