"""Settings: what each says of itself, and what cannot stand together."""

from __future__ import annotations

import re
import typing
from typing import Any

import pytest
from pydantic import ValidationError

from strop.errors import ConfigError
from strop.spec import OptimizerSpec, RunSpec, Section, TrainSpec
from strop.spec.base import SpecConflict
from strop.spec.schema import settings
from strop.spec.task import TaskSection, UserCodeSection
from strop.tasks.generated import ArithmeticSpec
from tests.fixtures.tiny_run import tiny_spec


def all_sections() -> list[type[Section]]:
    found = [Section]
    for section in found:
        # Not those of tests.
        found += [one for one in section.__subclasses__() if one.__module__.startswith("strop.")]
    found.remove(Section)
    return found


EVERYDAY = {
    *(
        "name",
        "seed",
        "model.uri",
        "sampling.temperature",
        "algorithm.name",
        "lora.rank",
        "reference.kl_beta",
    ),
    *("task.name", "task.max_reply_tokens", "task.system_prompt", "task.thinking", "task.num_held_out"),
    *("task.num_train", "task.source", "task.dataset", "task.prompt", "task.reward", "task.parts"),
    *("optimizer.lr", "optimizer.warmup_steps", "optimizer.schedule"),
    *("train.terms", "train.steps", "train.prompts_per_step", "train.group_size", "train.max_staleness"),
    *("train.checkpoint_every", "sft.source", "dpo.source", "teacher.source", "teacher.model"),
    *("eval.every", "eval.num_examples", "eval.num_samples", "engine.kind", "placement.kind"),
    *("harness.tasks", "harness.num_few_shot"),
    *("output.root", "store.uri", "job.nodes", "job.gpus", "job.train_gpus", "job.infer_gpus"),
    "job.time_limit",
}


def test_the_everyday_settings_are_few_and_every_other_says_why_it_exists() -> None:
    assert {setting.key for setting in settings() if setting.reason is None} == EVERYDAY
    assert len(EVERYDAY) <= 45
    for setting in settings():
        assert (setting.reason is None) == (setting.key in EVERYDAY), setting.key
        assert setting.reason is None or len(setting.reason.split()) >= 4, setting.key


@pytest.mark.parametrize("section", all_sections(), ids=lambda section: section.__name__)
def test_a_section_is_documented_frozen_strict_and_closed(section: type[Section]) -> None:
    assert section.__doc__
    for name, info in section.model_fields.items():
        # Which task it is the summary beside it says.
        is_tag = issubclass(section, TaskSection) and name == "name"
        assert is_tag or info.description, f"{section.__name__}.{name} has no description"
    config = section.model_config
    # What a class of the user's takes is checked by that class.
    extra = "allow" if issubclass(section, UserCodeSection) else "forbid"
    assert (config.get("frozen"), config.get("strict"), config.get("extra")) == (True, True, extra)


@pytest.mark.parametrize("setting", settings(), ids=lambda s: f"{s.key}-{s.variant}")
def test_every_setting_says_its_type_limits_and_the_meaning_of_no_value(setting: typing.Any) -> None:
    assert setting.type_text
    assert setting.allowed_text
    assert setting.is_nullable == ("none = " in setting.info.description), setting.key


def test_a_value_of_the_wrong_type_is_not_converted() -> None:
    for wrong in ("40", True, 40.0, None):
        with pytest.raises(ValidationError):
            TrainSpec(steps=typing.cast(int, wrong))
    # A whole number is a number.
    assert OptimizerSpec(lr=1).lr == 1.0
    with pytest.raises(ValidationError):
        OptimizerSpec(lr=float("nan"))


