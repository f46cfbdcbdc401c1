"""Whether memory and disk are free that a run is going to need."""

from __future__ import annotations

from strop.hardware import free_disk_bytes, free_memory_bytes, rss_bytes
from strop.policy.footprint import (
    DEFAULT_MICRO_BATCH_POSITIONS,
    activation_bytes,
    cache_bytes,
    checkpoint_bytes,
    count_trained,
    frozen_bytes,
    held_bytes,
    micro_batch_positions,
    packed_bytes,
    read_model_size,
    state_bytes,
    terms_bytes,
)
from strop.store.policy import find_mirror_root
from strop.tasks import render_prompt
from strop.train.gate_input import GateCheck, GateInput
from strop.train.given import count_given_positions
from strop.train.room import LOW_DISK_FACTOR, directory_bytes

_NUM_RENDERED = 8
"""Prompts whose longest stands for all."""


def check_room(gate: GateInput) -> GateCheck:
    """Refuse a run whose estimated memory or disk is not free now.

    What this process holds already, weights and masters among it, and checkpoints already written are
    part of the plan, so they count as free.
    """
    spec, size = gate.spec, read_model_size(gate.model_dir)
    dtype = spec.model.dtype
    task, answered = gate.task, _answered_positions(gate)
    given = count_given_positions(spec, gate.demonstrations or gate.preferences)
    positions = max(answered if spec.train.has_rl else 0, given)
    rows = spec.train.prompts_per_step * spec.train.rollouts_per_prompt
    num_terms, num_trained = spec.train.has_rl + spec.train.has_sft, count_trained(size, spec.lora)
    memory_bytes = state_bytes(size, dtype, num_trained) + terms_bytes(size, num_terms, num_trained)
    memory_bytes += held_bytes(spec, size, num_trained)
    memory_bytes += cache_bytes(size, dtype, rows, task.limits.max_reply_tokens + answered // rows)
    if not (is_elsewhere := gate.roles.learner.device != "cpu"):
        memory_bytes += packed_bytes(size, dtype)
    # A mirror holds one that is being sent, after it was pruned as well.
    num_checkpoints = spec.train.keep_checkpoints + bool(find_mirror_root(spec.store)) + LOW_DISK_FACTOR
    disk_bytes = int(num_checkpoints * checkpoint_bytes(size, dtype, num_trained))
    there_bytes = directory_bytes(gate.run_path / "checkpoints")
    free_bytes, have_disk = free_memory_bytes(), free_disk_bytes(gate.run_path) + there_bytes
    have_memory = None if free_bytes is None else free_bytes + (rss_bytes() or 0)
    activations = activation_bytes(size, dtype, positions, is_recomputed=gate.roles.learner.recomputes)
    # Frozen models are loaded already, and so a part of what this process holds.
    memory_bytes += activations + sum(
        frozen_bytes(read_model_size(path), dtype, num_positions=positions, beside_bytes=activations)
        for path in gate.roles.frozen_dirs.values()
    )
    has_memory = is_elsewhere or have_memory is None or memory_bytes <= have_memory
    known = "an unknown amount" if have_memory is None else f"{have_memory / 2**30:.1f} GiB"
    detail = (
        f"memory about {memory_bytes / 2**30:.1f} GiB of {known} free, checkpoints"
        f" {disk_bytes / 2**30:.1f} of {have_disk / 2**30:.1f} GiB free at {gate.run_path}"
    )
    return GateCheck(name="room", is_passed=disk_bytes <= have_disk and has_memory, detail=detail)


def _answered_positions(gate: GateInput) -> int:
    """Return the positions of the largest micro-batch of rollouts."""
    tokenizer, spec = gate.roles.tokenizer, gate.spec
    prompts = [gate.task.render(example) for example in gate.asked[:_NUM_RENDERED]]
    longest = max(len(render_prompt(tokenizer, prompt, spec.model.prompt_format)[1]) for prompt in prompts)
    return micro_batch_positions(
        budget=spec.train.micro_batch_tokens or DEFAULT_MICRO_BATCH_POSITIONS,
        num_prompts=spec.train.prompts_per_step,
        num_rollouts=spec.train.rollouts_per_prompt,
        prompt_tokens=min(longest, gate.max_positions),
        reply_tokens=gate.task.limits.max_reply_tokens,
    )
