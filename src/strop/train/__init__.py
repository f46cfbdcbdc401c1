"""What happens next: the one loop that makes a model better at a task.

Synchronous today: examples, rollouts, credit, one optimizer step, publication, record. Before the
first step the gate refuses what would train silently wrong; while it runs, tripwires watch; a
checkpoint continues to the same curve. Not here: who runs where (`cluster`), composing a run from
a run file (`launch`), and how good the result is (`evaluate`), which is handed in.
Modules that touch tensors import torch; import them by path.
Called, as `strop.train(...)`, this room is `launch.from_python.train`: both have the verb's name.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from strop.train.observer import EvalSummary, Evaluator, Observer, SilentObserver

__all__ = ["EvalSummary", "Evaluator", "Observer", "SilentObserver"]


class _Room(ModuleType):
    """What `strop.train` is, whether this room was imported before or not."""

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        """Train from Python; see `launch.from_python.train`."""
        return import_module("strop.run.from_python").train(*arguments, **settings)


sys.modules[__name__].__class__ = _Room
