"""Why a run file does without a key of PRIME-RL, and what the keys of its roles begin with."""

from __future__ import annotations

from collections.abc import Mapping

ROLE = r"(trainer\.|orchestrator\.|inference\.)?"
TRAINER = r"(trainer\.)?"
ORCH = r"(orchestrator\.)?"
INFER = r"inference\."
NEEDS_NO_EQUIVALENT = (
    r".*\.trust_remote_code",
    r".*\.(bench|dry_run|fake|fullgraph)",
    r"(bench|dry_run|clean_output_dir)",
    r".*\.(fsdp_cpu_offload|optim_cpu_offload|skip_\w+|enable_\w+)",
)
"""Keys that need no notice where they are false or 0: then they ask for nothing."""
_BY_ITSELF = "strop chooses it by itself"
REASONS: Mapping[str, str] = {
    rf"{ROLE}wandb(\..*)?": "metrics, events and a report are in the run's directory",
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
