"""From the word in the spec to the placement that it names."""

from __future__ import annotations

from pathlib import Path

from strop.cluster.contract import ModelSource, Placement
from strop.spec.run import RunSpec


def build_placement(spec: RunSpec, source: ModelSource, work_dir: Path) -> Placement:
    """Build the placement of `spec.placement.kind`; nothing is started yet.

    `work_dir` is where a placement keeps logs and files of its own; it need not exist.
    """
    # Inside the branches: all import torch, and this module is imported by light commands.
    if spec.placement.kind == "process":
        from strop.cluster.process import ProcessPlacement

        return ProcessPlacement(spec, source, work_dir)
    if spec.placement.kind == "ray":
        from strop.cluster.ray.placement import RayPlacement

        return RayPlacement(spec, source, work_dir)
    from strop.cluster.inline import InlinePlacement

    return InlinePlacement(spec, source)
