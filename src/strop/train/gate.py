"""The gate: checks that must pass before the first step.

Each check looks for one documented way in which systems of this kind trained silently wrong. All
checks run, so that one report shows every cause. A failure that the run file does not accept by
name and reason stops the run with exit code 76.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from strop.algorithm.building import find_idle_settings
from strop.audit import (
    AuditSettings,
    Verdict,
    accept_probes,
    describe_acceptance,
    find_audit,
    run_audit,
    write_audit,
)
from strop.environments import choose_environment, run_groups
from strop.errors import CheckRefused
from strop.policy.packing import PackedBatch, PackedGroup
from strop.rollout import FinishReason, Group, IntArray, Rollout, Split
from strop.spec.train import read_accepted
from strop.tasks import (
    PromptFormat,
    describe_counts,
    render_prompt,
    resolve_prompt_format,
)
from strop.tasks.failures import find_causes
from strop.tokenizer import Tokenizer
from strop.train.batch import pack_reply
from strop.train.data.offline import Demonstration
from strop.train.gate_checks import GateCheck, GateInput, check_overlap, check_room
from strop.train.gate_models import (
    PARITY_TOLERANCE_NATS,
    check_parity,
    check_tensors,
    check_tokenizer,
    check_weights,
    pack_rollouts,
)
from strop.train.generation import plan_attempts
from strop.train.step import pack_demonstrations

_NUM_PROBE_PROMPTS = 8
_NUM_PROBE_ROLLOUTS = 8
_NUM_AUDITED_EXAMPLES = 16
_NUM_MEASURED_PROMPTS = 10_000
"""Training prompts measured at most, evenly spaced. A thousand take about 0.3 s."""
_AUDIT = "audit"
_GATE_STEP = 2**31
"""Step in the names of the gate's random streams; no training step has it."""


async def pass_gate(gate: GateInput) -> list[GateCheck]:
    """Run every check.

    Raises: CheckRefused naming every failed check that the run file does not accept.
    """
    accepted = read_accepted(gate.spec.train.accept)
    checks = [check_prompt(gate), check_tokenizer(gate), await check_tensors(gate), await check_weights(gate)]
    checks.append(await check_audit(gate, accepted))
    # In a thread: it takes seconds for large data, and the event loop must not block.
    checks += [check_schedule(gate), await asyncio.to_thread(check_overlap, gate), check_room(gate)]
    if gate.demonstrations is not None:
        checks.append(check_demonstrations(gate))
    idle = find_idle_settings(gate.spec)
    checks += [GateCheck(name="ratio", is_passed=True, detail=idle, notice=idle)] if idle else []
    # Not for a run that is refused anyway: its prompts may not even fit.
    if all(check.is_passed or check.name in accepted for check in checks):
        # A few groups, sampled as in training.
        plans = [
            plan_attempts(
                gate.spec,
                gate.task,
                example,
                step=_GATE_STEP,
                num_attempts=_NUM_PROBE_ROLLOUTS,
                max_positions=gate.max_positions,
            )
            for example in gate.asked[:_NUM_PROBE_PROMPTS]
        ]
        make_environment = choose_environment(gate.task, gate.judge)
        groups = await run_groups(make_environment, gate.roles.engine, gate.roles.tokenizer, plans)
        gate.on_causes(find_causes(r.outcome for group in groups for r in group.rollouts))
        has_replies = any(r.num_sampled_tokens for group in groups for r in group.rollouts)
        checks += [check_terminator(gate, groups)] if has_replies else []
        checks.append(await check_parity(gate, groups))
        if has_replies and gate.spec.needs_reference:
            checks.append(await check_kl(gate, groups))
    refused = [check for check in checks if not check.is_passed and check.name not in accepted]
    if refused:
        causes = "; ".join(f"{check.name}: {check.detail}" for check in refused)
        raise CheckRefused(
            f"the gate refused to train: {causes}",
            allowed="a run whose every check passes, or whose train.accept names the check and a reason",
            next_step="mend the cause named above; nothing was trained",
        )
    return checks


