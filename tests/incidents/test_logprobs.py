"""Incidents of the group on log-probabilities, each test named after the incident's id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strop.algorithm import ALGORITHMS
from strop.cluster import Roles
from strop.engine import Completion, GenerationRequest
from strop.engine.native import NativeEngine
from strop.errors import CheckRefused
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner
from strop.policy.optimizer import Masters
from strop.policy.packing import PackedGroup
from strop.rollout import FailureOwner, Group, Outcome, Sampling
from strop.spec.train import OptimizerSpec, TripwireSpec
from strop.tokenizer import Tokenizer
from strop.train.batch import build_batch
from strop.train.gate_models import check_parity
from strop.train.measure import measure_batch, measure_rollouts, measure_update
from strop.train.step import Update
from strop.train.watch.tripwires import find_alarms
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.tiny_run import Composition, learner_of, new_run, tiny_spec
from tests.incidents.faulty_engines import (
    TamperedEngine,
    build_gate,
    load_model,
    native_engine,
    raw_values,
    sample_groups,
)
from tests.policy.worlds import REPLY_LIMIT, make_model, ragged_groups


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def bf16_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), dtype="bfloat16")


def test_log_1_raw_values_at_temperature_0_6_are_refused_by_name(model_dir: Path) -> None:
    """Incident: the trainer divided by the temperature, the engine reported values from before it.

    Symptom: a KL of about 1 at step 1; runs stayed wrong after the "fix" of always using 1.
    """
    checks = []
    for tamper in (None, raw_values(load_model(model_dir))):
        engine = TamperedEngine(native_engine(model_dir), tamper=tamper)
        gate = build_gate(model_dir, engine, sampling={"temperature": 0.6})
        checks.append(asyncio.run(check_parity(gate, sample_groups(gate))))
    assert [check.is_passed for check in checks] == [True, False]
    assert "cause: temperature" in checks[1].detail


def test_log_2_values_over_fewer_tokens_are_refused_by_name(model_dir: Path) -> None:
    """Incident: sampler and trainer normalised over different supports.

    Symptom: the log of the kept mass leaked into the importance ratios. Here the engine applies a
    top-p of its own, which nobody asked for.
    """
    engine = TamperedEngine(native_engine(model_dir), sampling=Sampling(top_p=0.9))
    gate = build_gate(model_dir, engine)
    check = asyncio.run(check_parity(gate, sample_groups(gate)))
    assert not check.is_passed
    assert "cause: support" in check.detail


def test_log_3_a_value_that_is_not_a_number_is_refused(model_dir: Path) -> None:
    """Incident: as above; a comparison with NaN must not count as agreement."""
    gate = build_gate(model_dir, native_engine(model_dir))
    groups = sample_groups(gate)
    with torch.no_grad():
        learner_of(gate.roles).model.head_weight[0, 0] = float("nan")
    assert not asyncio.run(check_parity(gate, groups)).is_passed


class ShapedModel(LanguageModel):
    """The fault: what it computes depends on how many rows it is asked about at once."""

    max_num_seqs = 10**6

    def logits(self, hidden_N_D: torch.Tensor, products: Any = None) -> torch.Tensor:
        logits = super().logits(hidden_N_D, products)
        return logits * 1.5 if len(hidden_N_D) > self.max_num_seqs else logits


def with_shaped_engine(model_dir: Path, max_num_seqs: int) -> Callable[[Roles], Roles]:
    model = ShapedModel.load(model_dir, dtype=torch.float32)
    assert isinstance(model, ShapedModel)
    model.max_num_seqs = max_num_seqs
    return lambda roles: replace(roles, engine=NativeEngine(model, roles.tokenizer, max_num_seqs=128))


def test_log_3_a_kernel_that_depends_on_the_engines_batch_is_refused(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: clip fraction .08 at one way to split a batch, none at another. The gate asks for 64 rows."""
    made = Composition(tiny_spec(), tiny_model_dir, new_run(tmp_path))
    with pytest.raises(CheckRefused, match=r"parity: mean gap .* cause: weights, position ids, template or"):
        made.run(with_shaped_engine(tiny_model_dir, max_num_seqs=8))


