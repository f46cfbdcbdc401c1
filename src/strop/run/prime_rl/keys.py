"""What each key of PRIME-RL means here, and why a run file does without the others.

Keys are dotted paths with underscores, in a file for the whole run; those of a role's own file begin with the
role. Several versions of PRIME-RL are covered, by their names for a thing. Sources: the configuration classes
of its trainer, orchestrator, inference and SFT entry points, and its published example files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from strop.run.prime_rl.translation import Given, Translation, env_name, take_output_dir
from strop.spec.model import DEFAULT_TARGETS

Rule = Callable[[Given, Translation], None]
# What the keys of a role begin with.
ROLE = r"(trainer\.|orchestrator\.|inference\.)?"
TRAINER = r"(trainer\.)?"
ORCH = r"(orchestrator\.)?"
INFER = r"inference\."


def _to(setting: str, allowed: Callable[[Any], bool] = lambda value: True, why: str = "") -> Rule:
    """Return the rule of a key that is a setting by another name; values that it cannot have are noted."""

    def rule(given: Given, out: Translation) -> None:
        if allowed(given.value):
            out.set(setting, given.value, given.origin)
        else:
            out.note(given, why or f"{setting} takes no such value")

    return rule


def _keep(word: str) -> Rule:
    """Return the rule of a number that a setting is made of together with others."""

    def rule(given: Given, out: Translation) -> None:
        out.numbers[word] = given.value

    return rule


def _quiet(given: Given, out: Translation) -> None:
    """Say nothing: strop does so anyway."""


def _only(value: Any, why: str) -> Rule:
    """Return the rule of a key that only matters where it has another value than strop's own."""

    def rule(given: Given, out: Translation) -> None:
        if given.value != value:
            out.note(given, why)

    return rule


def _name(given: Given, out: Translation) -> None:
    out.names.append((str(given.value), given.origin))


def _seq_len(given: Given, out: Translation) -> None:
    """The trainer packs as many tokens into a micro-batch; the orchestrator cuts samples there."""
    if not given.key.startswith("orchestrator"):
        out.set("train.micro_batch_tokens", given.value, given.origin)
    if not given.key.startswith(("trainer", "data", "sft")):
        out.settings.setdefault("engine.max_model_tokens", (given.value, given.origin))


def _broadcast(given: Given, out: Translation) -> None:
    names = {"nccl": "broadcast", "filesystem": "file"}
    if given.value in names:
        out.set("engine.transport", names[given.value], given.origin)
    else:
        out.note(given, "engine.transport is 'auto', 'file', 'broadcast' or 'store'")


def _optimizer(given: Given, out: Translation) -> None:
    if given.value != "adamw":
        out.note(given, "strop's optimizer is AdamW; its learning rate means another thing")


def _betas(given: Given, out: Translation) -> None:
    for index, value in enumerate(given.value[:2], start=1):
        out.set(f"optimizer.beta{index}", float(value), given.origin)


def _targets(given: Given, out: Translation) -> None:
    names = [one for one in given.value if re.fullmatch(r"\w+", str(one)) and one != "experts"]
    left = [one for one in given.value if one not in names]
    if left:
        out.note(given, f"lora.targets are names of layers, without {', '.join(map(str, left))}")
    out.set("lora.targets", ",".join(names) or DEFAULT_TARGETS, given.origin)


def _checkpointing(given: Given, out: Translation) -> None:
    out.set("train.activation_checkpointing", True, given.origin)
    if given.value not in ({}, 1):
        out.note(given, "strop computes every layer again, or none")


def _loss(given: Given, out: Translation) -> None:
    named = {"default": "dppo", "ipo": "ipo_mask", "grpo": "grpo", "gspo": "gspo", "cispo": "cispo"}
    if given.value in named:
        out.set("algorithm.name", named[given.value], given.origin)
    elif given.value == "sft":
        out.note(given, "imitate what `strop eval` kept of that model: train.terms = 'sft'")
    else:
        out.note(given, "a loss of your own is algorithm.name = 'FILE.py:NAME'")


def _own_code(given: Given, out: Translation) -> None:
    out.note(given, "write it as algorithm.name = 'FILE.py:NAME' (docs/tasks.md)")


def _filtering(given: Given, out: Translation) -> None:
    if given.value:
        out.set("algorithm.zero_variance", "resample", given.origin)


