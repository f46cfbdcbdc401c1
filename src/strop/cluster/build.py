"""Builds the placement that a run file names, and adds its frozen models (reference, teacher).

Frozen models live on the learner's ranks, sharded as it is: a teacher's hidden states need not travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from strop.cluster.contract import ModelSource, Placement, Roles
from strop.errors import ConfigError
from strop.spec.run import RunSpec
from strop.tokenizer import Tokenizer


def build_placement(spec: RunSpec, source: ModelSource, work_dir: Path) -> Placement:
    """Build the placement of `spec.layout`; nothing is started yet.

    `work_dir` is where a placement keeps logs and files of its own; it need not exist.
    """
    # Inside the branches: all import torch, and this module is imported by light commands.
    kind = spec.layout.kind
    if kind == "process":
        from strop.cluster.local import ProcessPlacement

        return ProcessPlacement(spec, source, work_dir)
    if kind == "ray":
        from strop.cluster.ray.placement import RayPlacement

        return RayPlacement(spec, source, work_dir)
    from strop.cluster.local import InlinePlacement

    return InlinePlacement(spec, source)


async def with_frozen(
    roles: Roles, spec: RunSpec, source: ModelSource, fetch: Callable[[str], ModelSource]
) -> Roles:
    """Return the roles with the reference and the teacher that a run asks for; nothing else is loaded.

    `source` is the model that the run starts from, `fetch` finds another by its URI.

    Raises: ConfigError if a model has another vocabulary or tokenizer.
    """
    for role, named in spec.frozen_models.items():
        found = source if named is None else fetch(named)
        if found.path != source.path:
            _require_same_tokens(Tokenizer.load(source.path), Tokenizer.load(found.path), role)
        scorer = await roles.learner.add_frozen(role, found)
        roles = replace(roles, reference=scorer) if role == "reference" else replace(roles, teacher=scorer)
        roles = replace(roles, frozen_dirs={**roles.frozen_dirs, role: found.path})
    return roles


def _require_same_tokens(own: Tokenizer, other: Tokenizer, role: str) -> None:
    """Refuse a tokenizer that means something else by an id. Raises: ConfigError naming the first."""
    num_own, num_other = own.vocab_size, other.vocab_size
    differing = [i for i in range(min(num_own, num_other)) if own.token_text(i) != other.token_text(i)]
    if num_own == num_other and not differing:
        return
    first = f"; token {differing[0]} is {own.token_text(differing[0])!r} here and" if differing else ""
    shown = f"{first} {other.token_text(differing[0])!r} there" if differing else ""
    raise ConfigError(
        f"the {role}'s tokenizer has {num_other} tokens and the policy's {num_own}{shown}",
        allowed="the same tokenizer: log-probabilities are compared token by token",
        next_step=f"choose another {role}",
    )
