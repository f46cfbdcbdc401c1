"""Metrics and events: one line each, cut back for a resume, bounded in size, whole after a crash."""

from __future__ import annotations

import errno
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import CorruptRecord, DataError, StoreError
from strop.io.atomic import write_bytes_atomically
from strop.record import Event, EventKind, EventLog, MetricsLog, RunDir
from strop.record.events import MAX_DETAIL_CHARACTERS, MAX_EXAMPLE_IDS, JsonLines
from strop.record.files import DirectoryRecord, LineFollower, RecordFiles, Shard, StoreRecord, list_shards
from strop.record.rollouts import read_rollouts
from strop.record.timeline import ENVIRONMENTS, LEARNER, MAX_GROUP_SPANS, VERIFIER, Timeline
from strop.store.local_objects import LocalObjects
from strop.train.data.sft_sources import find_rollouts_files
from tests.fixtures.killed_recording import record_step
from tests.fixtures.tiny_disk import tiny_disk


def notice(step: int, cause: str = "tested", detail: str = "", num_ids: int = 0) -> Event:
    ids = tuple(f"id{index}" for index in range(num_ids))
    return Event(kind=EventKind.NOTICE, step=step, cause=cause, detail=detail, example_ids=ids)


# Metrics


def test_a_line_holds_its_step_and_only_what_was_computed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(1, {"reward/mean": 0.5, "loss": 0.0})
    log.append(2, {})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step":1,"reward/mean":0.5,"loss":0.0}\n{"step":2}\n'
    assert log.read() == [{"step": 1, "reward/mean": 0.5, "loss": 0.0}, {"step": 2}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True])
def test_a_metric_that_is_no_number_is_refused(tmp_path: Path, value: float) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(DataError, match="metric loss="):
        log.append(1, {"loss": value})
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("second_step", [2, 1])
def test_a_step_is_written_once_and_in_order(tmp_path: Path, second_step: int) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).append(2, {})
    # A new object stands for the process after a resume that forgot to truncate.
    with pytest.raises(DataError, match=f"metrics of step {second_step} come after those of step 2"):
        MetricsLog(path).append(second_step, {})


@given(kept=st.integers(0, 6), torn_bytes=st.integers(0, 24), cut=st.integers(0, 7))
def test_a_kill_in_the_middle_of_a_line_costs_that_line_only(kept: int, torn_bytes: int, cut: int) -> None:
    """Whatever prefix of the next line reached the disk, and wherever the resume starts."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.jsonl"
        log = MetricsLog(path)
        for step in range(kept):
            log.append(step, {"loss": 0.5})
        log.close()
        with path.open("ab") as file:
            file.write(b'{"step":99,"loss":0.1234}'[:torn_bytes])
        after = MetricsLog(path)
        assert len(after.read()) == kept
        after.truncate_after(cut)
        after.append(cut + 100, {"loss": 1.5})
        steps = [line["step"] for line in MetricsLog(path).read()]
        assert steps == [*range(min(kept, cut + 1)), cut + 100]


@pytest.mark.parametrize("line", ["{", "[]", '{"loss":1}', '{"step":"1"}', "\x00\x00", ""])
def test_a_damaged_line_in_the_middle_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step":1}}\n{line}\n{{"step":3}}\n')
    with pytest.raises(CorruptRecord, match=r"metrics\.jsonl, line 2, is not a record"):
        MetricsLog(path).read()


def test_a_log_that_cannot_be_opened_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="could not be written") as raised:
        JsonLines(tmp_path / "absent" / "x.jsonl").append_line({"step": 1})
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == errno.ENOENT


# Events


def test_an_event_comes_back_as_it_was(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: 12.5)
    log.append(notice(3, "zero_variance", "a sentence", num_ids=2))
    (found,) = log.read()
    assert found == Event(
        kind=EventKind.NOTICE,
        step=3,
        cause="zero_variance",
        detail="a sentence",
        example_ids=("id0", "id1"),
        num_examples=2,
        at=12.5,
    )


def test_prc_8_an_event_has_a_bounded_size(tmp_path: Path) -> None:
    """Incident: 694 of 824 MB of a trace were one repeated event."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.append(notice(1, detail="x" * 1_000_000, num_ids=10_000))
    assert path.stat().st_size < MAX_DETAIL_CHARACTERS + 20 * MAX_EXAMPLE_IDS + 500
    (found,) = log.read()
    assert found.num_examples == 10_000
    assert len(found.example_ids) == MAX_EXAMPLE_IDS
    assert found.detail.endswith("995904 characters cut")


