"""The keys of PRIME-RL's configurations: which setting each becomes, and why the others have none.

Keys are dotted paths with underscores, as in a file for the whole run; in a file for one role the role is put
before them. The names of several versions of PRIME-RL are covered. Sources: the configuration classes of its
trainer, orchestrator, inference and SFT entry points, and its published example files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from strop.run.prime_rl.translation import Entry, Translation, env_name, take_output_dir
from strop.spec.model import DEFAULT_TARGETS

Rule = Callable[[Entry, Translation], None]
# Prefixes of the keys of a role.
ROLE = r"(trainer\.|orchestrator\.|inference\.)?"
TRAINER = r"(trainer\.)?"
ORCH = r"(orchestrator\.)?"
INFER = r"inference\."
_ADAMW = "strop's optimizer is AdamW; its learning rate means another thing"


def _to(setting: str, allowed: Callable[[Any], bool] = lambda value: True, why: str = "") -> Rule:
    """Return the rule of a key that is a setting under another name; values not `allowed` are noted."""

    def rule(entry: Entry, out: Translation) -> None:
        if allowed(entry.value):
            out.set(setting, entry.value, entry.origin)
        else:
            out.note(entry, why or f"{setting} takes no such value")

    return rule


def _keep(word: str) -> Rule:
    """Return the rule of a number that is combined with others into a setting."""

    def rule(entry: Entry, out: Translation) -> None:
        out.numbers[word] = entry.value

    return rule


def _quiet(entry: Entry, out: Translation) -> None:
    """Ignore the key: strop always behaves so."""


def _only(value: Any, why: str) -> Rule:
    """Return the rule of a key that strop has no setting for: another value than strop's is noted."""

    def rule(entry: Entry, out: Translation) -> None:
        if entry.value != value:
            out.note(entry, why)

    return rule


def _name(entry: Entry, out: Translation) -> None:
    out.names.append((str(entry.value), entry.origin))


def _seq_len(entry: Entry, out: Translation) -> None:
    """Set the trainer's tokens of a micro-batch, and the orchestrator's limit of a sample."""
    if not entry.key.startswith("orchestrator"):
        out.set("train.micro_batch_tokens", entry.value, entry.origin)
    if not entry.key.startswith(("trainer", "data", "sft")):
        out.settings.setdefault("engine.max_model_tokens", (entry.value, entry.origin))


def _broadcast(entry: Entry, out: Translation) -> None:
    names = {"nccl": "broadcast", "filesystem": "file"}
    if entry.value in names:
        out.set("engine.transport", names[entry.value], entry.origin)
    else:
        out.note(entry, "engine.transport is 'auto', 'file', 'broadcast' or 'store'")


def _betas(entry: Entry, out: Translation) -> None:
    for index, value in enumerate(entry.value[:2], start=1):
        out.set(f"optimizer.beta{index}", float(value), entry.origin)


def _targets(entry: Entry, out: Translation) -> None:
    names = [name for name in entry.value if re.fullmatch(r"\w+", str(name)) and name != "experts"]
    others = [name for name in entry.value if name not in names]
    if others:
        out.note(entry, f"lora.targets are names of layers, without {', '.join(map(str, others))}")
    out.set("lora.targets", ",".join(names) or DEFAULT_TARGETS, entry.origin)


def _checkpointing(entry: Entry, out: Translation) -> None:
    out.set("train.activation_checkpointing", True, entry.origin)
    if entry.value not in ({}, 1):
        out.note(entry, "strop computes every layer again, or none")


def _loss(entry: Entry, out: Translation) -> None:
    names = {"default": "dppo", "ipo": "ipo_mask", "grpo": "grpo", "gspo": "gspo", "cispo": "cispo"}
    if entry.value in names:
        out.set("algorithm.name", names[entry.value], entry.origin)
    elif entry.value == "sft":
        out.note(entry, "imitate what `strop eval` kept of that model: train.terms = 'sft'")
    else:
        out.note(entry, "a loss of your own is algorithm.name = 'FILE.py:NAME'")


def _filtering(entry: Entry, out: Translation) -> None:
    if entry.value:
        out.set("algorithm.zero_variance", "resample", entry.origin)


def _examples(entry: Entry, out: Translation) -> None:
    out.set("eval.num_examples", entry.value if entry.value > 0 else None, entry.origin)


