"""Every fault ends in success after more attempts, or in a typed error; never in a part taken for a whole."""

from __future__ import annotations

import hashlib
import io
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from strop.errors import (
    ConfigError,
    CorruptRecord,
    RemoteDenied,
    RemoteMissing,
    RemoteUnreachable,
    StoreError,
)
from strop.io.atomic import verify_directory
from strop.store import s3_client
from strop.store.contract import StoredObject
from strop.store.record_store import NUM_FILES_AT_ONCE, RecordStore
from strop.store.s3_client import S3Settings, open_client
from strop.store.s3_objects import S3Objects
from strop.store.uris import parse_s3
from tests.fixtures.object_store import (
    BUCKET,
    FAULTS,
    SETTINGS,
    Exchange,
    SpoilingProxy,
    ask_store,
    make_objects,
    use_store,
)
from tests.store.contract_suite import FILES, read_files, write_files

# One part of 5 MiB and a bit of a second one.
LARGE = random.Random(0).randbytes((5 << 20) + 12_345)
# What of a fault can happen to a request with a body and an empty reply, and the other way round.
PUT_FAULTS = tuple(fault for fault in FAULTS if fault != "truncated")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def stored_bytes(address: str, uri: str) -> bytes | None:
    """Return what the store really has, asked without strop."""
    status, data = ask_store(address, "GET", uri.removeprefix("s3:/"))
    return data if status == 200 else None