def test_the_pairs_of_a_range_by_hand() -> None:
    # 3, 4, 5 with each other: 3 * 3 ordered pairs.
    assert ArithmeticSpec(min_value=3, max_value=5, num_held_out=8).num_train == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": {"temperature": 0.0}}, "all rollouts of a prompt would be equal"),
        ({"sampling": {"top_p": 0.9}}, "a part of the vocabulary"),
        ({"sampling": {"top_k": 1}}, "a part of the vocabulary"),
        ({"task": {"name": "arithmetic", "min_value": 9, "max_value": 3}}, "0 examples to train on"),
        ({"task": {"name": "reasoning-gym", "dataset": "a", "num_train": 7}}, "7 examples to train on"),
        ({"task": {"name": "arithmetic", "num_held_out": 394}}, "6 examples to train on"),
        ({"eval": {"num_examples": 101}}, "fewer examples are held out"),
        ({"optimizer": {"warmup_steps": 40}}, "before the learning rate is reached"),
        ({"train": {"terms": "sft"}}, "there is nothing to imitate"),
        # PRC-2: 8 prompts per step, published every 16, staleness 0 (algorithms.md S1: k = 2, bound 1).
        (
            {"train": {"max_staleness": 1}, "placement": {"kind": "inline"}},
            "nothing is sampled while the learner works",
        ),
        ({"placement": {"kind": "inline", "rollout_workers": 1}}, "only Ray starts other processes"),
        ({"sft": {"source": "/a.jsonl"}}, "would not be trained on"),
        ({"train": {"terms": "sft"}, "sft": {"source": "/a.jsonl", "weight": 0.5}}, "there is no other term"),
        (
            {"train": {"terms": "sft"}, "sft": {"source": "/a.jsonl", "min_reward": 0.5}},
            "sft.min_reward=0.5: the setting chooses among rollouts of a run",
        ),
        (
            {"train": {"terms": "sft"}, "sft": {"source": "/run", "train_on": "last"}},
            "sft.train_on='last': the setting chooses among rows",
        ),
        (
            {"train": {"micro_batch_tokens": 32}, "task": {"name": "arithmetic", "max_reply_tokens": 32}},
            "would not fit",
        ),
        (
            {"task": {"name": "reasoning-gym", "dataset": "x", "config": {"a": [None]}}},
            "task.config.a=none: this value cannot be handed on",
        ),
        (
            {"task": {"name": "reasoning-gym", "dataset": "x", "config": {"a": {"b": 2**63}}}},
            "cannot be handed on",
        ),
        (
            {"task": {"name": "reasoning-gym", "dataset": "x", "config": {"a": float("inf")}}},
            "cannot be handed on",
        ),
    ],
)
def test_settings_that_cannot_stand_together_are_refused(
    changes: dict[str, dict[str, object]], words: str
) -> None:
    tree = {"name": "x", "task": {"name": "arithmetic"}} | changes
    with pytest.raises(ValidationError, match=words) as caught:
        RunSpec.model_validate(tree)
    cause = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(cause, SpecConflict)
    assert not isinstance(cause, ConfigError)
    assert " Allowed: " in str(cause)
    assert " Next: " in str(cause)


def test_the_same_sizes_one_apart_are_accepted() -> None:
    # 20 * 20 = 400 pairs, 392 held out: the 8 left fill one step exactly.
    spec = RunSpec(name="x", task=ArithmeticSpec(num_held_out=392))
    assert spec.train.prompts_per_step == 8


@pytest.mark.parametrize("name", ["a", "0", "gsm8k-small-2", "a" * 40])
def test_names_that_are_fine(name: str) -> None:
    assert RunSpec(name=name, task=ArithmeticSpec()).name == name


@pytest.mark.parametrize("name", ["", "..", "ä", "-"])
def test_names_without_a_letter_or_digit_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        RunSpec(name=name, task=ArithmeticSpec())


@pytest.mark.parametrize("name", ["A", "a b", "-a", "a_b", "a/b", "../a", "a\n", "a" * 41])
def test_other_names_are_mapped_to_those_of_folders_and_jobs(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,39}", RunSpec(name=name, task=ArithmeticSpec()).name)


