"""Replies judged by another model, which answers over HTTP.

`rubric` has what the judge is shown, what of its answer counts and the cache of judgements, `client` asks it
and limits how often, `calibration` compares it with people and with itself. Prose, a refusal, a time-out or
an error gives no score, never a 0.
"""

from strop.tasks.llm_judge.calibration import (
    JudgeReport,
    check_calibration,
    check_judge,
    correlation,
    read_labelled_replies,
    write_judge_report,
)
from strop.tasks.llm_judge.task import LlmJudge

__all__ = [
    "JudgeReport",
    "LlmJudge",
    "check_calibration",
    "check_judge",
    "correlation",
    "read_labelled_replies",
    "write_judge_report",
]
