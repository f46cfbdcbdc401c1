"""Files and directories are complete or absent, whatever the disk does."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import CorruptRecord, StoreError
from strop.io.atomic import (
    AtomicDirectory,
    digest_of_files,
    is_complete,
    read_manifest,
    remove_directory,
    seal_directory,
    verify_directory,
    walk_files,
    write_bytes_atomically,
)
from strop.store.local_objects import LocalObjects
from tests.fixtures.tiny_disk import tiny_disk


def fill(directory: Path) -> None:
    (directory / "model").mkdir()
    (directory / "model" / "weights.bin").write_bytes(b"weights" * 1000)
    (directory / "state.bin").write_bytes(b"moments" * 500)


def test_a_file_is_replaced_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "a file with 'quotes'\n"
    write_bytes_atomically(path, b"old")
    write_bytes_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full"), (errno.EIO, "permissions")],
)
def test_a_failing_disk_keeps_the_old_file_and_says_what_to_do(
    tmp_path: Path, number: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"old")

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match=message) as raised:
        write_bytes_atomically(path, b"new")
    assert "what was there before is intact" in str(raised.value)
    assert str(path) in str(raised.value)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_parent_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="could not be written"):
        write_bytes_atomically(tmp_path / "absent" / "x", b"")


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk") as disk:
        write_bytes_atomically(disk / "kept", b"k" * 1000)
        with pytest.raises(StoreError, match="the disk is full"):
            write_bytes_atomically(disk / "big", b"x" * (2 << 20))
        with pytest.raises(StoreError, match="the disk is full"), AtomicDirectory(disk / "step") as partial:
            (partial / "big").write_bytes(b"x" * (2 << 20))
        # The library that writes weights reports a full disk as text in an exception of its own.
        with pytest.raises(StoreError, match="the disk is full"), AtomicDirectory(disk / "step") as partial:
            raise RuntimeError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error 28)")
        assert [path.name for path in disk.iterdir()] == ["kept"]
        with AtomicDirectory(disk / "step") as partial:
            (partial / "small").write_bytes(b"x")
        verify_directory(disk / "step")


def test_an_error_that_says_nothing_is_judged_by_the_free_space(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk") as disk:
        (disk / "filler").write_bytes(b"x" * (512 << 10))
        with pytest.raises(StoreError, match="the disk is full"), AtomicDirectory(disk / "step"):
            raise RuntimeError("file write failed")
    with pytest.raises(RuntimeError), AtomicDirectory(tmp_path / "step"):
        raise RuntimeError("file write failed")


def test_a_directory_appears_complete_with_its_digests(tmp_path: Path) -> None:
    target = tmp_path / "step-000020"
    with AtomicDirectory(target, facts={"step": 20}) as partial:
        fill(partial)
        assert not target.exists()
    manifest = verify_directory(target)
    assert manifest == read_manifest(target)
    assert manifest.facts == {"step": 20}
    # 7,000 bytes of weights and 3,500 of moments.
    assert manifest.size_bytes == 10_500
    assert manifest.files["model/weights.bin"].sha256 == hashlib.sha256(b"weights" * 1000).hexdigest()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000020"]


def test_an_exception_inside_leaves_nothing_and_passes_on(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), AtomicDirectory(tmp_path / "x") as partial:
        (partial / "half").write_bytes(b"x" * (1 // 0))
    with pytest.raises(KeyboardInterrupt), AtomicDirectory(tmp_path / "x"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_complete_directory_is_never_overwritten_unasked(tmp_path: Path) -> None:
    target = tmp_path / "x"
    with AtomicDirectory(target) as partial:
        fill(partial)
    with pytest.raises(StoreError, match="exists already"), AtomicDirectory(target):
        pass
    verify_directory(target)


def test_replacement_swaps_whole_directories(tmp_path: Path) -> None:
    target = tmp_path / "x"
    for content in (b"old", b"new"):
        with AtomicDirectory(target, replace=True) as partial:
            (partial / content.decode()).write_bytes(content)
    assert set(verify_directory(target).files) == {"new"}
    assert not (target / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_link_is_refused_since_its_bytes_are_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a plain file"), AtomicDirectory(tmp_path / "x") as partial:
        (partial / "link").symlink_to(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_damage_is_refused_by_name(tmp_path: Path) -> None:
    target = tmp_path / "x"
    with AtomicDirectory(target) as partial:
        fill(partial)
    weights = target / "model" / "weights.bin"
    good = weights.read_bytes()

    weights.write_bytes(good[:-1])
    with pytest.raises(CorruptRecord, match=r"weights\.bin has 6999 bytes.*7000"):
        verify_directory(target)
    weights.write_bytes(b"W" + good[1:])
    with pytest.raises(CorruptRecord, match=r"weights\.bin has SHA-256"):
        verify_directory(target)
    weights.unlink()
    with pytest.raises(CorruptRecord, match=r"weights\.bin cannot be read"):
        verify_directory(target)
    weights.mkdir()
    with pytest.raises(CorruptRecord, match=r"weights\.bin"):
        verify_directory(target)
    weights.rmdir()
    weights.write_bytes(good)
    verify_directory(target)


def test_trusting_mtimes_reads_only_what_changed(tmp_path: Path) -> None:
    target = tmp_path / "x"
    with AtomicDirectory(target) as partial:
        fill(partial)
    path = target / "state.bin"
    sealed_ns = path.stat().st_mtime_ns
    path.write_bytes(b"Moments" * 500)
    with pytest.raises(CorruptRecord, match=r"state\.bin"):
        verify_directory(target, can_trust_mtime=True)
    os.utime(path, ns=(sealed_ns, sealed_ns))
    verify_directory(target, can_trust_mtime=True)
    with pytest.raises(CorruptRecord, match=r"state\.bin"):
        verify_directory(target)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"files": {"a": {}}, "facts": {}}', b"\xff", b"null"]
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "COMPLETE").write_bytes(content)
    assert is_complete(tmp_path)
    with pytest.raises(CorruptRecord, match="is not a manifest"):
        read_manifest(tmp_path)


def test_a_directory_without_manifest_is_incomplete(tmp_path: Path) -> None:
    assert not is_complete(tmp_path)
    with pytest.raises(StoreError, match="is incomplete"):
        verify_directory(tmp_path)


def test_removal_takes_the_name_away_first(tmp_path: Path) -> None:
    target = tmp_path / "x"
    with AtomicDirectory(target) as partial:
        fill(partial)
    remove_directory(target)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreError, match="could not be written"):
        remove_directory(target)


@given(st.dictionaries(st.text(min_size=1), st.text(alphabet="0123456789abcdef", min_size=64, max_size=64)))
def test_the_digest_ignores_order_and_sees_every_name_and_digest(files: dict[str, str]) -> None:
    backwards = dict(reversed(list(files.items())))
    assert digest_of_files(backwards) == digest_of_files(files)
    assert digest_of_files({**files, "one more": "0" * 64}) != digest_of_files(files) or "one more" in files


def test_a_manifest_is_plain_json(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    seal_directory(tmp_path)
    content = json.loads((tmp_path / "COMPLETE").read_bytes())
    # SHA-256 of "abc", the first example of the standard (FIPS 180-4).
    assert content["files"]["a"]["sha256"].startswith("ba7816bf8f01cfea")
    assert content["files"]["a"]["size_bytes"] == 3


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
    listing = [(path.relative_to(root).as_posix(), stat.st_size) for path, stat in walk_files(root)]
    assert listing == [("a/one", 5), ("b/c/two", 7), ("three", 5)]
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


@pytest.fixture
def made_durable(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Note in order what is made durable, and what is moved into its place."""
    noted: list[tuple[str, str]] = []
    fsync, replace, rename = os.fsync, os.replace, Path.rename

    def note_fsync(descriptor: int) -> None:
        fsync(descriptor)
        noted.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def note_replace(source: Path, target: Path) -> None:
        replace(source, target)
        noted.append(("move", str(target)))

    def note_rename(source: Path, target: Path) -> Path:
        noted.append(("move", str(target)))
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(Path, "rename", note_rename)
    return noted


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_before_the_writer_goes_on(
    tmp_path: Path, made_durable: list[tuple[str, str]]
) -> None:
    path = tmp_path / "x"
    write_bytes_atomically(path, b"new")
    (aside, move, folder) = made_durable
    assert aside[1].startswith(f"{path}.partial-")
    assert (move, folder) == (("move", str(path)), ("fsync", str(tmp_path)))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_directory_is_called_complete_when_all_of_it_is_on_the_disk(
    tmp_path: Path, made_durable: list[tuple[str, str]], is_replaced: bool
) -> None:
    """A power cut must not leave a COMPLETE beside files or names of files that are gone."""
    target = tmp_path / "record"
    for _ in range(1 + is_replaced):
        made_durable.clear()
        with AtomicDirectory(target, replace=True) as partial:
            fill(partial)
    sealed = made_durable.index(("move", str(partial / "COMPLETE")))
    before = {place for what, place in made_durable[:sealed] if what == "fsync"}
    parts = {partial / "model" / "weights.bin", partial / "state.bin", partial / "model", partial}
    assert {str(part) for part in parts} <= before
    # The directory's own name at last: whoever goes on relies on it.
    assert made_durable[-1] == ("fsync", str(tmp_path))
    assert made_durable[sealed + 1] == ("fsync", str(partial))
