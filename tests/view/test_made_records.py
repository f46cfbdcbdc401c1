"""An invented record is read by the readers of real ones."""

from __future__ import annotations

from pathlib import Path

from strop.record import RunDir
from strop.record.events import JsonLines
from strop.record.files import DirectoryRecord
from strop.record.rollouts import read_rollouts
from strop.view.alarms import count_alarms
from strop.view.live import LiveRun
from strop.view.run_record import compare_ends, read_live
from tests.fixtures.records import RecordSize, make_record

SIZE = RecordSize(num_steps=12, num_rollouts=20, num_reply_tokens=9, num_distinct=2, num_evaluations=3)


def test_a_record_has_all_that_a_run_leaves(tmp_path: Path) -> None:
    made = make_record(tmp_path, SIZE)
    assert not made.is_locked_here
    record = read_live(LiveRun(key="made", record=DirectoryRecord(made.path)))
    assert record.state.finished_at is not None
    assert record.num_steps == 12
    assert {len(line) for line in record.metrics} == {SIZE.num_metrics + 1}
    assert [result.step for result in record.evals] == [0, 6, 12]
    ends = compare_ends(record.evals)
    assert ends is not None
    assert ends.change is not None
    assert ends.change.low > 0.0
    assert record.prediction is not None
    assert {alarm.cause for alarm in count_alarms(record.events)} >= {"zero_variance"}
    timeline = JsonLines(made.path / "timeline.jsonl").read_lines()
    assert [line["step"] for line in timeline] == list(range(1, 13))
    lanes = {span["lane"] for span in timeline[0]["spans"]}
    assert lanes == {"learner", "engine", "environments", "verifier"}


def test_files_of_rollouts_are_linked_and_whole(tmp_path: Path) -> None:
    run = RunDir.open(make_record(tmp_path, SIZE).path)
    paths = run.rollouts_files()
    assert len(paths) == 12
    assert len({path.read_bytes() for path in paths}) == 2
    rollouts = read_rollouts(paths[-1])
    assert len(rollouts) == 20
    # Groups of 8, 8 and 4.
    assert [rollout.sample_index for rollout in rollouts] == [*range(8), *range(8), *range(4)]


def test_a_seed_makes_one_record(tmp_path: Path) -> None:
    one, same, other = (
        make_record(tmp_path, SIZE, name=name, seed=seed).path
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    for name in ("metrics.jsonl", "rollouts/step-000002.parquet", "timeline.jsonl"):
        assert (one / name).read_bytes() == (same / name).read_bytes()
        assert (one / name).read_bytes() != (other / name).read_bytes()
