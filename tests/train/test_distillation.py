"""What a teacher is shown, and runs that learn from one: another model, or the same one that knows more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strop.algorithm import Algorithm
from strop.errors import ConfigError
from strop.record.rollouts import read_row
from strop.rollout import Group, Split
from strop.spec.algorithm import AlgorithmSpec
from strop.spec.model import TeacherSpec
from strop.tasks.prompt import PromptFormat, render_prompt
from strop.tokenizer import Tokenizer
from strop.train.step import (
    TeacherPrompts,
    pack_for_teacher,
    sampled_distillation,
    takes_own_replies,
)
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_run import Composition, learner_of, new_run, tiny_spec
from tests.policy.worlds import World
from tests.train.test_sft_loop import imitate

TASK = SpellTask(max_reply_tokens=12)


def prompts_of(model_dir: Path, context: str) -> TeacherPrompts:
    tokenizer = Tokenizer.load(model_dir)
    return TeacherPrompts(context=context, task=TASK, tokenizer=tokenizer, prompt_format=PromptFormat.CHAT)


def test_a_share_of_the_steps_takes_own_replies() -> None:
    spec = TeacherSpec(source="initial", student_frac=0.25)
    drawn = [takes_own_replies(spec, 7, step) for step in range(400)]
    assert 70 < sum(drawn) < 130
    # A resumed run asks for a later step alone.
    assert [takes_own_replies(spec, 7, step) for step in (3, 200, 399)] == [drawn[3], drawn[200], drawn[399]]
    assert drawn != [takes_own_replies(spec, 8, step) for step in range(400)]
    for share in (0.0, 1.0):
        whole = spec.model_copy(update={"student_frac": share})
        assert takes_own_replies(whole, 7, 5) == bool(share)


def test_the_context_stands_behind_the_last_message(tiny_model_dir: Path) -> None:
    example = TASK.examples(Split.TRAIN)[3]
    prompts = prompts_of(tiny_model_dir, "{{It}} is {answer}, number {n}.")
    text = "".join(map(prompts.tokenizer.token_text, prompts.ids(example).tolist()))
    assert "#3\n\n{It} is Q7Z, number 3." in text
    _, plain_ids = render_prompt(prompts.tokenizer, TASK.render(example), PromptFormat.CHAT)
    assert len(prompts.ids(example)) > len(plain_ids)


def test_a_context_names_only_what_there_is(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"teacher\.context names \{hint\}, .* has answer, n"):
        prompts_of(tiny_model_dir, "See {hint}.").ids(TASK.examples(Split.TRAIN)[0])


@pytest.mark.parametrize("context", ["See {hint", "See {}.", "See {answer:>5}."])
def test_a_context_that_cannot_be_read_is_refused_with_the_run_file(context: str) -> None:
    """Incident: an open brace ended the run at its first step, with a ValueError."""
    with pytest.raises(ValueError, match=r"teacher\.context=.*'\{\{' and '\}\}' stand for braces"):
        TeacherSpec(context=context)


def solved(group: Group, is_correct: list[bool]) -> Group:
    rollouts = [
        replace(one, outcome=replace(one.outcome, is_correct=flag))
        for one, flag in zip(group.rollouts, is_correct, strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts))


def test_every_token_that_is_taught_weighs_the_same() -> None:
    # A reply without a score is taught as well: 3 + 2 + 4 tokens.
    group = solved(World().group(3, [[3], [2], [4]], [1.0, 0.0, None]), [True, False, False])
    (packed,) = pack_for_teacher(TeacherSpec(), [group], None, 512)
    assert [reply.weight for reply in packed.replies] == pytest.approx([1 / 9] * 3)
    assert packed.teacher_prompt_ids is None
    (packed,) = pack_for_teacher(TeacherSpec(rows="unsolved"), [group], None, 512)
    assert [len(reply.token_ids) for reply in packed.replies] == [2, 4]
    assert [reply.weight for reply in packed.replies] == pytest.approx([1 / 6] * 2)


def test_a_reply_without_room_behind_the_longer_prompt_is_left_out(tiny_model_dir: Path) -> None:
    prompts = prompts_of(tiny_model_dir, "The answer is {answer}.")
    example = TASK.examples(Split.TRAIN)[0]
    group = replace(World().group(3, [[3], [2], [4]], [1.0, 0.0, 0.0]), example=example)
    length = len(prompts.ids(example))
    (packed,) = pack_for_teacher(TeacherSpec(), [group], prompts, length + 3)
    assert [len(reply.token_ids) for reply in packed.replies] == [3, 2]
    assert packed.teacher_prompt_ids is not None
    assert packed.teacher_prompt_ids.tolist() == prompts.ids(example).tolist()
    assert pack_for_teacher(TeacherSpec(), [group], prompts, length) == []


def expected_step(algorithm: Algorithm, policy: Tensor, engine: Tensor, teacher: Tensor) -> Tensor:
    """Return what a token that the engine drew does to the logits, on average. Shapes: V each."""
    terms = algorithm.token_terms(policy, engine, teacher - policy)
    # Row y is the derivative of log p(y).
    slopes = torch.eye(len(policy)).double() - policy.exp()
    return (-engine.exp() * terms.grad_N) @ slopes


def test_a_teacher_of_sampled_tokens_is_corrected_for_the_age_of_replies() -> None:
    """Tokens come from earlier weights: only with their ratio is the step that of the reverse KL."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    policy, engine, teacher = logits.log_softmax(-1)
    moved = logits[0].clone().requires_grad_()
    own = moved.log_softmax(-1)
    (-(own.exp() * (own - teacher)).sum()).backward()
    corrected = sampled_distillation(TeacherSpec(form="sampled"), AlgorithmSpec(correction_cap=1e6))
    plain = sampled_distillation(TeacherSpec(form="sampled"), AlgorithmSpec(correction="none"))
    found, wrong = (expected_step(one, policy, engine, teacher) for one in (corrected, plain))
    assert moved.grad is not None
    assert torch.allclose(found, moved.grad, rtol=1e-9, atol=1e-12)
    assert torch.cosine_similarity(wrong, moved.grad, dim=0) < 0.9
    # By default the ratio is cut, as beside rewards.
    default = sampled_distillation(TeacherSpec(form="sampled"), AlgorithmSpec())
    assert (default.correction.name, default.correction_cap) == ("tis_token", 2.0)