def _examples(given: Given, out: Translation) -> None:
    out.set("eval.num_examples", given.value if given.value > 0 else None, given.origin)


def _log_level(given: Given, out: Translation) -> None:
    """Of the whole run, or of trainer and orchestrator, which are one process here."""
    if given.value not in ("debug", "info", "warning", "error"):
        out.note(given, "output.log_level is debug, info, warning or error")
        return
    known = str(out.settings.get("output.log_level", ("", ""))[0]).split(",")
    of_train = [one for one in known if one.startswith("train=")]
    of_all = [one for one in known if one and "=" not in one]
    if given.key.startswith(("trainer", "orchestrator")):
        of_train = [f"train={given.value}"]
    else:
        of_all = [str(given.value)]
    out.settings["output.log_level"] = (",".join([*of_all, *of_train]), given.origin)


def _environments(given: Given, out: Translation) -> None:
    tables = given.value if isinstance(given.value, list) else [given.value]
    out.envs += [(table, given.origin) for table in tables]


def _eval_environments(given: Given, out: Translation) -> None:
    tables = [table for table in given.value if isinstance(table, dict)]
    out.eval_envs += [(table, given.origin) for table in tables]
    names = ", ".join(map(env_name, tables))
    out.note(
        given,
        f"a run evaluates the held-out examples of its own task; {names} beside it is a file for"
        " --eval-config or `strop eval RUN --config`",
    )


def _gpu_ids(word: str) -> Rule:
    def rule(given: Given, out: Translation) -> None:
        out.numbers[word] = len(given.value)
        out.note(given, f"{len(given.value)} GPUs; which ones they are is left to the launcher")

    return rule


def _site(given: Given, out: Translation) -> None:
    out.note(given, f"write {given.key.rpartition('.')[2]} into the site's profile, strop-sites.toml")


def _sft_data(given: Given, out: Translation) -> None:
    out.is_sft = True
    tables = given.value if isinstance(given.value, list) else [{"dataset": given.value}]
    names = [str(table.get("dataset") or table.get("name")) for table in tables]
    if len(names) > 1:
        out.note(given, f"sft.source is one file: write {', '.join(names[1:])} into it too")
    if names[0].endswith((".jsonl", ".json", ".parquet", ".csv")):
        out.set("sft.source", names[0], given.origin)
    else:
        out.set("sft.source", f"./{names[0].rpartition('/')[2]}.jsonl", given.origin)
        out.note(given, "sft.source takes a file: write the data set there as JSONL or Parquet")


def _loss_mask(given: Given, out: Translation) -> None:
    if given.key.endswith("assistant") and given.value:
        return
    if given.key.endswith("user") and given.value:
        out.set("sft.train_on", "all", given.origin)
    elif given.value:
        out.note(given, "sft.train_on is 'assistant', 'last' or 'all'")