def check_prompt(gate: GateInput) -> GateCheck:
    """Show the rendered prompt and the stops; refuse if too many prompts leave no room for a reply."""
    tokenizer, task, spec = gate.roles.tokenizer, gate.task, gate.spec
    examples = gate.asked
    # Evenly spread where there are many: data is often sorted by length.
    measured = examples[:: math.ceil(len(examples) / _NUM_MEASURED_PROMPTS)]
    text, lengths, num_too_long = "", [], 0
    for example in measured:
        rendered, token_ids = render_prompt(tokenizer, task.render(example), spec.model.prompt_format)
        text = text or rendered
        lengths.append(len(token_ids))
        num_too_long += len(token_ids) + task.limits_of(example).max_reply_tokens > gate.max_positions
    limit, reply_tokens = gate.max_positions, task.limits.max_reply_tokens
    too_long_frac = num_too_long / len(lengths)
    is_passed = too_long_frac <= spec.task.max_too_long_frac
    stops = [tokenizer.token_text(token_id) for token_id in sorted(tokenizer.stop_token_ids)]
    prompt_format = resolve_prompt_format(tokenizer, spec.model.prompt_format)
    is_base = prompt_format is PromptFormat.BASE
    share = (
        f"{num_too_long} of {len(lengths)} measured prompts ({too_long_frac:.1%}) leave no room for a reply"
    )
    stops += task.limits_of(examples[0]).stops(is_base=is_base)
    detail = f"prompt {text!r}, stops {stops}; {share}"
    if counts := describe_counts(task):
        detail += f"; of the data: {counts}"
    if not is_passed:
        detail = (
            f"the longest prompt has {max(lengths)} tokens and a reply may have {reply_tokens}, together"
            f" more than the model's {limit} positions; {share}, and"
            f" task.max_too_long_frac={spec.task.max_too_long_frac:g} allows less; lower"
            " task.max_reply_tokens, or raise that share to leave these prompts out"
        )
    return GateCheck(name="prompt", is_passed=is_passed, detail=detail)


async def check_audit(gate: GateInput, accepted: Mapping[str, str]) -> GateCheck:
    """Refuse a verifier that rejects right replies or pays without work: by its stored audit, else here."""
    task = gate.task
    report = find_audit(task.name, task.version)
    if report is None:
        settings = AuditSettings(num_examples=_NUM_AUDITED_EXAMPLES, seed=gate.spec.seed)
        report = await run_audit(task, settings, gate.judge)
        gate.on_causes(report.causes)
    prefix = f"{_AUDIT}."
    reasons = {name.removeprefix(prefix): why for name, why in accepted.items() if name.startswith(prefix)}
    report = accept_probes(report, reasons)
    write_audit(report, gate.run_path / "audit.json")
    is_passed = report.accepted_verdict is not Verdict.RED
    detail, notice = describe_acceptance(report), None
    if report.verdict is not Verdict.GREEN:
        notice = f"the audit of task {report.task} is {report.verdict}; audit.json shows why"
    return GateCheck(name=_AUDIT, is_passed=is_passed, detail=detail, notice=notice)


def check_schedule(gate: GateInput) -> GateCheck:
    """Refuse a schedule that cannot fill a step."""
    num_train, num_held_out = (len(gate.task.examples(split)) for split in Split)
    wanted = gate.spec.train.prompts_per_step if gate.spec.train.has_rl else 0
    detail = f"{num_train} training and {num_held_out} held-out examples"
    if num_train < wanted:
        detail = f"{num_train} training examples cannot fill train.prompts_per_step={wanted}"
    return GateCheck(name="schedule", is_passed=num_train >= wanted, detail=detail)


def check_demonstrations(gate: GateInput) -> GateCheck:
    """Refuse demonstrations that do not teach where a reply ends."""
    demonstrations, tokenizer = gate.demonstrations, gate.roles.tokenizer
    if demonstrations is None:
        return GateCheck(name="demonstrations", is_passed=True, detail="no demonstrations")
    first, num_members = demonstrations.members[0], len(demonstrations.members)
    num_endless = sum(not _ends_once(tokenizer, member) for member in demonstrations.members)
    num_passes = gate.spec.train.steps * gate.spec.sft.rows_per_step / num_members
    text = "".join(map(tokenizer.token_text, first.reply_ids[first.is_trained].tolist()))
    detail = f"{demonstrations.describe()}, seen {num_passes:.3g} times; the first teaches {text!r}"
    if num_endless:
        detail = f"{num_endless} of {num_members} demonstrations do not teach one terminator at their end"
    return GateCheck(name="demonstrations", is_passed=not num_endless, detail=detail)


