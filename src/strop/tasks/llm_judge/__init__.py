"""Replies judged by another model, which answers over HTTP.

`rubric` writes the judge's prompt, parses its answer and caches judgements; `client` calls it and limits the
calls; `calibration` compares it with people and with itself. Prose, a refusal, a time-out or an error gives
no score, never a 0.
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