RULES: Mapping[str, Rule] = {
    # Shared.
    rf"{ROLE}model\.name": _to("model.uri"),
    rf"{ROLE}max_steps": _to("train.steps", bool, "PRIME-RL goes on without end; train.steps is strop's"),
    rf"{ROLE}(model\.)?(seq_len|max_seq_len)|data\.seq_len": _seq_len,
    r"max_model_len|inference\.((model|vllm)\.)?max_model_len": _to("engine.max_model_tokens", bool),
    rf"{ROLE}(max_async_level|async_level)": _to("train.max_staleness"),
    rf"{ORCH}seed": _to("seed", lambda value: value is not None),
    rf"{ROLE}ckpt\.interval": _to("train.checkpoint_every"),
    rf"{ROLE}ckpt\.(keep_last|keep)": _to("train.keep_checkpoints"),
    rf"{ROLE}ckpt\.keep_interval": _to("store.keep_every"),
    rf"{ROLE}weight_broadcast\.type": _broadcast,
    rf"{ROLE}output_dir": take_output_dir,
    rf"{ROLE}(wandb\.name|slurm\.job_name)": _name,
    rf"{ROLE}log\.level": _log_level,
    rf"{ROLE}ckpt|inference|trainer|orchestrator|deployment\.type": _quiet,
    # Trainer.
    rf"{TRAINER}optim\.type": _optimizer,
    rf"{TRAINER}optim\.lr": _to("optimizer.lr"),
    rf"{TRAINER}optim\.weight_decay": _to("optimizer.weight_decay"),
    rf"{TRAINER}optim\.betas1": _to("optimizer.beta1"),
    rf"{TRAINER}optim\.betas2": _to("optimizer.beta2"),
    rf"{TRAINER}optim\.betas": _betas,
    rf"{TRAINER}optim\.(max_norm|max_grad_norm)": _to(
        "optimizer.max_grad_norm", bool, "0 would train nothing"
    ),
    rf"{TRAINER}scheduler\.type": _to("optimizer.schedule", ("constant", "linear", "cosine").__contains__),
    rf"{TRAINER}scheduler\.warmup_steps": _to("optimizer.warmup_steps"),
    rf"{TRAINER}scheduler\.min_lr": _keep("final_lr"),
    rf"{TRAINER}model\.ac(\.freq)?": _checkpointing,
    rf"{ROLE}model\.lora\.rank": _to("lora.rank", bool),
    rf"{ROLE}model\.lora\.alpha": _to("lora.alpha", bool),
    rf"{ROLE}model\.lora\.dropout": _only(0.0, "strop's adapters have no dropout"),
    rf"{ROLE}model\.lora\.target_modules": _targets,
    rf"{TRAINER}model\.(optimization|reduce)_dtype": _only("float32", "master weights and sums are float32"),
    rf"{TRAINER}loss\.type": _loss,
    rf"{TRAINER}loss\.(ipo_mask_low|token_mask_low|mask_low)": _to("algorithm.clip_low"),
    rf"{TRAINER}loss\.(ipo_mask_high|token_mask_high|mask_high)": _to("algorithm.clip_high"),
    rf"{TRAINER}loss\.kl_tau": _only(1e-3, "dppo holds the ratio near 1 with a weight of 0.001"),
    rf"{TRAINER}loss\.adv_tau": _only(1.0, "scale the learning rate instead"),
    rf"{TRAINER}loss\.teacher_tau": _only(0.0, "a teacher is train.terms = 'distill' with [teacher]"),
    rf"{TRAINER}loss\.import_path|{ORCH}advantage\.import_path": _own_code,
    # Orchestrator.
    rf"{ORCH}batch_size": _keep("batch"),
    rf"{ORCH}(rollouts_per_example|rollouts_per_prompt|group_size)": _keep("group"),
    rf"{ORCH}(train\.)?sampling\.temperature": _to("sampling.temperature", bool, "a run that trains samples"),
    rf"{ORCH}(train\.)?sampling\.(max_tokens|max_completion_tokens)": _to("task.max_reply_tokens", bool),
    rf"{ORCH}(train\.)?sampling\.top_p": _only(1.0, "a run that trains samples from the whole vocabulary"),
    rf"{ORCH}(train\.)?sampling\.(repetition_penalty)": _only(1.0, "log-probabilities would be others"),
    rf"{ORCH}(train\.)?(env|environment|envs)": _environments,
    rf"{ORCH}environment\.id": lambda given, out: out.envs.append(({"id": given.value}, given.origin)),
    rf"{ORCH}(buffer|train)\.env_ratios": lambda given, out: setattr(out, "ratios", given.value or ()),
    rf"{ORCH}(buffer\.)?online_difficulty_filtering": _filtering,
    rf"{ORCH}eval\.interval": _to("eval.every"),
    rf"{ORCH}eval\.(num_examples|select\.limit)": _examples,
    rf"{ORCH}eval\.rollouts_per_example": _to("eval.num_samples"),
    rf"{ORCH}eval\.(env|source|environment)": _eval_environments,
    rf"{ORCH}verification\.enabled": _only(True, "strop judges every reply"),
    rf"{ORCH}advantage\.type": _only("default", "algorithm.advantage has other names for them"),
    # Inference.
    rf"{INFER}(parallel\.tp|(vllm\.)?tensor_parallel_size)": _to("engine.tensor_parallel"),
    rf"{INFER}(parallel\.dp|(vllm\.)?data_parallel_size)": _keep("engines"),
    rf"{INFER}(vllm\.)?gpu_memory_utilization": _to("engine.gpu_memory_frac"),
    rf"{INFER}((model|vllm)\.)?enforce_eager": _to("engine.is_eager"),
    rf"{INFER}((vllm|vllm_extra)\.)?max_num_seqs": _to("engine.max_num_seqs"),
    # Launchers.
    r"(deployment\.)?(num_train_gpus|train_gpus)|deployment\.num_gpus|deployment\.gpus": _keep("train_gpus"),
    r"(deployment\.)?(num_infer_gpus|infer_gpus)": _keep("infer_gpus"),
    r"deployment\.single_gpu|single_gpu": _keep("single_gpu"),
    r"trainer_gpu_ids": _gpu_ids("train_gpus"),
    r"inference_gpu_ids": _gpu_ids("infer_gpus"),
    r"deployment\.gpus_per_node": _keep("node_gpus"),
    r"deployment\.num_train_nodes|deployment\.num_nodes": _keep("train_nodes"),
    r"deployment\.num_infer_nodes": _keep("infer_nodes"),
    rf"{ROLE}slurm\.(partition|account|qos|constraint|project_dir)": _site,
    # Supervised fine-tuning.
    rf"data\.(name|dataset|path|source)|{ORCH}algo\.dataset\.name": _sft_data,
    r"data\.batch_size": _to("sft.rows_per_step"),
    r"data\.loss_mask\.\w+": _loss_mask,
}
"""Pattern of a key to its meaning; the first that fits counts."""
NEEDS_NO_EQUIVALENT = (
    r".*\.trust_remote_code",
    r".*\.(bench|dry_run|fake|fullgraph)",
    r"(bench|dry_run|clean_output_dir)",
    r".*\.(fsdp_cpu_offload|optim_cpu_offload|skip_\w+|enable_\w+)",
)
"""Keys that need no notice where they are false or 0: then they ask for nothing."""
_BY_ITSELF = "strop chooses it by itself"
REASONS: Mapping[str, str] = {
    rf"{ROLE}wandb(\..*)?": "metrics and events are in the run's directory; for W&B set trackers.use",
    rf"{ROLE}(log|prime_monitor|monitor|heartbeat|metrics_server)(\..*)?": "every role has a log in the run",
    rf"{ROLE}model\.(attn|impl|compile.*|reshard_after_forward|fused_lm_head_chunk_size|moe\w*)": _BY_ITSELF,
    rf"{ROLE}model\.(dtype|trust_remote_code)": "model.dtype is about the policy; no code of a model runs",
    rf"{ROLE}model\.(ep|tp|cp|dp_replicate|dp_shard)": "learners share weights by FSDP2 alone",
    rf"{ROLE}tokenizer\..*": "the tokenizer and its template are the model's own",
    rf"{TRAINER}scheduler\.decay_steps": "the learning rate falls until the run's last step",
    rf"{ROLE}(rollout_transport|client)(\..*)?": "the run starts its engines and finds them by itself",
    rf"{ROLE}ckpt\.resume_step": "a run goes on from its newest checkpoint by itself; --from names another",
    rf"{ROLE}weight_broadcast\..*": _BY_ITSELF,
    rf"{ORCH}(strict_async_level|max_off_policy_steps)": "train.max_staleness bounds how old weights may be",
    rf"{ORCH}(max_inflight_rollouts|oversampling_factor|max_concurrent|tasks_per_minute)": _BY_ITSELF,
    rf"{ORCH}token_batch_size": "a batch is counted in prompts and rollouts; give train.prompts_per_step",
    rf"{ORCH}filters": "tripwires watch for replies that repeat or run away",
    rf"{ORCH}val(\..*)?": "eval.every evaluates the held-out examples",
    rf"{ORCH}eval\.sampling\..*": "sampled replies of an evaluation are drawn as the run's own",
    rf"{ORCH}(train\.)?sampling\..*": "a run that trains samples from the whole vocabulary",
    rf"{ORCH}buffer\..*": "examples are shuffled, or stand in the order of task.order_file",
    rf"{ORCH}(teacher_model|rollout_model)(\..*)?|teacher_inference(\..*)?|deployment\.num_teacher_\w+": (
        "a teacher is train.terms = 'distill' with [teacher]"
    ),
    rf"{INFER}.*": "strop starts vLLM with its own settings",
    r"clean_output_dir": "strop removes no run",
    rf"{ROLE}slurm\..*": "options of `strop submit`, or the site's profile",
}
"""Pattern of a key to why the run file does without it."""