def _ends_once(tokenizer: Tokenizer, member: Demonstration) -> bool:
    """Whether the last token in the loss is a terminator, and the one before is not."""
    batch = PackedBatch.of_groups(pack_demonstrations([member]), torch.device("cpu"))
    is_end = [token_id in tokenizer.stop_token_ids for token_id in batch.target_M[-2:].tolist()]
    return sum(is_end) == 1 and is_end[-1]


def check_terminator(gate: GateInput, groups: Sequence[Group]) -> GateCheck:
    """Refuse to train other tokens than were sampled; the end of a reply must be among them."""
    tokenizer = gate.roles.tokenizer
    rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.num_sampled_tokens]
    ended = [r for r in rollouts if set(_sampled_ids(r)[-1:].tolist()) & tokenizer.stop_token_ids]
    untrained = [r for r in ended if not set(_target_ids(r)[-1:].tolist()) & tokenizer.stop_token_ids]
    stopped = [r for r in rollouts if r.reply and r.reply.finish_reason is FinishReason.STOP_STRING]
    withheld = [r for r in stopped if r.reply and tokenizer.decode(r.reply.token_ids) == r.reply.text]
    changed = [r for r in rollouts if not np.array_equal(_target_ids(r), _sampled_ids(r))]
    detail = f"{len(ended)} sampled terminators, all inside the loss mask"
    if untrained:
        detail = f"{len(untrained)} of {len(ended)} sampled terminators are outside the loss mask"
    elif withheld:
        detail = (
            f"of {len(withheld)} of {len(stopped)} replies that a stop string ended the engine gives no token"
            " of that string: the choice to end there was sampled, and could not be trained"
        )
    elif changed:
        detail = f"{len(changed)} of {len(rollouts)} replies are trained on other tokens than were sampled"
    elif stopped:
        detail += f"; {len(stopped)} replies trained with the stop string that ended them"
    elif not ended:
        detail = "no probe reply ended by itself; the reply limit may be too small"
    is_passed = not untrained and not withheld and not changed
    return GateCheck(name="terminator", is_passed=is_passed, detail=detail)


def _sampled_ids(rollout: Rollout) -> IntArray:
    sampled: IntArray = np.concatenate([turn.token_ids for turn in rollout.turns if turn.is_sampled])
    return sampled


def _target_ids(rollout: Rollout) -> IntArray:
    """Return the ids that the loss is computed on, in order."""
    reply = pack_reply(rollout.turns, 1.0, 1.0)
    group = PackedGroup(prompt_ids=rollout.turns[0].token_ids, replies=(reply,))
    target_ids: IntArray = PackedBatch.of_groups([group], torch.device("cpu")).target_M.numpy()
    return target_ids


async def check_kl(gate: GateInput, groups: Sequence[Group]) -> GateCheck:
    """Refuse a reference that disagrees with the policy where both are the same weights."""
    packed = pack_rollouts(r for group in groups for r in group.rollouts if r.num_sampled_tokens)
    temperature = gate.spec.sampling.temperature
    own, theirs = [
        np.concatenate(await gate.roles.learner.score(packed, temperature, role))
        for role in (None, "reference")
    ]
    is_same = gate.spec.reference.model is None and gate.roles.learner.version == 0
    mean_nats = float(np.abs(own - theirs).mean())
    detail = f"mean gap to the reference {mean_nats:.2g} nats over {len(own)} tokens"
    is_passed = not is_same or mean_nats <= PARITY_TOLERANCE_NATS[gate.spec.model.dtype]
    if not is_passed:
        detail += "; policy and reference are the same weights and disagree about the same tokens"
    return GateCheck(name="kl", is_passed=is_passed, detail=detail)
