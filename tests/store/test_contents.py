"""What a store holds, as `strop store ls` shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.cli import main
from strop.store import open_store
from strop.store.contract import Objects
from strop.store.local_objects import LocalObjects
from tests.fixtures.object_store import make_objects
from tests.store.contract_suite import StoreContract, write_files
from tests.store.test_listed import sync
from tests.store.test_models import write_model

pytestmark = pytest.mark.usefixtures("away_from_home")


def fill(root: str, folder: Path) -> None:
    store = open_store(root)
    store.put(write_model(folder / "m"), f"{root}/models/org/mine")
    store.put(write_files(folder / "step", {"model/w.bin": b"12345"}), f"{root}/checkpoints/job/run_step5")
    store.put(
        write_files(folder / "t", {"metrics.jsonl": b"{}\n"}) / "metrics.jsonl",
        f"{root}/checkpoints/job/traces/metrics.jsonl",
    )
    store.put(
        write_files(folder / "o", {"order.txt": b"1\n2\n"}) / "order.txt", f"{root}/curricula/order.txt"
    )


def show(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, tuple[str, int]]:
    assert main(["store", "ls", *words, "--json"]) == 0
    return {one["name"]: (one["state"], one["num_files"]) for one in json.loads(capsys.readouterr().out)}


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
    assert show(capsys, root) == expected
    monkeypatch.setenv("STROP_STORE_URI", root)
    assert show(capsys) == expected
    assert show(capsys, f"{root}/models/org/") == {"mine": ("record", 4)}
    assert main(["store", "ls"]) == 0
    assert "models/org/mine" in capsys.readouterr().out


def test_no_store_and_no_place_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "ls"]) == 2
    assert "no store is named" in capsys.readouterr().err
    assert main(["store", "ls", "gs://bucket/x"]) == 2
    assert main(["store", "ls", str(tmp_path / "none")]) == 0
    assert "nothing is there" in capsys.readouterr().err


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
