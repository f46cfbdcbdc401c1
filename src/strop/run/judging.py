"""Comparing the judges of a run with people, before anything is trained."""

from __future__ import annotations

import asyncio

from strop.errors import ConfigError, explain_refusal
from strop.spec import RunSpec
from strop.spec.task import judge_sections
from strop.tasks.llm_judge import JudgeReport, check_calibration


def check_judges_here(spec: RunSpec) -> list[JudgeReport]:
    """Check every judge of a run against its calibration file.

    Raises: ConfigError if the run has no judge with such a file; DataError for a malformed file.
    """
    named = [
        (judge, judge.calibration) for judge in judge_sections(spec.task) if judge.calibration is not None
    ]
    if not named:
        raise ConfigError(
            explain_refusal(
                f"a check of the judges of task {spec.task.name}, which names no labelled replies",
                allowed="a task llm-judge, or a part that is one, with task.calibration",
                next_step="name a file of labelled replies in task.calibration",
            )
        )
    return [asyncio.run(check_calibration(judge, file)) for judge, file in named]
