"""What every store that records can be sent to must do, whatever the place."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from strop.errors import CorruptRecord, RemoteMissing, StoreError
from strop.io.atomic import AtomicDirectory, Manifest, read_manifest, verify_directory
from strop.store.contract import Transfer
from strop.store.record_store import INCOMING_SUFFIX, Objects, RecordStore, describe_directory, describe_files

FILES = {
    "config.json": b"{}",
    "weights/part 1.bin": b"w" * 70_000,
    "weights/empty.bin": b"",
    "größe.txt": "Größe".encode(),
}


def write_files(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != "COMPLETE"}


class StoreContract:
    """Inherit, and give `objects` and `root` as fixtures."""

    @pytest.fixture
    def store(self, objects: Objects) -> RecordStore:
        return RecordStore(objects)

    def test_a_directory_goes_there_and_comes_back(
        self, store: RecordStore, root: str, tmp_path: Path
    ) -> None:
        sent = store.put(write_files(tmp_path / "a"), f"{root}/r", facts={"uri": "org/m"})
        assert set(sent.moved) == set(FILES)
        assert sent.moved_bytes == sum(map(len, FILES.values()))
        got = store.get(f"{root}/r", tmp_path / "b")
        assert read_files(tmp_path / "b") == FILES
        assert set(got.moved) == set(FILES)
        assert verify_directory(tmp_path / "b").facts == {"uri": "org/m"}
        assert got.manifest.digest == sent.manifest.digest
        assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("place")) == [
            "a",
            "b",
            "b.lock",
        ]

    def test_the_second_time_nothing_moves(self, store: RecordStore, root: str, tmp_path: Path) -> None:
        store.put(write_files(tmp_path / "a"), f"{root}/r/")
        assert store.put(tmp_path / "a", f"{root}/r").moved == ()
        store.get(f"{root}/r", tmp_path / "b")
        assert store.get(f"{root}/r", tmp_path / "b").moved == ()
        # A copy is a complete record itself, and knows its digests.
        assert store.put(tmp_path / "b", f"{root}/r").moved == ()

    def test_an_interrupted_put_is_not_a_record_and_goes_on(
        self, store: RecordStore, objects: Objects, root: str, tmp_path: Path
    ) -> None:
        write_files(tmp_path / "a")
        for name in ("config.json", "weights/part 1.bin"):
            data = FILES[name]
            objects.upload(tmp_path / "a" / name, f"{root}/r/{name}", hashlib.sha256(data).hexdigest())
        assert not store.find_manifest(f"{root}/r")
        with pytest.raises(RemoteMissing, match="COMPLETE"):
            store.get(f"{root}/r", tmp_path / "b")
        assert not (tmp_path / "b").exists()
        assert set(store.put(tmp_path / "a", f"{root}/r").moved) == {"weights/empty.bin", "größe.txt"}
        assert store.find_manifest(f"{root}/r")

    def test_an_interrupted_get_goes_on(self, store: RecordStore, root: str, tmp_path: Path) -> None:
        store.put(write_files(tmp_path / "a"), f"{root}/r")
        incoming = write_files(tmp_path / f"b{INCOMING_SUFFIX}")
        (incoming / "config.json").write_bytes(b"{")  # cut short
        (incoming / "weights/part 1.bin").write_bytes(b"x" * 70_000)  # another content
        (incoming / "stray.bin").write_bytes(b"of another record")
        (incoming / "gone").mkdir()
        got = store.get(f"{root}/r", tmp_path / "b")
        assert set(got.moved) == {"config.json", "weights/part 1.bin"}
        assert read_files(tmp_path / "b") == FILES
        verify_directory(tmp_path / "b")
        assert not incoming.exists()

    def test_a_complete_record_is_not_overwritten_by_put(
        self, store: RecordStore, root: str, tmp_path: Path
    ) -> None:
        store.put(write_files(tmp_path / "a"), f"{root}/r")
        write_files(tmp_path / "a", {"config.json": b"[]"})
        with pytest.raises(StoreError, match=r"config\.json"):
            store.put(tmp_path / "a", f"{root}/r")
        (tmp_path / "a" / "config.json").unlink()
        with pytest.raises(StoreError):
            store.put(tmp_path / "a", f"{root}/r")
        store.get(f"{root}/r", tmp_path / "b")
        assert read_files(tmp_path / "b") == FILES

    def test_sync_and_get_replace_another_record(self, store: RecordStore, root: str, tmp_path: Path) -> None:
        store.put(write_files(tmp_path / "a"), f"{root}/r")
        store.get(f"{root}/r", tmp_path / "b")
        write_files(tmp_path / "a", {"config.json": b"[]"})
        assert store.sync(tmp_path / "a", f"{root}/r").moved == ("config.json",)
        assert store.get(f"{root}/r", tmp_path / "b").moved
        assert (tmp_path / "b" / "config.json").read_bytes() == b"[]"

    def test_a_directory_of_the_users_own_is_never_replaced(
        self, store: RecordStore, root: str, tmp_path: Path
    ) -> None:
        store.put(write_files(tmp_path / "a"), f"{root}/r")
        write_files(tmp_path / "mine", {"thesis.txt": b"the only copy"})
        with pytest.raises(StoreError, match="mine"):
            store.get(f"{root}/r", tmp_path / "mine")
        assert read_files(tmp_path / "mine") == {"thesis.txt": b"the only copy"}

    def test_a_damaged_copy_is_fetched_again(self, store: RecordStore, root: str, tmp_path: Path) -> None:
        store.put(write_files(tmp_path / "a"), f"{root}/r")
        store.get(f"{root}/r", tmp_path / "b")
        (tmp_path / "b" / "config.json").write_bytes(b"}{")
        store.get(f"{root}/r", tmp_path / "b")
        assert read_files(tmp_path / "b") == FILES

    def test_a_file_that_changed_in_the_store_is_refused(
        self, store: RecordStore, objects: Objects, root: str, tmp_path: Path
    ) -> None:
        store.put(write_files(tmp_path / "a"), f"{root}/r")
        objects.write(f"{root}/r/config.json", b"[]")  # as long as the promised one
        with pytest.raises(CorruptRecord, match=r"config\.json"):
            store.get(f"{root}/r", tmp_path / "b")
        objects.write(f"{root}/r/config.json", b"[ ]")
        with pytest.raises(CorruptRecord, match=r"config\.json"):
            store.get(f"{root}/r", tmp_path / "b")
        assert not (tmp_path / "b").exists()
        with pytest.raises(RemoteMissing, match=r"config\.json"):
            store.verify(f"{root}/r")
        # Sending again mends it.
        assert store.put(tmp_path / "a", f"{root}/r").moved == ("config.json",)
        assert store.verify(f"{root}/r").digest == read_manifest_digest(store, root, tmp_path)

    def test_files_are_added_to_a_record(self, store: RecordStore, root: str, tmp_path: Path) -> None:
        write_files(tmp_path, {"x": b"x", "y": b"y"})

        def put(*, replace: bool = False, **names: str) -> Transfer:
            paths = {f"main/{name}": tmp_path / file for name, file in names.items()}
            manifest = Manifest(files=describe_files(paths))
            return store.put_described(paths, f"{root}/d", manifest, replace=replace, is_whole=False)

        put(x="x")
        assert put(y="y").moved == ("main/y",)
        manifest = store.find_manifest(f"{root}/d")
        assert manifest is not None
        assert sorted(manifest.files) == ["main/x", "main/y"]
        assert store.plan_put({"main/x": tmp_path / "x", "z": tmp_path / "y"}, f"{root}/d").moved == ("z",)
        with pytest.raises(StoreError, match="main/x differs"):
            put(x="y")
        put(x="y", replace=True)
        assert store.list_names(f"{root}/d") == ("main/x", "main/y")
        # A choice of its files is a record too.
        got = store.get(f"{root}/d", tmp_path / "got", only=("main/x", "main/z", "*"))
        assert got.moved == ("main/x",)
        assert read_files(tmp_path / "got") == {"main/x": b"y"}
        assert store.get(f"{root}/d", tmp_path / "got", only=("main/x",)).moved == ()
        assert store.get(f"{root}/d", tmp_path / "both", only=("main/*",)).moved == ("main/x", "main/y")
        with pytest.raises(RemoteMissing, match="d/main/z"):
            store.get(f"{root}/d", tmp_path / "none", only=("main/z",))

    def test_a_single_file(self, store: RecordStore, root: str, tmp_path: Path) -> None:
        write_files(tmp_path, {"a.txt": b"alpha", "b.txt": b"beta"})
        store.put_file(tmp_path / "a.txt", f"{root}/f.txt")
        assert store.objects.find(f"{root}/f.txt")
        assert store.get(f"{root}/f.txt", tmp_path / "got").moved == ("got",)
        assert (tmp_path / "got").read_bytes() == b"alpha"
        assert store.get(f"{root}/f.txt", tmp_path / "got").moved == ()
        # It is sent over what is there.
        store.put_file(tmp_path / "b.txt", f"{root}/f.txt")
        assert store.get_object(f"{root}/f.txt", tmp_path / "got")
        assert not store.get_object(f"{root}/f.txt", tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == b"beta"

    def test_what_is_not_there(self, store: RecordStore, root: str, tmp_path: Path) -> None:
        assert not store.find_manifest(f"{root}/nothing")
        assert list(store.list(f"{root}/nothing")) == []
        assert store.find_manifest(f"{root}/nothing") is None
        with pytest.raises(RemoteMissing, match="nothing"):
            store.get(f"{root}/nothing", tmp_path / "b")
        with pytest.raises(StoreError, match="cannot be sent"):
            store.put(tmp_path / "absent", f"{root}/r")
        (tmp_path / "empty").mkdir()
        with pytest.raises(StoreError, match="cannot be sent"):
            store.put(tmp_path / "empty", f"{root}/r")

    def test_listing_is_by_name_and_below_the_prefix_only(
        self, store: RecordStore, objects: Objects, root: str
    ) -> None:
        for name in ("r/b", "r/a", "r/c/d", "rest"):
            objects.write(f"{root}/{name}", name.encode())
        found = list(store.list(f"{root}/r"))
        assert [stored.uri for stored in found] == [f"{root}/r/a", f"{root}/r/b", f"{root}/r/c/d"]
        assert [stored.size_bytes for stored in found] == [3, 3, 5]

    def test_a_manifest_cannot_lead_out_of_its_directory(
        self, store: RecordStore, objects: Objects, root: str, tmp_path: Path
    ) -> None:
        with AtomicDirectory(tmp_path / "a") as partial:
            (partial / "x").write_bytes(b"x")
        data = (tmp_path / "a" / "COMPLETE").read_bytes()
        for name in ("../x", "/etc/x", "a/../../x", "COMPLETE"):
            objects.write(f"{root}/r/COMPLETE", data.replace(b'"x"', f'"{name}"'.encode()))
            with pytest.raises(CorruptRecord, match="promises"):
                store.get(f"{root}/r", tmp_path / "b")
        objects.write(f"{root}/r/COMPLETE", b"{")
        with pytest.raises(CorruptRecord, match="is not a manifest"):
            store.find_manifest(f"{root}/r")

    def test_a_sealed_directory_that_was_damaged_is_not_sent(
        self, store: RecordStore, root: str, tmp_path: Path
    ) -> None:
        with AtomicDirectory(tmp_path / "a") as partial:
            (partial / "x").write_bytes(b"x")
        assert read_manifest(tmp_path / "a").files
        (tmp_path / "a" / "x").write_bytes(b"y")
        with pytest.raises(CorruptRecord, match="has SHA-256"):
            store.put(tmp_path / "a", f"{root}/r")
        assert list(store.list(f"{root}/r")) == []

    def test_a_conditional_write_succeeds_once_for_each_version(self, store: RecordStore, root: str) -> None:
        place = f"{root}/latest.json"
        assert store.objects.read_versioned(place) is None
        assert not store.objects.write_if(place, b"first", "a version of something that is not there")
        assert store.objects.write_if(place, b"first", None)
        assert not store.objects.write_if(place, b"second", None)
        found = store.objects.read_versioned(place)
        assert found is not None
        data, version = found
        assert data == b"first"
        assert store.objects.write_if(place, b"second", version)
        assert not store.objects.write_if(place, b"third", version)
        again = store.objects.read_versioned(place)
        assert again is not None
        assert again[0] == b"second"

    def test_folders_are_what_has_objects_below_it(
        self, store: RecordStore, root: str, tmp_path: Path
    ) -> None:
        assert list(store.objects.list_folders(root)) == []
        store.put(write_files(tmp_path / "a"), f"{root}/one")
        store.objects.write(f"{root}/two/deep/x", b"x")
        store.objects.write(f"{root}/single", b"x")
        assert list(store.objects.list_folders(root)) == ["one", "two"]
        assert list(store.objects.list_folders(f"{root}/")) == ["one", "two"]
        store.remove_record(f"{root}/one")
        store.remove_record(f"{root}/one")  # None is no error.
        store.objects.remove(f"{root}/two/deep/x")
        assert list(store.objects.list_folders(root)) == []
        assert store.objects.find(f"{root}/single")

    def test_a_record_of_described_files_is_complete_when_its_writer_agrees(
        self, store: RecordStore, root: str, tmp_path: Path
    ) -> None:
        manifest, paths = describe_directory(write_files(tmp_path / "a"), {"step": 2})

        def refuse() -> None:
            raise StoreError("another has begun")

        with pytest.raises(StoreError, match="another has begun"):
            store.put_described(paths, f"{root}/r", manifest, before_complete=refuse)
        assert not store.find_manifest(f"{root}/r")
        store.objects.give_up_uploads(root)
        assert store.put_described(paths, f"{root}/r", manifest).moved == ()
        found = store.find_manifest(f"{root}/r")
        assert found is not None
        assert (found.digest, found.facts) == (manifest.digest, {"step": 2})


def read_manifest_digest(store: RecordStore, root: str, tmp_path: Path) -> str:
    store.get(f"{root}/r", tmp_path / "whole")
    return read_manifest(tmp_path / "whole").digest
