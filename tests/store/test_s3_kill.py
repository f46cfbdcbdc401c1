"""kill -9 in the middle of a put or a get: what is left is no record, and the same call completes it."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from strop.errors import RemoteMissing
from strop.io.atomic import verify_directory
from strop.store.record_store import NUM_FILES_AT_ONCE, RecordStore
from strop.store.s3_client import S3Settings
from tests.fixtures.object_store import Exchange, SpoilingProxy, make_objects
from tests.store.contract_suite import read_files

FILES = {f"{number:02}.bin": bytes([number]) * 100_000 for number in range(12)}
KILL_LIMIT_S = 180.0
PROGRAM = """
import sys
from pathlib import Path
from strop.store import open_store
verb, uri, path = sys.argv[1:]
store = open_store(uri)
store.put(Path(path), uri) if verb == "put" else store.get(uri, Path(path))
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
@pytest.mark.parametrize("num_before", [0, 5, 11])
def test_kill_in_the_middle_of_a_put(
    num_before: int, proxy: SpoilingProxy, s3_root: str, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    for name, data in FILES.items():
        (tmp_path / "a" / name).write_bytes(data)
    run_and_kill(proxy, "PUT", num_before, "put", f"{s3_root}/r", str(tmp_path / "a"))
    store = RecordStore(make_objects())
    assert not store.exists(f"{s3_root}/r")
    with pytest.raises(RemoteMissing):
        store.get(f"{s3_root}/r", tmp_path / "b")
    # What had arrived is not sent again; a few files were on the wire when it died, and arrived too.
    num_moved = len(store.put(tmp_path / "a", f"{s3_root}/r").moved)
    assert len(FILES) - num_before - NUM_FILES_AT_ONCE <= num_moved <= len(FILES) - num_before
    store.get(f"{s3_root}/r", tmp_path / "b")
    assert read_files(tmp_path / "b") == FILES


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [0, 5, 11])
def test_kill_in_the_middle_of_a_get(
    num_before: int, proxy: SpoilingProxy, s3_root: str, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    for name, data in FILES.items():
        (tmp_path / "a" / name).write_bytes(data)
    store = RecordStore(make_objects())
    store.put(tmp_path / "a", f"{s3_root}/r")
    run_and_kill(proxy, "GET", num_before, "get", f"{s3_root}/r", str(tmp_path / "b"))
    assert not (tmp_path / "b").exists()
    num_moved = len(store.get(f"{s3_root}/r", tmp_path / "b").moved)
    # A few replies were on their way to the disk when it died.
    assert len(FILES) - num_before <= num_moved <= len(FILES) - num_before + NUM_FILES_AT_ONCE
    assert read_files(tmp_path / "b") == FILES
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
    assert not store.exists(f"{s3_root}/large")
    assert store.put(tmp_path / "a", f"{s3_root}/large").moved == ("a",)
    run_and_kill(proxy, "GET", 1, "get", f"{s3_root}/large", str(tmp_path / "b"), pattern="/large$")
    assert not (tmp_path / "b").exists()
    assert [path.name[:10] for path in tmp_path.glob("b.*")] == ["b.partial-"]
    store.get(f"{s3_root}/large", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data
    # The dead writer's part of a file is gone too.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