def compose(root: Path, model_dir: Path, teacher: dict[str, Any], **sections: Any) -> Composition:
    train = {"terms": "distill", "steps": 10, "group_size": 2} | sections.pop("train", {})
    spec = tiny_spec(train=train, teacher=teacher, **sections)
    return Composition(spec, model_dir, new_run(root), task=TASK)


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("teacher"), num_hidden_layers=1)


@pytest.mark.parametrize("form", ["exact", "sampled"])
def test_a_run_comes_closer_to_its_teacher(
    tmp_path: Path, tiny_model_dir: Path, teacher_dir: Path, form: str
) -> None:
    teacher = {"source": "model", "model": str(teacher_dir), "form": form, "divergence": "reverse_kl"}
    # Few replies and steps are enough for whole distributions, and not for single tokens.
    train = {"group_size": 2, "steps": 10} if form == "exact" else {"group_size": 10}
    train = {"steps": 20} | train
    made = compose(tmp_path, tiny_model_dir, teacher, train=train)
    roles = made.run()
    assert "teacher" in learner_of(roles).frozen
    losses = [line["loss"] for line in made.run_dir.metrics.read()]
    assert len(losses) == train["steps"]
    assert made.notes.causes("tripwire") == []
    # The sampled form's loss is minus its mean advantage: the same divergence, estimated.
    assert losses[0] > 0.0
    assert np.mean(losses[-3:]) < 0.8 * losses[0]
    # A teacher's judgement is no advantage.
    path = made.run_dir.rollouts_path(1)
    stored = read_row(path.read_bytes(), path.name, 0)
    assert (stored.status, stored.staleness, {*stored.advantages}) == ("trained", 0, {None})
    is_corrected = ["correction_mean" in line for line in made.run_dir.metrics.read()]
    assert is_corrected == [form == "sampled"] * train["steps"]


@pytest.mark.parametrize("source", ["initial", "current"])
def test_a_policy_learns_from_itself_knowing_the_answer(
    tmp_path: Path, tiny_model_dir: Path, source: str
) -> None:
    teacher = {"source": source, "context": "The answer is {answer}.", "rows": "unsolved"}
    made = compose(tmp_path, tiny_model_dir, teacher, train={"steps": 3})
    roles = made.run()
    lines = made.run_dir.metrics.read()
    assert all(line["loss"] > 0.0 and line["grad_norm"] > 0.0 for line in lines)
    assert (not roles.frozen_dirs) == (source == "current")


def test_the_other_steps_take_demonstrations(tmp_path: Path, tiny_model_dir: Path, teacher_dir: Path) -> None:
    found = imitate(tmp_path, tiny_model_dir)
    teacher = {"source": "model", "model": str(teacher_dir), "student_frac": 0.5}
    sft = {"source": found.source, "rows_per_step": 4}
    made = compose(tmp_path / "runs", tiny_model_dir, teacher, sft=sft, train={"steps": 6})
    Composition(made.spec, tiny_model_dir, made.run_dir, task=TASK, demonstrations=found).run()
    lines = made.run_dir.metrics.read()
    own = ["reward_mean" in line for line in lines]
    assert own == [takes_own_replies(made.spec.teacher, made.spec.seed, step) for step in range(6)]
    assert len(set(own)) == 2
    assert ["num_sft_rows" in line for line in lines] == [not is_own for is_own in own]


def test_a_teacher_beside_rewards(tmp_path: Path, tiny_model_dir: Path, teacher_dir: Path) -> None:
    teacher = {"source": "model", "model": str(teacher_dir), "form": "sampled", "weight": 0.5}
    made = compose(tmp_path, tiny_model_dir, teacher, train={"terms": "rl", "steps": 2})
    made.run()
    assert all(line["grad_norm"] > 0.0 for line in made.run_dir.metrics.read())


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    other = tiny_model(tmp_path / "other", vocab_size=300)
    made = compose(tmp_path / "runs", tiny_model_dir, {"source": "model", "model": str(other)})
    with pytest.raises(ConfigError, match="teacher has a vocabulary of 300 tokens and the policy one of"):
        made.run()
