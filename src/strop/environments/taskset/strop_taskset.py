"""strop's environments and tasks as a taskset of verifiers v1. Tried with verifiers 0.4.0.

verifiers imports this file by itself, as `strop_taskset`, where strop is installed; of strop's dependencies
it needs psutil alone. An attempt is played as the harness's program: its calls of the model pass through
verifiers, which records them. Attempts use the seed of the self-test, so that one example is one task.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, Literal

import httpx
import verifiers.v1 as vf
from pydantic import TypeAdapter
from verifiers.v1.errors import SandboxError, TaskError

from strop.environments.contract import Action, Environment
from strop.environments.single_turn import choose_environment
from strop.errors import ConfigError, DataError
from strop.rollout import Example, FailureOwner, FinishReason, Message, Split, ToolCall
from strop.spec.judge import role_judges
from strop.spec.parts import needs_ray
from strop.spec.task import TaskSpec
from strop.tasks import Task, build_task, task_builder
from strop.tasks.failures import catch_failure
from strop.tasks.judging import Judge
from strop.tasks.prompt import posed
from strop.tasks.tool_calls import Spoken
from strop.tasks.user.own_task import OPENING_SEED


@cache
def _build(environment: str) -> tuple[Task, Callable[[], Environment]]:
    """Return a task and what makes its attempts. Raises: ConfigError as for a run, or if it needs one."""
    spec = TypeAdapter[Any](TaskSpec).validate_json(environment)
    task = build_task(spec)
    is_conducted = spec.name == "verifiers" or spec.agent is not None
    if is_conducted or role_judges(spec) or needs_ray(spec) or spec.thinking != "model_default":
        raise ConfigError(
            f"{task.name} cannot be played by verifiers",
            allowed="no agent program, no judge or sandbox that a run starts, and no task.thinking",
            next_step="change these settings, or name another one",
        )
    return task, choose_environment(task, Judge(task, task_builder(spec)))


class StropConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The environment, and the split that is played."""

    environment: dict[str, Any]
    """The table `[environment]` or `[task]` of a run file. Relative paths begin where verifiers runs."""
    split: Literal["train", "held_out"] = "train"


class StropData(vf.TaskData):  # type: ignore[misc]
    """One example."""

    environment: str
    split: str
    example: int


class StropTask(vf.Task[StropData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """One example; the environment judges the attempt."""


class StropTaskset(vf.Taskset[StropTask, StropConfig]):  # type: ignore[misc]
    """The examples of a split."""

    def load(self) -> Iterator[StropTask]:
        """Yield the examples in strop's order."""
        environment, split = json.dumps(self.config.environment), self.config.split
        task, _ = _build(environment)
        for index, example in enumerate(task.examples(Split(split))):
            prompt = [message.to_json() for message in task.render(example)]
            named = {"id": example.example_id, "name": task.name, "prompt": prompt}
            data = StropData(**named, environment=environment, split=split, example=index)
            yield StropTask(data, self.config.task)


class StropHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Plays an attempt, and records its rewards."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        """Play the attempt on verifiers' endpoint. Raises: SandboxError or TaskError if it has no score."""
        task, make_environment = _build(data.environment)
        example = task.examples(Split(data.split))[data.example]
        asked = {"model": ctx.model, "max_tokens": task.limits_of(example).max_reply_tokens}
        headers = {"authorization": f"Bearer {secret}"}
        environment = make_environment()
        with catch_failure(FailureOwner.TASK) as caught:
            try:
                async with httpx.AsyncClient(base_url=endpoint, headers=headers, timeout=None) as client:
                    await _converse(environment, example, client, asked)
                outcome = await environment.score()
            finally:
                await environment.close()
        if (failure := caught.failure or outcome.failure) is not None:
            kind = TaskError if failure.owner is FailureOwner.TASK else SandboxError
            raise kind(f"{failure.kind}: {failure.detail}")
        for name, value in outcome.parts.items():
            if value is None:
                trace.rewards[name] = None
            else:
                trace.record_reward(name, value)
        correct = {} if outcome.is_correct is None else {"is_correct": float(outcome.is_correct)}
        trace.record_metrics({**outcome.metrics, **correct})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _converse(
    environment: Environment, example: Example, client: httpx.AsyncClient, asked: dict[str, Any]
) -> None:
    """Let the model and the environment take turns, until one of them or a limit ends it."""
    opening = await environment.reset(example, OPENING_SEED)
    asked["messages"] = [message.to_json() for message in opening]
    if tools := [json.loads(schema) for schema in posed(opening).tools]:
        asked["tools"] = tools
    num_left = environment.max_attempt_tokens or math.inf
    for _ in range(environment.max_turns):
        asked["max_tokens"] = int(min(asked["max_tokens"], num_left))
        answer = await client.post("chat/completions", json=asked)
        if answer.is_client_error:
            # A limit of the attempt's agent: it is scored as it is.
            return
        said = answer.raise_for_status().json()
        choice, num_left = said["choices"][0], num_left - said["usage"]["completion_tokens"]
        reply = {name: value for name, value in choice["message"].items() if value is not None}
        text, calls = reply.get("content") or "", [*map(_to_call, reply.get("tool_calls") or ())]
        stops = [place for stop in environment.stop_strings if (place := text.find(stop)) >= 0]
        is_cut = choice["finish_reason"] == "length"
        reason = FinishReason.STOP_STRING if stops else FinishReason.LENGTH if is_cut else FinishReason.EOS
        text = text[: min(stops)] if stops else text
        spoken = Spoken(content=text.strip(), calls=tuple(calls)) if calls else None
        result = await environment.step(Action(text=text, finish_reason=reason, spoken=spoken))
        if result.done or reason is FinishReason.LENGTH or num_left < 1:
            return
        # A server wants an answer of a tool to those calls alone that it has read.
        messages = result.messages if calls else map(_as_user, result.messages)
        asked["messages"] += [reply, *(message.to_json() for message in messages)]


def _to_call(call: dict[str, Any]) -> ToolCall:
    """Read a call; arguments that cannot be read become one that every tool refuses."""
    name, text = call["function"]["name"], call["function"].get("arguments") or "{}"
    with suppress(DataError):
        return ToolCall(name=name, arguments=text, call_id=call["id"])
    return ToolCall(name=name, arguments=json.dumps({"unreadable": text}), call_id=call["id"])


def _as_user(message: Message) -> Message:
    if message.role != "tool":
        return message
    return Message(role="user", content=f"{message.name} returned:\n{message.text}")


class StropEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """The agent, on this machine."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})


class StropEnv(vf.Env[StropEnvConfig]):  # type: ignore[misc]
    """One agent, which is the environment."""

    async def run(self, task: Any, agents: Any) -> None:
        """Play one attempt."""
        await agents.agent.run(task)


__all__ = ["StropEnv", "StropHarness", "StropTaskset"]
