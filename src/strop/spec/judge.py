"""The section of the task llm-judge: here, because a run starts, places and prices such a judge."""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from strop.spec.base import SpecConflict, Unhashed, expert
from strop.spec.parts import plain_sections
from strop.spec.task import SOURCE_HELP, TaskSection, TrainingRows

ROLE = "role"
"""Stands for the address of a judge that the run starts itself."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_this_machine(url: str) -> bool:
    """Whether an address is on this machine."""
    return urlsplit(url).hostname in _LOOPBACK


MAX_ANSWER_TOKENS = 512
"""Of a judge, at most."""


class LlmJudgeSpec(TrainingRows):
    """Open questions, in the columns `prompt` and, if known, `gold`; a model behind HTTP judges replies."""

    name: Literal["llm-judge"]
    source: Unhashed[str | None] = Field(
        default=None,
        min_length=1,
        description=SOURCE_HELP.format("some/prompts") + " none = no data.",
    )
    rubric: Unhashed[str] = Field(
        default="quality",
        min_length=1,
        description="Criterion of the judge: 'quality', 'correctness' (compares with the column gold), or a"
        " text file (.txt, .md, or marked as a path) with the placeholders {{prompt}} and {{reply}}, and"
        " {{gold}} or any other column of the rows.",
        json_schema_extra=expert("the criterion depends on the task"),
    )
    judge_url: Unhashed[str] = Field(
        pattern=r"^(role|https?://[^\s@?#]+)$",
        description="Address of the judge's OpenAI endpoint, such as http://127.0.0.1:8000/v1. 'role' = the"
        " run starts task.judge_model itself, in a separate process.",
        json_schema_extra=expert("a judge has an address"),
    )
    judge_model: str = Field(
        min_length=1,
        max_length=300,
        description="Model name in requests to the judge.",
        json_schema_extra=expert("servers select a model by name"),
    )
    judge_revision: str = Field(
        min_length=1,
        max_length=300,
        description="Revision of the judge's weights: a commit, a digest or a date. Part of the task's"
        " version. For a 'role', the beginning of the model's digest.",
        json_schema_extra=expert("verdicts of two judges are not comparable"),
    )
    judge_engine: Unhashed[Literal["native", "vllm"]] = Field(
        default="native",
        description="Engine of a judge that is a 'role'.",
        json_schema_extra=expert("a judge that the run starts can use either engine"),
    )
    judge_key_env: Unhashed[str | None] = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable with the judge's key, which is sent as a bearer token. none = no"
        " key.",
        json_schema_extra=expert("a served judge may require a key"),
    )
    judge_concurrency: Unhashed[int] = Field(
        default=8,
        ge=1,
        le=256,
        description="Most concurrent calls.",
        json_schema_extra=expert("servers limit concurrent calls"),
    )
    max_judge_calls: Unhashed[int] = Field(
        default=100_000,
        ge=1,
        le=10**9,
        description="Most calls per start of a run, evaluation or audit; further replies are unscored. Cached"
        " judgements do not count.",
        json_schema_extra=expert("calls of a served judge cost money"),
    )
    compares: bool = Field(
        default=False,
        description="Whether the judge grades all replies to a prompt at once, beside each other, instead of"
        " one by one. Equal replies get equal scores.",
        json_schema_extra=expert("judges tell better from worse more surely than they grade"),
    )
    pass_score: float = Field(
        default=0.5,
        gt=0.0,
        le=1.0,
        description="Lowest score of a reply that counts as solved.",
        json_schema_extra=expert("the threshold for a right answer is a judgement"),
    )
    can_judge_itself: Unhashed[bool] = Field(
        default=False,
        description="Whether the judge may be the trained or evaluated model itself.",
        json_schema_extra=expert("a model that judges itself drifts, so this is only for studies of that"),
    )

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        given = {} if self.judge_engine == "native" else {"task.judge_engine": self.judge_engine}
        other = {} if self.judge_key_env is None else {"task.judge_key_env": self.judge_key_env}
        wrong = other if self.judge_url == ROLE else given
        if wrong:
            raise SpecConflict(
                {"task.judge_url": self.judge_url, **wrong},
                "the run makes the key of a judge that it starts, and chooses the engine of no other",
                allowed="judge_engine with 'role', judge_key_env with an address",
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


def judge_sections(task: TaskSection) -> list[LlmJudgeSpec]:
    """Return the sections of all judges that a task asks, itself or in its parts."""
    return [section for section in plain_sections(task) if isinstance(section, LlmJudgeSpec)]


def role_judges(task: TaskSection) -> list[LlmJudgeSpec]:
    """Return the sections of the judges that a run starts itself."""
    return [judge for judge in judge_sections(task) if judge.judge_url == ROLE]
