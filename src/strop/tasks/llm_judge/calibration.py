"""Compare a judge with people, with itself, and with the length of the replies.

Cohen's kappa is the agreement beyond chance: with p the share of rows on which judge and people agree, and
e that share if both gave their labels at random in their own proportions, kappa = (p - e) / (1 - e). A reply
that the judge did not score counts against it. Scores are repeatable only as far as the judge's server is.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from strop.errors import DataError
from strop.io import write_bytes_atomically
from strop.rollout import Example
from strop.spec.judge import LlmJudgeSpec
from strop.store.data_files import locate_named
from strop.tasks.failures import FailureCause, find_causes, find_failures, sum_up
from strop.tasks.judging import InlineJudge, Judge, open_judge
from strop.tasks.llm_judge.task import LlmJudge, row_example
from strop.tasks.rows.layout import Row, bad_row, read_rows
from strop.tasks.rows.row_task import require_texts

MIN_ROWS = 50
MIN_KAPPA = 0.6
NUM_REPEATED = 32
MIN_AGREEMENT = 0.95
_SAME_SCORE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledReply:
    """A reply with a label from people."""

    example: Example
    text: str
    is_good: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeReport:
    """The quality of a judge on labelled replies."""

    judge: str
    """Model and revision."""
    judge_digest: str
    num_rows: int
    num_unscored: int
    causes: tuple[FailureCause, ...]
    """Causes of the unscored replies, the commonest first."""
    num_cached: int
    """Judgements from the cache."""
    num_calls: int
    """Calls of this process for the repetition."""
    accuracy: float
    kappa: float
    num_repeated: int
    agreement: float
    """Share of replies that got the same score twice."""
    length_correlation: float | None
    """Pearson's, between score and length of the reply in characters; None if one of them is constant."""

    @property
    def faults(self) -> tuple[str, ...]:
        """Reasons against training with this judge; () if there are none."""
        faults = []
        if self.kappa < MIN_KAPPA:
            faults.append(f"kappa {self.kappa:.2f} with people is below {MIN_KAPPA:g}")
        if self.agreement < MIN_AGREEMENT:
            faults.append(
                f"{self.agreement:.0%} of {self.num_repeated} replies got the same score twice, and"
                f" {MIN_AGREEMENT:.0%} must"
            )
        return tuple(faults)

    def describe(self) -> str:
        """Describe it in one line."""
        lost = f"{sum_up(self.causes, self.num_rows, 'judgements')}; " if self.causes else ""
        slope = "undefined" if self.length_correlation is None else f"{self.length_correlation:+.2f}"
        return (
            f"{lost}judge {self.judge}: accuracy {self.accuracy:.1%}, kappa {self.kappa:.2f} on"
            f" {self.num_rows} labelled replies, {self.num_unscored} unscored; {self.agreement:.0%} of"
            f" {self.num_repeated} repeated; score and length correlate {slope}"
        )


def read_labelled_replies(source: str) -> list[LabelledReply]:
    """Read a calibration file: prompt, reply, label, and if known gold and other columns of the rubric.

    Raises: DataError naming file and row if one is malformed; or if there are too few, or all are alike.
    """
    labelled = []
    for row in read_rows(locate_named(source)):
        (reply,) = require_texts(row, "reply")
        label = row.values.get("label")
        if label not in (True, False):
            raise bad_row(f"{row.place} has label={str(label)[:80]!r}", allowed="true or false")
        others = {key: value for key, value in row.values.items() if key not in ("reply", "label")}
        example = row_example(Row(values=others, place=row.place))
        labelled.append(LabelledReply(example=example, text=reply, is_good=bool(label)))
    num_good = sum(reply.is_good for reply in labelled)
    if len(labelled) < MIN_ROWS or num_good in (0, len(labelled)):
        raise DataError(
            f"task.calibration={source} has {len(labelled)} labelled replies, {num_good} of them good",
            allowed=f"at least {MIN_ROWS}, good ones and bad ones",
            next_step="have more replies labelled",
        )
    return labelled


