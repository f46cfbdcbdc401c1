"""The gate's checks of the models: tokenizer, tensors, language, and that engine and trainer agree."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from strop.hardware.tuning import compute_in_thread
from strop.policy.families import say_alone
from strop.policy.footprint import read_model_size
from strop.policy.learner import Learner
from strop.policy.packing import PackedGroup
from strop.policy.scoring import pack_given
from strop.policy.weights import find_strange
from strop.rollout import Group, Rollout
from strop.tasks.failures import find_causes, sum_up
from strop.train.batch import pack_reply
from strop.train.gate_checks import GateCheck, GateInput

CANARY = (
    "The sun rises in the east and sets in the west. Water freezes at zero degrees and boils at one"
    " hundred. A week has seven days, and a year has twelve months."
)
_MIN_KNOWN_FRAC = 0.9
"""Share of a model's ids that its tokenizer must know. Models have up to some 3 % more rows than ids, to make
their number round: of the supported families DeepSeek V2 leaves most of them unused, 2.3 %."""
_SPECIAL_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LAW_PARAMS, _LAW_EXPONENT = 8.8e13, 0.076
"""Kaplan et al. 2020 (arXiv:2001.08361), equation 1.1: the test loss of a converged model of N parameters,
embeddings left out, is (8.8e13 / N)^0.076 nats per token, measured for 768 to 1.5e9 parameters."""
_LAW_RANGE = (768, 1.5e9)
_LAW_BYTES = 96e9 / 2.29e10
"""Bytes per token of WebText2, on which the law was measured (section 2.3 there)."""
_LOSS_SLACK = 1.5
"""Bound on the ratio of a sound model's loss on some tens of tokens to the law. SmolLM2-135M is at 0.83; with
5 of its 30 layers reinitialized at 1.6 to 4.6, with only the first layer at 4.4, with another tokenizer at
10."""
_MAX_NAMED = 5


def check_tokenizer(gate: GateInput) -> GateCheck:
    """Refuse a tokenizer that is not the model's, by the number of its ids and by its special tokens."""
    tokenizer, num_rows = gate.roles.tokenizer, gate.roles.learner.shape.vocab_size
    flaws = []
    if tokenizer.vocab_size > num_rows:
        flaws.append(f"its ids go up to {tokenizer.vocab_size - 1} and the model's to {num_rows - 1}")
    if tokenizer.num_ids < _MIN_KNOWN_FRAC * num_rows:
        share = tokenizer.num_ids / num_rows
        flaws.append(
            f"it knows {share:.1%} of the model's ids, and at least {_MIN_KNOWN_FRAC:.0%} are allowed"
        )
    for name in ("config.json", "generation_config.json"):
        for key, token_id in _special_ids(gate.model_dir / name):
            if token_id >= num_rows:
                flaws.append(f"{key}={token_id} of {name} is no id of the model")
            elif token_id not in tokenizer.special_ids:
                text = tokenizer.token_text(token_id)
                flaws.append(f"{key}={token_id} of {name} is {text!r} in the tokenizer, no special token")
    detail = f"{tokenizer.num_ids} ids of a model with {num_rows}"
    if flaws:
        detail += f"; {'; '.join(flaws)}; is it the tokenizer that the model was trained with?"
    return GateCheck(name="tokenizer", is_passed=not flaws, detail=detail)


