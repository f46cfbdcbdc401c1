"""What happens next: the one loop that makes a model better at a task.

Synchronous today: examples, rollouts, credit, one optimizer step, publication, record. Before the
first step the gate refuses what would train silently wrong; while it runs, tripwires watch; a
checkpoint continues to the same curve. Not here: who runs where (`cluster`), composing a run from
a run file (`launch`), and how good the result is (`evaluate`), which is handed in.
Modules that touch tensors import torch; import them by path.
"""

from strop.train.observer import EvalSummary, Evaluator, Observer, SilentObserver

__all__ = ["EvalSummary", "Evaluator", "Observer", "SilentObserver"]
