"""Downloading artefacts: interrupted, damaged, growing and vanishing ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.errors import CorruptRecord, StoreError
from strop.io.atomic import AtomicDirectory
from strop.launch.fetch import Fetched, Part, fetch_run, follow_run
from strop.record.files import DirectoryRecord, StoreRecord
from strop.store import open_store
from strop.store.s3_objects import S3Objects


def checkpoint(run: Path, step: int, *, size_bytes: int = 1000) -> None:
    with AtomicDirectory(run / "checkpoints" / f"step-{step:06d}", replace=True) as partial:
        (partial / "model").mkdir()
        (partial / "model" / "weights.bin").write_bytes(bytes([step % 256]) * size_bytes)
        (partial / "state.json").write_text("{}")


def put(run: Path, name: str, text: str) -> None:
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(text)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two complete checkpoints and one that is being written."""
    path = tmp_path / "runs" / "run-1"
    checkpoint(path, 10)
    checkpoint(path, 20)
    put(path, "checkpoints/step-000030/model/weights.bin", "half")
    # A seal inside of it does not seal it.
    put(path, "checkpoints/step-000030/model/COMPLETE", "{}")
    put(path, "checkpoints/.partial-step-000040/model/weights.bin", "half")
    put(path, "run.json", '{"name": "run"}')
    put(path, "metrics.jsonl", '{"step": 1}\n{"step": 2}\n{"st')
    put(path, "attempts/17-0/0/train.log", "hello\nwor")
    put(path, "job/plan.json", "{}")
    put(path, "job/secrets.json", '{"values": {"T": "canary"}}')
    put(path, "job/secrets.json.partial-4711-0a1b2c0a1b2c3d4", '{"values": {"T": "canary"}}')
    put(path, "job/env.json", '{"variables": {"A": "canary"}}')
    put(path, "lock", "canary")
    (path / "latest").symlink_to("attempts/17-0")
    return path


def names_in(path: Path) -> set[str]:
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}