def _special_ids(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the special ids that a file of the model names. A negative id means none."""
    if not path.is_file():
        return
    settings: dict[str, Any] = json.loads(path.read_text())
    for table in (settings, settings.get("text_config") or {}):
        for key in _SPECIAL_KEYS:
            value = table.get(key)
            for token_id in value if isinstance(value, list) else [value]:
                if isinstance(token_id, int) and token_id >= 0:
                    yield key, token_id


async def check_tensors(gate: GateInput) -> GateCheck:
    """Refuse weights that differ from the files that they were loaded from, naming the tensors."""
    learner, details, is_passed = gate.roles.learner, [], True
    places = {"policy": gate.weights_dir or gate.model_dir, **gate.roles.frozen_dirs}
    for role, path in places.items():
        live = await learner.call(Learner.digest_tensors, None if role == "policy" else role)
        try:
            strange = await compute_in_thread(partial(find_strange, live, path))
        except (OSError, SafetensorError, ValueError) as error:
            strange, note = list(live), f" ({error})"
        else:
            note = ""
        if strange:
            is_passed = False
            names = ", ".join(strange[:_MAX_NAMED]) + (", ..." if len(strange) > _MAX_NAMED else "")
            details.append(
                f"{len(strange)} of {len(live)} tensors of the {role} are not those of {path}{note}: {names};"
                " they were made anew or changed after loading"
            )
        else:
            details.append(f"{len(live)} tensors of the {role} are those of {path}")
    return GateCheck(name="tensors", is_passed=is_passed, detail="; ".join(details))


async def check_weights(gate: GateInput) -> GateCheck:
    """Refuse models that know less English than sound models of their size.

    A policy that this run has already trained is not refused: it may have been trained for anything.
    """
    roles = gate.roles
    models = {"policy": gate.model_dir}
    models |= {role: path for role, path in roles.frozen_dirs.items() if path != gate.model_dir}
    details, is_passed = [], True
    for role, path in models.items():
        loss_nats, per_byte = await _measure_loss(gate, None if role == "policy" else role)
        bound = bound_nats_per_byte(read_model_size(path).body_params)
        is_begun = role == "policy" and roles.learner.version > 0
        is_sound = is_begun or per_byte < bound
        is_passed = is_passed and is_sound
        detail = (
            f"loss of the {role} {loss_nats:.2f} nats per token on plain English, {per_byte:.2f} per byte"
        )
        detail += "" if is_begun else f", bound {bound:.2f}"
        if not is_sound:
            detail += (
                "; the weights look random: were they loaded, and from the right file? A model that was made"
                " for something else than English may be accepted in train.accept"
            )
        details.append(detail)
    why = f" ({gate.dtype_reason})" if gate.dtype_reason else ""
    details.append(f"in {gate.spec.model.dtype}{why}")
    return GateCheck(name="weights", is_passed=is_passed, detail=", ".join(details))


def bound_nats_per_byte(num_params: int) -> float:
    """Return an upper bound on a sound model's loss on plain English, with any tokenizer.

    `num_params` counts the layers, without embeddings.
    """
    low, high = _LAW_RANGE
    law_nats = (_LAW_PARAMS / min(max(num_params, low), high)) ** _LAW_EXPONENT
    return float(_LOSS_SLACK * law_nats / _LAW_BYTES)


async def _measure_loss(gate: GateInput, role: str | None) -> tuple[float, float]:
    """Return the loss on the canary per token and per byte; infinite with ids beyond the vocabulary."""
    tokenizer = gate.roles.tokenizer
    start_ids, token_ids = tokenizer.start_ids, tokenizer.encode(CANARY)
    if int(token_ids.max()) >= gate.roles.learner.shape.vocab_size:
        return float("inf"), float("inf")
    if not len(start_ids):
        start_ids, token_ids = token_ids[:1], token_ids[1:]
    (logprobs,) = await gate.roles.learner.score([pack_given(start_ids, [token_ids])], 1.0, role)
    loss_nats = -float(logprobs.mean())
    num_bytes = sum(len(tokenizer.token_text(token_id).encode()) for token_id in token_ids.tolist())
    return loss_nats, loss_nats * len(token_ids) / max(num_bytes, 1)


PARITY_TOLERANCE_NATS = {"bfloat16": 0.06, "float32": 1e-3}
"""Largest mean abs(engine - trainer) log-probability at equal weights."""


async def check_parity(gate: GateInput, groups: Sequence[Group]) -> GateCheck:
    """Refuse an engine and a trainer that disagree about the same tokens at equal weights."""
    probes = [rollout for group in groups for rollout in group.rollouts]
    causes = find_causes(rollout.outcome for rollout in probes)
    lost = sum_up(causes, len(probes), "probes") if causes else ""
    rollouts = [rollout for rollout in probes if rollout.num_sampled_tokens]
    if not rollouts:
        detail = "the engine gave no reply to compare"
        return GateCheck(name="parity", is_passed=False, detail=f"{lost}; {detail}" if lost else detail)
    tolerance = PARITY_TOLERANCE_NATS[gate.spec.model.dtype]
    temperature = gate.spec.sampling.temperature
    gaps = await _gaps(gate, rollouts, temperature)
    mean_nats = float(np.abs(gaps).mean())
    detail = f"mean gap {mean_nats:.2g} nats over {len(gaps)} tokens, tolerance {tolerance:g}"
    detail += f"; {say_alone(because)}" if (because := gate.roles.learner.shape.alone_because) else ""
    detail += f"; {lost}" if lost else ""
    if not mean_nats <= tolerance:
        detail += f"; cause: {await _name_cause(gate, rollouts, gaps, tolerance)}"
        return GateCheck(name="parity", is_passed=False, detail=detail)
    return GateCheck(name="parity", is_passed=True, detail=detail)


def pack_rollouts(rollouts: Iterable[Rollout]) -> list[PackedGroup]:
    """Pack the samples of rollouts as in training, each with its own prompt, every sampled token once."""
    samples = [turns for rollout in rollouts for turns in rollout.samples]
    return [
        PackedGroup(prompt_ids=turns[0].token_ids, replies=(pack_reply(turns, 0.0, 0.0),))
        for turns in samples
        if any(turn.is_sampled for turn in turns)
    ]


async def _gaps(gate: GateInput, rollouts: Sequence[Rollout], temperature: float) -> np.ndarray:
    """Return trainer minus engine log-probability of every sampled token."""
    groups = pack_rollouts(rollouts)
    scores = await gate.roles.learner.score(groups, temperature)
    engine_logprobs = [reply.engine_logprobs for group in groups for reply in group.replies]
    gaps: np.ndarray = np.concatenate(scores) - np.concatenate(engine_logprobs)
    return gaps


async def _name_cause(
    gate: GateInput, rollouts: Sequence[Rollout], gaps: np.ndarray, tolerance: float
) -> str:
    """Name the first convention that explains the gap."""
    is_scaled = gate.spec.sampling.temperature != 1.0
    if is_scaled and np.abs(await _gaps(gate, rollouts, 1.0)).mean() <= tolerance:
        return "temperature (the engine reports log-probabilities before dividing by it)"
    if gaps.max() <= tolerance:
        return "support (the engine's values are renormalised over fewer tokens than the trainer's)"
    return "weights, position ids, template or dtype differ between engine and trainer"
