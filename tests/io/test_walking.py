"""Walking what others write to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from strop.io.walking import walk_files
from strop.store.local_objects import LocalObjects


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("a/one", "b/c/two", "three"):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "root/gone").symlink_to("nowhere")
    return tmp_path / "root"


class Listing(AbstractContextManager["Listing"], Iterator[Any]):
    """Entries of a directory, read before something happened to them."""

    def __init__(self, entries: list[os.DirEntry[str]]) -> None:
        self._entries = iter(entries)

    def __exit__(self, *details: object) -> None:
        return

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)


def test_files_come_in_order_with_their_sizes(root: Path) -> None:
    found = [(path.relative_to(root).as_posix(), stat.st_size) for path, stat in walk_files(root)]
    assert found == [("a/one", 5), ("b/c/two", 7), ("three", 5)]
    assert list(walk_files(root / "absent")) == []


def test_a_directory_that_is_removed_meanwhile_is_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint was removed while its folder was copied: FileNotFoundError ended the copying."""
    real = os.scandir

    def scandir(path: Any) -> Any:
        entries = list(real(path))
        if not isinstance(path, int) and Path(path) == root:
            shutil.rmtree(root / "b", ignore_errors=True)
        return Listing(entries)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [path.name for path, _ in walk_files(root)] == ["one", "three"]


def test_a_file_that_is_removed_while_a_store_is_listed_is_no_error(root: Path) -> None:
    listed = LocalObjects().list(str(root))
    first = next(listed)
    shutil.rmtree(root / "b")
    assert [Path(stored.uri).name for stored in (first, *listed)] == ["one", "three"]