def test_everything_but_secrets_and_unfinished_checkpoints_is_brought(run: Path, tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    fetched = fetch_run(DirectoryRecord(run), tmp_path / "home", Part.ALL)
    assert fetched.steps == (10, 20)
    assert names_in(tmp_path / "home") == {
        "run.json",
        "metrics.jsonl",
        "attempts/17-0/0/train.log",
        "job/plan.json",
        *(f"checkpoints/step-0000{step}/{name}" for step in (10, 20) for name in ("COMPLETE", "state.json")),
        *(f"checkpoints/step-0000{step}/model/weights.bin" for step in (10, 20)),
    }
    assert not any(
        b"canary" in file.read_bytes() for file in (tmp_path / "home").rglob("*") if file.is_file()
    )
    # What grows is brought up to its last complete line.
    assert (tmp_path / "home" / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "home" / "attempts" / "17-0" / "0" / "train.log").read_text() == "hello\n"
    # Nothing is removed or changed where it came from.
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    assert not (tmp_path / "home.incoming").exists()


@pytest.mark.parametrize(
    ("part", "steps", "has_traces"),
    [(Part.TRACES, (), True), (Part.CHECKPOINTS, (10, 20), False), (Part.LATEST, (20,), False)],
)
def test_a_part_alone(
    run: Path, tmp_path: Path, part: Part, steps: tuple[int, ...], has_traces: bool
) -> None:
    fetched = fetch_run(DirectoryRecord(run), tmp_path / "home", part)
    assert fetched.steps == steps
    assert (tmp_path / "home" / "metrics.jsonl").exists() is has_traces
    folders = {path.name for path in (tmp_path / "home").glob("checkpoints/*")}
    assert folders == {f"step-0000{one}" for one in steps}


def test_one_checkpoint_alone(run: Path, tmp_path: Path) -> None:
    assert fetch_run(DirectoryRecord(run), tmp_path / "home", Part.CHECKPOINTS, step=10).steps == (10,)
    assert {name.split("/")[1] for name in names_in(tmp_path / "home")} == {"step-000010"}
    for step in (15, 30):
        # 30 is being written.
        with pytest.raises(StoreError, match=f"step {step}.*: 10, 20"):
            fetch_run(DirectoryRecord(run), tmp_path / "other", Part.CHECKPOINTS, step=step)
    assert not (tmp_path / "other.incoming").exists()


class Breaking(DirectoryRecord):
    """A place that stops answering after some bytes."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        super().__init__(path)
        self.left_bytes = num_bytes
        self.asked: list[tuple[str, int]] = []

    def read_from(self, name: str, offset: int) -> bytes:
        self.asked.append((name, offset))
        data = super().read_from(name, offset)[:100]
        if len(data) > self.left_bytes:
            raise StoreError("the place stopped answering")
        self.left_bytes -= len(data)
        return data


def test_an_interrupted_fetch_goes_on_where_it_stopped(run: Path, tmp_path: Path) -> None:
    dest = tmp_path / "home"
    with pytest.raises(StoreError, match="stopped answering"):
        fetch_run(Breaking(run, 1100), dest, Part.LATEST)
    # A partial copy does not look like a whole one.
    assert not dest.exists()
    partial = sum(file.stat().st_size for file in (tmp_path / "home.incoming").rglob("*") if file.is_file())
    assert 0 < partial <= 1100
    record = Breaking(run, 10**6)
    fetched = fetch_run(record, dest, Part.LATEST)
    total = sum(file.stat().st_size for file in dest.rglob("*") if file.is_file())
    assert fetched.moved_bytes == total - partial
    assert fetched.steps == (20,)


def test_what_another_interrupted_call_had_begun_does_not_slip_in(run: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        fetch_run(Breaking(run, 1100), tmp_path / "home", Part.CHECKPOINTS)
    fetched = fetch_run(DirectoryRecord(run), tmp_path / "home", Part.TRACES)
    assert fetched.steps == ()
    assert not any("weights" in name for name in names_in(tmp_path / "home"))


def test_files_that_were_replaced_since_the_interruption_are_brought_anew(run: Path, tmp_path: Path) -> None:
    dest = tmp_path / "home"
    incoming = tmp_path / "home.incoming"
    put(incoming, "run.json", '{"name": "an older, longer state of the run"}')
    put(incoming, "metrics.jsonl", '{"step": 1}\n{"step": 2}\n{"step": 3, "cut": "by a resume"}\n')
    fetch_run(DirectoryRecord(run), dest, Part.ALL)
    assert (dest / "run.json").read_text() == '{"name": "run"}'
    assert (dest / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


class Flipping(DirectoryRecord):
    """A way home on which one byte of the weights is changed."""

    def read_from(self, name: str, offset: int) -> bytes:
        data = super().read_from(name, offset)
        return data.replace(b"\x14\x14", b"\x14\x15", 1) if name.endswith("weights.bin") else data


def test_a_flipped_byte_is_refused_and_the_next_call_brings_it_anew(run: Path, tmp_path: Path) -> None:
    dest = tmp_path / "home"
    with pytest.raises(CorruptRecord, match=r"weights\.bin"):
        fetch_run(Flipping(run), dest, Part.LATEST)
    assert not dest.exists()
    assert fetch_run(DirectoryRecord(run), dest, Part.LATEST).steps == (20,)
    assert (dest / "checkpoints" / "step-000020" / "model" / "weights.bin").read_bytes() == b"\x14" * 1000


class Vanishing(DirectoryRecord):
    """A run that removes its oldest checkpoint while it is fetched."""

    def read_from(self, name: str, offset: int) -> bytes:
        if "step-000010" in name and (self.path / name).exists():
            for file in sorted((self.path / "checkpoints" / "step-000010").rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()
        return super().read_from(name, offset)


def test_a_checkpoint_that_is_removed_meanwhile_is_left_out(run: Path, tmp_path: Path) -> None:
    fetched = fetch_run(Vanishing(run), tmp_path / "home", Part.ALL)
    assert fetched.steps == (20,)
    assert not (tmp_path / "home" / "checkpoints" / "step-000010").exists()


def test_a_folder_that_is_there_is_not_written_to(run: Path, tmp_path: Path) -> None:
    put(tmp_path / "home", "mine.txt", "mine")
    with pytest.raises(StoreError, match=r"home exists already.*--to"):
        fetch_run(DirectoryRecord(run), tmp_path / "home", Part.ALL)
    assert names_in(tmp_path / "home") == {"mine.txt"}
    with pytest.raises(StoreError, match="could not be written"):
        fetch_run(DirectoryRecord(run), tmp_path / "home" / "mine.txt" / "x", Part.ALL)


@pytest.mark.parametrize("part", list(Part))
def test_a_job_that_has_written_nothing_has_nothing_to_fetch(tmp_path: Path, part: Part) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match=f"has no {part.value} to fetch"):
        fetch_run(DirectoryRecord(tmp_path / "empty"), tmp_path / "home", part)


def test_a_large_file_comes_in_parts(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.record.files.MAX_READ_BYTES", 3)
    fetched = fetch_run(DirectoryRecord(run), tmp_path / "home", Part.ALL)
    assert fetched.steps == (10, 20)
    assert (tmp_path / "home" / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "home" / "run.json").read_text() == '{"name": "run"}'


def test_files_of_a_directory_are_read_in_parts_and_listed_in_order(tmp_path: Path) -> None:
    put(tmp_path, "b/deep/x", "0123456789")
    put(tmp_path, "b/a", "")
    (tmp_path / "link").symlink_to("b")
    record = DirectoryRecord(tmp_path)
    assert record.list("") == ["b/a", "b/deep/x"]
    assert record.list("b/deep") == ["b/deep/x"]
    assert record.list("absent") == []
    assert record.read("b/deep/x") == b"0123456789"
    parts = [record.read_from("b/deep/x", offset) for offset in (0, 7, 10, 99)]
    assert parts == [b"0123456789", b"789", b"", b""]
    for name in ("absent", "b/a/under"):
        assert (record.read(name), record.read_from(name, 0)) == (None, b"")
    calls: list[Callable[[], object]] = [lambda: record.read("b"), lambda: record.read_from("b", 0)]
    for call in calls:
        with pytest.raises(StoreError, match=f"{tmp_path / 'b'} cannot be read"):
            call()


# Following: the same, while the run goes on.


class LivingRun:
    """Does one thing to a run between two looks, and has ended when nothing is left to do."""

    def __init__(self, *deeds: Callable[[], None]) -> None:
        self.deeds = list(deeds)
        self.said: list[str] = []

    def is_over(self) -> bool:
        return not self.deeds

    def pause(self) -> None:
        self.deeds.pop(0)()

    def follow(self, run: Path, dest: Path, part: Part = Part.ALL) -> Fetched:
        return follow_run(
            DirectoryRecord(run), dest, part, is_over=self.is_over, say=self.said.append, pause=self.pause
        )


def test_traces_and_checkpoints_come_as_they_appear(run: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    seen: list[set[str]] = []

    def note(deed: Callable[[], None]) -> Callable[[], None]:
        def act() -> None:
            seen.append(names_in(home))
            deed()

        return act

    def grow() -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write('ep": 3}\n{"step": 4}\n')
        put(run, "rollouts/step-000003.parquet", "rows")

    def save() -> None:
        checkpoint(run, 40)
        # The run keeps two; what was fetched stays.
        shutil.rmtree(run / "checkpoints" / "step-000010")

    def cut() -> None:
        put(run, "metrics.jsonl", '{"step": 1}\n{"step": 2}\n{"step": 30}\n{"step": 31}\n')

    living = LivingRun(note(grow), note(save), note(cut))
    fetched = living.follow(run, home)
    assert fetched.steps == (10, 20, 40)
    assert "rollouts/step-000003.parquet" not in seen[0]
    assert "rollouts/step-000003.parquet" in seen[1]
    assert "checkpoints/step-000040/COMPLETE" not in seen[1]
    assert "checkpoints/step-000040/COMPLETE" in seen[2]
    assert (home / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()
    assert [line.partition(":")[0] for line in living.said] == [
        f"{home}/checkpoints/step-0000{step}" for step in (10, 20, 40)
    ]
    assert not [name for name in names_in(home) if name.startswith(".") or "secrets" in name]


def test_a_mirror_in_a_store_is_followed_without_reading_what_is_here(s3_root: str, tmp_path: Path) -> None:
    root = f"{s3_root}/checkpoints/run"
    store, objects = open_store(root), S3Objects()
    checkpoint(tmp_path / "r", 10)
    objects.write(f"{root}/metrics.jsonl", b'{"step": 1}\n')
    objects.write(f"{root}/rollouts/step-000001.parquet", b"rows")

    def save() -> None:
        store.put(tmp_path / "r" / "checkpoints" / "step-000010", f"{root}/checkpoints/step-000010")
        objects.write(f"{root}/metrics.jsonl", b'{"step": 1}\n{"step": 2}\n')

    home, living, read = tmp_path / "home", LivingRun(lambda: None, save), list[str]()

    class Counted(S3Objects):
        def read(self, uri: str) -> bytes:
            read.append(uri.rpartition("/")[2])
            return super().read(uri)

    fetched = follow_run(
        StoreRecord(Counted(), root),
        home,
        Part.ALL,
        is_over=living.is_over,
        say=living.said.append,
        pause=living.pause,
    )
    assert fetched.steps == (10,)
    assert (home / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (home / "rollouts" / "step-000001.parquet").read_bytes() == b"rows"
    # Once when it appears, and once at the end.
    assert read.count("step-000001.parquet") == 2


def test_following_again_goes_on_and_another_run_is_refused(run: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LivingRun(die).follow(run, home)
    other = tmp_path / "runs" / "run-2"
    put(other, "run.json", "{}")
    with pytest.raises(StoreError, match=r"home exists already and is a copy of .*run-1"):
        LivingRun().follow(other, home)
    before = (home / "checkpoints" / "step-000020" / "COMPLETE").stat().st_mtime_ns
    assert LivingRun().follow(run, home).steps == (10, 20)
    assert (home / "checkpoints" / "step-000020" / "COMPLETE").stat().st_mtime_ns == before
    with pytest.raises(StoreError, match="home exists already and is no copy of this run"):
        LivingRun().follow(run, home)
