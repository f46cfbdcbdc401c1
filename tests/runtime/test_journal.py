from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

from strop.errors import CorruptRecord, StoreError
from strop.runtime.journal import Journal


def write(path: Path, *names: str) -> None:
    async def main() -> None:
        journal = Journal.open(path)
        for name in names:
            await journal.put(name, {"name": name})
        await journal.close()

    asyncio.run(main())


def read(path: Path) -> list[str]:
    async def main() -> list[str]:
        journal = Journal.open(path)
        found = [line["name"] for line in journal.read()]
        await journal.close()
        return found

    return asyncio.run(main())


async def test_the_last_line_of_each_counts_in_the_order_of_the_first(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    for state in (1, 2):
        for name in ("a", "b"):
            await journal.put(name, {"name": name, "state": state})
    await journal.close()
    again = Journal.open(tmp_path / "journal")
    assert again.read() == [{"name": "a", "state": 2}, {"name": "b", "state": 2}]
    await again.close()
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o600


@pytest.mark.parametrize("torn", [b'{"id": "c", "con', b'{"id": "c"\n', b"\0\0\0", b"\xff\n"])
def test_a_torn_last_line_costs_nothing_but_itself(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal"
    write(path, "a", "b")
    with path.open("ab") as file:
        file.write(torn)
    assert read(path) == ["a", "b"]
    write(path, "d")
    assert read(path) == ["a", "b", "d"]


def test_any_cut_of_a_journal_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, "a", "b", "c")
    data = path.read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        assert read(path) == ["a", "b", "c"][: data[:size].count(b"\n")]


def test_another_broken_line_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, "a", "b")
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"{broken}\n" + second)
    with pytest.raises(CorruptRecord, match="line 2"):
        read(path)
    # The lock was given back.
    path.write_bytes(first)
    assert read(path) == ["a"]


async def test_a_second_controller_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    with pytest.raises(StoreError, match=f"process {os.getpid()}"):
        Journal.open(tmp_path / "journal")
    await journal.close()


async def test_changes_that_come_together_share_a_sync(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    await asyncio.gather(*(journal.put(f"s{index}", {"index": index}) for index in range(512)))
    assert journal.num_written == 512
    assert journal.num_syncs <= 3
    await journal.close()


async def test_a_journal_of_old_lines_is_written_anew_and_what_is_forgotten_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    journal = Journal.open(path)
    await journal.put("gone", {"index": 0})
    journal.forget("gone")
    for index in range(0, 3000, 10):
        await asyncio.gather(*(journal.put("a", {"index": index + more}) for more in range(10)))
    await journal.put("b", {"index": 1})
    await journal.close()
    assert len(path.read_bytes().splitlines()) < 1200
    again = Journal.open(path)
    assert again.read() == [{"index": 2999}, {"index": 1}]
    await again.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_full_disk_fails_the_change_and_leaves_a_whole_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"

    journal = Journal.open(path)
    await journal.put("a", {"name": "a"})
    real_write = os.write

    def write_half(descriptor: int, data: bytes) -> int:
        real_write(descriptor, data[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("strop.runtime.journal.os.write", write_half)
        with pytest.raises(StoreError, match="disk is full"):
            await journal.put("b", {"name": "b"})
    await journal.put("c", {"name": "c"})
    await journal.close()
    rows = [json.loads(row) for row in path.read_bytes().splitlines()]
    assert [row["id"] for row in rows] == ["a", "c"]
