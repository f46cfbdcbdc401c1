"""Whether a run file asks for what the command is named after."""

from __future__ import annotations

from strop.errors import ConfigError, explain_refusal
from strop.spec import ResolvedSpec
from strop.spec.base import DEFAULT


def require_sft(resolved: ResolvedSpec) -> None:
    """Refuse a run file that asks for more than imitation.

    Raises: ConfigError naming what it asks for, and where that was written.
    """
    terms = resolved.spec.train.terms
    if terms == "sft":
        return
    origin = resolved.origins.get("train.terms", DEFAULT)
    raise ConfigError(
        explain_refusal(
            f"`strop sft` was given a run file with train.terms={terms!r} ({origin})",
            allowed="train.terms = 'sft' here; `strop train` runs any run file",
            next_step="set train.terms and sft.source, or use `strop train`",
        )
    )