async def check_judge(
    task: LlmJudge, labelled: Sequence[LabelledReply], judge: Judge | None = None
) -> JudgeReport:
    """Judge labelled replies, some of them twice more. Without a `judge`, in this process.

    Raises: DataError if there is no reply; ConfigError or DataError as `LlmJudge.verify` does.
    """
    if not labelled:
        raise DataError(
            "a check of a judge on no labelled reply",
            allowed="at least one labelled reply",
            next_step="pass some",
        )
    chosen = judge or InlineJudge(task)
    outcomes = await asyncio.gather(*(chosen.judge(reply.example, reply.text) for reply in labelled))
    verdicts = [
        bool(outcome.is_correct) if outcome.is_scored else not reply.is_good
        for reply, outcome in zip(labelled, outcomes, strict=True)
    ]
    labels = [reply.is_good for reply in labelled]
    calls_before = task.client.limiter.num_calls
    repeated = labelled[:NUM_REPEATED]
    pairs = [await asyncio.to_thread(task.score_twice, reply.example, reply.text) for reply in repeated]
    scores = [(outcome.reward, len(reply.text)) for reply, outcome in zip(labelled, outcomes, strict=True)]
    scored = [(score, float(length)) for score, length in scores if score is not None]
    return JudgeReport(
        judge=task.judge_name,
        judge_digest=task.judge_digest,
        num_rows=len(labelled),
        num_unscored=len(labelled) - len(scored),
        causes=find_causes(find_failures(outcomes)),
        num_cached=sum(outcome.metrics.get("judge_cached") == 1.0 for outcome in outcomes),
        num_calls=task.client.limiter.num_calls - calls_before,
        accuracy=fmean(ours == theirs for ours, theirs in zip(verdicts, labels, strict=True)),
        kappa=cohens_kappa(verdicts, labels),
        num_repeated=len(pairs),
        agreement=fmean(
            first is not None and second is not None and abs(first - second) <= _SAME_SCORE
            for first, second in pairs
        ),
        length_correlation=correlation(scored),
    )


async def check_calibration(section: LlmJudgeSpec, calibration: str) -> JudgeReport:
    """Compare a run's judge with the labelled replies of a file, in worker processes.

    Raises: like `read_labelled_replies` and `check_judge`; CheckRefused if no worker can be made ready.
    """
    task = LlmJudge(section)
    task.warm_up()
    labelled = read_labelled_replies(calibration)
    judge = open_judge(task, partial(LlmJudge, section))
    try:
        return await check_judge(task, labelled, judge)
    finally:
        await judge.close()
        task.client.close()


def write_judge_report(report: JudgeReport, path: Path) -> None:
    """Write a report as JSON, complete or not at all.

    Raises: StoreError if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(path, (json.dumps(asdict(report), indent=1, sort_keys=True) + "\n").encode())


def cohens_kappa(ours: Sequence[bool], theirs: Sequence[bool]) -> float:
    """Return the agreement beyond chance of two judges on the same rows; 1.0 if both are constant."""
    agreed_frac = fmean(our == their for our, their in zip(ours, theirs, strict=True))
    yes_frac, other_yes_frac = fmean(ours), fmean(theirs)
    by_chance_frac = yes_frac * other_yes_frac + (1.0 - yes_frac) * (1.0 - other_yes_frac)
    return 1.0 if by_chance_frac == 1.0 else (agreed_frac - by_chance_frac) / (1.0 - by_chance_frac)


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Pearson's correlation, or None if one of the two is constant."""
    if not pairs:
        return None
    mean_x, mean_y = fmean(x for x, _ in pairs), fmean(y for _, y in pairs)
    spread_x = math.fsum((x - mean_x) ** 2 for x, _ in pairs)
    spread_y = math.fsum((y - mean_y) ** 2 for _, y in pairs)
    if spread_x == 0.0 or spread_y == 0.0:
        return None
    return math.fsum((x - mean_x) * (y - mean_y) for x, y in pairs) / math.sqrt(spread_x * spread_y)
