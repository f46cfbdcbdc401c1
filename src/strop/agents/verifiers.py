"""Environments of the package verifiers, run by the package in a separate process and environment.

Its agents ask the model through the face of a rollout, which records their calls as exact ids.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import Field
from typing_extensions import override

from strop.agents.face import lease_face
from strop.agents.task import Conducted
from strop.environments.guests.guest import Guest, guest_of
from strop.environments.recording import Recorder
from strop.errors import DataError
from strop.io.notices import tell
from strop.rollout import Example, FailureOwner, Message, Outcome, Split, make_example
from strop.spec.base import FreeTable, Unhashed, expert
from strop.spec.task import TaskSection
from strop.store.python_environment import PythonEnvironment, ensure_environment
from strop.tasks.failures import AttemptFailed
from strop.tasks.judging import Judge
from strop.tasks.prompt import pose
from strop.tasks.task import TURN, Task, TaskLimits, fit_limits, hash_version, within_bounds
from strop.tasks.user.rewards import FULL_MARKS_SLACK
from strop.user_code import hash_sources

RELEASES = {"v1": "0.4.0", "v0": "0.3.1"}
"""The release of verifiers that runs an environment of each form."""
_LIMITS = TaskLimits(max_reply_tokens=1024, max_goldless_frac=1.0)
_GRACE_S = 60.0
"""Time for the package to score an episode whose agent was stopped by its limit."""
_BUDGET_STATUSES = frozenset({400, 410})
"""The face's answers to calls beyond an attempt's limits."""
_INFRA_ERRORS = frozenset({"SandboxError", "InterceptionError", "TunnelError"})


def environment_of(packages: Sequence[str] = (), form: str = "v1") -> PythonEnvironment:
    """Return the environment of verifiers with further packages."""
    name = f"verifiers-{RELEASES[form]}"
    if packages:
        name += f"-{hashlib.sha256(json.dumps([*packages]).encode()).hexdigest()[:8]}"
    steps = ((f"verifiers=={RELEASES[form]}", *packages),)
    return PythonEnvironment(name=name, folder="guests", pip_steps=steps)


class VerifiersSpec(TaskSection):
    """An environment of the package verifiers."""

    name: Literal["verifiers"] = "verifiers"
    taskset: str = Field(
        min_length=1,
        max_length=200,
        description="The id of a taskset of verifiers: a module that exports it, in task.folder, in one of"
        " task.packages, or of verifiers itself.",
        json_schema_extra=expert("verifiers has environments of many authors"),
    )
    form: Literal["v1", "v0"] = Field(
        default="v1",
        description="The verifiers release that the taskset is written for: from 0.4 on (v1), or older, with"
        " load_environment in its module (v0; task.config has its parameters).",
        json_schema_extra=expert("most published environments are of the older form"),
    )
    packages: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Packages that pip installs with verifiers, in a separate environment: names with"
        " versions, or paths.",
        json_schema_extra=expert("most tasksets are packages"),
    )
    folder: Unhashed[str | None] = Field(
        default=None,
        min_length=1,
        description="A folder from which the taskset's module is imported. none = it is installed.",
        json_schema_extra=expert("a taskset may be a file"),
    )
    config: FreeTable = Field(
        default={},
        description="Further settings of verifiers' environment, passed on unchanged.",
        json_schema_extra=expert("each environment has other settings"),
    )
    max_reward: float = Field(
        default=1.0,
        gt=0.0,
        le=10**6,
        description="Reward of a correct attempt: the weighted sum of the taskset's rewards. The worst is as"
        " far below 0.",
        json_schema_extra=expert("each taskset has other marks"),
    )
    num_train: int = Field(
        default=1000, ge=1, le=10**6, description="Most tasks trained on, behind the held-out ones."
    )
    num_held_out: int = Field(default=100, ge=1, le=10**6, description="Tasks held out, from the first.")


class VerifiersTask(Task):
    """The tasks of a taskset. Reward: the weighted sum of its rewards, averaged over several agents."""

    name = "verifiers"

    def __init__(self, spec: VerifiersSpec) -> None:
        self.spec = spec
        limits = replace(_LIMITS, max_reward=spec.max_reward, min_reward=-spec.max_reward)
        self.limits = fit_limits(limits, spec)
        self.variant, self.world = spec.taskset, self

    @cached_property
    def version(self) -> str:
        """Hash over settings, tasks, the release of verifiers, and the taskset's source if it is a file."""
        digest = json.dumps([[example.example_id for example in self.examples(split)] for split in Split])
        module = self.spec.taskset.replace("-", "_").lower()
        source = Path(self.spec.folder or "/dev/null").expanduser() / f"{module}.py"
        digest += hash_sources(source) if source.is_file() else ""
        release = f"verifiers-{RELEASES[self.spec.form]}-1"
        return hash_version(self.name, "", release, self.limits, self.spec, digest)

    def guest(self) -> Guest:
        """Return the process that runs the taskset. Raises: ConfigError if there is no such environment."""
        spec = self.spec
        settings = {
            "taskset": spec.taskset,
            "form": spec.form,
            "folder": None if spec.folder is None else str(Path(spec.folder).expanduser().absolute()),
            "config": spec.config,
            "limit_s": spec.agent_limit_s,
        }
        python = ensure_environment(environment_of(spec.packages, spec.form), say=tell)
        return guest_of(python, settings)

    @override
    def examples(self, split: Split) -> Sequence[Example]:
        number = self.spec.num_held_out
        return self._all[:number] if split is Split.HELD_OUT else self._all[number:]

    @cached_property
    def _all(self) -> tuple[Example, ...]:
        number = self.spec.num_held_out
        rows = self.guest().list_tasks(number + self.spec.num_train)
        if len(rows) <= number:
            raise DataError(
                f"taskset {self.spec.taskset} has {len(rows)} tasks, and {number} are held out",
                allowed=f"1 to {len(rows) - 1} held-out tasks",
                next_step="set task.num_held_out",
            )
        return tuple(make_example(self.name, {"task": row}, None) for row in rows)

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return the first messages of a task, as far as they are known before an episode."""
        row = example.fields["task"]
        system, prompt = row.get("system_prompt"), row.get("prompt") or ()
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        turns = [{"role": "system", "content": system}, *turns] if system else turns
        turns = turns or [{"role": "user", "content": "(the environment opens the conversation)"}]
        messages = [Message(role=turn["role"], content=str(turn["content"])) for turn in turns]
        return pose(messages, self.spec.thinking)

    @override
    def problem_of(self, example: Example) -> str:
        return example.example_id

    @override
    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return ()

    async def verify(self, example: Example, text: str) -> Outcome:
        """Play an episode without a model; `TURN` separates the replies in the text."""
        episode = await self.guest().play("replay", example.fields["task"], text.split(TURN))
        return to_outcome(episode, self.limits)

    def make_environment(self, judge: Judge | None = None) -> VerifiersEnvironment:
        """Make one attempt. The taskset judges it, not `judge`."""
        return VerifiersEnvironment(self)

    @override
    def attempt_tokens(self, limits: TaskLimits) -> int:
        return self.spec.agent_tokens


class VerifiersEnvironment(Conducted):
    """One episode."""

    def __init__(self, task: VerifiersTask) -> None:
        self._task = task
        self._example: Example | None = None
        self._outcome: Outcome | None = None
        self.max_attempt_tokens = task.spec.agent_tokens

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Pose the task; the package does not use the seed."""
        self._example, self._outcome = example, None
        return self._task.render(example)

    async def act(self, recorder: Recorder) -> None:
        """Let the package play the episode. Raises: AttemptFailed."""
        assert self._example is not None
        task = self._task
        guest = await asyncio.to_thread(task.guest)
        limit_s = task.spec.agent_limit_s + _GRACE_S
        async with lease_face() as face, face.open(recorder) as (base_url, key):
            try:
                async with asyncio.timeout(limit_s):
                    data = self._example.fields["task"]
                    episode = await guest.play("run", data, base_url, key)
            except TimeoutError as error:
                detail = f"the episode was not over after {limit_s:g} s"
                raise AttemptFailed(FailureOwner.TASK, "episode_timeout", detail) from error
        self._outcome = to_outcome(episode, task.limits)

    async def score(self) -> Outcome:
        """Return the package's outcome of the episode."""
        return self._outcome or Outcome.lost(FailureOwner.TASK, "no_episode", "verifiers scored no episode")


