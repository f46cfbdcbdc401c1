"""Incidents on rewards, in tasks that a model judges and in blends of several verifiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.errors import DataError
from strop.rollout import FailureOwner, Group, Rollout, Sampling, Split
from strop.spec.train import TripwireSpec
from strop.tasks import build_task
from strop.tasks.blend import BlendSpec
from strop.train.measure import measure_rollouts
from strop.train.watch.tripwires import find_alarms
from tests.fixtures.judge_server import judge_server, scored
from tests.fixtures.judged import ROWS, judge_task

pytestmark = pytest.mark.usefixtures("own_cache")


def test_rew_6_a_template_with_an_unknown_field_is_refused_with_the_row(tmp_path: Path) -> None:
    """An absent placeholder became an empty text, and the judge graded another question."""
    (tmp_path / "rubric.txt").write_text("{{prompt}} {{reply}} {{refrence}}")
    task = judge_task(tmp_path, "http://127.0.0.1:1/v1", rubric=str(tmp_path / "rubric.txt"))
    message = (
        r"rows.jsonl, row \d+, example [0-9a-f]{16}, has no text for \{\{refrence\}\} of the rubric .*txt"
    )
    with pytest.raises(DataError, match=message):
        task.examples(Split.TRAIN)


@pytest.mark.parametrize("said", ["It is a fine reply, 10/10.", "I can't help with that.", ""])
def test_rew_6_prose_of_a_judge_is_no_score_and_an_alarm(tmp_path: Path, said: str) -> None:
    """An unparsable judge reply was scored 0, as if the answer had been wrong."""
    answers = [said, scored(1.0), scored(0.0), scored(0.5)]
    with judge_server(lambda question: answers.pop(0)) as server:
        task = judge_task(tmp_path, server.url)
        example = task.examples(Split.TRAIN)[0]
        outcomes = [task.verify(example, text) for text in "abcd"]
        task.client.close()
    assert [outcome.reward for outcome in outcomes] == [None, 1.0, 0.0, 0.5]
    failure = outcomes[0].failure
    assert failure is not None
    assert (failure.owner, failure.kind) == (FailureOwner.ENGINE, "judge_unparsable")
    rollouts = tuple(
        Rollout(example=example, step=0, sample_index=index, turns=(), outcome=outcome, sampling=Sampling())
        for index, outcome in enumerate(outcomes)
    )
    metrics = measure_rollouts([Group(example=example, rollouts=rollouts)])
    # One of four is unparsable, and the mean is over the other three.
    assert (metrics["judge_unparsable_frac"], metrics["reward_mean"]) == (0.25, 0.5)
    causes = [event.cause for event in find_alarms(TripwireSpec(), 1, metrics)]
    assert "verifier_errors" in causes


def test_rew_6_a_row_without_verifier_is_refused(tmp_path: Path) -> None:
    """A missing verifier type made every reply to the row wrong."""
    parts: dict[str, Any] = {
        "sums": {"name": "arithmetic", "max_value": 4, "num_held_out": 2},
        "instructions": {"name": "rlvr-ifeval", "source": str(tmp_path / "unused.jsonl")},
    }
    task = build_task(BlendSpec(name="blend", parts=parts))
    message = r"part instructions of the blend cannot judge example [0-9a-f]{16} of task arithmetic"
    with pytest.raises(DataError, match=message):
        task.examples(Split.TRAIN)
    with pytest.raises(ValueError, match=r"task\.parts\.judge.*judge-llm"):
        BlendSpec(name="blend", parts={**parts, "judge": {"name": "judge-llm"}})


def test_rew_6_no_row_is_left_to_chance(tmp_path: Path) -> None:
    """Rows that no verifier could judge were scored 0 for ever."""
    rows = [*ROWS[:-1], {"prompt": "A row without gold?"}]
    task = judge_task(tmp_path, "http://127.0.0.1:1/v1", rows)
    with pytest.raises(DataError, match=r"row 24, example [0-9a-f]{16}, has no text for \{\{gold\}\}"):
        task.examples(Split.TRAIN)
