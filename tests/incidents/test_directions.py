"""A penalty, a teacher or a preference whose direction is reversed looks plausible in every value."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strop.algorithm.losses import ESTIMATORS, KlPenalty, PenaltyFn
from strop.cluster import Roles
from strop.errors import CheckRefused
from strop.policy.packing import PackedGroup
from strop.record import EventKind
from strop.record.rollouts import read_rollouts
from strop.rollout import FloatArray, Rollout
from strop.train.batch import pack_reply, share_prompts
from tests.fixtures.tiny_run import Composition, new_run, tiny_spec

_POLICY = (0.5, 0.3, 0.2)
_REFERENCE = (0.6, 0.3, 0.1)
_TOY_RATE = 0.5


def find_penalty_flaw(penalty: KlPenalty) -> str | None:
    """Return the flaw of a penalty, or None, by its effect on three tokens.

    It must be 0 where policy and reference agree, and one step down its gradient, averaged over all tokens,
    must come closer to a reference that differs. Swapped arguments keep its values and fail here.
    """
    policy_V, reference_V = (
        torch.tensor(probabilities, dtype=torch.float64).log() for probabilities in (_POLICY, _REFERENCE)
    )
    value_V, grad_V = penalty(policy_V, policy_V, policy_V)
    if float(value_V.abs().max()) > 0.0 or float(grad_V.abs().max()) > 0.0:
        return "the penalty is not 0 between a policy and itself"
    before = _divergence(policy_V, reference_V)
    _, grad_V = penalty(policy_V, reference_V, policy_V)
    # d logp_v / d logits = onehot(v) - policy, averaged over tokens drawn from the policy.
    weighed_V = policy_V.exp() * grad_V / penalty.beta
    step_V = weighed_V - policy_V.exp() * weighed_V.sum()
    after = _divergence((policy_V - _TOY_RATE * step_V).log_softmax(dim=0), reference_V)
    if after < before:
        return None
    return f"a step down the penalty moves away from the reference: from {before:.4f} to {after:.4f} nats"


def _divergence(logp_V: Tensor, reference_V: Tensor) -> float:
    return float((logp_V.exp() * (logp_V - reference_V)).sum())


OFFERED = ["k2", "k3", "k3+"]


def swapped(estimate: PenaltyFn) -> PenaltyFn:
    """Return an estimator whose two arguments were exchanged, as the incident had it."""

    def estimate_swapped(logp_N: Tensor, reference_N: Tensor) -> tuple[Tensor, Tensor]:
        return estimate(reference_N, logp_N)

    return estimate_swapped


@pytest.mark.parametrize("name", OFFERED)
def test_opt_1_swapped_arguments_have_the_wrong_sign_and_are_found(name: str) -> None:
    """Incident: the direction of the KL was reversed for six days; the blow-ups were explained otherwise.

    Symptom: the penalty drives the policy away from its reference, and its value stays plausible.
    """
    estimate = ESTIMATORS[name]
    # The policy likes the token more than the reference does: descent must lower it.
    logp_N, reference_N = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert estimate(logp_N, reference_N)[1].item() > 0.0 > swapped(estimate)(logp_N, reference_N)[1].item()
    assert find_penalty_flaw(KlPenalty(beta=0.1, estimate=estimate)) is None
    flaw = find_penalty_flaw(KlPenalty(beta=0.1, estimate=swapped(estimate)))
    assert flaw is not None
    assert "moves away from the reference: from 0.0475" in flaw


def test_opt_1_an_estimator_without_a_gradient_is_found_too() -> None:
    """k1 measures well and teaches nothing: its gradient is 0 on average, and 1 where nothing is to do."""
    flaw = find_penalty_flaw(KlPenalty(beta=0.1, estimate=ESTIMATORS["k1"]))
    assert flaw == "the penalty is not 0 between a policy and itself"


def compose(root: Path, model_dir: Path, **sections: Any) -> Composition:
    reference = {"kl_beta": 0.05} | sections.pop("reference", {})
    return Composition(tiny_spec(reference=reference, **sections), model_dir, new_run(root))


class Shifted:
    """A reference that is not the weights it says it is."""

    def __init__(self, roles: Roles) -> None:
        assert roles.reference is not None
        self._reference = roles.reference

    async def score(self, groups: list[PackedGroup], temperature: float) -> list[FloatArray]:
        return [scores - np.float32(0.5) for scores in await self._reference.score(groups, temperature)]


def test_opt_1_the_gate_refuses_a_reference_that_differs_at_the_start(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    made = compose(tmp_path, tiny_model_dir)
    with pytest.raises(CheckRefused, match="are the same weights and disagree about the same tokens"):
        made.run(lambda roles: replace(roles, reference=Shifted(roles)))


def test_opt_1_a_run_with_a_penalty_starts_at_0_and_stays_close(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The same run with a strong penalty ends nearer to where it began, by its own measure."""
    moved = {}
    for beta in (1e-6, 3.0):
        made = compose(tmp_path / str(beta), tiny_model_dir, reference={"kl_beta": beta}, train={"steps": 6})
        roles = made.run()
        gates = [event.detail for event in made.notes.events if event.kind is EventKind.GATE]
        assert any(detail.startswith("mean gap to the reference 0 nats") for detail in gates)
        moved[beta] = asyncio.run(distance(roles, read_rollouts(made.run_dir.rollouts_path(6))))
    assert moved[3.0] > 0.0
    assert moved[3.0] < 0.7 * moved[1e-6]


async def distance(roles: Roles, rollouts: Sequence[Rollout]) -> float:
    """Return the divergence of the policy from its reference, in nats per token that it sampled."""
    groups = share_prompts([(one.turns[0].token_ids, pack_reply(one.turns, 0.0, 0.0)) for one in rollouts])
    reference = roles.reference
    assert reference is not None
    own, theirs = [np.concatenate(await one.score(groups, 1.0)) for one in (roles.learner, reference)]
    return float((own - theirs).mean())


def test_without_a_penalty_no_reference_is_loaded(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = Composition(tiny_spec(train={"steps": 1}), tiny_model_dir, new_run(tmp_path))
    assert made.run().reference is None
    assert "kl" not in made.notes.causes("gate")
