"""Engines that break one promise each, around a real one, and the gate that must notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from strop.cluster import Roles
from strop.cluster.local import LocalLearner, publish_shared
from strop.engine import Completion, Engine, GenerationRequest
from strop.engine.native import NativeEngine
from strop.environments import SingleTurn, run_group
from strop.policy.language_model import DTYPES, LanguageModel
from strop.policy.learner import Learner
from strop.policy.scoring import score_replies
from strop.rollout import Group, Sampling, Split
from strop.spec.run import RunSpec
from strop.tasks import build_task
from strop.tokenizer import Tokenizer
from strop.train.gate_checks import GateInput
from tests.fixtures.builders import plan_for

Tamper = Callable[[GenerationRequest, Completion], Completion]


class TamperedEngine:
    """Passes everything on; requests are made with other fields, and completions changed on the way."""

    def __init__(self, inner: Engine, *, tamper: Tamper | None = None, **asked: Any) -> None:
        self._inner = inner
        self._tamper = tamper
        self._asked = asked

    async def generate(self, request: GenerationRequest) -> Completion:
        completion = await self._inner.generate(replace(request, **self._asked))
        return completion if self._tamper is None else self._tamper(request, completion)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def load_model(path: Path, dtype: str = "float32") -> LanguageModel:
    return LanguageModel.load(path, dtype=DTYPES[dtype])


def native_engine(path: Path, dtype: str = "float32") -> NativeEngine:
    return NativeEngine(load_model(path, dtype), Tokenizer.load(path))


def perturbed_engine(path: Path, share: float) -> NativeEngine:
    """Build an engine one of whose layers is not the policy's."""
    model = load_model(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.1.mlp.down_proj" in name:
                parameter.mul_(1.0 + share)
    return NativeEngine(model, Tokenizer.load(path))


def raw_values(model: LanguageModel) -> Tamper:
    """Report log-probabilities from before the division by the temperature."""

    def tamper(request: GenerationRequest, completion: Completion) -> Completion:
        raw = score_replies(model, request.prompt_ids, [completion.token_ids], 1.0)[0]
        return replace(completion, logprobs=raw)

    return tamper


def build_gate(path: Path, engine: Engine, *, dtype: str = "float32", **settings: Any) -> GateInput:
    """Put a gate before the arithmetic task, an engine and a tiny policy."""
    spec = RunSpec.model_validate(
        {"name": "gate", "task": {"name": "arithmetic"}, "model": {"dtype": dtype}, **settings}
    )
    tokenizer = Tokenizer.load(path)
    learner = Learner(load_model(path, dtype), spec.optimizer)
    role = LocalLearner(learner)
    roles = Roles(learner=role, engine=engine, publish=partial(publish_shared, role), tokenizer=tokenizer)
    return GateInput(spec=spec, task=build_task(spec.task), roles=roles, model_dir=path, run_path=path)


def sample_groups(gate: GateInput, *, num_groups: int = 3, reply_limit: int = 12) -> list[Group]:
    """Sample as training does."""

    async def run() -> list[Group]:
        return [
            await run_group(
                partial(SingleTurn, gate.task),
                gate.roles.engine,
                gate.roles.tokenizer,
                [
                    plan_for(
                        example,
                        max_reply_tokens=reply_limit,
                        sample_index=index,
                        sampling=Sampling(**gate.spec.sampling.model_dump()),
                    )
                    for index in range(4)
                ],
            )
            for example in gate.task.examples(Split.TRAIN)[:num_groups]
        ]

    return asyncio.run(run())
