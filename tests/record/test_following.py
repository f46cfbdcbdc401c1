"""A growing file is read line by line, and a file that was cut back is read anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.errors import CorruptRecord, StoreError
from strop.io.atomic import write_bytes_atomically
from strop.record import MetricsLog
from strop.record.files import DirectoryRecord, LineFollower, RecordFiles, Shard, StoreRecord, list_shards
from strop.store.local_objects import LocalObjects
from strop.train.data.sft_sources import find_rollouts_files

NAME = "metrics.jsonl"


class InStore:
    """A file of a mirror, written whole as a mirror does."""

    def __init__(self, folder: Path) -> None:
        self._uri = f"{folder}/run/traces/{NAME}"
        self.record: RecordFiles = StoreRecord(LocalObjects(), f"{folder}/run", run="run")
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
    with pytest.raises(CorruptRecord, match=r"metrics.jsonl has a line that is no record"):
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


def test_a_name_says_which_examples_and_is_read_back() -> None:
    shard = Shard(examples=range(64, 70))
    assert shard.file_name == "examples-000064-000069.parquet"
    assert Shard.of_file(Path("a") / shard.file_name) == shard
    for other in ("examples-000064.parquet", "examples-000009-000001.parquet", "step-000001.parquet", "lock"):
        assert Shard.of_file(Path(other)) is None


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
