"""Settings that were given and play no part, because the run's terms do not ask for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from strop.spec.base import DEFAULT
from strop.spec.display import KeyPath, show_value
from strop.spec.run import RunSpec
from strop.spec.schema import Setting, settings

_SIZES_OF_RL: frozenset[KeyPath] = frozenset(
    {("train", "prompts_per_step"), ("train", "rollouts_per_prompt")}
)
_OF_SFT = frozenset({"sft"})
_OF_ONE: Mapping[str, frozenset[str]] = {
    "algorithm": frozenset({"rl", "rl+sft"}),
    "dpo": frozenset({"dpo"}),
    "teacher": frozenset({"rl", "rl+sft", "distill"}),
    "reference": frozenset({"rl", "rl+sft", "dpo"}),
}
"""Section, and the terms that it has a part in."""


def note_unused(spec: RunSpec, origins: Mapping[str, str]) -> list[str]:
    """Return a notice for every setting that was changed from its default and is not used.

    A file that is extended, or the record of another run, may well hold them: no reason to refuse.
    """
    notices = []
    for setting in _without_part(spec):
        value = getattr(getattr(spec, setting.path[0]), setting.path[1])
        origin = origins.get(setting.key, DEFAULT)
        if origin != DEFAULT and value != setting.info.default:
            notices.append(
                f"{setting.key}={show_value(value)} ({origin}) is not used: train.terms={spec.train.terms!r}"
                f" ({origins.get('train.terms', DEFAULT)})"
            )
    return notices


def _without_part(spec: RunSpec) -> Iterable[Setting]:
    for setting in settings():
        if not spec.train.has_rl and setting.path in _SIZES_OF_RL:
            yield setting
        if not spec.has_demonstrations and setting.path[0] in _OF_SFT:
            yield setting
        if spec.train.terms not in _OF_ONE.get(setting.path[0], frozenset({spec.train.terms})):
            yield setting
