"""References and teachers: what is loaded, and what is refused as another vocabulary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strop.algorithm import ALGORITHMS
from strop.cluster import LearnerRole, Roles
from strop.cluster.contract import with_frozen
from strop.cluster.local import LocalLearner
from strop.cluster.ray.learners import RayLearner
from strop.cluster.ray.ranks import LearnerRank
from strop.errors import ConfigError
from strop.policy.optimizer import StepPlan
from strop.policy.packing import with_logprobs
from strop.spec.run import RunSpec
from strop.store import ModelHandle
from strop.tokenizer import Tokenizer
from strop.train.step import rl_term
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_run import tiny_spec
from tests.policy.worlds import World, build_learner


class SilentPublisher:
    """Publishes nothing: no test here trains."""

    async def publish(self) -> None:
        raise AssertionError("nothing is published here")


def roles_of(model_dir: Path, learner: LearnerRole | None = None) -> Roles:
    tokenizer = Tokenizer.load(model_dir)
    return Roles(
        learner=learner or LocalLearner(build_learner(model_dir)),
        engine=DummyEngine(tokenizer, lambda request: ""),
        publisher=SilentPublisher(),  # type: ignore[arg-type]
        tokenizer=tokenizer,
    )


def freeze(roles: Roles, spec: RunSpec, model_dir: Path) -> Roles:
    own = ModelHandle(path=model_dir, digest="unused")
    fetch = lambda uri: ModelHandle(path=Path(uri), digest="unused")  # noqa: E731
    return asyncio.run(with_frozen(roles, spec, own, fetch))


def teacher_spec(model: Path) -> RunSpec:
    return tiny_spec(train={"terms": "distill"}, teacher={"source": "model", "model": str(model)})


def test_a_run_that_asks_for_none_gets_none(tiny_model_dir: Path) -> None:
    roles = roles_of(tiny_model_dir)
    assert freeze(roles, tiny_spec(), tiny_model_dir) == roles


def test_a_reference_says_what_the_policy_said_at_the_start(tiny_model_dir: Path) -> None:
    roles = freeze(roles_of(tiny_model_dir), tiny_spec(reference={"kl_beta": 0.1}), tiny_model_dir)
    assert roles.reference is not None
    groups = [World(2).packed(4, [3, 5])]
    own, theirs = [asyncio.run(one.score(groups, 0.7)) for one in (roles.learner, roles.reference)]
    assert [one.tolist() for one in own] == [one.tolist() for one in theirs]


def test_another_tokenizer_of_the_same_size_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Two ids exchanged: every log-probability would be of another token."""
    other = tiny_model(tmp_path)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"the teacher's tokenizer has 262 tokens and the policy's 262;"):
        freeze(roles_of(tiny_model_dir), teacher_spec(other), tiny_model_dir)


class NearRank:
    """A rank in this process, called as an actor is."""

    def __init__(self, rank: LearnerRank) -> None:
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            return getattr(self._rank, name)(*arguments)

        return SimpleNamespace(remote=call)


class NoDeaths:
    """A watch under which nothing dies."""

    async def guard(self, call: Awaitable[Any], limit_s: float) -> Any:
        return await call


def test_ranks_elsewhere_score_their_shares_and_have_the_teacher(tiny_model_dir: Path) -> None:
    spec, source = tiny_spec(), ModelHandle(path=tiny_model_dir, digest="unused")
    # Without what makes an actor of one: it would take over the log of this process.
    ranks = [LearnerRank.__new__(LearnerRank) for _ in range(2)]
    # Each is a learner of its own here: what is shown is whom the loop asks, and the order of answers.
    facts = [rank.load(spec, source, 0, 1, ("unused", 0)) for rank in ranks]
    far = RayLearner([NearRank(rank) for rank in ranks], NoDeaths(), facts[0])  # type: ignore[arg-type]
    asked = {"terms": "distill"}
    with_teacher = tiny_spec(train=asked, teacher={"source": "initial"})
    with_reference = tiny_spec(reference={"kl_beta": 0.1})
    roles = freeze(
        freeze(roles_of(tiny_model_dir, far), with_teacher, tiny_model_dir), with_reference, tiny_model_dir
    )
    assert roles.reference is not None
    assert roles.teacher is not None
    groups = [World(seed).packed(3 + seed, [4, 2 + seed]) for seed in range(4)]
    near = LocalLearner(build_learner(tiny_model_dir))
    expected = asyncio.run(near.score(groups, 0.7))
    for scorer in (far, roles.reference, roles.teacher):
        for actual, one in zip(asyncio.run(scorer.score(groups, 0.7)), expected, strict=True):
            np.testing.assert_allclose(actual, one, atol=1e-4)
    assert [rank._learner.teacher is not None for rank in ranks] == [True, True]


async def test_what_a_step_is_within_the_run_crosses_to_ranks(tiny_model_dir: Path) -> None:
    spec = tiny_spec(
        train={"steps": 2, "mini_batches": 3}, optimizer={"lr": 1e-2, "schedule": "linear", "final_frac": 0.5}
    )
    rank = LearnerRank.__new__(LearnerRank)
    facts = rank.load(spec, ModelHandle(path=tiny_model_dir, digest="unused"), 0, 1, ("unused", 0))
    far = RayLearner([NearRank(rank)], NoDeaths(), facts)  # type: ignore[arg-type]
    group = World(2).packed(4, [3, 5])
    before = (await far.score([group], 1.0))[0].tolist()
    algorithm = replace(ALGORITHMS["grpo"], mode="decoupled")
    sided = with_logprobs([group], "old", await far.score([group], 1.0))
    terms = [rl_term(algorithm, sided, 1.0)]
    plans = [StepPlan(version=1, place=0), StepPlan(version=1, place=3)]
    reports = [await far.step_terms(terms, plan) for plan in plans]
    now = (await far.score([group], 1.0))[0].tolist()
    # Six optimizer steps in the run: the first at the full rate, the fourth at 1 - 0.5 x 3 / 6 of it.
    assert [report.lr for report in reports] == pytest.approx([1e-2, 7.5e-3])
    assert far.version == 1
    assert before != now
