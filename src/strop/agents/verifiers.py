"""Environments of the package verifiers, run by it in an environment and a process of its own (`guests`).

Its agents ask the model over the face of a rollout: what they see and say is recorded as exact ids.
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

from strop.agents.face import lease_face
from strop.agents.task import Conducted
from strop.environments.guests.guest import Guest, guest_of
from strop.environments.recording import Recorder
from strop.errors import ConfigError, DataError
from strop.io.notices import tell
from strop.rollout import Example, FailureOwner, Message, Outcome, Split, make_example
from strop.spec.base import FreeTable, expert
from strop.spec.task import TaskSection
from strop.store.python_environment import PythonEnvironment, ensure_environment
from strop.tasks.contract import TURN, TaskLimits, within_bounds
from strop.tasks.failures import AttemptFailed
from strop.tasks.judging import Judge
from strop.tasks.prompt import pose_messages
from strop.tasks.registry import built_in
from strop.tasks.user.own_task import require_whole
from strop.tasks.version import fit_limits, hash_version
from strop.user_code import hash_sources

RELEASES = {"v1": "0.4.0", "v0": "0.3.1"}
"""The release of verifiers that runs an environment, by the form that it is written in."""
_GRACE_S = 60.0
"""What the package has to score an episode whose agent is out of time."""
_FULL_MARKS_SLACK = 1e-9
_OF_THE_BUDGET = frozenset({400, 410})
"""Answers of the face to calls beyond what an attempt may have."""
_OF_THE_MACHINE = frozenset({"SandboxError", "InterceptionError", "TunnelError"})


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
        description="What the taskset is written for: verifiers from 0.4 on (v1), or before, when a module"
        " had load_environment (v0; task.config is what that takes).",
        json_schema_extra=expert("most published environments are of the older form"),
    )
    packages: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="What pip installs beside verifiers, in an environment of their own: names with versions,"
        " or paths.",
        json_schema_extra=expert("most tasksets are packages"),
    )
    folder: str | None = Field(
        default=None,
        min_length=1,
        description="A folder from which the taskset's module is imported as it stands. none = it is"
        " installed.",
        json_schema_extra=expert("a taskset may be a file"),
    )
    agent_program: str = Field(
        default="chat",
        min_length=1,
        max_length=100,
        description="The harness of verifiers that its agents run, such as 'null' or 'bash', on this machine."
        " chat = one message, one reply, without a process.",
        json_schema_extra=expert("agents may have tools and programs"),
    )
    config: FreeTable = Field(
        default={},
        description="Further settings of verifiers' environment, handed on as they stand.",
        json_schema_extra=expert("environments have settings of their own"),
    )
    renderer: str | None = Field(
        default=None,
        min_length=1,
        description="A model's name or folder, whose prompts verifiers then renders by itself and sends as"
        " token ids. none = strop renders them.",
        json_schema_extra=expert("a renderer of verifiers' own may be what a model was trained with"),
    )
    max_reward: float = Field(
        default=1.0,
        gt=0.0,
        le=10**6,
        description="What a right attempt earns, all rewards of the taskset together with their weights.",
        json_schema_extra=expert("tasksets have marks of their own"),
    )
    min_reward: float = Field(
        default=0.0,
        ge=-(10**6),
        le=0.0,
        description="What the worst attempt earns.",
        json_schema_extra=expert("some tasksets have negative marks"),
    )
    num_train: int | None = Field(
        default=None, ge=1, le=10**6, description="Tasks trained on, behind the held-out ones. none = all."
    )
    num_held_out: int = Field(default=100, ge=1, le=10**6, description="Tasks held out, from the first.")


_MOST_TASKS = 1000
"""Tasks that are read to train on where the run file does not say how many."""


@built_in(
    "verifiers",
    VerifiersSpec,
    "Any environment of the package verifiers, which gets an environment of its own.",
    rank=38,
)
class VerifiersTask:
    """The tasks of a taskset. Reward: the sum of its rewards by weight, the mean over several agents."""

    name = "verifiers"

    def __init__(self, spec: VerifiersSpec) -> None:
        if spec.agent is not None:
            raise ConfigError(
                f"task.agent={spec.agent}: the environments of verifiers have agents of their own",
                allowed="task.agent_program",
                next_step="remove task.agent",
            )
        self.spec = spec
        limits = TaskLimits(
            max_reply_tokens=1024,
            max_reward=spec.max_reward,
            min_reward=spec.min_reward,
            max_goldless_frac=1.0,
        )
        self.limits = fit_limits(limits, spec)

    @property
    def variant(self) -> str:
        """The taskset."""
        return self.spec.taskset

    @cached_property
    def version(self) -> str:
        """Hash over settings, tasks, the release of verifiers, and, where it is a file, the taskset."""
        digest = json.dumps([[one.example_id for one in self.examples(split)] for split in Split])
        if self.spec.folder is not None:
            module = self.spec.taskset.replace("-", "_").lower()
            source = Path(self.spec.folder).expanduser() / f"{module}.py"
            digest += hash_sources(source) if source.is_file() else ""
        spec = self.spec.model_copy(update={"folder": None})
        return hash_version(
            self.name, "", f"verifiers-{RELEASES[self.spec.form]}-1", self.limits, spec, digest
        )

    @property
    def world(self) -> VerifiersTask:
        """Itself; see `tasks.traits`."""
        return self

    def guest(self) -> Guest:
        """Return the process that runs it. Raises: ConfigError if there is no such environment."""
        spec = self.spec
        settings = {
            "taskset": spec.taskset,
            "folder": None if spec.folder is None else str(Path(spec.folder).expanduser().absolute()),
            "harness": spec.agent_program,
            "config": spec.config,
            "limit_s": spec.agent_limit_s,
        }
        python = ensure_environment(environment_of(spec.packages, spec.form), say=tell)
        module = "for_verifiers.py" if spec.form == "v1" else "for_verifiers_v0.py"
        return guest_of(python, module, settings)

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the tasks of a split: the first are held out.

        Raises: DataError if there are too few; ConfigError like `guest`.
        """
        return self._split[split]

    @cached_property
    def _split(self) -> Mapping[Split, tuple[Example, ...]]:
        number, num_train = self.spec.num_held_out, self.spec.num_train or _MOST_TASKS
        rows: list[dict[str, Any]] = self.guest().ask("tasks", number=number + num_train)
        if len(rows) <= number:
            raise DataError(
                f"taskset {self.spec.taskset} has {len(rows)} tasks, and {number} are held out",
                allowed=f"1 to {len(rows) - 1} held-out tasks",
                next_step="set task.num_held_out",
            )
        made = [make_example(self.name, {"task": row}, None) for row in rows]
        return {Split.HELD_OUT: tuple(made[:number]), Split.TRAIN: tuple(made[number:])}

    def render(self, example: Example) -> tuple[Message, ...]:
        """Return what a task says first, as far as it says it before an episode."""
        row = example.fields["task"]
        system, prompt = row.get("system_prompt"), row.get("prompt")
        messages = [Message(role="system", content=system)] if system else []
        if isinstance(prompt, str):
            messages.append(Message(role="user", content=prompt))
        else:
            messages += [Message(role=one["role"], content=str(one["content"])) for one in prompt or ()]
        if not messages:
            messages = [Message(role="user", content="(the environment opens the conversation)")]
        return pose_messages(messages, self.spec.thinking)

    def problem_of(self, example: Example) -> str:
        """Return the example's id."""
        return example.example_id

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        """Return nothing: tasksets keep what is right to themselves."""
        return ()

    def verify(self, example: Example, text: str) -> Outcome:
        """Play an episode of which the replies are the text's."""
        return asyncio.run(self.play(example, text))

    async def play(self, example: Example, text: str) -> Outcome:
        """Play an episode without a model: the replies stand in the text, with `TURN` between them."""
        require_whole(self.name, example)
        found = await self.guest().do("play", data=example.fields["task"], replies=text.split(TURN))
        return within_bounds(to_outcome(found, self.limits.max_reward), self.limits)

    def make_environment(self, judge: Judge | None = None) -> VerifiersEnvironment:
        """Make one attempt; the taskset judges it by itself."""
        return VerifiersEnvironment(self)

    def attempt_tokens(self, limits: TaskLimits) -> int:
        """Return how many tokens the agents may have sampled."""
        return self.spec.agent_tokens


