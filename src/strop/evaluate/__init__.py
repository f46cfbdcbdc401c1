"""Accuracy of a model on a task, with intervals, stored with everything that could have changed it.

`run_evaluation` uses the same rollouts as training and returns an `EvalResult`; with a `ShardFolder` it keeps
the replies and resumes after a kill. `write_result` and `read_result` store it;
`compare_results` compares two results, `compare_seeds` several training seeds of two configurations;
`rescore` judges kept replies again; `write_order` sorts examples by difficulty; `find_reference` looks up
published scores with their conditions; `stored` compares with the user's own. Left out: causes of a change.
"""

from strop.evaluate.accuracy import (
    EvalSettings,
    PlannedCanary,
    PlannedEvaluation,
    attempt_share,
    plan_canary,
    plan_evaluation,
    require_baseline,
    run_evaluation,
)
from strop.evaluate.comparison import (
    Change,
    Comparison,
    Difference,
    Interval,
    clustered_interval,
    compare_results,
    compare_seeds,
    correct_by_holm,
    difference_over_seeds,
    paired_difference,
    pass_at_k,
    pass_at_k_interval,
    sign_test,
)
from strop.evaluate.result import (
    EvalPlan,
    EvalResult,
    ExampleScore,
    PartScores,
    PassAtK,
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
from strop.evaluate.shards import ChangedVerdict, Rescored, ShardFolder, rescore

__all__ = [
    "Change",
    "ChangedVerdict",
    "Comparison",
    "Difference",
    "EvalPlan",
    "EvalResult",
    "EvalSettings",
    "ExampleScore",
    "Interval",
    "PartScores",
    "PassAtK",
    "PlannedCanary",
    "PlannedEvaluation",
    "Rescored",
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
    "paired_difference",
    "pass_at_k",
    "pass_at_k_interval",
    "plan_canary",
    "plan_evaluation",
    "read_result",
    "refuse_invalid",
    "require_baseline",
    "rescore",
    "result_name",
    "run_evaluation",
    "sign_test",
    "write_order",
    "write_result",
]