@pytest.mark.parametrize("fault", PUT_FAULTS)
@pytest.mark.parametrize("data", [b"small", LARGE], ids=["whole", "parts"])
def test_a_passing_fault_while_sending(
    fault: str, data: bytes, proxy: SpoilingProxy, s3_root: str, store_address: str, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(data)
    proxy.once(fault, "PUT")
    make_objects(fault).upload(tmp_path / "f", f"{s3_root}/f", sha256(data))
    assert [spoilt[0] for spoilt in proxy.spoilt] == [fault]
    assert stored_bytes(store_address, f"{s3_root}/f") == data


@pytest.mark.parametrize("fault", ["500", "503", "dropped", "lost-reply"])
def test_a_passing_fault_while_parts_are_joined(
    fault: str, proxy: SpoilingProxy, s3_root: str, store_address: str, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(LARGE)
    proxy.once(fault, "POST", r"\?uploadId=")
    make_objects().upload(tmp_path / "f", f"{s3_root}/f", sha256(LARGE))
    assert len(proxy.spoilt) == 1
    assert stored_bytes(store_address, f"{s3_root}/f") == LARGE


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("data", [b"small", LARGE], ids=["whole", "parts"])
def test_a_passing_fault_while_fetching(
    fault: str, data: bytes, proxy: SpoilingProxy, s3_root: str, tmp_path: Path
) -> None:
    objects = make_objects(fault)
    (tmp_path / "f").write_bytes(data)
    objects.upload(tmp_path / "f", f"{s3_root}/f", sha256(data))
    stored = objects.find(f"{s3_root}/f")
    assert stored is not None
    proxy.once(fault, "GET", "/f")
    assert objects.download(stored, tmp_path / "g", None) == sha256(data)
    assert [spoilt[0] for spoilt in proxy.spoilt] == [fault]
    assert (tmp_path / "g").read_bytes() == data


@pytest.mark.parametrize("fault", ["500", "503", "dropped", "truncated"])
def test_a_fault_that_lasts_is_an_error_that_says_so(
    fault: str, proxy: SpoilingProxy, s3_root: str, tmp_path: Path
) -> None:
    store = RecordStore(make_objects())
    store.put(write_files(tmp_path / "a"), f"{s3_root}/r")
    proxy.once(fault, "GET", r"part%201", times=100)
    with pytest.raises(RemoteUnreachable, match=r"part 1\.bin"):
        store.get(f"{s3_root}/r", tmp_path / "b")
    assert len(proxy.spoilt) == SETTINGS.num_attempts
    assert not (tmp_path / "b").exists()
    assert list(tmp_path.rglob("*.partial-*")) == []
    # The same call later fetches the rest only.
    proxy.spoil = lambda exchange: None
    assert "weights/part 1.bin" in store.get(f"{s3_root}/r", tmp_path / "b").moved
    assert read_files(tmp_path / "b") == FILES


@pytest.mark.parametrize("fault", ["500", "503", "dropped"])
def test_a_fault_that_lasts_while_sending_leaves_no_record(
    fault: str, proxy: SpoilingProxy, s3_root: str, store_address: str, tmp_path: Path
) -> None:
    store = RecordStore(make_objects())
    write_files(tmp_path / "a", {**FILES, "large.bin": LARGE})
    proxy.once(fault, "PUT", r"partNumber=2", times=100)
    with pytest.raises(RemoteUnreachable, match=r"large\.bin"):
        store.put(tmp_path / "a", f"{s3_root}/r")
    assert stored_bytes(store_address, f"{s3_root}/r/large.bin") is None
    assert stored_bytes(store_address, f"{s3_root}/r/COMPLETE") is None
    # Nobody pays for parts that are not joined.
    assert b"<UploadId>" not in ask_store(store_address, "GET", f"/{BUCKET}?uploads")[1]
    proxy.spoil = lambda exchange: None
    moved = store.put(tmp_path / "a", f"{s3_root}/r").moved
    assert "large.bin" in moved
    assert "config.json" not in moved


def test_a_listing_is_retried_and_goes_over_pages(
    proxy: SpoilingProxy, s3_root: str, store_address: str
) -> None:
    prefix = s3_root.removeprefix("s3:/")
    # S3 answers at most 1,000 keys at once: 1,003 need two pages.
    for number in range(1003):
        assert ask_store(store_address, "PUT", f"{prefix}/many/{number:04}", b"x")[0] == 200
    ask_store(store_address, "PUT", f"{prefix}/many/folder/", b"")
    proxy.once("503", "GET", "continuation-token")
    names = [stored.uri.rpartition("/")[2] for stored in make_objects().list(f"{s3_root}/many")]
    assert names == [f"{number:04}" for number in range(1003)]
    assert len(proxy.spoilt) == 1


@pytest.mark.parametrize("data", [b"small", LARGE], ids=["whole", "parts"])
def test_a_store_that_lies_about_content_or_size_is_refused(
    data: bytes, proxy: SpoilingProxy, s3_root: str, tmp_path: Path
) -> None:
    objects = make_objects()
    (tmp_path / "f").write_bytes(data)
    objects.upload(tmp_path / "f", f"{s3_root}/f", sha256(data))
    stored = objects.find(f"{s3_root}/f")
    assert stored is not None
    proxy.once("wrong-reply", "GET", times=100)
    with pytest.raises(CorruptRecord):
        objects.download(stored, tmp_path / "g", None)
    proxy.spoil = lambda exchange: None
    for size_bytes in (stored.size_bytes - 1, stored.size_bytes + 1):
        listed = StoredObject(uri=stored.uri, size_bytes=size_bytes, version=stored.version)
        with pytest.raises(CorruptRecord):
            objects.download(listed, tmp_path / "g", None)
    assert not (tmp_path / "g").exists()


def test_what_did_not_arrive_as_it_was_sent_is_removed(
    s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compatible service that takes half a body, and checks no checksum."""
    objects, uri = make_objects(), f"{s3_root}/f"
    (tmp_path / "f").write_bytes(b"whole")
    client = open_client(SETTINGS)
    real = client.upload_fileobj
    monkeypatch.setattr(
        client, "upload_fileobj", lambda file, *place, **more: real(io.BytesIO(file.read(2)), *place, **more)
    )
    with pytest.raises(CorruptRecord):
        objects.upload(tmp_path / "f", uri, sha256(b"whole"))
    assert objects.find(uri) is None


def test_what_is_missing_or_forbidden_is_asked_for_once(
    proxy: SpoilingProxy, s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = make_objects()
    with pytest.raises(RemoteMissing, match="absent"):
        objects.read(f"{s3_root}/absent")
    assert len(proxy.seen) == 1
    with pytest.raises(RemoteMissing, match="no-such-bucket"):
        objects.write("s3://no-such-bucket/x", b"x")
    assert len(proxy.seen) == 2
    proxy.once("403", "GET")
    with pytest.raises(RemoteDenied, match="absent"):
        objects.read(f"{s3_root}/absent")
    assert len(proxy.seen) == 3


def test_an_object_that_changes_while_it_is_fetched_is_never_joined_from_two(
    proxy: SpoilingProxy, s3_root: str, store_address: str, tmp_path: Path
) -> None:
    objects = make_objects()
    (tmp_path / "f").write_bytes(LARGE)
    objects.upload(tmp_path / "f", f"{s3_root}/f", sha256(LARGE))
    stored = objects.find(f"{s3_root}/f")
    assert stored is not None

    def spoil(exchange: Exchange) -> str | None:
        # Between the question for its size and that for its bytes.
        if exchange.method == "GET":
            ask_store(store_address, "PUT", f"{s3_root}/f".removeprefix("s3:/"), b"z" * len(LARGE))
        return None

    proxy.spoil = spoil
    with pytest.raises(StoreError):
        objects.download(stored, tmp_path / "g", None)


def test_a_file_that_changes_while_it_is_sent_is_refused(
    proxy: SpoilingProxy, s3_root: str, store_address: str, tmp_path: Path
) -> None:
    path = write_files(tmp_path / "a", {"f": b"before"}) / "f"

    def spoil(exchange: Exchange) -> str | None:
        if exchange.method == "PUT" and path.read_bytes() == b"before":
            path.write_bytes(b"after!")
            os.utime(path, (1, 1))
        return None

    proxy.spoil = spoil
    with pytest.raises(StoreError, match="changed"):
        RecordStore(make_objects()).put(tmp_path / "a", f"{s3_root}/r")
    assert stored_bytes(store_address, f"{s3_root}/r/f") is None


@pytest.mark.parametrize("calculation", ["when_supported", "when_required"])
def test_parts_carry_a_checksum_unless_the_service_knows_none(
    calculation: str, s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", calculation)
    (tmp_path / "sent").write_bytes(LARGE)
    uri = f"{s3_root}/{calculation}"
    make_objects().upload(tmp_path / "sent", uri, sha256(LARGE))
    place = parse_s3(uri)
    head = open_client(SETTINGS).head_object(Bucket=place.bucket, Key=place.key, ChecksumMode="ENABLED")
    assert ("ChecksumSHA256" in head) is (calculation == "when_supported")


def test_no_server_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    use_store(monkeypatch, "http://127.0.0.1:9")  # the discard port, where nobody listens
    with pytest.raises(RemoteUnreachable, match="EndpointConnectionError"):
        make_objects().read(f"s3://{BUCKET}/x")


def test_no_credentials(monkeypatch: pytest.MonkeyPatch, store_address: str) -> None:
    use_store(monkeypatch, store_address)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    s3_client._make_client.cache_clear()
    with pytest.raises(RemoteDenied, match="credentials"):
        S3Objects(s3_client.S3Settings(part_bytes=1 << 20)).read(f"s3://{BUCKET}/x")


def test_variables_that_make_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    use_store(monkeypatch, "not an address")
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL"):
        make_objects().read(f"s3://{BUCKET}/x")


def test_without_the_package_the_command_that_installs_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    s3_client._make_client.cache_clear()
    with pytest.raises(ConfigError, match=r"strop\[s3\]"):
        make_objects().read(f"s3://{BUCKET}/x")


@pytest.mark.parametrize("fault", ["500", "503", "dropped", "lost-reply"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_a_passing_fault_while_writing_on_a_condition(
    fault: str, is_first: bool, proxy: SpoilingProxy, s3_root: str
) -> None:
    """The answer of a write that succeeded may be lost; the repetition finds its own work."""
    objects, place = make_objects(fault), f"{s3_root}/latest.json"
    version = None
    if not is_first:
        objects.write(place, b"before")
        found = objects.read_versioned(place)
        assert found is not None
        version = found[1]
    proxy.once(fault, "PUT")
    assert objects.write_if(place, b"mine", version)
    assert len(proxy.spoilt) == 1
    assert not objects.write_if(place, b"later", version)


def test_unfinished_uploads_below_a_prefix_are_given_up(s3_root: str) -> None:
    client, place = open_client(SETTINGS), parse_s3(s3_root)
    begun = {
        name: client.create_multipart_upload(Bucket=BUCKET, Key=f"{place.key}/{name}")["UploadId"]
        for name in ("mine/a", "mine/deep/b", "mine-not/c")
    }
    make_objects().give_up_uploads(f"{s3_root}/mine")
    left = client.list_multipart_uploads(Bucket=BUCKET, Prefix=place.key).get("Uploads", ())
    assert [entry["UploadId"] for entry in left] == [begun["mine-not/c"]]


# kill -9 in the middle of a put or a get: what is left is no record, and the same call completes it.


MANY_FILES = {f"{number:02}.bin": bytes([number]) * 100_000 for number in range(12)}
KILL_LIMIT_S = 180.0
PROGRAM = """
import sys
from pathlib import Path
from strop.store import open_store
verb, uri, path = sys.argv[1:]
store = open_store(uri)
if verb == "get":
    store.get(uri, Path(path))
else:
    (store.put if Path(path).is_dir() else store.put_file)(Path(path), uri)
"""


def run_and_kill(
    proxy: SpoilingProxy, method: str, num_before: int, *words: str, pattern: str = r"\.bin$"
) -> None:
    """Start a transfer, and kill it at the matching request that comes after the given number of them."""
    is_time, may_go_on = threading.Event(), threading.Event()
    num_files = 0

    def spoil(exchange: Exchange) -> str | None:
        nonlocal num_files
        if exchange.method == method and re.search(pattern, exchange.path):
            num_files += 1
            if num_files > num_before:
                is_time.set()
                may_go_on.wait(KILL_LIMIT_S)
                return "dropped"
        return None

    proxy.spoil = spoil
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], env=dict(os.environ))
    try:
        assert is_time.wait(KILL_LIMIT_S)
    finally:
        child.kill()
        child.wait()
        may_go_on.set()
        proxy.spoil = lambda exchange: None


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [0, 11])
def test_kill_in_the_middle_of_a_put(
    num_before: int, proxy: SpoilingProxy, s3_root: str, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    for name, data in MANY_FILES.items():
        (tmp_path / "a" / name).write_bytes(data)
    run_and_kill(proxy, "PUT", num_before, "put", f"{s3_root}/r", str(tmp_path / "a"))
    store = RecordStore(make_objects())
    assert not store.find_manifest(f"{s3_root}/r")
    with pytest.raises(RemoteMissing):
        store.get(f"{s3_root}/r", tmp_path / "b")
    # What had arrived is not sent again; a few files were on the wire when it died, and arrived too.
    num_moved = len(store.put(tmp_path / "a", f"{s3_root}/r").moved)
    assert len(MANY_FILES) - num_before - NUM_FILES_AT_ONCE <= num_moved <= len(MANY_FILES) - num_before
    store.get(f"{s3_root}/r", tmp_path / "b")
    assert read_files(tmp_path / "b") == MANY_FILES


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [5])
def test_kill_in_the_middle_of_a_get(
    num_before: int, proxy: SpoilingProxy, s3_root: str, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    for name, data in MANY_FILES.items():
        (tmp_path / "a" / name).write_bytes(data)
    store = RecordStore(make_objects())
    store.put(tmp_path / "a", f"{s3_root}/r")
    run_and_kill(proxy, "GET", num_before, "get", f"{s3_root}/r", str(tmp_path / "b"))
    assert not (tmp_path / "b").exists()
    num_moved = len(store.get(f"{s3_root}/r", tmp_path / "b").moved)
    # A few replies were on their way to the disk when it died.
    assert len(MANY_FILES) - num_before <= num_moved <= len(MANY_FILES) - num_before + NUM_FILES_AT_ONCE
    assert read_files(tmp_path / "b") == MANY_FILES
    verify_directory(tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "b.lock"]


@pytest.mark.slow
def test_kill_in_the_middle_of_an_object_in_parts(proxy: SpoilingProxy, s3_root: str, tmp_path: Path) -> None:
    # More than one part of the size that the child uses.
    data = random.Random(0).randbytes(S3Settings().part_bytes + 1000)
    (tmp_path / "a").write_bytes(data)
    words = ("put", f"{s3_root}/large", str(tmp_path / "a"))
    run_and_kill(proxy, "PUT", 1, *words, pattern="partNumber=")
    store = RecordStore(make_objects())
    assert not store.objects.find(f"{s3_root}/large")
    store.put_file(tmp_path / "a", f"{s3_root}/large")
    run_and_kill(proxy, "GET", 1, "get", f"{s3_root}/large", str(tmp_path / "b"), pattern="/large$")
    assert not (tmp_path / "b").exists()
    assert [path.name[:10] for path in tmp_path.glob("b.*")] == ["b.partial-"]
    store.get(f"{s3_root}/large", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data
    # The dead writer's part of a file is gone too.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
