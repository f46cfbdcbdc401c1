"""How good is it: accuracy of a model on a task, with intervals, stored so that it can be believed.

`evaluate_task` rolls out the same way as training does and returns an `EvalResult`; with a `ShardFolder`,
`run_evaluation` keeps the replies and goes on after a kill. `write_result` and `read_result` keep it,
`compare_results` says what changed, `compare_seeds` between several seeds of two configurations; `rescore`
judges kept replies anew, `write_order` sorts examples; `find_reference` looks up published scores with their
conditions; `stored` puts the user's own beside. Left out on purpose: what caused a change.
"""

from strop.evaluate.accuracy import (
    EvalSettings,
    PlannedEvaluation,
    attempt_share,
    evaluate_task,
    plan_evaluation,
    run_evaluation,
)
from strop.evaluate.baselines import Baseline, BaselineStatus, find_baselines, find_reference
from strop.evaluate.canary import PlannedCanary, plan_canary, require_baseline
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
    "Baseline",
    "BaselineStatus",
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
    "evaluate_task",
    "find_baselines",
    "find_reference",
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
