"""Consistency of the loss terms: the algorithm, the reference, the teacher, the pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from strop.spec.algorithm import AlgorithmSpec
from strop.spec.base import SpecConflict
from strop.spec.model import ReferenceSpec
from strop.spec.task import EnvironmentSection

if TYPE_CHECKING:
    from strop.spec.run import RunSpec
    from strop.spec.train import TrainSpec


Mode = Literal["single", "decoupled", "bypass"]
_UNCLIPPED = ("cispo", "sapo", "dppo", "ipo_mask")
"""Entries whose loss is not the clipped one."""


def choose_mode(wanted: Mode, train: TrainSpec) -> Mode:
    """Return where ratios start; `single` if the ratio is 1 by construction.

    `wanted` is the run's choice, or else the algorithm's own.
    """
    if wanted == "bypass":
        return wanted
    return "decoupled" if train.steps_per_batch > 1 else "single"


def require_acting_settings(spec: RunSpec) -> None:
    """Refuse settings of the algorithm that have no effect. Raises: SpecConflict."""
    chosen, terms = spec.algorithm, spec.train.terms
    named = {"algorithm.name": chosen.name}
    if chosen.name == "sapo":
        _refuse_given(
            spec,
            ("clip_low", "clip_high"),
            named,
            "its gate has no bounds",
            allowed="another algorithm with them",
        )
    if chosen.name in _UNCLIPPED:
        _refuse_given(
            spec,
            ("dual_clip",),
            named,
            "its loss is not the clipped one",
            allowed="grpo, dr_grpo, dapo, rloo, gspo, reinforce_pp or reinforce_pp_baseline",
        )
    if chosen.is_own:
        _refuse_given(
            spec,
            ("advantage",),
            named,
            "an algorithm of one's own has an advantage of its own",
            allowed="one of the two",
        )
    if chosen.entropy_weight and terms not in ("rl", "rl+sft"):
        raise SpecConflict(
            {"algorithm.entropy_weight": chosen.entropy_weight, "train.terms": terms},
            "the loss has no term that the bonus belongs to",
            allowed="train.terms = 'rl' or 'rl+sft'",
            next_step="remove algorithm.entropy_weight",
        )
    _require_turns(spec)
    if chosen.mode == "single" and spec.train.steps_per_batch > 1:
        raise SpecConflict(
            {
                "algorithm.mode": chosen.mode,
                "train.mini_batches": spec.train.mini_batches,
                "train.epochs": spec.train.epochs,
            },
            "every ratio would be 1 in every optimizer step, and nothing would hold the policy near the one"
            " that the rollouts came from",
            allowed="algorithm.mode = 'decoupled' or 'bypass' where a batch takes several optimizer steps",
            next_step="remove algorithm.mode",
        )
    _require_one_place_of_kl(spec)


def _require_turns(spec: RunSpec) -> None:
    """Refuse credit by turn without turns or without credit. Raises: SpecConflict."""
    chosen = spec.algorithm
    if chosen.credit == "rollout" and chosen.turn_discount != 1.0:
        raise SpecConflict(
            {"algorithm.turn_discount": chosen.turn_discount, "algorithm.credit": chosen.credit},
            "all turns share the reward of the whole attempt",
            allowed="a discount with algorithm.credit = 'turn'",
            next_step="remove algorithm.turn_discount, or set algorithm.credit to 'turn'",
        )
    if chosen.credit == "rollout":
        return
    if not isinstance(spec.task, EnvironmentSection) or spec.train.terms not in ("rl", "rl+sft"):
        raise SpecConflict(
            {"algorithm.credit": chosen.credit, "task.name": spec.task.name, "train.terms": spec.train.terms},
            "there are no turns whose rewards it could compare",
            allowed="'turn' in an [environment], with train.terms = 'rl' or 'rl+sft'",
            next_step="remove algorithm.credit",
        )


def _refuse_given(
    spec: RunSpec, names: tuple[str, ...], beside: dict[str, str], why: str, *, allowed: str
) -> None:
    """Refuse algorithm settings that are set. Raises: SpecConflict."""
    found = {f"algorithm.{name}": getattr(spec.algorithm, name) for name in names}
    given = {key: value for key, value in found.items() if value is not None}
    if given:
        next_step = f"remove {' and '.join(given)}"
        raise SpecConflict({**beside, **given}, why, allowed=allowed, next_step=next_step)


def _require_one_place_of_kl(spec: RunSpec) -> None:
    """Refuse settings of a KL loss term if the penalty is part of the reward."""
    reference = spec.reference
    is_changed = reference.kl_estimator != ReferenceSpec().kl_estimator
    if spec.algorithm.whitened == "rpp" and reference.kl_beta > 0.0 and is_changed:
        raise SpecConflict(
            {
                "algorithm.name": spec.algorithm.name,
                "algorithm.advantage": spec.algorithm.advantage,
                "reference.kl_estimator": reference.kl_estimator,
            },
            "its KL penalty is a part of the reward, as the log-ratio itself (k1)",
            allowed="reference.kl_beta alone",
            next_step="remove reference.kl_estimator",
        )


def require_exact_skipping(spec: RunSpec) -> None:
    """Refuse to skip rollouts without advantage that still have a gradient. Raises: SpecConflict."""
    chosen = spec.algorithm
    has_mask = chosen.name in ("dppo", "ipo_mask")
    if has_mask and chosen.mode not in (None, "bypass"):
        raise SpecConflict(
            {"algorithm.name": chosen.name, "algorithm.mode": chosen.mode},
            "its range bounds the difference to the engine's probability",
            allowed="algorithm.mode = 'bypass'",
            next_step="remove algorithm.mode",
        )
    is_taught = spec.train.terms != "distill" and spec.teacher.source != "none"
    acting = {
        "algorithm.name": (chosen.name, has_mask),
        "algorithm.advantage": (chosen.whitened, chosen.whitened is not None),
        "algorithm.entropy_weight": (chosen.entropy_weight, chosen.entropy_weight > 0.0),
        "reference.kl_beta": (spec.reference.kl_beta, spec.reference.kl_beta > 0.0),
        "teacher.source": (spec.teacher.source, is_taught),
    }
    given = {key: value for key, (value, is_acting) in acting.items() if is_acting}
    if chosen.zero_variance == "skip" and given:
        raise SpecConflict(
            {"algorithm.zero_variance": chosen.zero_variance, **given},
            "the loss has a gradient on tokens without advantage too, which skipping would leave out",
            allowed="'keep', 'drop' or 'resample' beside a KL penalty, an entropy bonus, a teacher, a trust"
            " region or an advantage whitened over the batch",
            next_step="remove algorithm.zero_variance",
        )


def require_short_sequences(spec: RunSpec) -> None:
    """Refuse sequence-level ratios for replies that are too long. Raises: SpecConflict."""
    chosen, reply = spec.algorithm, spec.task.max_reply_tokens
    limit = chosen.max_sequence_tokens
    is_of_sequence = chosen.correction in ("tis_seq", "mis_seq")
    if is_of_sequence and limit is not None and reply is not None and reply > limit:
        raise SpecConflict(
            {
                "algorithm.correction": chosen.correction,
                "task.max_reply_tokens": reply,
                "algorithm.max_sequence_tokens": limit,
            },
            "the ratio of a long reply is a product that says nothing",
            allowed="a correction by token, or replies within algorithm.max_sequence_tokens",
            next_step="set algorithm.correction to 'tis_token', or raise that limit knowingly",
        )


def require_teacher(spec: RunSpec) -> None:
    """Refuse distillation without a teacher, and a teacher without effect. Raises: SpecConflict."""
    teacher, terms = spec.teacher, spec.train.terms
    if terms == "distill" and teacher.source == "none":
        raise SpecConflict(
            {"train.terms": terms, "teacher.source": teacher.source},
            "there is nobody to learn from",
            allowed="'model', 'initial' or 'current'",
            next_step="set teacher.source, and teacher.model where it is 'model'",
        )
    if (teacher.source == "model") != (teacher.model is not None):
        raise SpecConflict(
            {"teacher.source": teacher.source, "teacher.model": teacher.model},
            "only a teacher of its own has a model of its own",
            allowed="teacher.source = 'model' together with teacher.model, or neither",
            next_step="set both, or remove teacher.model",
        )
    is_same = teacher.source == "current" and teacher.context is None
    if is_same:
        raise SpecConflict(
            {"teacher.source": teacher.source, "teacher.context": teacher.context},
            "teacher and policy would be the same in every respect, and nothing would be learned",
            allowed="a context that only the teacher reads, or another teacher",
            next_step="set teacher.context, for example to 'The answer is {answer}.'",
        )
    needs_rows = terms == "distill" and teacher.student_frac < 1.0
    if needs_rows and (spec.sft.source is None or teacher.context is not None):
        raise SpecConflict(
            {
                "teacher.student_frac": teacher.student_frac,
                "sft.source": spec.sft.source,
                "teacher.context": teacher.context,
            },
            "the other steps need demonstrations, which have no context of a teacher",
            allowed="sft.source and no teacher.context, or teacher.student_frac = 1",
            next_step="set sft.source, or remove teacher.student_frac",
        )
    if terms in ("rl", "rl+sft") and teacher.source != "none" and teacher.form != "sampled":
        raise SpecConflict(
            {"train.terms": terms, "teacher.form": teacher.form},
            "beside rewards a teacher is a part of the advantage of sampled tokens",
            allowed="teacher.form = 'sampled', or train.terms = 'distill'",
            next_step="set teacher.form to 'sampled'",
        )


def require_read_settings(spec: RunSpec) -> None:
    """Refuse algorithm settings that a run without rewards ignores. Raises: SpecConflict."""
    if spec.train.terms != "distill":
        return
    read = ("correction", "correction_cap", "max_sequence_tokens") if spec.teacher.form == "sampled" else ()
    plain = AlgorithmSpec()
    given = {
        f"algorithm.{name}": getattr(spec.algorithm, name)
        for name in AlgorithmSpec.model_fields
        if name not in read and getattr(spec.algorithm, name) != getattr(plain, name)
    }
    if spec.reference.kl_beta > 0.0:
        given["reference.kl_beta"] = spec.reference.kl_beta
    if given:
        raise SpecConflict(
            {"train.terms": spec.train.terms, "teacher.form": spec.teacher.form, **given},
            "rewards take no part, and nothing would read the setting",
            allowed="with teacher.form = 'sampled' the correction: algorithm.correction, correction_cap and"
            " max_sequence_tokens",
            next_step=f"remove {', '.join(given)}, or set train.terms to 'rl'",
        )


def require_pairs(spec: RunSpec) -> None:
    """Refuse DPO without pairs, and pairs that are not used. Raises: SpecConflict."""
    terms, chosen = spec.train.terms, spec.dpo
    if (terms == "dpo") != (chosen.source is not None):
        raise SpecConflict(
            {"train.terms": terms, "dpo.source": chosen.source},
            "pairs and the loss on them belong together",
            allowed="train.terms = 'dpo' with the folder of a run in dpo.source, or neither",
            next_step="set both, or set dpo.source to none",
        )
