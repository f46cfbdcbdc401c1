"""Attempts whose sandboxes have GPUs: each sees its own alone, waits for them, and gives them back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import pytest

from strop.environments import Workspace, choose_environment, gpus, run_rollout
from strop.environments.worlds import BuiltInWorld
from strop.errors import CheckRefused, ConfigError
from strop.hardware.gpu_pool import GpuLease
from strop.rollout import Example, FailureOwner, Rollout, Split
from strop.sandbox.served import ServedSandbox
from strop.spec.sandboxing import GpuSettings
from strop.spec.task import EnvironmentSection
from strop.tasks import Task
from strop.tasks.contract import TaskLimits
from strop.tokenizer import Tokenizer
from tests.environments.test_worlds import build, call, plan_of, tokenizer_of
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.gpus import MakeGpus, fake_gpu
from tests.fixtures.sandboxes import needs_bubblewrap

SHOW = "ls /dev | grep -E '^nvidia[0-9]'; echo sees $CUDA_VISIBLE_DEVICES"
LOOK = call("bash", command=SHOW)
SUBMIT = call("submit")

CARD = """
import os
from pathlib import Path
from strop.environments import Done

class Card:
    max_turns = 1

    def examples(self, split):
        return [{"split": split}]

    def reset(self, example, seed):
        return "Which card is it?"

    def step(self, text):
        return Done()

    def score(self):
        files = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]"))
        return text_is(files, os.environ["CUDA_VISIBLE_DEVICES"])

def text_is(files, seen):
    return files == ["nvidia1"] and seen == "GPU-1"
"""


class Section(GpuSettings, EnvironmentSection):
    name: str = "card"
    num_train: int = 1
    num_held_out: int = 1


class Cards(Workspace):
    """Say which GPU there is."""

    name = "card"
    version = "card-1"
    max_turns = 4
    limits = TaskLimits(max_reply_tokens=2000)
    breaks = False

    def examples(self, split: Split) -> Iterator[dict[str, Any]]:
        return iter([{"name": split}])

    def opening(self, example: Example, seed: int) -> str:
        return "Which card is it?"

    async def prepare(self, example: Example, seed: int) -> None:
        if self.breaks:
            raise RuntimeError("no data")

    async def grade(self, sandbox: ServedSandbox) -> bool:
        done = await sandbox.exec(["/bin/sh", "-c", SHOW], wall_limit_s=60)
        return done.stdout == b"nvidia1\nsees GPU-1\n"


class Broken(Cards):
    """Fails once it has its GPU."""

    breaks = True


def make(kind: type[Cards] = Cards, **settings: Any) -> Task:
    task: Task = BuiltInWorld(
        Section(sandbox="bubblewrap", **{"sandbox_gpus": 1.0, **settings}), lambda _: kind()
    )
    return task


@pytest.fixture
def two_gpus(gpus_of: MakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs, of which the last two are for sandboxes."""
    gpus_of([fake_gpu(index) for index in range(3)])
    monkeypatch.setenv("STROP_SANDBOX_DEVICES", "1,2")
    monkeypatch.setattr(gpus, "_pools", {})


async def attempt(task: Task, tokenizer: Tokenizer, *replies: str) -> Rollout:
    environment, engine = choose_environment(task)(), DummyEngine(tokenizer, list(replies))
    return await run_rollout(environment, engine, tokenizer, plan_of(task, max_reply_tokens=2000))


async def lease_late(lease: Any, waited_s: float, *words: Any, **more: Any) -> GpuLease:
    """Lease GPUs after some time."""
    made: GpuLease = await lease(*words, **more)
    return replace(made, waited_s=waited_s)


def seen(rollout: Rollout) -> str:
    """Return what the model was told after its first turn."""
    return [turn.text for turn in rollout.turns if not turn.is_sampled][1]


@needs_bubblewrap
@pytest.mark.usefixtures("two_gpus")
def test_attempts_have_gpus_of_their_own_and_wait_for_them(tmp_path: Any) -> None:
    task, tokenizer = make(), tokenizer_of(tmp_path)

    async def play() -> list[Rollout]:
        return await asyncio.gather(*(attempt(task, tokenizer, LOOK, SUBMIT) for _ in range(4)))

    rollouts = asyncio.run(play())
    cards = []
    for rollout in rollouts:
        (card,) = [number for number in (1, 2) if f"nvidia{number}\nsees GPU-{number}" in seen(rollout)]
        # The grader saw the same one.
        assert rollout.outcome.reward == float(card == 1), rollout.outcome
        cards.append(card)
    assert sorted(cards[:2]) == [1, 2]
    waits = sorted(rollout.outcome.metrics["gpu_wait_s"] for rollout in rollouts)
    assert waits[1] < waits[2]
    assert gpus.find_pool().num_waiting == 0