RAY = {"kind": "ray"}
TEACHER = {"source": "model", "model": "some/model"}
LONG = {"name": "arithmetic", "max_reply_tokens": 600}
CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"algorithm": {"name": "dppo", "mode": "single"}},
        "its range bounds the difference to the engine's probability",
    ),
    (
        {"algorithm": {"zero_variance": "skip"}, "reference": {"kl_beta": 0.04}},
        "the loss has a gradient on tokens without advantage too",
    ),
    ({"algorithm": {"name": "ipo_mask", "zero_variance": "skip"}}, "without advantage too"),
    (
        {"algorithm": {"zero_variance": "skip"}, "teacher": {"source": "initial", "form": "sampled"}},
        "without advantage too",
    ),
    ({"algorithm": {"correction": "mis_seq"}, "task": LONG}, "the ratio of a long reply is a product"),
    ({"train": {"terms": "distill"}}, "there is nobody to learn from"),
    (
        {"train": {"terms": "distill"}, "teacher": {"source": "model"}},
        "only a teacher of its own has a model of its own",
    ),
    (
        {"train": {"terms": "distill"}, "teacher": {"source": "current"}},
        "teacher and policy would be the same in every respect",
    ),
    (
        {"train": {"terms": "distill"}, "teacher": {**TEACHER, "student_frac": 0.5}},
        "the other steps need demonstrations",
    ),
    (
        {"train": {"terms": "distill"}, "teacher": TEACHER, "algorithm": {"correction": "icepop"}},
        r"algorithm\.correction='icepop'.*nothing would read the setting",
    ),
    (
        {
            "train": {"terms": "distill"},
            "teacher": {**TEACHER, "form": "sampled"},
            "algorithm": {"clip_high": 0.5, "correction": "icepop"},
        },
        r"algorithm\.clip_high=0\.5.*nothing would read .*remove algorithm\.clip_high, or",
    ),
    (
        {"train": {"terms": "distill"}, "teacher": TEACHER, "reference": {"kl_beta": 0.1}},
        r"reference\.kl_beta=0\.1.*nothing would read the setting",
    ),
    ({"teacher": TEACHER}, "beside rewards a teacher is a part of the advantage"),
    ({"train": {"terms": "dpo"}}, "pairs and the loss on them belong together"),
    ({"dpo": {"source": "runs/one"}}, "pairs and the loss on them belong together"),
    ({"algorithm": {"name": "sapo", "clip_low": 0.1}}, "algorithm.clip_low=0.1: its gate has no bounds"),
    ({"algorithm": {"name": "cispo", "dual_clip": 3.0}}, "its loss is not the clipped one"),
    (
        {"algorithm": {"entropy_weight": 0.1}, "train": {"terms": "distill"}, "teacher": TEACHER},
        "the loss has no term that the bonus belongs to",
    ),
    (
        {"algorithm": {"mode": "single"}, "train": {"epochs": 2}},
        "every ratio would be 1 in every optimizer step",
    ),
    ({"algorithm": {"zero_variance": "skip", "entropy_weight": 0.1}}, "without advantage too"),
    ({"algorithm": {"zero_variance": "skip", "advantage": "rpp_baseline"}}, "without advantage too"),
    ({"algorithm": {"name": "reinforce_pp", "zero_variance": "skip"}}, "without advantage too"),
    (
        {"algorithm": {"name": "reinforce_pp"}, "reference": {"kl_beta": 0.1, "kl_estimator": "k2"}},
        "its KL penalty is a part of the reward",
    ),
    (
        {"algorithm": {"advantage": "rpp"}, "reference": {"kl_beta": 0.1, "kl_estimator": "k3"}},
        "its KL penalty is a part of the reward",
    ),
    *(
        ({"train": {"group_size": 1}, "algorithm": {"name": name}}, "every advantage would be zero")
        for name in ("grpo", "dr_grpo", "dapo", "rloo", "gspo")
    ),
    (
        {"algorithm": {"name": "reinforce_pp", "zero_variance": "drop"}, "train": {"group_size": 1}},
        "every group would be left out",
    ),
    ({"train": {"prompts_per_step": 6, "mini_batches": 4}}, "the parts of a batch would differ in size"),
    (
        {"train": {"terms": "distill", "epochs": 2}, "teacher": TEACHER},
        "only a batch of rollouts alone is gone through several times",
    ),
    (
        {"train": {"terms": "rl+sft", "mini_batches": 3}, "sft": {"source": "r"}},
        "only a batch of rollouts alone",
    ),
    ({"optimizer": {"final_frac": 0.1}}, "a learning rate that stays never gets there"),
    (
        {"optimizer": {"warmup_steps": 6}, "train": {"steps": 3, "epochs": 2}},
        "before the learning rate is reached, after 6 optimizer steps",
    ),
]


@pytest.mark.parametrize(("sections", "why"), CASES)
def test_opt_4_what_cannot_go_together_is_refused(sections: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        tiny_spec(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"name": "dppo", "mode": "bypass"}},
        {"algorithm": {"zero_variance": "keep"}, "reference": {"kl_beta": 0.04}},
        {"algorithm": {"correction": "mis_seq", "max_sequence_tokens": None}, "task": LONG},
        {"teacher": {**TEACHER, "form": "sampled"}},
        {"train": {"terms": "distill"}, "teacher": {"source": "current", "context": "It is {answer}."}},
        {"train": {"terms": "distill", "group_size": 1}, "teacher": TEACHER},
        {
            "train": {"terms": "distill"},
            "teacher": {**TEACHER, "form": "sampled"},
            "algorithm": {"correction": "icepop", "correction_cap": 3.0},
        },
        {"train": {"terms": "dpo"}, "dpo": {"source": "r", "loss": "pref_ipo"}},
        {"algorithm": {"name": "gspo", "dual_clip": 3.0}},
        {"algorithm": {"mode": "single"}, "train": {"max_staleness": 1}, "placement": RAY},
        {"algorithm": {"name": "reinforce_pp"}, "train": {"group_size": 1}},
        {"algorithm": {"name": "reinforce_pp_baseline"}, "reference": {"kl_beta": 0.1, "kl_estimator": "k2"}},
        {"train": {"prompts_per_step": 8, "mini_batches": 4, "epochs": 2}},
        {"optimizer": {"schedule": "cosine", "final_frac": 0.1, "warmup_steps": 5}, "train": {"epochs": 2}},
    ],
)
def test_what_can_is_taken(sections: dict[str, Any]) -> None:
    tiny_spec(**sections)


def test_a_reference_is_needed_only_for_a_penalty() -> None:
    assert not tiny_spec().needs_reference
    assert tiny_spec(reference={"kl_beta": 0.1}).needs_reference
    assert not tiny_spec(train={"terms": "dpo"}, dpo={"source": "r"}).needs_reference
