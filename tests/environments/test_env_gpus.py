"""The sandboxes of a workspace see the GPUs for environments, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.environments import Workspace, choose_environment, run_rollout
from strop.environments.worlds import BuiltInWorld
from strop.rollout import Example, Rollout, Split
from strop.sandbox.contract import SandboxSpec
from strop.sandbox.served import ServedSandbox
from strop.spec.sandboxing import SandboxSettings
from strop.spec.task import EnvironmentSection
from strop.tasks.contract import TaskLimits
from tests.environments.test_worlds import call, plan_of, tokenizer_of
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.gpus import MakeGpus, fake_gpu
from tests.fixtures.sandboxes import needs_bubblewrap

SHOW = "ls /dev | grep -E '^nvidia[0-9]'; echo sees $CUDA_VISIBLE_DEVICES"


class Section(SandboxSettings, EnvironmentSection):
    name: str = "card"
    num_train: int = 1
    num_held_out: int = 1


class Cards(Workspace):
    """Say which GPUs there are."""

    name = "card"
    version = "card-1"
    max_turns = 4
    limits = TaskLimits(max_reply_tokens=2000)

    def examples(self, split: Split) -> Iterator[dict[str, Any]]:
        return iter([{"name": split}])

    def opening(self, example: Example, seed: int) -> str:
        return "Which cards are there?"

    async def grade(self, sandbox: ServedSandbox) -> bool:
        done = await sandbox.exec(["/bin/sh", "-c", SHOW], wall_limit_s=60)
        return done.stdout == b"nvidia1\nnvidia2\nsees GPU-1,GPU-2\n"


class OneCard(Cards):
    """Shows one of them."""

    def sandbox_for(self, example: Example) -> SandboxSpec:
        return SandboxSpec(gpus=("2",))


def play(tmp_path: Path, kind: type[Cards], sandbox: str = "bubblewrap") -> Rollout:
    level = "namespace" if sandbox == "bubblewrap" else "rlimit"
    section = Section.model_validate({"sandbox": sandbox, "min_isolation": level})
    task, tokenizer = BuiltInWorld(section, lambda _: kind()), tokenizer_of(tmp_path)
    engine = DummyEngine(tokenizer, [call("bash", command=SHOW), call("submit")])
    environment = choose_environment(task)()
    return asyncio.run(run_rollout(environment, engine, tokenizer, plan_of(task, max_reply_tokens=2000)))


@needs_bubblewrap
def test_the_model_and_the_grader_see_them(
    tmp_path: Path, gpus_of: MakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus_of([fake_gpu(index) for index in range(3)])
    monkeypatch.setenv("STROP_ENV_DEVICES", "1,2")
    rollout = play(tmp_path, Cards)
    assert "nvidia1\nnvidia2\nsees GPU-1,GPU-2" in rollout.turns[2].text
    assert rollout.outcome.reward == 1.0
    # An environment may choose among them.
    rollout = play(tmp_path, OneCard)
    assert "nvidia2\nsees GPU-2" in rollout.turns[2].text
    assert "nvidia1" not in rollout.turns[2].text
    monkeypatch.delenv("STROP_ENV_DEVICES")
    assert "nvidia" not in play(tmp_path, Cards).turns[2].text


def test_where_sandboxes_have_no_devices_of_their_own_none_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_ENV_DEVICES", "1,2")
    assert play(tmp_path, Cards, "process").outcome.failure is None
