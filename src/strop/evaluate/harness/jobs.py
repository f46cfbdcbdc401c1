"""What the harness is asked in one run: a task with examples of ours, or any task of its own."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from strop.errors import ConfigError
from strop.evaluate.harness.engine import LM_EVAL, HarnessEngine, own_engine
from strop.evaluate.harness.protocols import HarnessProtocol
from strop.rollout import Example, Split
from strop.spec.harness import HarnessSpec
from strop.tasks import Task

_CHANGING = (
    *("gen_kwargs", "chat_template", "system_prompt", "model_args", "arguments", "max_model_tokens"),
    *("include",),
)
"""Settings that no field of a protocol stands for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedModel:
    """The model that is asked, by which engine and how."""

    model_path: Path
    model_digest: str
    step: int
    dtype: str | None
    """None: a server's own, which it does not tell."""
    max_positions: int
    """Tokens that the model can look at; the harness cuts longer prompts from the left without a word."""
    num_examples: int | None
    """From the first. None: all."""
    settings: HarnessSpec = field(default_factory=HarnessSpec)
    engine: HarnessEngine = field(default_factory=own_engine)
    threads: int | None = None
    """Compute threads; None: the engine's own default."""
    file_name: str | None = None
    """Name of the evaluation that a file describes: results' names begin with it."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the settings beside the protocol's own."""
        values = {name: getattr(self.settings, name) for name in _CHANGING}
        return tuple(f"{name}={value}" for name, value in values.items() if value)

    def digest(self, words: list[str], data_digest: str) -> str:
        """Return a hash over everything that the harness is given."""
        content: list[Any] = [words, data_digest, self.model_digest, self.engine.kind, LM_EVAL.stamp]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessJob(AskedModel):
    """A task with a pinned protocol, on the examples of one of ours."""

    protocol: HarnessProtocol
    task: Task

    @property
    def name(self) -> str:
        """The harness's name."""
        return self.protocol.task

    @property
    def examples(self) -> list[Example]:
        """What is asked."""
        return list(self.task.examples(Split.HELD_OUT))[: self.num_examples]


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeJob(AskedModel):
    """A task, group or tag of the harness, on its own data."""

    name: str
    may_run_code: bool = False


def change_protocol(protocol: HarnessProtocol, settings: HarnessSpec) -> HarnessProtocol:
    """Return a protocol with the shots and the budget that a user asks for.

    Raises: ConfigError for what the harness's task would not follow.
    """
    shots, budget = settings.num_few_shot, settings.max_reply_tokens
    if shots is not None:
        most = protocol.num_written if not protocol.stages_shown else None
        if most is not None and shots > most:
            raise ConfigError(
                f"harness.num_few_shot={shots} with task {protocol.task}",
                allowed=f"0 to {most}: the examples that lm-eval's task has"
                if most
                else "0: lm-eval's task shows no examples",
                next_step="lower it, or leave it out for the published number",
            )
        if protocol.shows_own_split and shots > protocol.num_fewshot:
            raise ConfigError(
                f"harness.num_few_shot={shots} with task {protocol.task}",
                allowed=f"0 to {protocol.num_fewshot}: the examples of the split dev",
                next_step="lower it, or leave it out for the published number",
            )
        protocol = replace(protocol, num_fewshot=shots)
    if budget is not None:
        if protocol.chooses:
            raise ConfigError(
                f"harness.max_reply_tokens={budget} with task {protocol.task}",
                allowed="no budget: replies are chosen by their likelihood, and none is generated",
                next_step="leave it out",
            )
        protocol = replace(protocol, max_reply_tokens=budget)
    return protocol
