"""Scores that others can repeat: a foreign harness beside strop, on the examples of strop's own tasks."""

from strop.evaluate.harness.protocols import GENERATING, PROTOCOLS, HarnessProtocol, find_protocol
from strop.evaluate.harness.result import LM_EVAL, HarnessJob, HarnessMetric, HarnessPart, HarnessResult
from strop.evaluate.harness.run import (
    refuse_small_model,
    refuse_unconfirmed_code,
    run_harness,
)

__all__ = [
    "GENERATING",
    "LM_EVAL",
    "PROTOCOLS",
    "HarnessJob",
    "HarnessMetric",
    "HarnessPart",
    "HarnessProtocol",
    "HarnessResult",
    "find_protocol",
    "refuse_small_model",
    "refuse_unconfirmed_code",
    "run_harness",
]
