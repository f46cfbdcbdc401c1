"""Scores that others can repeat: a foreign harness beside strop, on the examples of strop's own tasks."""

from strop.evaluate.harness.environment import LM_EVAL
from strop.evaluate.harness.protocols import GENERATING, PROTOCOLS, HarnessProtocol, find_protocol
from strop.evaluate.harness.result import HarnessJob, HarnessMetric, HarnessPart, HarnessResult
from strop.evaluate.harness.run import run_harness
from strop.evaluate.harness.staging import (
    refuse_small_model,
    refuse_unconfirmed_code,
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
