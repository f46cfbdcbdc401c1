"""References and teachers: what is loaded, and what is refused as another vocabulary."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from strop.cluster import LearnerRole, Roles
from strop.cluster.contract import with_frozen
from strop.cluster.local import LocalLearner
from strop.errors import ConfigError
from strop.spec.run import RunSpec
from strop.store import ModelHandle
from strop.tokenizer import Tokenizer
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_run import tiny_spec
from tests.policy.worlds import World, build_learner


def roles_of(model_dir: Path, learner: LearnerRole | None = None) -> Roles:
    tokenizer = Tokenizer.load(model_dir)
    return Roles(
        learner=learner or LocalLearner(build_learner(model_dir)),
        engine=DummyEngine(tokenizer, lambda request: ""),
        publish=lambda: None,  # type: ignore[arg-type,return-value]
        tokenizer=tokenizer,
    )


def freeze(roles: Roles, spec: RunSpec, model_dir: Path) -> Roles:
    own = ModelHandle(path=model_dir, digest="unused")
    fetch = lambda uri: ModelHandle(path=Path(uri), digest="unused")  # noqa: E731
    return asyncio.run(with_frozen(roles, spec, own, fetch))


def teacher_spec(model: Path) -> RunSpec:
    return tiny_spec(train={"terms": "distill"}, teacher={"source": "model", "model": str(model)})


def test_a_reference_says_what_the_policy_said_at_the_start(tiny_model_dir: Path) -> None:
    roles = freeze(roles_of(tiny_model_dir), tiny_spec(reference={"kl_beta": 0.1}), tiny_model_dir)
    groups = [World(2).packed(4, [3, 5])]
    own, theirs = [asyncio.run(roles.learner.score(groups, 0.7, role)) for role in (None, "reference")]
    assert [one.tolist() for one in own] == [one.tolist() for one in theirs]


def test_another_tokenizer_of_the_same_size_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Two ids exchanged: every log-probability would be of another token."""
    other = tiny_model(tmp_path)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"token \d+ is 'A' for the policy and 'B' for the teacher"):
        freeze(roles_of(tiny_model_dir), teacher_spec(other), tiny_model_dir)
