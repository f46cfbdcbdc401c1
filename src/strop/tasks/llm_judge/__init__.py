"""Replies judged by another model, which answers over HTTP.

`rubric` says what the judge is shown, `verdict` what of its answer counts, `client` how it is asked and
`desk` how often, `cache` keeps its judgements, and `calibration` compares it with people and with itself.
What the judge leaves open has no score: prose, a refusal, a time-out or an error is never a 0.
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
