from __future__ import annotations

import re
import typing

import pytest
from pydantic import ValidationError

from strop.errors import ConfigError
from strop.spec import OptimizerSpec, RunSpec, Section, TrainSpec, all_keys, expert_keys
from strop.spec.base import SpecConflict
from strop.spec.schema import settings
from strop.spec.task import TaskSection, UserCodeSection
from strop.tasks.generated.arithmetic import ArithmeticSpec


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
    assert set(all_keys()) - expert_keys() == EVERYDAY
    assert len(EVERYDAY) <= 45
    for setting in settings():
        assert (setting.reason is None) == (setting.key in EVERYDAY), setting.key
        assert setting.reason is None or len(setting.reason.split()) >= 4, setting.key


def test_the_settings_of_strop_are_this_list() -> None:
    # Adding a setting is a decision: it must be read, documented and kept for years.
    assert all_keys() == (
        *("name", "seed"),
        *("model.uri", "model.dtype", "model.prompt_format"),
        *("task.name", "task.max_reply_tokens", "task.max_too_long_frac", "task.thinking"),
        *("task.system_prompt", "task.prompt_template", "task.stop"),
        *("task.order_file", "task.min_solved_frac", "task.max_solved_frac"),
        *("task.agent", "task.agent_limit_s", "task.agent_tokens"),
        *("task.min_value", "task.max_value", "task.operators", "task.num_held_out"),
        *("task.num_train", "task.min_words", "task.max_words", "task.partial_marks"),
        *("task.max_turns", "task.max_attempt_tokens", "task.max_attempt_s", "task.max_observation_chars"),
        *("task.tool_limit_s", "task.mcp_servers", "task.max_format_errors"),
        *("task.taskset", "task.form", "task.packages", "task.folder"),
        *("task.agent_program", "task.config", "task.renderer", "task.max_reward", "task.min_reward"),
        *("task.dataset", "task.data_seed", "task.num_few_shot", "task.source"),
        *("task.mode", "task.strictness", "task.min_level", "task.max_level", "task.year", "task.subject"),
        *("task.min_isolation", "task.sandbox", "task.agent_paths"),
        *("task.rules", "task.hidden_tests", "task.difficulty"),
        *("task.memory_gib", "task.disk_gib"),
        *("task.image", "task.test_command", "task.test_limit_s", "task.hidden_paths"),
        *("task.protected", "task.root", "task.tasks", "task.raw_validate"),
        *("task.open_network", "task.url", "task.action_field", "task.action_is_number", "task.instructions"),
        *("task.options", "task.max_return", "task.min_return"),
        *("task.all_or_nothing", "task.rubric", "task.judge_url", "task.judge_model", "task.judge_revision"),
        "task.judge_engine",
        *("task.judge_key_env", "task.judge_concurrency", "task.max_judge_calls"),
        *("task.pass_score", "task.calibration", "task.can_judge_itself"),
        *("task.subset", "task.train_on", "task.answer", "task.prompt", "task.reward"),
        *("task.reward_weights", "task.reward_limit_s"),
        "task.gold",
        *("task.parts", "task.data", "task.alpha", "task.format_weight", "task.max_format_weight"),
        "task.judge_limit_s",
        *("sampling.temperature", "sampling.top_p", "sampling.top_k"),
        *("algorithm.name", "algorithm.advantage", "algorithm.mode"),
        *("algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip"),
        *("algorithm.entropy_weight", "algorithm.zero_variance", "algorithm.overlong"),
        *("algorithm.correction", "algorithm.correction_cap", "algorithm.max_sequence_tokens"),
        *("algorithm.credit", "algorithm.turn_discount"),
        *("lora.rank", "lora.alpha", "lora.targets"),
        *("reference.model", "reference.kl_beta", "reference.kl_estimator"),
        *("optimizer.lr", "optimizer.weight_decay", "optimizer.beta2"),
        *("optimizer.max_grad_norm", "optimizer.warmup_steps"),
        *("optimizer.schedule", "optimizer.final_frac"),
        *("train.terms", "train.steps", "train.prompts_per_step", "train.group_size"),
        *("train.mini_batches", "train.epochs"),
        *("train.max_staleness", "train.deterministic"),
        *("train.micro_batch_tokens", "train.activation_checkpointing", "train.checkpoint_every"),
        "train.keep_checkpoints",
        "train.accept",
        *("sft.source", "sft.train_on", "sft.subset", "sft.min_reward", "sft.max_per_example"),
        *("sft.rows_per_step", "sft.max_dropped_frac", "sft.weight"),
        *(
            "dpo.source",
            "dpo.loss",
            "dpo.beta",
        ),
        *("dpo.pairs_per_step", "teacher.source", "teacher.model", "teacher.context", "teacher.form"),
        *("teacher.divergence", "teacher.student_frac", "teacher.rows", "teacher.weight"),
        *("eval.every", "eval.num_examples", "eval.num_samples", "eval.baselines"),
        *("harness.tasks", "harness.engine", "harness.num_few_shot", "harness.max_reply_tokens"),
        *("harness.max_model_tokens", "harness.gpu_memory_frac", "harness.tensor_parallel"),
        *("harness.include", "harness.model_args", "harness.arguments", "harness.seed"),
        *("engine.kind", "engine.max_num_seqs", "engine.python", "engine.is_eager"),
        *("engine.gpu_memory_frac", "engine.max_model_tokens", "engine.tensor_parallel"),
        *("engine.update_mode", "engine.transport"),
        *("placement.kind", "placement.learners", "placement.engines", "placement.rollout_workers"),
        *(
            "placement.threads",
            "ray.address",
            "ray.temp_dir",
        ),
        *("runtime.serve", "runtime.url", "runtime.key_file", "runtime.backend"),
        "tripwires.max_zero_variance_frac",
        *("tripwires.max_truncated_frac", "tripwires.max_failed_frac", "tripwires.max_drift_nats"),
        "tripwires.min_entropy_nats",
        "tripwires.max_unearned_ratio",
        *("tripwires.max_stall_s", "tripwires.on_alarm"),
        *("output.root", "output.dir", "output.log_level", "store.uri", "store.order"),
        *("store.mirror", "store.mirror_as"),
        "store.keep_last",
        *("trackers.use", "trackers.project", "trackers.offline", "trackers.rollouts_every"),
        "trackers.finish_limit_s",
        *("job.nodes", "job.gpus", "job.train_gpus", "job.infer_gpus", "job.infer_nodes"),
        *("job.judge_gpus", "job.env_gpus", "job.single_gpu"),
        *("job.cpus_per_gpu", "job.cpus", "job.memory", "job.time_limit", "job.max_requeue", "job.grace_s"),
        *("job.preflight", "job.max_silence_s", "job.cpu_nodes", "job.cpu_command"),
    )


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
    assert ArithmeticSpec(min_value=3, max_value=5, num_held_out=8).num_pairs == 9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": {"group_size": 1}}, "every advantage would be zero"),
        ({"sampling": {"temperature": 0.0}}, "all rollouts of a prompt would be equal"),
        ({"sampling": {"top_p": 0.9}}, "a part of the vocabulary"),
        ({"sampling": {"top_k": 1}}, "a part of the vocabulary"),
        ({"task": {"name": "arithmetic", "min_value": 9, "max_value": 3}}, "no number is left"),
        ({"task": {"name": "arithmetic", "num_held_out": 400}}, "no pair is left"),
        ({"task": {"name": "reverse-text", "min_words": 5, "max_words": 4}}, "no length is left"),
        ({"task": {"name": "reverse-text", "num_train": 7}}, "7 examples to train on"),
        ({"task": {"name": "arithmetic", "num_held_out": 394}}, "6 examples to train on"),
        ({"eval": {"num_examples": 101}}, "fewer examples are held out"),
        ({"optimizer": {"warmup_steps": 40}}, "before the learning rate is reached"),
        ({"train": {"terms": "sft"}}, "there is nothing to imitate"),
        # PRC-2: 8 prompts per step, published every 16, staleness 0 (algorithms.md S1: k = 2, bound 1).
        (
            {"train": {"max_staleness": 1}, "placement": {"kind": "inline"}},
            "nothing is sampled while the learner works",
        ),
        ({"train": {"terms": "rl+sft"}}, "there is nothing to imitate"),
        (
            {"placement": {"kind": "process", "engines": 2}},
            "placement.kind='process' and placement.engines=2: they make 1 learners, 2 engines and 0 rollout",
        ),
        ({"placement": {"kind": "inline", "learners": 2}}, "only Ray starts several processes of a role"),
        ({"placement": {"kind": "inline", "rollout_workers": 1}}, "or processes for rollouts"),
        (
            {"placement": {"kind": "ray", "engines": 2, "rollout_workers": 3}},
            "some engines would have fewer workers than others",
        ),
        ({"sft": {"source": "/a.jsonl"}}, "would not be trained on"),
        ({"train": {"terms": "sft"}, "sft": {"source": "/a.jsonl", "weight": 0.5}}, "there is no other term"),
        (
            {"train": {"terms": "sft"}, "sft": {"source": "/a.jsonl", "min_reward": 0.5}},
            "sft.min_reward=0.5: the setting chooses among rollouts of a run",
        ),
        (
            {"train": {"terms": "sft"}, "sft": {"source": "/run", "subset": "x", "train_on": "last"}},
            "sft.subset='x' and sft.train_on='last': the setting chooses among rows",
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
