"""The typed run spec: its reader, its writer and its explanations.

Each setting is documented where it is defined: meaning, unit and special values. `load_spec` reads a run file
with everything that it extends and overrides; every value keeps its origin. Importing this room reads no file
and imports nothing heavy: no torch, no numpy.
Not here: building the things that a section names; that is the business of the room behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop import bring_when_asked

if TYPE_CHECKING:
    from strop.spec.algorithm import AlgorithmSpec
    from strop.spec.base import Section, SpecConflict
    from strop.spec.description import NOT_ASKED, Explanation, explain, spec_digest, write_spec
    from strop.spec.engine import EngineSpec, PlacementSpec, SamplingSpec
    from strop.spec.model import ModelSpec
    from strop.spec.offline import SftSpec
    from strop.spec.output import OutputSpec, StoreSpec, TrackersSpec
    from strop.spec.reader import ResolvedSpec, load_spec
    from strop.spec.run import RunSpec
    from strop.spec.schema import all_keys
    from strop.spec.task import TaskSection, TaskSpec, UserEnvironmentSpec, UserTaskSpec
    from strop.spec.train import EvalSpec, OptimizerSpec, TrainSpec, TripwireSpec
else:
    # An agent of a node, and a process that looks at code, have a use for few of these.
    __getattr__ = bring_when_asked(
        __name__,
        {
            "strop.spec.algorithm": "AlgorithmSpec",
            "strop.spec.base": "Section SpecConflict",
            "strop.spec.engine": "EngineSpec PlacementSpec SamplingSpec",
            "strop.spec.description": "NOT_ASKED Explanation explain spec_digest write_spec",
            "strop.spec.model": "ModelSpec",
            "strop.spec.offline": "SftSpec",
            "strop.spec.reader": "ResolvedSpec load_spec",
            "strop.spec.run": "RunSpec",
            "strop.spec.schema": "all_keys",
            "strop.spec.output": "OutputSpec StoreSpec TrackersSpec",
            "strop.spec.task": "TaskSection TaskSpec UserEnvironmentSpec UserTaskSpec",
            "strop.spec.train": "EvalSpec OptimizerSpec TrainSpec TripwireSpec",
        },
    )

__all__ = [
    "NOT_ASKED",
    "AlgorithmSpec",
    "EngineSpec",
    "EvalSpec",
    "Explanation",
    "ModelSpec",
    "OptimizerSpec",
    "OutputSpec",
    "PlacementSpec",
    "ResolvedSpec",
    "RunSpec",
    "SamplingSpec",
    "Section",
    "SftSpec",
    "SpecConflict",
    "StoreSpec",
    "TaskSection",
    "TaskSpec",
    "TrackersSpec",
    "TrainSpec",
    "TripwireSpec",
    "UserEnvironmentSpec",
    "UserTaskSpec",
    "all_keys",
    "explain",
    "load_spec",
    "spec_digest",
    "write_spec",
]