def test_prc_8_a_repeated_event_is_thinned_and_counted(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    written = Counter(log.append(notice(step, "timeout")) for step in range(5000))
    log.append(notice(5000, "other"))
    # The first 100, then 128, 256, 512, 1024, 2048 and 4096.
    assert written == {True: 106, False: 5000 - 106}
    events = log.read()
    assert [event.occurrence for event in events[-4:]] == [1024, 2048, 4096, 1]


@pytest.mark.parametrize(
    "changed", [{"kind": "surprise"}, {"example_ids": 3}, {"unknown": 1}, {"kind": None}]
)
def test_a_line_that_is_no_event_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    path = tmp_path / "events.jsonl"
    line = {"kind": "notice", "step": 1, "cause": "x", "example_ids": [], **changed}
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(CorruptRecord, match="is not an event"):
        EventLog(path).read()


class Clocks:
    """A monotonic clock, and one on the wall that somebody may set."""

    def __init__(self) -> None:
        self.now, self.ahead = 100.0, 1_764_000_000.0

    def open(self, path: Path) -> Timeline:
        return Timeline(path, clock=lambda: self.now, wall=lambda: self.now + self.ahead)


def test_spans_are_placed_on_the_wall_clock(tmp_path: Path) -> None:
    clocks = Clocks()
    timeline = clocks.open(tmp_path / "timeline.jsonl")
    with timeline.span(LEARNER, "learn"):
        clocks.now += 1.5
        # Set while the span lasts: it is none the longer.
        clocks.ahead += 3600.0
    timeline.add(ENVIRONMENTS, "group", 100.25, 101.0, {"number": 7, "example": "ab", "status": "trained"})
    timeline.add(VERIFIER, "verify", 100.0, 100.0001)
    timeline.write(12)
    begun_at = 1_764_003_700.0
    assert timeline.read_lines() == [
        {
            "step": 12,
            "spans": [
                {"lane": "learner", "name": "learn", "start": begun_at, "end": begun_at + 1.5},
                {
                    "lane": "environments",
                    "name": "group",
                    "start": begun_at + 0.25,
                    "end": begun_at + 1.0,
                    "detail": {"number": 7, "example": "ab", "status": "trained"},
                },
            ],
        }
    ]


def test_a_line_has_what_was_added_since_the_last(tmp_path: Path) -> None:
    timeline = Clocks().open(tmp_path / "timeline.jsonl")
    timeline.write(0)
    assert not timeline.path.exists()
    for step in (1, 2, 2):
        timeline.add(LEARNER, f"span of {step}", 0.0, 1.0)
        timeline.write(step)
    lines = [(line["step"], [span["name"] for span in line["spans"]]) for line in timeline.read_lines()]
    assert lines == [(1, ["span of 1"]), (2, ["span of 2"]), (2, ["span of 2"])]
    assert timeline.truncate_after(1) == 2
    assert [line["step"] for line in timeline.read_lines()] == [1]


def test_a_line_stays_small_however_many_groups_a_step_has(tmp_path: Path) -> None:
    timeline = Clocks().open(tmp_path / "timeline.jsonl")
    for number in range(1_000_000, 1_000_000 + 3 * MAX_GROUP_SPANS):
        detail = {"number": number, "example": "0123456789abcdef", "status": "trained"}
        timeline.add(ENVIRONMENTS, "group", 0.0, float(1 + number % 997), detail)
    for number in range(128):
        timeline.add(f"engine {number}", "generate", 0.123, 1.234)
    for number in range(32):
        timeline.add(VERIFIER, "verify", float(number), number + 0.5)
    for name in ("wait", "learn", "sync", "record", "evaluate", "checkpoint"):
        timeline.add(LEARNER, name, 0.0, 1.0)
    timeline.write(123_456)
    (text,) = timeline.path.read_text().splitlines()
    assert len(text) < 100_000
    spans = json.loads(text)["spans"]
    groups = [span for span in spans if span["lane"] == ENVIRONMENTS]
    assert len(groups) == MAX_GROUP_SPANS
    # The longest are kept, and everything else with them.
    assert min(span["end"] - span["start"] for span in groups) > 500
    assert len(spans) == MAX_GROUP_SPANS + 128 + 32 + 6


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_kill_before_in_or_after_any_write_leaves_a_readable_record(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fixtures.killed_recording", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # It did die between any two of them.
    assert found["points"] > 40
    assert found["steps"] == sorted(found["steps"])
    assert {*found["steps"]} == {0, 1, 2}


def record_until_full(run: RunDir) -> None:
    for step in range(2, 1000):
        record_step(run, step)


def test_a_disk_that_fills_up_keeps_every_step_that_was_recorded(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk") as disk, RunDir.create(disk, "full", "", "digest", {}) as run:
        record_step(run, 1)
        filler = disk / "filler"
        filler.write_bytes(b"x" * (900 << 10))
        with pytest.raises(StoreError, match="the disk is full"):
            record_until_full(run)
        steps = [int(line["step"]) for line in run.metrics.read()]
        assert steps == list(range(1, len(steps) + 1))
        for path in run.rollouts_files():
            assert len(read_rollouts(path)) == 1
        # With room again, the run goes on behind its last whole step.
        filler.unlink()
        run.truncate_after(len(steps))
        record_step(run, len(steps) + 1)
        assert [line["step"] for line in run.timeline.read_lines()] == [*steps, len(steps) + 1]
        assert not list(run.path.rglob("*.partial-*"))


NAME = "metrics.jsonl"


class InStore:
    """A file of a mirror, written whole as a mirror does."""

    def __init__(self, folder: Path) -> None:
        self._uri = f"{folder}/run/{NAME}"
        self.record: RecordFiles = StoreRecord(LocalObjects(), f"{folder}/run")
        self.content = b""

    def write(self, data: bytes) -> None:
        self.content = data
        LocalObjects().write(self._uri, data)


class OnDisk:
    """A file of a run's directory."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self.record: RecordFiles = DirectoryRecord(folder)
        self.content = b""

    def write(self, data: bytes) -> None:
        if data.startswith(self.content):
            with self._path.open("ab") as file:
                file.write(data[len(self.content) :])
        else:
            write_bytes_atomically(self._path, data)
        self.content = data


@pytest.fixture(params=[OnDisk, InStore])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> OnDisk | InStore:
    made: OnDisk | InStore = request.param(tmp_path)
    return made


def read(follower: LineFollower) -> tuple[bool, list[bytes]]:
    found = follower.read_new()
    return found.is_restarted, found.lines


def test_lines_are_given_once_and_a_torn_one_waits(file: OnDisk | InStore) -> None:
    follower = LineFollower(file.record, NAME)
    assert read(follower) == (False, [])
    file.write(b"one\ntw")
    assert read(follower) == (False, [b"one"])
    assert read(follower) == (False, [])
    file.write(b"one\ntwo\n\nfour\n")
    assert read(follower) == (False, [b"two", b"", b"four"])
    assert follower.offset == len(file.content)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(b"1\n2\n", id="shorter"),
        pytest.param(b"1\n2\nc\n", id="as long as before"),
        pytest.param(b"1\n2\nc\nd\ne\nf\n", id="longer, as when many steps came between two looks"),
    ],
)
def test_a_file_that_was_cut_back_is_read_anew(file: OnDisk | InStore, after: bytes) -> None:
    follower = LineFollower(file.record, NAME)
    file.write(b"1\n2\n3\n")
    assert read(follower) == (False, [b"1", b"2", b"3"])
    file.write(after)
    assert read(follower) == (True, after.split())
    file.write(after + b"next\n")
    assert read(follower) == (False, [b"next"])


def test_a_file_that_is_gone_takes_its_lines_with_it(tmp_path: Path) -> None:
    file = OnDisk(tmp_path)
    follower = LineFollower(file.record, NAME)
    file.write(b"1\n")
    assert read(follower) == (False, [b"1"])
    (tmp_path / NAME).unlink()
    assert read(follower) == (True, [])
    assert read(follower) == (False, [])


def test_another_reader_goes_on_at_an_offset(file: OnDisk | InStore) -> None:
    file.write(b"one\ntwo\nthree\n")
    assert read(LineFollower(file.record, NAME, offset=4)) == (False, [b"two", b"three"])
    assert read(LineFollower(file.record, NAME, offset=14)) == (False, [])
    # No line ends there: it was another file that was read.
    for offset in (5, 99):
        assert read(LineFollower(file.record, NAME, offset=offset)) == (True, [b"one", b"two", b"three"])


def test_a_resume_of_a_real_log_is_seen(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / NAME)
    follower = LineFollower(DirectoryRecord(tmp_path), NAME)
    for step in (1, 2, 3):
        log.append(step, {"seconds_step": 1.0})
    assert len(follower.read_new().lines) == 3
    log.truncate_after(1)
    for step in (2, 3):
        log.append(step, {"seconds_step": 2.0})
    assert read(follower) == (
        True,
        [
            b'{"step":1,"seconds_step":1.0}',
            b'{"step":2,"seconds_step":2.0}',
            b'{"step":3,"seconds_step":2.0}',
        ],
    )


def test_lines_are_read_as_objects_and_another_one_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b'{"step": 1}\n')
    follower = LineFollower(DirectoryRecord(tmp_path), NAME)
    assert follower.read_records() == (False, [{"step": 1}])
    with (tmp_path / NAME).open("ab") as file:
        file.write(b"[1]\n")
    with pytest.raises(CorruptRecord):
        follower.read_records()


def test_what_a_silent_place_kept_back_comes_later(tmp_path: Path) -> None:
    is_silent = True

    class Sometimes(DirectoryRecord):
        def read_from(self, name: str, offset: int) -> bytes:
            if is_silent:
                raise StoreError("the place does not answer")
            return super().read_from(name, offset)

    (tmp_path / NAME).write_bytes(b"1\n")
    follower = LineFollower(Sometimes(tmp_path), NAME)
    with pytest.raises(StoreError):
        follower.read_new()
    is_silent = False
    assert read(follower) == (False, [b"1"])


def test_shards_are_in_the_order_of_their_examples(tmp_path: Path) -> None:
    # As texts, 1000000 comes before 999968.
    shards = [Shard(examples=range(start, start + 32)) for start in (0, 999968, 1000000)]
    for name in ("examples-rest.parquet", *(shard.file_name for shard in reversed(shards))):
        (tmp_path / name).touch()
    assert [path.name for path in list_shards(tmp_path)] == [shard.file_name for shard in shards]
    # Rejection sampling reads the same files, in the same order.
    assert find_rollouts_files(tmp_path) == list_shards(tmp_path)


def test_a_folder_without_shards_is_a_run_or_nothing(tmp_path: Path) -> None:
    assert list_shards(tmp_path / "missing") == []
    with pytest.raises(StoreError, match="missing"):
        find_rollouts_files(tmp_path / "missing")
