"""Accuracy of a model on a task, with intervals, stored with everything that could have changed it.

`run_evaluation` uses the same rollouts as training and returns an `EvalResult`; with a `ShardFolder` it keeps
the replies and resumes after a kill. `compare_results` compares two results, `compare_seeds` several training
seeds of two configurations; `rescore` judges kept replies again; `stored` compares with the user's own.
"""

from strop.evaluate.accuracy import (
    EvalSettings,
    PlannedEvaluation,
    attempt_share,
    plan_evaluation,
    run_evaluation,
)
from strop.evaluate.comparison import (
    Change,
    Comparison,
    Interval,
    clustered_interval,
    compare_results,
    compare_seeds,
    correct_by_holm,
    difference_over_seeds,
)
from strop.evaluate.result import (
    EvalPlan,
    EvalResult,
    ExampleScore,
    Score,
    Summary,
    Validity,
    dump_result,
    read_result,
    refuse_invalid,
    result_name,
    write_order,
    write_result,
)
from strop.evaluate.shards import ShardFolder, rescore

__all__ = [
    "Change",
    "Comparison",
    "EvalPlan",
    "EvalResult",
    "EvalSettings",
    "ExampleScore",
    "Interval",
    "PlannedEvaluation",
    "Score",
    "ShardFolder",
    "Summary",
    "Validity",
    "attempt_share",
    "clustered_interval",
    "compare_results",
    "compare_seeds",
    "correct_by_holm",
    "difference_over_seeds",
    "dump_result",
    "plan_evaluation",
    "read_result",
    "refuse_invalid",
    "rescore",
    "result_name",
    "run_evaluation",
    "write_order",
    "write_result",
]