def test_log_3_a_kernel_that_depends_on_the_trainers_micro_batch_is_refused(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Here the engine is right, and the trainer wrong wherever several groups are fed together."""

    def pack_badly(roles: Roles) -> Roles:
        learner = learner_of(roles)
        score = learner.score

        def score_packed(
            groups: Sequence[PackedGroup], temperature: float, role: str | None = None
        ) -> list[Any]:
            found = score(groups, temperature, role)
            if len(groups) == 1:
                return found
            return [values + np.float32(0.2 * (-1) ** index) for index, values in enumerate(found)]

        learner.score = score_packed  # type: ignore[method-assign]
        return roles

    made = Composition(tiny_spec(), tiny_model_dir, new_run(tmp_path))
    with pytest.raises(CheckRefused, match=r"parity: mean gap .* cause: weights, position ids, template or"):
        made.run(pack_badly)


def test_log_3_a_shape_that_no_gate_asked_for_raises_an_alarm_in_its_step(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """More rows than the gate's 64: the first step that has them says so."""
    train = {"steps": 1, "prompts_per_step": 12, "group_size": 8}
    causes = {}
    for max_num_seqs in (1000, 64):
        made = Composition(tiny_spec(train=train), tiny_model_dir, new_run(tmp_path))
        made.run(with_shaped_engine(tiny_model_dir, max_num_seqs))
        causes[max_num_seqs] = made.notes.causes("tripwire")
    assert causes == {1000: [], 64: ["logprob_drift"]}


def test_log_3_drift_at_learning_rate_0_is_seen_by_a_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Incident: the gap grew with every step, although the weights stood still."""

    def drift(request: GenerationRequest, completion: Completion) -> Completion:
        shift = np.float32(0.025 * completion.policy_version)
        return replace(completion, logprobs=np.minimum(completion.logprobs - shift, 0.0))

    spec = tiny_spec(train={"steps": 4}, optimizer={"lr": 1e-30})
    alarms: dict[str, list[int]] = {}
    for name, tamper in (("true", None), ("drifting", drift)):
        made = Composition(spec, tiny_model_dir, new_run(tmp_path))
        made.run(lambda roles, t=tamper: replace(roles, engine=TamperedEngine(roles.engine, tamper=t)))
        found = [event for event in made.notes.events if event.cause == "logprob_drift"]
        alarms[name] = [event.step for event in found]
    assert alarms["true"] == []
    # 0.06 nats are allowed, which the third publication exceeds.
    assert alarms["drifting"] == [4]


def _with_difference(group: Group) -> Group:
    """Give the scored members of a group rewards of which none is their mean: all are trained on."""
    judged = [
        replace(rollout, outcome=Outcome(parts={"score": float(index**2)}))
        if rollout.outcome.is_scored
        else rollout
        for index, rollout in enumerate(group.rollouts)
    ]
    return replace(group, rollouts=tuple(judged))


def _drop_one(request: GenerationRequest, completion: Completion) -> Completion:
    return replace(completion, logprobs=completion.logprobs[:-1])


def _drop_all(request: GenerationRequest, completion: Completion) -> Completion:
    nothing: Any = None
    return replace(completion, logprobs=nothing)


def _fill_infinite(request: GenerationRequest, completion: Completion) -> Completion:
    return replace(completion, logprobs=np.full_like(completion.logprobs, -np.inf))


@pytest.mark.parametrize(
    ("tamper", "kind"),
    [(_drop_one, "UnfitRecord"), (_drop_all, "EngineError"), (_fill_infinite, "UnfitRecord")],
)
def test_log_4_a_missing_value_masks_the_rollout(
    model_dir: Path, tamper: Callable[[GenerationRequest, Completion], Completion], kind: str
) -> None:
    """Incident: fillers stood for missing values (0.0, -100), and training ran on them."""
    tokenizer = Tokenizer.load(model_dir)

    def break_some(request: GenerationRequest, completion: Completion) -> Completion:
        return tamper(request, completion) if completion.text == "broken" else completion

    # An attempt that is made again has the same seed, and the same reply.
    replies = iter(["broken", "2", "3", "4"])
    said: dict[int, str] = {}

    def say(request: GenerationRequest) -> str:
        return said.get(request.seed) or said.setdefault(request.seed, next(replies))

    engine = TamperedEngine(DummyEngine(tokenizer, say), tamper=break_some)
    (group,) = sample_groups(build_gate(model_dir, engine), num_groups=1)
    lost, *kept = group.rollouts
    assert lost.outcome.failure is not None
    assert (lost.outcome.failure.owner, lost.outcome.failure.kind) == (FailureOwner.ENGINE, kind)
    assert lost.outcome.reward is None
    assert all(rollout.outcome.is_scored for rollout in kept)
    batch = build_batch(ALGORITHMS["grpo"], [_with_difference(group)], REPLY_LIMIT)
    assert (batch.credit.num_unscored, batch.credit.num_forwarded) == (1, 3)
    # What is trained on holds what the engine said about the others, and nothing else.
    values = np.concatenate([reply.engine_logprobs for g in batch.groups for reply in g.replies])
    assert set(values.tolist()) == {-0.5}
    assert measure_rollouts([group])["failed_frac"] == 0.25
    assert lost.outcome.metrics["num_refills"] == 2.0


class Bf16Masters(Masters):
    """The fault: the compute copies are their own masters."""

    def _make_master(self, copy: torch.nn.Parameter) -> torch.Tensor:
        copy.grad = torch.zeros_like(copy)
        return copy


def test_log_5_updates_that_vanish_in_16_bits_raise_an_alarm(bf16_dir: Path) -> None:
    """Incident: as above. At a learning rate of 1e-6 an update is far below half a step of bf16.

    A bf16 weight of 0.15 has neighbours 0.0005 to 0.001 away. The share of changed compute copies
    is as small in a healthy run, whose small updates add up in the masters; it tells nothing.
    """
    algorithm = ALGORITHMS["grpo"]
    batch = build_batch(algorithm, ragged_groups(), REPLY_LIMIT)
    seen, copies = {}, {}
    for kind in (Masters, Bf16Masters):
        model = load_model(bf16_dir, "bfloat16")
        learner = Learner(model, OptimizerSpec(lr=1e-6), masters=kind(model))
        report = learner.step(batch.groups, temperature=1.0, token_terms=algorithm)
        metrics = measure_batch(batch) | measure_update(Update(steps=(report,)))
        quiet = TripwireSpec(max_drift_nats=None)
        seen[kind.__name__] = [alarm.cause for alarm in find_alarms(quiet, 1, metrics)]
        copies[kind.__name__] = report.changed_frac
    assert seen == {"Masters": [], "Bf16Masters": ["vanishing_updates"]}
    assert max(copies.values()) < 0.05
