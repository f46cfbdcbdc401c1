"""Scores by lm-eval, which others can repeat, on the examples of strop's tasks or on lm-eval's own data."""

from strop.evaluate.harness.engine import LM_EVAL, HarnessEngine, choose_engine
from strop.evaluate.harness.jobs import FreeJob, HarnessJob, change_protocol
from strop.evaluate.harness.protocols import GENERATING, PROTOCOLS, HarnessProtocol
from strop.evaluate.harness.result import HarnessMetric, HarnessPart, HarnessResult
from strop.evaluate.harness.run import (
    refuse_small_model,
    refuse_unconfirmed_code,
    run_harness,
)

__all__ = [
    "GENERATING",
    "LM_EVAL",
    "PROTOCOLS",
    "FreeJob",
    "HarnessEngine",
    "HarnessJob",
    "HarnessMetric",
    "HarnessPart",
    "HarnessProtocol",
    "HarnessResult",
    "change_protocol",
    "choose_engine",
    "refuse_small_model",
    "refuse_unconfirmed_code",
    "run_harness",
]
