"""How good is it: accuracy of a model on a task, with intervals, stored so that it can be believed.

`evaluate_task` rolls out the same way as training does and returns an `EvalResult`. `write_result`
and `read_result` keep it; `compare_results` says what changed and refuses unequal protocols.
`statistics.py` holds the intervals, pass@k and paired differences.
Left out on purpose: other evaluation harnesses, and verdicts over several runs.
"""

from strop.evaluate.accuracy import EvalSettings, evaluate_task
from strop.evaluate.result import (
    Comparison,
    EvalResult,
    Score,
    Validity,
    compare_results,
    read_result,
    refuse_invalid,
    result_name,
    write_result,
)
from strop.evaluate.statistics import (
    Interval,
    clustered_interval,
    paired_difference,
    pass_at_k,
    wilson_interval,
)

__all__ = [
    "Comparison",
    "EvalResult",
    "EvalSettings",
    "Interval",
    "Score",
    "Validity",
    "clustered_interval",
    "compare_results",
    "evaluate_task",
    "paired_difference",
    "pass_at_k",
    "read_result",
    "refuse_invalid",
    "result_name",
    "wilson_interval",
    "write_result",
]
