"""Distillation through the packed head: the gradient of full logits, in chunks, whoever teaches."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from strop.algorithm.offline import Divergence
from strop.errors import ConfigError
from strop.policy.distilling import DistillTerm
from strop.policy.learner import TEACHER, Learner
from strop.policy.packing import PackedGroup
from strop.policy.scoring import FrozenModel
from tests.policy.worlds import Gradients, World, build_learner, load_model, make_model, relative_error

RULES = [Divergence(name="forward_kl"), Divergence(name="jsd"), Divergence(name="reverse_kl")]
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def student_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Another width, other layers: only the vocabulary must be the same.
    return make_model(tmp_path_factory.mktemp("teacher"), hidden_size=48, num_hidden_layers=3)


def samples() -> list[PackedGroup]:
    return [World(3).packed(4, [3, 1, 5], weight=0.1), World(4).packed(1, [2], weight=0.3)]


def term_of(rule: Divergence, groups: list[PackedGroup]) -> DistillTerm:
    return DistillTerm(name="distill", groups=groups, temperature=TEMPERATURE, divergence=rule)


def taught(student_dir: Path, teacher_dir: Path, max_positions: int | None = None) -> Learner:
    learner = build_learner(student_dir, max_positions=max_positions, max_grad_norm=1e9)
    learner.frozen[TEACHER] = FrozenModel(load_model(teacher_dir))
    return learner


def naive(
    student_dir: Path, teacher_dir: Path, rule: Divergence, groups: list[PackedGroup]
) -> tuple[float, Gradients]:
    """One row at a time, all logits, autograd through the value."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        for path in (student_dir, teacher_dir)
    )
    total = torch.zeros(())
    for group in groups:
        for reply in group.replies:
            both = []
            prompts = (group.prompt_ids, group.teacher_prompt_ids)
            for model, prompt in zip((student, teacher), prompts, strict=True):
                asked = group.prompt_ids if prompt is None else prompt
                ids = torch.from_numpy(np.concatenate([asked, reply.token_ids]).astype(np.int64))
                logits = model(input_ids=ids[None], use_cache=False).logits[0, len(asked) - 1 : -1]
                both.append(torch.log_softmax(logits / TEMPERATURE, dim=-1))
            value, _ = rule(both[0], both[1].detach())
            total = total + reply.weight * value.sum()
    total.backward()  # type: ignore[no-untyped-call]
    named = student.named_parameters()
    return float(total.detach()), {name: one.grad for name, one in named if one.grad is not None}


@pytest.mark.parametrize("rule", RULES, ids=["forward", "jsd", "top"])
@pytest.mark.parametrize("max_positions", [None, 7])
def test_the_packed_gradient_is_the_naive_one(
    student_dir: Path, teacher_dir: Path, rule: Divergence, max_positions: int | None
) -> None:
    groups = samples()
    loss, expected = naive(student_dir, teacher_dir, rule, groups)
    learner = taught(student_dir, teacher_dir, max_positions)
    assert relative_error(learner.term_gradients(term_of(rule, groups)), expected) <= 1e-4
    report = learner.step_terms([term_of(rule, groups)])
    assert report.loss == pytest.approx(loss, rel=1e-5)
    assert report.drift.num_values == 11


def test_a_teacher_may_read_more_than_the_policy(student_dir: Path, teacher_dir: Path) -> None:
    world = World(9)
    groups = [
        replace(group, teacher_prompt_ids=world.ids(6 + index)) for index, group in enumerate(samples())
    ]
    _, expected = naive(student_dir, teacher_dir, RULES[0], groups)
    gradients = taught(student_dir, teacher_dir).term_gradients(term_of(RULES[0], groups))
    assert relative_error(gradients, expected) <= 1e-4


def test_a_policy_may_be_its_own_teacher(student_dir: Path) -> None:
    """Self-distillation: the same weights, without gradient, under a richer prompt."""
    world = World(9)
    groups = [replace(group, teacher_prompt_ids=world.ids(6)) for group in samples()]
    _, expected = naive(student_dir, student_dir, RULES[1], groups)
    term = replace(term_of(RULES[1], groups), is_own_teacher=True)
    assert relative_error(build_learner(student_dir).term_gradients(term), expected) <= 1e-4
    # Under the same prompt both agree, and nothing is to be learned.
    same = replace(term, groups=samples())
    report = build_learner(student_dir).step_terms([same])
    assert report.loss == pytest.approx(0.0, abs=1e-6)
    assert report.grad_norm == pytest.approx(0.0, abs=1e-6)


def test_the_weight_of_a_term_scales_its_gradient(student_dir: Path, teacher_dir: Path) -> None:
    once = taught(student_dir, teacher_dir).step_terms([term_of(RULES[0], samples())])
    thrice = taught(student_dir, teacher_dir).step_terms([replace(term_of(RULES[0], samples()), weight=3.0)])
    assert thrice.grad_norm == pytest.approx(3 * once.grad_norm, rel=1e-5)
    assert thrice.loss == pytest.approx(3 * once.loss, rel=1e-6)


def test_chunks_change_nothing(student_dir: Path, teacher_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = taught(student_dir, teacher_dir).term_gradients(term_of(RULES[0], samples()))
    monkeypatch.setattr("strop.policy.distilling.DISTILL_CHUNK_ROWS", 1)
    chunked = taught(student_dir, teacher_dir).term_gradients(term_of(RULES[0], samples()))
    assert relative_error(chunked, expected) <= 1e-5


def test_a_learner_without_a_teacher_says_so(student_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"term distill compares with a teacher, and the learner has none"):
        build_learner(student_dir).step_terms([term_of(RULES[0], samples())])


def test_a_term_goes_to_another_process(student_dir: Path, teacher_dir: Path) -> None:
    term = term_of(RULES[2], samples())
    arrived: DistillTerm = pickle.loads(pickle.dumps(term))
    assert arrived.divergence == term.divergence
    sent, got = (taught(student_dir, teacher_dir).term_gradients(one) for one in (term, arrived))
    assert all(torch.equal(sent[name], got[name]) for name in sent)
