"""A strop environment as a taskset of verifiers v1. Tried with verifiers 0.4.0.

strop plays whole attempts, as the harness's program, in a process of its Python (`python` of the taskset);
its calls of the model pass through verifiers, which records them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import verifiers.v1 as vf
from verifiers.v1.errors import SandboxError, TaskError

from strop.environments.guests.process import Process

_HERE = Path(__file__).parent
_EXPORTED = json.loads((_HERE / "environment.json").read_text(encoding="utf-8"))
_START_S = 600.0


@cache
def player_of(python: str) -> Process:
    """Return the process of a Python; start one if there is none."""
    folder = _EXPORTED["folder"] if Path(_EXPORTED["folder"]).is_dir() else None
    argv = [python, "-P", "-m", "strop.environments.export.playing"]
    settings = {"section": _EXPORTED["section"], "version": _EXPORTED["version"]}
    return Process(argv, settings, _START_S, cwd=folder)


class StropData(vf.TaskData):  # type: ignore[misc]
    """One example, and the Python that plays it."""

    split: str
    example: int
    python: str


class StropConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The split, and the Python that plays."""

    split: Literal["train", "held_out"] = "train"
    python: str = _EXPORTED["python"]
    """A Python that has strop, of the release that exported this package."""


class StropTask(vf.Task[StropData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """One example; the environment judges the attempt."""


class StropTaskset(vf.Taskset[StropTask, StropConfig]):  # type: ignore[misc]
    """The examples of a split."""

    def load(self) -> Iterator[StropTask]:
        """Yield the examples in strop's order."""
        for row in player_of(self.config.python).ask("tasks", split=self.config.split):
            yield StropTask(StropData(**row, python=self.config.python), self.config.task)


class StropHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Lets strop play the attempt, and records its rewards."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        """Play the attempt on verifiers' endpoint. Raises: SandboxError or TaskError if it has no score."""
        asked = {"split": data.split, "example": data.example, "model": ctx.model}
        outcome = await player_of(data.python).do("play", **asked, base_url=endpoint, key=secret)
        if (failure := outcome.get("failure")) is not None:
            kind = TaskError if failure["owner"] == "task" else SandboxError
            raise kind(f"{failure['kind']}: {failure['detail']}")
        for name, value in outcome["parts"].items():
            if value is None:
                trace.rewards[name] = None
            else:
                trace.record_reward(name, value)
        trace.record_metrics(outcome["metrics"])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class StropEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """The agent, within strop's limits of an attempt."""

    agent: vf.AgentConfig = vf.AgentConfig(**_EXPORTED["agent"])


class StropEnv(vf.Env[StropEnvConfig]):  # type: ignore[misc]
    """One agent, which is strop's player."""

    async def run(self, task: Any, agents: Any) -> None:
        """Play one attempt."""
        await agents.agent.run(task)


__all__ = ["StropEnv", "StropHarness", "StropTaskset"]
