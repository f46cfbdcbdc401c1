"""The translation of a configuration: settings with their origins, and settings made of several keys.

Environments become a task, rollouts per step become prompts per step, and deployments become GPUs of a node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.errors import ConfigError
from strop.spec.display import dotted, show_value
from strop.spec.job import GPU_SPLIT
from strop.spec.sources import OVERRIDE, join_words, parse_override

_DEFAULT_LR = 1e-6
DEFAULTS: Mapping[str, tuple[str, Any]] = {
    "algorithm.name": ("trainer.loss", "dppo"),
    "train.max_staleness": ("max_async_level", 1),
    "optimizer.lr": ("trainer.optim.lr", _DEFAULT_LR),
    "optimizer.weight_decay": ("trainer.optim.weight_decay", 0.01),
    "optimizer.beta2": ("trainer.optim.betas2", 0.999),
    "model.uri": ("model.name", "Qwen/Qwen3-0.6B"),
}
"""PRIME-RL's defaults that differ from strop's, by setting: key and value."""
_TASKS: Mapping[str, str] = {
    "math": "math",
    "hendrycks-math": "math",
    "math-env": "math",
    "math500": "math500",
    "deepscaler": "deepscaler",
    "gsm8k": "gsm8k",
    "reverse-text": "reverse-text",
    "reasoning-gym": "reasoning-gym",
    "mbpp": "mbpp",
    "humaneval": "humaneval",
    "apps": "apps",
    "ifeval": "rlvr-ifeval",
    "rlvr-ifeval": "rlvr-ifeval",
    "mmlu": "mmlu",
}
"""strop's task with the same prompts and verifier, by environment."""
_ENV_SETTINGS = {
    "num_train_examples": "num_train",
    "num_eval_examples": "num_held_out",
    "system_prompt": "system_prompt",
    "gym": "dataset",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One key of a configuration."""

    key: str
    value: Any
    origin: str
    """Key and place in the file: 'trainer.optim.lr, rl.toml:12'."""


@dataclass(kw_only=True, slots=True)
class Translation:
    """The settings of the run file so far, each with its origin, and notices about the other keys."""

    folder: Path
    """The folder of the run file, to which its paths are relative."""
    task: str | None = None
    """The task to use instead of the environments."""
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    names: list[tuple[str, str]] = field(default_factory=list)
    """Names that the configuration gives the run, with their origins."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers that are combined into settings, by a short name."""
    envs: list[tuple[Mapping[str, Any], str]] = field(default_factory=list)
    """Environments to train on, with their origins."""
    eval_envs: list[tuple[Mapping[str, Any], str]] = field(default_factory=list)
    ratios: Sequence[float] = ()
    is_sft: bool = False

    def set(self, key: str, value: Any, origin: str) -> None:
        """Set a setting. If an earlier key set another value, the later one wins, with a notice."""
        if key in self.settings and self.settings[key][0] != value:
            old, other = self.settings[key]
            self.notices.append(f"{key}: {show_value(value)} ({origin}) over {show_value(old)} ({other})")
        self.settings[key] = (value, origin)

    def note(self, entry: Entry, why: str) -> None:
        """Add a notice about a key that is not in the run file."""
        self.notices.append(f"{entry.origin} = {show_value(entry.value)}: {why}")

    def finish(self) -> None:
        """Add the settings made of several keys, and PRIME-RL's defaults that differ from strop's."""
        _finish_task(self)
        _finish_batch(self)
        _finish_gpus(self)
        if "final_lr" in self.numbers:
            lr = self.settings.get("optimizer.lr", (_DEFAULT_LR, ""))[0]
            self.set("optimizer.final_frac", min(1.0, self.numbers["final_lr"] / lr), "scheduler.min_lr")
        reply = self.settings.get("task.max_reply_tokens", (0, ""))[0]
        for key in ("train.micro_batch_tokens", "engine.max_model_tokens"):
            if isinstance(reply, int) and self.settings.get(key, (reply + 1, ""))[0] <= reply:
                value, origin = self.settings.pop(key)
                self.notices.append(
                    f"{key} = {value} ({origin}) is left out: a prompt stands before {reply} tokens"
                )
        for key, (name, value) in DEFAULTS.items():
            is_of_rl = key in ("algorithm.name", "train.max_staleness")
            if is_of_rl and (self.is_sft or (key != "algorithm.name" and "job.single_gpu" in self.settings)):
                continue
            self.settings.setdefault(key, (value, f"default of {name}"))
        if not self.is_sft and self.settings["engine.kind"][0] != "vllm":
            self.settings.pop("engine.max_model_tokens", None)
        if "train.steps" not in self.settings:
            self.notices.append(
                "max_steps is not given: PRIME-RL goes on without end, train.steps is strop's"
            )


def env_name(env: Mapping[str, Any]) -> str:
    """Return the name of an environment, in any version of the configuration."""
    taskset = env.get("taskset") or env.get("env", {}).get("taskset") or {}
    name = str(env.get("id") or taskset.get("id") or env.get("name") or "")
    plain = name.rpartition("/")[2].partition("@")[0].replace("_", "-").lower()
    return re.sub(r"-v\d+$", "", plain)


def take_output_dir(entry: Entry, out: Translation) -> None:
    """Set the run's directory, as a path relative to the run file."""
    path = os.path.relpath(os.path.abspath(str(entry.value)), out.folder)
    out.set("output.dir", path if os.path.isabs(path) else f"./{path}", entry.origin)


def take_settings(out: Translation, words: Sequence[str]) -> dict[str, Any]:
    """Apply `key=value` words, which win over the configuration; those about GPUs replace all its GPUs.

    Returns the settings to copy into the run file unchanged.
    Raises: ConfigError for an invalid word, and for GPU settings of the other kind of run.
    """
    values = {dotted(path): value for path, value in map(parse_override, join_words(words))}
    foreign = ("job.train_gpus", "job.infer_gpus", "job.single_gpu") if out.is_sft else ("job.gpus",)
    if wrong := [key for key in foreign if key in values]:
        kind, allowed = ("SFT", "job.gpus") if out.is_sft else ("RL", "job.train_gpus, job.infer_gpus, ...")
        raise ConfigError(
            f"{wrong[0]} for a configuration of {kind}", allowed=allowed, next_step="set these instead"
        )
    out.task = values.pop("task.name", None)
    gpus = {key: values.pop(f"job.{key}") for key in GPU_SPLIT if f"job.{key}" in values}
    if wrong := [f"job.{key}={show_value(value)}" for key, value in gpus.items() if type(value) is str]:
        raise ConfigError(f"{wrong[0]} is no number", allowed="a whole number", next_step="correct it")
    if gpus:
        for word in ("train_gpus", "infer_gpus", "single_gpu", "train_nodes", "infer_nodes"):
            out.numbers.pop(word, None)
        out.numbers |= {"train_gpus" if key == "gpus" else key: value for key, value in gpus.items()}
    if "name" in values:
        out.names.insert(0, (str(values.pop("name")), OVERRIDE))
    if "output.dir" in values:
        out.settings.pop("output.dir", None)
        take_output_dir(Entry(key="output_dir", value=values.pop("output.dir"), origin=OVERRIDE), out)
    return values


def _finish_task(out: Translation) -> None:
    """Set the task: that of the environment, or a mixture for several environments.

    Raises: ConfigError naming an environment without a task.
    """
    if out.task is not None:
        out.set("task.name", out.task, OVERRIDE)
        for env, origin in out.envs:
            out.notices.append(f"{origin} = {env_name(env)!r}: {out.task} stands for it")
        return
    if out.is_sft and not out.envs:
        # SFT data have no task; an evaluation beside them has one.
        out.envs = out.eval_envs[:1]
    unknown = [env_name(env) or "none" for env, _ in out.envs if env_name(env) not in _TASKS]
    if unknown or not out.envs:
        raise ConfigError(
            f"the environment {', '.join(unknown)} is no task of strop's"
            if unknown
            else "no environment is named",
            allowed=f"{', '.join(_TASKS)}, or task.name= with a task of `strop tasks ls` or FILE.py:CLASS",
            next_step="add task.name=NAME; `strop tasks new` writes one of your own to start from",
        )
    if len(out.envs) == 1:
        _write_env(out, *out.envs[0], "task")
        return
    out.set("task.name", "mixture", out.envs[0][1])
    limit = out.settings.pop("task.max_reply_tokens", None)
    names = [env_name(env) for env, _ in out.envs]
    for index, (env, origin) in enumerate(out.envs):
        label = f"{names[index]}-{index}" if names.count(names[index]) > 1 else names[index]
        _write_env(out, env, origin, f"task.parts.{label}")
        if out.ratios:
            out.set(f"task.parts.{label}.weight", float(out.ratios[index]), "buffer.env_ratios")
        if limit is not None:
            out.set(f"task.parts.{label}.max_reply_tokens", *limit)


def _write_env(out: Translation, env: Mapping[str, Any], origin: str, table: str) -> None:
    left = {key: value for key, value in env.items() if key not in ("id", "name", "taskset", "args", "env")}
    taskset = env.get("taskset") or env.get("env", {}).get("taskset") or {}
    arguments = {**env.get("args", {}), **{k: v for k, v in taskset.items() if k != "id"}}
    task = _TASKS[env_name(env)]
    if task == "math" and "dataset_name" in arguments:
        task = "rows"
        _write_rows(out, arguments, origin, table)
    out.set(f"{table}.name", task, origin)
    for key, value in arguments.items():
        setting = _ENV_SETTINGS.get(key)
        if setting is None or (setting == "dataset" and env_name(env) != "reasoning-gym"):
            left[f"args.{key}"] = value
        elif not (isinstance(value, int) and value < 0):
            # -1 is all of them.
            out.set(f"{table}.{setting}", value, f"{origin}.args.{key}")
    for key, value in left.items():
        out.notices.append(f"{origin}.{key} = {show_value(value)}: task {task} has no such setting")


def _write_rows(out: Translation, arguments: dict[str, Any], origin: str, table: str) -> None:
    """Set a task of rows for the user's mathematics data, and remove its keys from the arguments."""
    column = arguments.pop("question_key", "question")
    settings = {
        "source": arguments.pop("dataset_name"),
        "prompt": f"{{{column}}}\n\nPut the final answer in \\boxed{{{{}}}}.",
        "answer": arguments.pop("answer_key", "answer"),
        "reward": "math",
    }
    if arguments.get("dataset_subset") == "default":
        del arguments["dataset_subset"]
    for key, value in settings.items():
        out.set(f"{table}.{key}", value, f"{origin}.args")
    out.notices.append(f"{origin}: task.prompt is worded by strop, and graded as its reward math does")


def _finish_batch(out: Translation) -> None:
    """Set group size and prompts per step from rollouts per step and rollouts per example."""
    if out.is_sft:
        out.set("train.terms", "sft", "data")
        return
    group, batch = int(out.numbers.get("group", 1)), int(out.numbers.get("batch", 128))
    if group < 2:
        out.notices.append(
            f"rollouts_per_example = {group}: strop compares the rollouts of one prompt, and takes 8 of each"
        )
        group = 8
    out.set("train.group_size", group, "rollouts_per_example")
    out.set("train.prompts_per_step", max(1, batch // group), f"batch_size {batch} / {group}")


def _finish_gpus(out: Translation) -> None:
    """Set the GPUs of each role on a node, and the number of nodes."""
    numbers = out.numbers
    if out.is_sft:
        if numbers.get("infer_gpus"):
            out.notices.append("num_infer_gpus: a run that imitates evaluates on the GPUs that learn")
        if "train_gpus" in numbers:
            out.set("job.gpus", int(numbers["train_gpus"]), "deployment")
        if "train_nodes" in numbers:
            out.set("job.nodes", int(numbers["train_nodes"]), "deployment.num_nodes")
        return
    out.settings.setdefault("engine.kind", ("vllm", "inference"))
    if numbers.get("single_gpu"):
        out.set("job.single_gpu", True, "single_gpu")
        return
    if "infer_nodes" in numbers:
        nodes = [int(numbers.get("train_nodes", 1)), int(numbers["infer_nodes"])]
        out.set("job.nodes", sum(nodes), "deployment.num_train_nodes + num_infer_nodes")
        out.set("job.infer_nodes", nodes[1], "deployment.num_infer_nodes")
        out.set("job.gpus", int(numbers.get("node_gpus", 8)), "deployment.gpus_per_node")
        num_gpus = nodes[1] * int(numbers.get("node_gpus", 8))
    else:
        num_gpus = int(numbers.get("infer_gpus", 1))
        out.set("job.train_gpus", int(numbers.get("train_gpus", 1)), "deployment.num_train_gpus")
        out.set("job.infer_gpus", num_gpus, "deployment.num_infer_gpus")
    parallel = int(out.settings.get("engine.tensor_parallel", (1, ""))[0])
    engines = max(1, num_gpus // parallel)
    if numbers.get("engines", engines) != engines:
        out.notices.append(
            f"inference.parallel.dp = {numbers['engines']:g}: {num_gpus} GPUs by {parallel} are"
            f" {engines} engines"
        )