def _log_level(entry: Entry, out: Translation) -> None:
    """Set the log level of the whole run, or of trainer and orchestrator, which are one process here."""
    if entry.value not in ("debug", "info", "warning", "error"):
        out.note(entry, "output.log_level is debug, info, warning or error")
        return
    levels = str(out.settings.get("output.log_level", ("", ""))[0]).split(",")
    of_train = [level for level in levels if level.startswith("train=")]
    of_all = [level for level in levels if level and "=" not in level]
    if entry.key.startswith(("trainer", "orchestrator")):
        of_train = [f"train={entry.value}"]
    else:
        of_all = [str(entry.value)]
    out.settings["output.log_level"] = (",".join([*of_all, *of_train]), entry.origin)


def _environments(entry: Entry, out: Translation) -> None:
    tables = entry.value if isinstance(entry.value, list) else [entry.value]
    out.envs += [(table, entry.origin) for table in tables]


def _eval_environments(entry: Entry, out: Translation) -> None:
    tables = [table for table in entry.value if isinstance(table, dict)]
    out.eval_envs += [(table, entry.origin) for table in tables]
    names = ", ".join(map(env_name, tables))
    out.note(
        entry,
        f"a run evaluates the held-out examples of its own task; {names} beside it is a file for"
        " --eval-config or `strop eval RUN --config`",
    )


def _gpu_ids(word: str) -> Rule:
    def rule(entry: Entry, out: Translation) -> None:
        out.numbers[word] = len(entry.value)
        out.note(entry, f"{len(entry.value)} GPUs; which ones they are is left to the launcher")

    return rule


def _site(entry: Entry, out: Translation) -> None:
    out.note(entry, f"write {entry.key.rpartition('.')[2]} into the site's profile, strop-sites.toml")


def _sft_data(entry: Entry, out: Translation) -> None:
    out.is_sft = True
    tables = entry.value if isinstance(entry.value, list) else [{"dataset": entry.value}]
    names = [str(table.get("dataset") or table.get("name")) for table in tables]
    if len(names) > 1:
        out.note(entry, f"sft.source is one file: write {', '.join(names[1:])} into it too")
    if names[0].endswith((".jsonl", ".json", ".parquet", ".csv")):
        out.set("sft.source", names[0], entry.origin)
    else:
        out.set("sft.source", f"./{names[0].rpartition('/')[2]}.jsonl", entry.origin)
        out.note(entry, "sft.source takes a file: write the data set there as JSONL or Parquet")


def _loss_mask(entry: Entry, out: Translation) -> None:
    if entry.key.endswith("assistant") and entry.value:
        return
    if entry.key.endswith("user") and entry.value:
        out.set("sft.train_on", "all", entry.origin)
    elif entry.value:
        out.note(entry, "sft.train_on is 'assistant', 'last' or 'all'")


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
    rf"{TRAINER}optim\.type": _only("adamw", _ADAMW),
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
    # Orchestrator.
    rf"{ORCH}batch_size": _keep("batch"),
    rf"{ORCH}(rollouts_per_example|rollouts_per_prompt|group_size)": _keep("group"),
    rf"{ORCH}(train\.)?sampling\.temperature": _to("sampling.temperature", bool, "a run that trains samples"),
    rf"{ORCH}(train\.)?sampling\.(max_tokens|max_completion_tokens)": _to("task.max_reply_tokens", bool),
    rf"{ORCH}(train\.)?sampling\.top_p": _only(1.0, "a run that trains samples from the whole vocabulary"),
    rf"{ORCH}(train\.)?sampling\.(repetition_penalty)": _only(1.0, "log-probabilities would be others"),
    rf"{ORCH}(train\.)?(env|environment|envs)": _environments,
    rf"{ORCH}environment\.id": lambda entry, out: out.envs.append(({"id": entry.value}, entry.origin)),
    rf"{ORCH}(buffer|train)\.env_ratios": lambda entry, out: setattr(out, "ratios", entry.value or ()),
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
"""Rules by a pattern of their keys; the first that matches applies."""
NEEDS_NO_EQUIVALENT = (
    r".*\.trust_remote_code",
    r".*\.(bench|dry_run|fake|fullgraph)",
    r"(bench|dry_run|clean_output_dir)",
    r".*\.(fsdp_cpu_offload|optim_cpu_offload|skip_\w+|enable_\w+)",
)
"""Keys that need no notice if they are false or 0."""
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
    rf"{TRAINER}loss\.import_path|{ORCH}advantage\.import_path": (
        "write it as algorithm.name = 'FILE.py:NAME' (docs/tasks.md)"
    ),
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
"""Why a run file has no such setting, by a pattern of the keys."""
