"""The scripted scheduler keeps the contract, and records on a disk do."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.hardware.findings import Severity
from strop.launch.job_dir import job_path_of, read_plan
from strop.record.files import DirectoryRecord
from tests.fixtures.scripted_jobs import World, refusal

# Records on a disk.


def test_files_of_a_directory_are_read_in_parts_and_listed_in_order(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "b" / "deep" / "x").write_bytes(b"0123456789")
    (tmp_path / "b" / "a").write_bytes(b"")
    (tmp_path / "link").symlink_to("b")
    record = DirectoryRecord(tmp_path)
    assert record.list("") == ["b/a", "b/deep/x"]
    assert record.list("b/deep") == ["b/deep/x"]
    assert record.list("absent") == []
    assert record.read("b/deep/x") == b"0123456789"
    assert [record.read_from("b/deep/x", offset) for offset in (0, 7, 10, 99)] == [
        b"0123456789",
        b"789",
        b"",
        b"",
    ]
    assert (record.read("absent"), record.read_from("absent", 0)) == (None, b"")
    assert (record.read("b/a/under"), record.read_from("b/a/under", 0)) == (None, b"")


@pytest.mark.parametrize("offset", [None, 0])
def test_what_cannot_be_read_is_named(tmp_path: Path, offset: int | None) -> None:
    record = DirectoryRecord(tmp_path)
    (tmp_path / "folder").mkdir()
    call = (lambda: record.read("folder")) if offset is None else (lambda: record.read_from("folder", offset))
    assert f"{tmp_path / 'folder'} cannot be read (Is a directory)" in refusal(call, StoreError)


# What a home keeps.


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "is damaged"), ("[]", "values have another form"), ('{"name": 3}', "values have another form")],
)
def test_a_damaged_plan_is_named(world: World, content: str, words: str) -> None:
    ref = world.submit()
    path = job_path_of(ref.home) / "plan.json"
    path.write_text(content)
    told = refusal(lambda: read_plan(job_path_of(ref.home)), StoreError)
    assert str(path) in told
    assert words in told
    path.unlink()
    assert "`strop ls` lists them" in refusal(lambda: read_plan(job_path_of(ref.home)), StoreError)


def test_a_disk_without_room_is_a_finding(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.launch.submit.free_disk_bytes", lambda path: 500_000_000)
    (found,) = world.launcher.check(world.launcher.plan(world.request()))
    assert (found.code, found.severity) == ("disk", Severity.ERROR)
    assert "0.50 GB are free" in str(found)
    assert "1.1 GB or more" in str(found)
