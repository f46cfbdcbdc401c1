"""The gate's checks of the models: tokenizer, tensors, language, and that engine and trainer agree."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from strop.cluster import Scorer
from strop.engine import GenerationRequest
from strop.errors import EngineError
from strop.hardware.tuning import compute_in_thread
from strop.policy.families import say_alone
from strop.policy.footprint import read_model_size
from strop.policy.head import TOP_RANKS
from strop.policy.packing import PackedGroup
from strop.policy.scoring import pack_given
from strop.policy.weights import find_strange
from strop.rollout import FloatArray, Group, Rollout, Sampling, Turn, cut_samples
from strop.tasks.failures import find_causes, find_failures, sum_up
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
        live = await learner.digest_tensors(None if role == "policy" else role)
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
    models: list[tuple[str, Scorer, Path]] = [("policy", roles.learner, gate.model_dir)]
    for role, frozen in (("reference", roles.reference), ("teacher", roles.teacher)):
        if frozen is not None and roles.frozen_dirs.get(role) not in (None, gate.model_dir):
            models.append((role, frozen, roles.frozen_dirs[role]))
    details, is_passed = [], True
    for role, scorer, path in models:
        loss_nats, per_byte = await _measure_loss(gate, scorer)
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


async def _measure_loss(gate: GateInput, scorer: Scorer) -> tuple[float, float]:
    """Return the loss on the canary per token and per byte; infinite with ids beyond the vocabulary."""
    tokenizer = gate.roles.tokenizer
    start_ids, token_ids = tokenizer.start_ids, tokenizer.encode(CANARY)
    if int(token_ids.max()) >= gate.roles.learner.shape.vocab_size:
        return float("inf"), float("inf")
    if not len(start_ids):
        start_ids, token_ids = token_ids[:1], token_ids[1:]
    (logprobs,) = await scorer.score([pack_given(start_ids, [token_ids])], 1.0)
    loss_nats = -float(logprobs.mean())
    num_bytes = sum(len(tokenizer.token_text(token_id).encode()) for token_id in token_ids.tolist())
    return loss_nats, loss_nats * len(token_ids) / max(num_bytes, 1)


PARITY_TOLERANCE_NATS = {"bfloat16": 0.06, "float32": 1e-3}
"""Largest mean abs(engine - trainer) log-probability at equal weights."""
_TAILS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
"""Shares of a distribution that its least likely tokens have; top-p, top-k and min-p cut those."""
_FACTORS = (0.0, 0.5, 0.8, 1.25, 2.0)
"""Factors by which the frequency of such tokens may differ from the reported one; 0: never sampled."""
MAX_EVIDENCE = 1e6
"""An engine that samples from what it reports exceeds it once in a million gates at most."""
_MIN_TOKENS = 1000
"""Tokens that suffice to detect a cut of a real model's sampling to top-p 0.95 or top-k 50 (SmolLM2-135M:
evidence 4.8e7 and 2e18 from 900 tokens). A cut to 0.98 takes some 2500."""
_FREE_ROWS, _FREE_TOKENS = 16, 64
"""Plain text that is sampled where the task's probes have fewer tokens than `_MIN_TOKENS`."""
_SEED = 20_01
"""Seed of the random positions of tokens within their own mass."""


async def check_parity(gate: GateInput, groups: Sequence[Group]) -> GateCheck:
    """Refuse an engine and a trainer that disagree about the same tokens at equal weights.

    Refuse also an engine that samples from another distribution than the one that it reports.
    """
    probes = [rollout for group in groups for rollout in group.rollouts]
    causes = find_causes(find_failures(rollout.outcome for rollout in probes))
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
    is_whole = not Sampling(**gate.spec.sampling.model_dump()).is_truncated and temperature > 0.0
    finding = await _weigh_sampling(gate, rollouts) if is_whole else None
    if finding is None:
        return GateCheck(name="parity", is_passed=True, detail=detail)
    detail += f"; {finding.describe()}"
    if not finding.is_sound:
        detail += "; cause: support (the engine samples from another distribution than it reports)"
    return GateCheck(name="parity", is_passed=finding.is_sound, detail=detail)


