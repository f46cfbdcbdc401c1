"""The jobs of lm-eval: one of its tasks with the examples of a strop task, or on its own data."""

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
"""Settings that change the scores and are no field of a protocol."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedModel:
    """The evaluated model, its engine and the settings."""

    model_path: Path
    model_digest: str
    step: int
    dtype: str | None
    """None: chosen by a server, and unknown."""
    max_positions: int
    """The model's context length; lm-eval silently cuts longer prompts from the left."""
    num_examples: int | None
    """Examples used, from the first. None: all."""
    settings: HarnessSpec = field(default_factory=HarnessSpec)
    engine: HarnessEngine = field(default_factory=own_engine)
    threads: int | None = None
    """Compute threads; None: the engine's own default."""
    file_name: str | None = None
    """Name of an evaluation file's evaluation: the names of its results begin with it."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The settings that are no field of the protocol."""
        values = {name: getattr(self.settings, name) for name in _CHANGING}
        return tuple(f"{name}={value}" for name, value in values.items() if value)

    def digest(self, words: list[str], data_digest: str) -> str:
        """Return a hash over all inputs of lm-eval."""
        content: list[Any] = [words, data_digest, self.model_digest, self.engine.kind, LM_EVAL.stamp]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessJob(AskedModel):
    """A task of lm-eval with a pinned protocol, on the examples of a strop task."""

    protocol: HarnessProtocol
    task: Task

    @property
    def name(self) -> str:
        """lm-eval's name of the task."""
        return self.protocol.task

    @property
    def examples(self) -> list[Example]:
        """The evaluated examples."""
        return list(self.task.examples(Split.HELD_OUT))[: self.num_examples]


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeJob(AskedModel):
    """A task, group or tag of lm-eval, on its own data."""

    name: str
    may_run_code: bool = False


def change_protocol(protocol: HarnessProtocol, settings: HarnessSpec) -> HarnessProtocol:
    """Apply the user's shots and budget to a protocol.

    Raises: ConfigError for a value that lm-eval's task would not follow.
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
