"""Algorithms of the user's: what they may be, and what of them is refused before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch

from strop.algorithm import build_algorithm
from strop.algorithm.catalog import GRPO
from strop.errors import ConfigError
from strop.spec import load_spec
from strop.user_code import reference

RANK = "def rank(rewards_G):\n    return rewards_G.argsort().argsort() - (len(rewards_G) - 1) / 2\n"
WHOLE = """
from dataclasses import replace

from strop.algorithm import ALGORITHMS, TokenLoss

def value(logp_N, old_logp_N, advantage_N, clip_low, clip_high):
    return -advantage_N * (logp_N - old_logp_N).tanh()

MINE = replace(ALGORITHMS["dr_grpo"], loss=TokenLoss(name="tanh", value=value), clip_low=0.1)
"""


def build(tmp_path: Path, code: str, name: str, *words: str) -> object:
    (tmp_path / "mine.py").write_text(code)
    given = [f"algorithm.name={tmp_path / 'mine.py'}:{name}", *words]
    return build_algorithm(load_spec(None, ["name=x", "task.name=arithmetic", *given]).spec.algorithm)


def test_a_function_of_rewards_takes_the_place_of_grpos(tmp_path: Path) -> None:
    found = build(tmp_path, RANK, "rank", "algorithm.clip_low=0.3")
    assert (found.name, found.loss, found.clip_low) == ("rank", GRPO.loss, 0.3)  # type: ignore[attr-defined]
    advantages = found.advantage(np.array([0.1, 0.9, 0.5]))  # type: ignore[attr-defined]
    assert advantages.tolist() == [-1.0, 1.0, 0.0]


def test_an_algorithm_of_ones_own_has_its_own_loss(tmp_path: Path) -> None:
    found = build(tmp_path, WHOLE, "MINE")
    assert (found.name, found.clip_low, found.aggregation.name) == ("MINE", 0.1, "CONST")  # type: ignore[attr-defined]
    logp, advantage = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, -0.5])
    terms = found.token_terms(logp, logp, advantage)  # type: ignore[attr-defined]
    # The derivative of tanh at 0 is 1.
    assert terms.grad_N.tolist() == [-1.0, 0.5]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "def rank(rewards_G):\n    return rewards_G[:1]\n",
            ["makes [0.0] of", "one finite number for each"],
        ),
        ("def rank(rewards_G):\n    return rewards_G * float('nan')\n", ["[nan, nan, nan, nan]"]),
        ("def rank(rewards_G):\n    return 1 / 0\n", ["ZeroDivisionError", "(mine.py:2)"]),
        ("rank = 3\n", ["is a int", "an Algorithm, or a function"]),
        ("import nothing_of_this_name\n", ["ModuleNotFoundError", "(mine.py:1)"]),
        ("", ["has no rank"]),
        (
            WHOLE.replace(".tanh()", ".sum()").replace("MINE", "rank").replace("advantage_N *", "2 *"),
            ["without a finite value and gradient for each token"],
        ),
    ],
)
def test_what_is_no_algorithm_is_refused(tmp_path: Path, code: str, words: Sequence[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        build(tmp_path, code, "rank")
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_name_that_nobody_announces_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.name='grpoo'.*'reinforce_pp_baseline', FILE\.py:NAME"):
        load_spec(None, ["name=x", "task.name=arithmetic", "algorithm.name=grpoo"])


def test_an_installed_package_announces_algorithms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "announced_algorithms.py").write_text(RANK)
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [EntryPoint(name="ranked", value="announced_algorithms:rank", group="strop.algorithms")]
    monkeypatch.setattr(
        reference, "entry_points", lambda group: [one for one in points if one.group == group]
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reference.announced.cache_clear()
    try:
        spec = load_spec(None, ["name=x", "task.name=arithmetic", "algorithm.name=ranked"]).spec
        assert build_algorithm(spec.algorithm).advantage(np.array([0.0, 1.0])).tolist() == [-0.5, 0.5]
        points.append(EntryPoint(name="ranked", value="others:rank", group="strop.algorithms"))
        reference.announced.cache_clear()
        with pytest.raises(ConfigError, match="two installed packages announce 'ranked'"):
            load_spec(None, ["name=x", "task.name=arithmetic", "algorithm.name=ranked"])
    finally:
        reference.announced.cache_clear()
