"""What a store holds, as `strop ls` shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.cli import main
from strop.errors import ConfigError
from strop.store import open_store
from strop.store.local_objects import LocalObjects
from strop.store.opening import list_contents
from strop.store.record_store import Objects
from tests.fixtures.object_store import make_objects
from tests.store.contract_suite import StoreContract, write_files
from tests.store.test_listed import sync
from tests.store.test_models import write_model

pytestmark = pytest.mark.usefixtures("away_from_home")


def fill(root: str, folder: Path) -> None:
    store = open_store(root)
    store.put(write_model(folder / "m"), f"{root}/models/org/mine")
    store.put(write_files(folder / "step", {"model/w.bin": b"12345"}), f"{root}/checkpoints/job/run_step5")
    for name in ("checkpoints/job/traces/metrics.jsonl", "curricula/order.txt"):
        store.put_file(write_files(folder / "t", {name: b"1\n"}) / name, f"{root}/{name}")


def show(root: str | None = None) -> dict[str, tuple[str, int]]:
    return {one.name: (one.state, one.num_files) for one in list_contents(root)}


@pytest.mark.parametrize("kind", ["bucket", "directory"])
def test_records_runs_and_what_others_sent(
    kind: str,
    s3_root: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = s3_root if kind == "bucket" else str(tmp_path / "store")
    fill(root, tmp_path)
    expected = {
        "checkpoints/job/run_step5": ("record", 2),
        "checkpoints/job/traces": ("no COMPLETE", 1),
        "curricula/order.txt": ("file", 1),
        "models/org/mine": ("record", 4),
    }
    if kind == "bucket":
        sync(tmp_path / "m", f"{root}/models/theirs")
        expected["models/theirs"] = ("no COMPLETE", 3)
    assert show(root) == expected
    monkeypatch.setenv("STROP_STORE_URI", root)
    assert show() == expected
    assert show(f"{root}/models/org/") == {"mine": ("record", 4)}
    if kind == "bucket":
        assert main(["ls", root]) == 0
        assert "models/org/mine" in capsys.readouterr().out
        assert main(["ls", root, "--json"]) == 0
        assert {one["name"] for one in json.loads(capsys.readouterr().out)} == set(expected)


def test_no_store_and_no_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no store is named"):
        list_contents()
    assert main(["ls", "gs://bucket/x"]) == 2
    assert list_contents(str(tmp_path / "none")) == []


class TestDirectoryStore(StoreContract):
    @pytest.fixture
    def objects(self) -> Objects:
        return LocalObjects()

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path / "place of mine")


class TestS3Store(StoreContract):
    @pytest.fixture
    def objects(self, s3_root: str) -> Objects:
        return make_objects()

    @pytest.fixture
    def root(self, s3_root: str) -> str:
        return s3_root