def to_outcome(episode: Mapping[str, Any], limits: TaskLimits) -> Outcome:
    """Return an episode's outcome. An error of the package or of an agent leaves it without a score.

    Calls beyond the attempt's limits are no such error; an episode without rewards then has no score.
    """
    traces = episode["traces"]
    errors = [*episode["errors"], *(error for trace in traces for error in trace["errors"])]
    bad = [error for error in errors if error["status"] not in _BUDGET_STATUSES]
    if bad:
        error = bad[-1]
        owner = FailureOwner.INFRA if error["type"] in _INFRA_ERRORS else FailureOwner.TASK
        return Outcome.lost(owner, error["type"], error["message"])
    parts: dict[str, float | None] = {}
    for name in {name for trace in traces for name in trace["rewards"]}:
        values = [trace["rewards"][name] for trace in traces if name in trace["rewards"]]
        parts[name] = None if None in values else fmean(values)
    if not parts and errors:
        return Outcome(parts={"reward": None}, truncated=True)
    if not parts:
        return Outcome.lost(FailureOwner.TASK, "no_reward", "the taskset gave no reward")
    outcome = Outcome(
        parts=dict(sorted(parts.items())),
        metrics={k: float(v) for trace in traces for k, v in trace["metrics"].items() if v is not None},
        truncated=any(trace["is_truncated"] for trace in traces),
    )
    if (reward := outcome.reward) is not None:
        outcome = replace(outcome, is_correct=reward >= limits.max_reward - FULL_MARKS_SLACK)
    return within_bounds(outcome, limits)
