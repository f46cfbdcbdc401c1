"""The training loop, and what it needs beside the policy: gate, watches, offline data, checkpoints.

Before the first step the gate refuses what would train silently wrong; while the loop runs, tripwires watch;
a checkpoint continues to the same curve. `watch/` holds the watches, `data/` what a run trains on. Not here:
where roles run (`cluster`), composing a run from a run file (`run`), and evaluation (`evaluate`), which is
handed in. Modules that touch tensors import torch; import them by path.
Called as `strop.train(...)`, this package is `run.from_python.train`: both have the verb's name.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from strop.train.observer import EvalSummary, Evaluator, Observer

__all__ = ["EvalSummary", "Evaluator", "Observer"]


class _Room(ModuleType):
    """The module `strop.train`, which can be called as well."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Train from Python; see `run.from_python.train`."""
        return import_module("strop.run.from_python").train(*arguments, **settings)


sys.modules[__name__].__class__ = _Room