@needs_bubblewrap
@pytest.mark.usefixtures("two_gpus")
def test_they_are_given_back_whatever_happens(tmp_path: Any) -> None:
    tokenizer = tokenizer_of(tmp_path)

    async def play() -> None:
        for _ in range(3):
            rollout = await attempt(make(Broken, sandbox_gpus=2), tokenizer, SUBMIT)
            assert rollout.outcome.failure is not None
            assert rollout.outcome.failure.owner is FailureOwner.TASK
        both = await gpus.find_pool().lease(2, limit_s=60.0)
        late = asyncio.create_task(attempt(make(sandbox_gpus=2), tokenizer, LOOK))
        for _ in range(100):
            await asyncio.sleep(0)
        assert gpus.find_pool().num_waiting == 1
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        assert gpus.find_pool().num_waiting == 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpus, "WAIT_LIMIT_S", 0.01)
            rollout = await attempt(make(), tokenizer, SUBMIT)
        assert rollout.outcome.failure is not None
        assert (rollout.outcome.failure.owner, rollout.outcome.failure.kind) == (FailureOwner.INFRA, "no_gpu")
        both.release()
        assert (await attempt(make(sandbox_gpus=2), tokenizer, SUBMIT)).outcome.failure is None

    asyncio.run(play())


@needs_bubblewrap
@pytest.mark.usefixtures("two_gpus")
def test_waiting_is_no_part_of_an_attempt_s_time(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(tmp_path)
    # An hour goes by while others have the GPUs, and a minute of its own; or all of it is its own.
    rollouts = []
    for waited_s, spent_s in ((3600.0, 60.0), (0.0, 3660.0)):
        environment = choose_environment(make(max_attempt_s=90.0))()
        pool = gpus.find_pool()
        lease = pool.lease
        monkeypatch.setattr(pool, "lease", partial(lease_late, lease, waited_s))
        times = chain([0.0], repeat(waited_s + spent_s))
        rollouts.append(
            asyncio.run(
                run_rollout(
                    environment,
                    DummyEngine(tokenizer, [SUBMIT]),
                    tokenizer,
                    plan_of(make(), max_reply_tokens=2000),
                    clock=partial(next, times),
                )
            )
        )
        monkeypatch.setattr(pool, "lease", lease)
    in_time, too_late = (rollout.outcome.metrics for rollout in rollouts)
    assert in_time["stopped_by_done"] == too_late["stopped_by_time"] == 1.0
    assert (in_time["gpu_wait_s"], too_late["gpu_wait_s"]) == (3600.0, 0.0)


@needs_bubblewrap
@pytest.mark.usefixtures("two_gpus")
def test_a_class_in_a_sandbox_sees_them_too(tmp_path: Any) -> None:
    words = ("environment.lane=sandbox", "environment.sandbox_gpus=0.5", "job.env_gpus=2")
    task = build(CARD, *words, "environment.sandbox=bubblewrap", name="Card")
    rollout = asyncio.run(attempt(task, tokenizer_of(tmp_path), "The first."))
    assert rollout.outcome.reward == 1.0, rollout.outcome


@pytest.mark.parametrize(
    ("devices", "error", "words"),
    [
        (None, CheckRefused, "this process has for sandboxes none"),
        ("", CheckRefused, "this process has for sandboxes none"),
        ("1,1", ConfigError, "STROP_SANDBOX_DEVICES=1,1: 1 twice"),
        ("card", ConfigError, "no name of a GPU is 'card'"),
    ],
)
def test_a_process_without_gpus_for_sandboxes_makes_no_attempt(
    monkeypatch: pytest.MonkeyPatch, devices: str | None, error: type[Exception], words: str
) -> None:
    monkeypatch.setattr(gpus, "_pools", {})
    monkeypatch.delenv("STROP_SANDBOX_DEVICES", raising=False)
    if devices is not None:
        monkeypatch.setenv("STROP_SANDBOX_DEVICES", devices)
    with pytest.raises(error, match=words):
        choose_environment(make())()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("environment.sandbox_gpus=1.5",), "an attempt has whole GPUs, or shares one"),
        (("environment.sandbox_gpus=1", "environment.sandbox=remote"), "hands out no GPUs"),
        (("environment.sandbox_gpus=1",), "attempts at .*Card have no sandbox"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build(CARD, *words, "job.env_gpus=1", name="Card")