def pack_rollouts(rollouts: Iterable[Rollout]) -> list[PackedGroup]:
    """Pack the samples of rollouts as in training, each with its own prompt, every sampled token once."""
    samples: list[tuple[Turn, ...]] = []
    for rollout in rollouts:
        new, num_shared = rollout.new_turns, len(rollout.turns) - len(rollout.new_turns)
        # Turns that an earlier rollout has are context here.
        shared = [replace(turn, logprobs=None) for turn in rollout.turns[:num_shared]]
        samples += cut_samples((*shared, *new))
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingFinding:
    """How often unlikely tokens were sampled, for the set with the most evidence against the engine."""

    evidence: float
    """Evidence of another distribution; its mean is 1 for engines that sample from the reported one."""
    which: str
    """Describes the set of tokens."""
    num_seen: int
    num_expected: float
    num_tokens: int

    @property
    def is_sound(self) -> bool:
        """Whether chance explains it."""
        return self.evidence < MAX_EVIDENCE

    def describe(self) -> str:
        """Return one line for the report."""
        return f"{self.num_seen} of {self.num_tokens} tokens {self.which}, expected {self.num_expected:.1f}"


async def _weigh_sampling(gate: GateInput, rollouts: Sequence[Rollout]) -> SamplingFinding:
    """Compare how often unlikely tokens were sampled with how often the trainer expects them.

    Each token is expected under what the engine was given before it, in its turn and conversation.
    Every sampled token counts, even one behind a stop string that is not trained on: selection by what a
    token is would bias the count.
    """
    groups = pack_rollouts(rollouts)
    if sum(rollout.num_new_tokens for rollout in rollouts) < _MIN_TOKENS:
        groups += await _sample_free_text(gate)
    places = await gate.roles.learner.place_tokens(groups, gate.spec.sampling.temperature)
    return weigh_evidence(np.concatenate(places))


async def _sample_free_text(gate: GateInput) -> list[PackedGroup]:
    """Have the engine continue plain English, which makes replies neither certain nor short."""
    tokenizer = gate.roles.tokenizer
    prompt_ids = np.concatenate([tokenizer.start_ids, tokenizer.encode(CANARY)[:8]])
    max_tokens = min(_FREE_TOKENS, gate.max_positions - len(prompt_ids))
    requests = [
        GenerationRequest(
            prompt_ids=prompt_ids,
            seed=seed,
            sampling=Sampling(**gate.spec.sampling.model_dump()),
            max_tokens=max_tokens,
            stop_token_ids=tokenizer.stop_token_ids,
        )
        for seed in range(_FREE_ROWS if max_tokens > 0 else 0)
    ]
    try:
        completions = await asyncio.gather(*map(gate.roles.engine.generate, requests))
    except EngineError:
        # An engine that fails here fails on the task's prompts as well, which is reported.
        return []
    return [pack_given(prompt_ids, [reply.token_ids]) for reply in completions if len(reply.token_ids)]


def weigh_evidence(places: FloatArray) -> SamplingFinding:
    """Return the evidence that tokens were drawn from other distributions than the trainer's.

    For a set of mass q, and X = 1 if the drawn token is in it, w^X / (1 - q (1 - w)) has the mean 1, given
    all earlier draws; so has the product over all tokens, and the mean over sets and factors w. By Markov's
    inequality it exceeds 1/p with a probability of p at most. The sets are the least likely tokens: those
    beyond a rank; and those beyond a share of the mass, at a random position within the token's own mass.

    Shapes: `places` as from `strop.policy.head.token_places`, (M, 2 + 2 K); S sets, F factors.
    """
    values = places.astype(np.float64)
    stands_M = values[:, 0] + np.random.default_rng(_SEED).random(len(values)) * values[:, 1]
    tails_M_S, beyond_M_K = np.tile(_TAILS, (len(values), 1)), values[:, 2::2].clip(0.0, 1.0 - 1e-12)
    mass_M_S = np.concatenate([tails_M_S, beyond_M_K], axis=1)
    is_in_M_S = np.concatenate([stands_M[:, None] >= 1.0 - tails_M_S, values[:, 3::2] > 0.0], axis=1)
    logs = []
    for factor in _FACTORS:
        weight_M_S = np.where(is_in_M_S, math.log(factor) if factor else -math.inf, 0.0)
        logs.append((weight_M_S - np.log1p(-mass_M_S * (1.0 - factor))).sum(axis=0))
    logs_F_S = np.array(logs)
    worst = int(logs_F_S.max(axis=0).argmax())
    names = [f"among the least likely {tail:.1%}" for tail in _TAILS]
    names += [f"beyond the {rank} likeliest" for rank in TOP_RANKS]
    return SamplingFinding(
        evidence=float(np.exp(np.minimum(logs_F_S, 700.0)).mean()),
        which=names[worst],
        num_seen=int(is_in_M_S[:, worst].sum()),
        num_expected=float(mass_M_S[:, worst].sum()),
        num_tokens=len(values),
    )
