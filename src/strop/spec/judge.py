"""The settings of a model that judges replies: here, because a run starts, places and prices such a judge."""

from __future__ import annotations

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from strop.spec.base import SpecConflict, Unhashed, expert
from strop.spec.parts import plain_sections
from strop.spec.task import TaskSection

ROLE = "role"
"""Stands for the address of a judge that the run starts itself."""
MAX_ANSWER_TOKENS = 512


def is_this_machine(url: str) -> bool:
    """Whether an address is on this machine."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


class JudgeSettings(TaskSection):
    """Base of tasks whose replies a model may judge; it does where `judge_url` is set."""

    judge_url: Unhashed[str] = Field(
        default="",
        pattern=r"^(|role|https?://[^\s@?#]+)$",
        description="Address of the OpenAI endpoint that the reward 'judge' asks, such as"
        " http://127.0.0.1:8000/v1. 'role' = the run starts task.judge_model itself, in a separate process."
        " Empty = no model judges.",
        json_schema_extra=expert("a judge has an address"),
    )
    judge_model: str = Field(
        default="",
        max_length=300,
        description="Model name in requests to the judge.",
        json_schema_extra=expert("servers select a model by name"),
    )
    judge_revision: str = Field(
        default="",
        max_length=300,
        description="Revision of the judge's weights: a commit, a digest or a date. Part of the task's"
        " version. For a 'role', the beginning of the model's digest.",
        json_schema_extra=expert("verdicts of two judges are not comparable"),
    )
    rubric: Unhashed[str] = Field(
        default="correctness",
        min_length=1,
        description="Criterion of the judge: 'correctness' (compares with the answer), or a text file"
        " (.txt, .md, or marked as a path) with the placeholders {{prompt}} and {{reply}}, and"
        " {{answer}} or any column of the rows.",
        json_schema_extra=expert("the criterion depends on the task"),
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
        description="Most concurrent questions to the judge.",
        json_schema_extra=expert("servers limit concurrent calls"),
    )
    compares: bool = Field(
        default=False,
        description="Whether the judge grades all replies to a prompt at once, beside each other, instead of"
        " one by one. Equal replies get equal scores.",
        json_schema_extra=expert("judges tell better from worse more surely than they grade"),
    )
    can_judge_itself: Unhashed[bool] = Field(
        default=False,
        description="Whether the judge may be the trained or evaluated model itself.",
        json_schema_extra=expert("a model that judges itself drifts, so this is only for studies of that"),
    )

    @model_validator(mode="after")
    def _check_judge(self) -> Self:
        if self.judge_url and not (self.judge_model and self.judge_revision):
            raise SpecConflict(
                {f"task.{name}": getattr(self, name) for name in ("judge_model", "judge_revision")},
                "nobody would know which judge it was",
                allowed="both with task.judge_url",
                next_step="name the model as its server does, and a revision that you will recognise it by",
            )
        if self.judge_key_env is None:
            return self
        if not self.judge_url.startswith("https") and not is_this_machine(self.judge_url):
            raise SpecConflict(
                {"task.judge_url": self.judge_url, "task.judge_key_env": self.judge_key_env},
                "the key would cross the network in plain text, or serves nothing",
                allowed="https for a judge on another machine, http on this one; 'role' has a key of its own",
                next_step="write the address with https, or remove task.judge_key_env",
            )
        return self


def judge_sections(task: TaskSection) -> list[JudgeSettings]:
    """Return the sections with a judge, of a task or of its parts."""
    return [one for one in plain_sections(task) if isinstance(one, JudgeSettings) and one.judge_url]


def role_judges(task: TaskSection) -> list[JudgeSettings]:
    """Return the sections of the judges that a run starts itself."""
    return [judge for judge in judge_sections(task) if judge.judge_url == ROLE]
