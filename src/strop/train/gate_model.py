"""What the gate asks of the models: a tokenizer of their own, the tensors of their files, some language."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from strop.cluster import Scorer
from strop.hardware.compute_thread import compute_in_thread
from strop.policy.footprint import read_model_size
from strop.policy.scoring import pack_given
from strop.policy.weights import find_strange
from strop.tokenizer import Tokenizer
from strop.train.gate_input import GateCheck, GateInput

CANARY = (
    "The sun rises in the east and sets in the west. Water freezes at zero degrees and boils at one"
    " hundred. A week has seven days, and a year has twelve months."
)
_MIN_KNOWN_FRAC = 0.9
"""Share of a model's ids that its tokenizer knows. Models have up to some 3 % more rows than ids, to make
their number round: of the families that are trained here DeepSeek V2 leaves most of them unused, 2.3 %."""
_SPECIAL_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LAW_PARAMS, _LAW_EXPONENT = 8.8e13, 0.076
"""Kaplan et al. 2020 (arXiv:2001.08361), equation 1.1: the test loss of a converged model of N parameters,
embeddings left out, is (8.8e13 / N)^0.076 nats per token, measured for 768 to 1.5e9 parameters."""
_LAW_RANGE = (768, 1.5e9)
_LAW_BYTES = 96e9 / 2.29e10
"""Bytes per token of the text that it was measured on, WebText2 (section 2.3 there)."""
_LOSS_SLACK = 1.5
"""How far above the law a sound model may be on some tens of tokens. SmolLM2-135M is at 0.83 of it; with 5 of
its 30 layers made anew at 1.6 to 4.6, with the first layer alone at 4.4, with another tokenizer at 10."""
_MAX_NAMED = 5


def check_tokenizer(gate: GateInput) -> GateCheck:
    """Refuse a tokenizer that is not the model's: by the number of ids, and by what the special ones are."""
    tokenizer, num_rows = gate.roles.tokenizer, gate.roles.learner.shape.vocab_size
    flaws = list(_find_flaws(tokenizer, num_rows, gate.model_dir))
    detail = f"{tokenizer.num_ids} ids of a model with {num_rows}"
    if flaws:
        detail += f"; {'; '.join(flaws)}; is it the tokenizer that the model was trained with?"
    return GateCheck(name="tokenizer", is_passed=not flaws, detail=detail)


def _find_flaws(tokenizer: Tokenizer, num_rows: int, model_dir: Path) -> Iterator[str]:
    if tokenizer.vocab_size > num_rows:
        yield f"its ids go up to {tokenizer.vocab_size - 1} and the model's to {num_rows - 1}"
    if tokenizer.num_ids < _MIN_KNOWN_FRAC * num_rows:
        share = tokenizer.num_ids / num_rows
        yield f"it knows {share:.1%} of the model's ids, and at least {_MIN_KNOWN_FRAC:.0%} are allowed"
    for name in ("config.json", "generation_config.json"):
        for key, token_id in _special_ids(model_dir / name):
            if token_id >= num_rows:
                yield f"{key}={token_id} of {name} is no id of the model"
            elif token_id not in tokenizer.special_ids:
                text = tokenizer.token_text(token_id)
                yield f"{key}={token_id} of {name} is {text!r} in the tokenizer, no special token"


def _special_ids(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the special ids that a file of the model names. What is negative means none."""
    if not path.is_file():
        return
    settings: dict[str, Any] = json.loads(path.read_text())
    for table in (settings, settings.get("text_config") or {}):
        for key in _SPECIAL_KEYS:
            named = table.get(key)
            for token_id in named if isinstance(named, list) else [named]:
                if isinstance(token_id, int) and token_id >= 0:
                    yield key, token_id


async def check_tensors(gate: GateInput) -> GateCheck:
    """Refuse weights that are not those of the files that they were loaded from, naming the tensors."""
    learner, found, is_passed = gate.roles.learner, [], True
    places = {"policy": gate.weights_dir or gate.model_dir, **gate.roles.frozen_dirs}
    for who, path in places.items():
        live = await learner.digest_tensors(None if who == "policy" else who)
        try:
            strange = await compute_in_thread(partial(find_strange, live, path))
        except (OSError, SafetensorError, ValueError) as error:
            strange, note = list(live), f" ({error})"
        else:
            note = ""
        if strange:
            is_passed = False
            named = ", ".join(strange[:_MAX_NAMED]) + (", ..." if len(strange) > _MAX_NAMED else "")
            found.append(
                f"{len(strange)} of {len(live)} tensors of the {who} are not those of {path}{note}: {named};"
                " they were made anew or changed after loading"
            )
        else:
            found.append(f"{len(live)} tensors of the {who} are those of {path}")
    return GateCheck(name="tensors", is_passed=is_passed, detail="; ".join(found))


async def check_weights(gate: GateInput) -> GateCheck:
    """Refuse models that know less English than sound ones of their size do.

    What a run itself has made of its policy is not judged: it may have been trained for anything.
    """
    roles = gate.roles
    asked: list[tuple[str, Scorer, Path]] = [("policy", roles.learner, gate.model_dir)]
    for role, scorer in (("reference", roles.reference), ("teacher", roles.teacher)):
        if scorer is not None and roles.frozen_dirs.get(role) not in (None, gate.model_dir):
            asked.append((role, scorer, roles.frozen_dirs[role]))
    details, is_passed = [], True
    for who, scorer, path in asked:
        loss_nats, per_byte = await _measure_loss(gate, scorer)
        bound = bound_nats_per_byte(read_model_size(path).body_params)
        is_begun = who == "policy" and roles.learner.version > 0
        is_sound = is_begun or per_byte < bound
        is_passed = is_passed and is_sound
        detail = f"loss of the {who} {loss_nats:.2f} nats per token on plain English, {per_byte:.2f} per byte"
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
    """Return the loss on plain English that a sound model stays below, whatever its tokenizer.

    `num_params` are those of the layers, without embeddings.
    """
    low, high = _LAW_RANGE
    law_nats = (_LAW_PARAMS / min(max(num_params, low), high)) ** _LAW_EXPONENT
    return float(_LOSS_SLACK * law_nats / _LAW_BYTES)


async def _measure_loss(gate: GateInput, scorer: Scorer) -> tuple[float, float]:
    """Return the loss on the canary per token and per byte, infinite where it has ids that there are not."""
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
