"""Scores by lm-eval, which others can repeat, on lm-eval's own tasks and data."""

from strop.evaluate.harness.result import HarnessMetric, HarnessPart, HarnessResult
from strop.evaluate.harness.run import LM_EVAL, PROTOCOLS, HarnessJob, find_engine, run_harness

__all__ = [
    "LM_EVAL",
    "PROTOCOLS",
    "HarnessJob",
    "HarnessMetric",
    "HarnessPart",
    "HarnessResult",
    "find_engine",
    "run_harness",
]