class VerifiersEnvironment(Conducted):
    """One episode."""

    def __init__(self, task: VerifiersTask) -> None:
        self._task = task
        self._example: Example | None = None
        self._outcome: Outcome | None = None
        self.max_attempt_tokens = task.spec.agent_tokens

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Pose the task; the package draws from no seed of the run's."""
        require_whole(self._task.name, example)
        self._example, self._outcome = example, None
        return self._task.render(example)

    async def act(self, recorder: Recorder) -> None:
        """Have the package play the episode. Raises: AttemptFailed."""
        assert self._example is not None
        task = self._task
        guest = await asyncio.to_thread(task.guest)
        limit_s = task.spec.agent_limit_s + _GRACE_S
        async with lease_face() as face, face.open(recorder) as (base_url, key):
            try:
                async with asyncio.timeout(limit_s):
                    found = await guest.do(
                        "run",
                        data=self._example.fields["task"],
                        base_url=base_url,
                        key=key,
                        renderer=task.spec.renderer,
                    )
            except TimeoutError as error:
                detail = f"the episode was not over after {limit_s:g} s"
                raise AttemptFailed(FailureOwner.TASK, "episode_timeout", detail) from error
        self._outcome = to_outcome(found, task.limits.max_reward)

    async def score(self) -> Outcome:
        """Return what the package said of the episode. Raises: DataError before `reset`."""
        if self._example is None:
            raise DataError(f"{self._task.name}: score before reset")
        if self._outcome is None:
            return Outcome.lost(FailureOwner.TASK, "no_episode", "verifiers scored no episode")
        return within_bounds(self._outcome, self._task.limits)


def to_outcome(found: Mapping[str, Any], full_marks: float) -> Outcome:
    """Return an episode as an outcome; an error of the package's, or of an agent, leaves it without a score.

    Calls beyond what an attempt may have are no such error; what the package did not score then has no score.
    """
    traces = found["traces"]
    errors = [*found["errors"], *(error for trace in traces for error in trace["errors"])]
    bad = [error for error in errors if error["status"] not in _OF_THE_BUDGET]
    if bad:
        error = bad[-1]
        owner = FailureOwner.INFRA if error["type"] in _OF_THE_MACHINE else FailureOwner.TASK
        return Outcome.lost(owner, error["type"], error["message"])
    parts: dict[str, float | None] = {}
    for name in {name for trace in traces for name in trace["rewards"]}:
        values = [trace["rewards"][name] for trace in traces if name in trace["rewards"]]
        parts[name] = None if None in values else fmean(values)
    if not parts and errors:
        return Outcome(parts={"reward": None}, truncated=True)
    if not parts:
        return Outcome.lost(FailureOwner.TASK, "no_reward", "no reward of the taskset was given")
    outcome = Outcome(
        parts=dict(sorted(parts.items())),
        metrics={name: float(value) for trace in traces for name, value in trace["metrics"].items()},
        truncated=any(trace["is_truncated"] for trace in traces),
    )
    reward = outcome.reward
    if reward is None:
        return outcome
    return replace(outcome, is_correct=reward >= full_marks - _FULL_MARKS_SLACK)
