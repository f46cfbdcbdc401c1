"""The algorithm of a run: an entry of the catalog or the user's own code, with the run's settings.

    # mine.py, named as algorithm.name = "mine.py:rank"
    def rank(rewards_G):
        return rewards_G.argsort().argsort() - (len(rewards_G) - 1) / 2

User code is an advantage function, or an `Algorithm` with another loss. It runs in the training process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.algorithm.advantages import ADVANTAGES, AdvantageFn
from strop.algorithm.catalog import ALGORITHMS, GRPO, Algorithm
from strop.algorithm.corrections import CORRECTIONS, NO_CORRECTION
from strop.algorithm.losses import (
    CLIPPED,
    ESTIMATORS,
    KlPenalty,
    TokenLoss,
    dual_clipped,
)
from strop.errors import ConfigError
from strop.spec.objectives import choose_mode
from strop.user_code import CodeRef, blaming, find_algorithm, inspect_import, load_code

if TYPE_CHECKING:
    from strop.spec.algorithm import AlgorithmSpec
    from strop.spec.model import ReferenceSpec
    from strop.spec.run import RunSpec
    from strop.spec.train import TrainSpec

_REWARDS = np.array([0.0, 0.5, 1.0, 1.0])
_NUM_TOKENS = 64
_RANGE = ("clip_low", "clip_high", "dual_clip")
_TWINS = {
    "gspo": "'grpo'",
    "sapo": "'grpo'",
    "cispo": "'grpo' with every token weighing the same",
}
"""Entries that differ from another algorithm only by the form of the ratio, and that algorithm."""


def build_algorithm(
    spec: AlgorithmSpec, reference: ReferenceSpec | None = None, train: TrainSpec | None = None
) -> Algorithm:
    """Return an entry of `ALGORITHMS`, or the user's algorithm, with the settings of a run.

    `train` tells how far the weights move from those that sampled a rollout; None: one optimizer step on
    rollouts of the newest weights.
    Raises: ConfigError if user code is no algorithm, or a setting does not apply to the algorithm.
    """
    own = None if spec.name in ALGORITHMS else find_algorithm(spec.name)
    entry = ALGORITHMS[spec.name] if own is None else _load_own(own)
    wanted = entry.mode if spec.mode is None else spec.mode
    mode = wanted if train is None else choose_mode(wanted, train)
    # A ratio that starts from the engine's value covers the gap itself.
    correction = NO_CORRECTION if mode == "bypass" else CORRECTIONS[spec.correction]
    if spec.advantage is not None:
        estimator = ADVANTAGES[spec.advantage]
        entry = replace(
            entry,
            advantage=estimator.compare,
            over_batch=estimator.over_batch,
            is_relative=estimator.is_relative,
            zero_variance="keep" if spec.whitened else entry.zero_variance,
        )
    built = replace(
        entry,
        loss=_choose_loss(entry, spec),
        clip_low=entry.clip_low if spec.clip_low is None else spec.clip_low,
        clip_high=entry.clip_high if spec.clip_high is None else spec.clip_high,
        overlong=entry.overlong if spec.overlong is None else spec.overlong,
        mode=mode,
        correction=correction,
        correction_cap=correction.cap if spec.correction_cap is None else spec.correction_cap,
        max_sequence_tokens=spec.max_sequence_tokens,
        entropy_weight=spec.entropy_weight,
        has_turn_credit=spec.credit == "turn",
        turn_discount=spec.turn_discount,
    )
    if reference is not None and reference.kl_beta > 0.0:
        is_stale = train is not None and train.max_staleness > 0
        built = _penalize(built, reference, is_off_policy=is_stale or mode != "single")
    zero_variance = built.zero_variance if spec.zero_variance is None else spec.zero_variance
    # Skipping is exact only where nothing acts on tokens without advantage.
    if zero_variance == "skip" and built.acts_on_all_tokens:
        zero_variance = "keep"
    built = replace(built, zero_variance=zero_variance)
    _require_turns_compared(built)
    return built


def find_idle_settings(spec: RunSpec) -> str | None:
    """Return a note on settings of a run that have no effect; None where all have one.

    Raises: ConfigError if the user's algorithm cannot be built.
    """
    if spec.train.terms not in ("rl", "rl+sft"):
        return None
    chosen = spec.algorithm
    if build_algorithm(chosen, spec.reference, spec.train).mode != "single":
        return None
    ranges = {name: getattr(chosen, name) for name in _RANGE}
    idle = [
        f"algorithm.{name}={value:g} stops nothing" for name, value in ranges.items() if value is not None
    ]
    if chosen.name in _TWINS:
        idle.append(f"algorithm.name={chosen.name!r} learns as {_TWINS[chosen.name]} does")
    if chosen.mode == "decoupled":
        idle.append("algorithm.mode='decoupled' is 'single', and its forward pass is left out")
    if not idle:
        return None
    return (
        f"{'; '.join(idle)}: a step takes one optimizer step on rollouts of the newest weights"
        " (train.mini_batches=1, train.epochs=1), so every probability ratio is 1. Set train.mini_batches or"
        " train.epochs to take several, or leave these settings out"
    )


def _require_turns_compared(built: Algorithm) -> None:
    """Refuse credit per turn where whole rollouts are compared. Raises: ConfigError."""
    if not built.has_turn_credit:
        return
    if built.over_batch != "none" or not built.is_relative:
        raise ConfigError(
            f"algorithm.credit='turn' under {built.name}, which compares rewards over the whole batch",
            allowed="an algorithm and an advantage that compare within the group, such as 'grpo'",
            next_step="set algorithm.advantage to 'grpo', or leave algorithm.credit out",
        )
    if built.zero_variance in ("drop", "resample"):
        raise ConfigError(
            f"algorithm.credit='turn' with zero_variance={built.zero_variance!r}, which looks for groups of"
            " equal rewards: their turns may differ",
            allowed="algorithm.zero_variance = 'skip' or 'keep'",
            next_step="set algorithm.zero_variance to 'skip'",
        )


def _load_own(ref: CodeRef) -> Algorithm:
    """Return the user's algorithm; an advantage function replaces that of GRPO.

    Raises: ConfigError if it cannot be imported, is neither, or gives wrong numbers.
    """
    inspect_import(ref)
    loaded = load_code(ref)
    if isinstance(loaded, Algorithm):
        own = replace(loaded, name=ref.name)
    elif callable(loaded) and not isinstance(loaded, type):
        own = replace(GRPO, name=ref.name, advantage=loaded)
    else:
        raise _refuse(ref, f"is a {type(loaded).__name__}", "an Algorithm, or a function of rewards")
    _check_advantage(ref, own.advantage)
    _check_loss(ref, own.loss, own.clip_low, own.clip_high)
    return own


def _check_advantage(ref: CodeRef, advantage: AdvantageFn) -> None:
    """Refuse a function that does not return a finite number for each reward. Raises: ConfigError."""
    with blaming(ref, f"compare rewards {_REWARDS.tolist()}"):
        values: Any = np.asarray(advantage(_REWARDS.copy()), dtype=float)
    if values.shape != _REWARDS.shape or not np.isfinite(values).all():
        raise _refuse(
            ref, f"makes {values.tolist()} of {_REWARDS.tolist()}", "one finite number for each reward"
        )


def _check_loss(ref: CodeRef, loss: TokenLoss, clip_low: float, clip_high: float) -> None:
    """Refuse a loss without a finite gradient for each token. Raises: ConfigError."""
    import torch

    generator = torch.Generator().manual_seed(0)
    logp_N, old_N, advantage_N = torch.randn(3, _NUM_TOKENS, generator=generator, dtype=torch.float64)
    inputs = (logp_N - 2.0, old_N - 2.0, advantage_N, clip_low, clip_high)
    with blaming(ref, "compute its loss"):
        results_N = loss.differentiate(*inputs)
    if not all(result_N.shape == advantage_N.shape and result_N.isfinite().all() for result_N in results_N):
        raise _refuse(
            ref, "has a loss without a finite value and gradient for each token", "N finite numbers"
        )


def _refuse(ref: CodeRef, flaw: str, allowed: str) -> ConfigError:
    return ConfigError(f"{ref} {flaw}", allowed=allowed, next_step=f"correct {ref.place}")


def _choose_loss(entry: Algorithm, spec: AlgorithmSpec) -> TokenLoss:
    """Return the entry's loss with the settings of the run."""
    if spec.dual_clip is None:
        return entry.loss
    if entry.loss is not CLIPPED:
        raise ConfigError(
            f"algorithm.dual_clip={spec.dual_clip:g} beside {entry.name} with the loss {entry.loss.name}",
            allowed="an algorithm with the clipped loss",
            next_step="remove algorithm.dual_clip",
        )
    return dual_clipped(spec.dual_clip)


def _penalize(algorithm: Algorithm, reference: ReferenceSpec, *, is_off_policy: bool) -> Algorithm:
    """Add the penalty on the distance from a reference: to the loss, or to rewards that no group compares."""
    if not algorithm.is_relative:
        return replace(algorithm, reward_kl_beta=reference.kl_beta)
    penalty = KlPenalty(
        beta=reference.kl_beta,
        estimate=ESTIMATORS[reference.kl_estimator],
        is_corrected=is_off_policy,
    )
    return replace(algorithm, kl=penalty)
