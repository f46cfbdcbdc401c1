"""Which source is asked first, and that offline asks no hub."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from strop.errors import ConfigError, HubUnreachable, RemoteMissing, StoreError
from strop.io.variables import set_variables
from strop.spec import StoreSpec
from strop.store import follow_store, get_model, open_store, read_policy
from strop.store.data_files import collect_data_files, fetch_data_files, list_data_files, locate_named
from strop.store.resolve import only_local
from tests.fixtures.sockets import only_connects_to
from tests.fixtures.sources import DATA, follow
from tests.fixtures.tiny_disk import tiny_disk
from tests.store.contract_suite import write_files
from tests.store.test_models import write_model

pytestmark = pytest.mark.usefixtures("away_from_home")


def test_a_run_files_store_holds_for_a_block_and_for_children(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_policy().root is None
    with follow_store(follow("s3://bucket/a", "hub-first")) as policy:
        assert policy.model_uri("org/m") == "s3://bucket/a/models/org/m"
        assert policy.model_uri("org/m", "refs/pr/1") == "s3://bucket/a/models/org/m@refs--pr--1"
        assert policy.dataset_uri("org/d") == "s3://bucket/a/datasets/org/d"
        assert os.environ["STROP_STORE_URI"] == "s3://bucket/a"
        with follow_store(follow("/b")):
            assert read_policy().root == "/b"
        # A section without a store leaves it to the environment.
        with follow_store(StoreSpec()) as inner:
            assert (inner.root, inner.order) == ("s3://bucket/a", "hub-first")
    assert "STROP_STORE_URI" not in os.environ
    monkeypatch.setenv("STROP_STORE_ORDER", "hub")
    with pytest.raises(ConfigError, match="STROP_STORE_ORDER=hub"):
        read_policy()


@pytest.mark.parametrize("uri", ["gs://bucket/x", "hf://org/name", "bucket/prefix"])
def test_what_is_no_root(uri: str) -> None:
    with pytest.raises(ConfigError), follow_store(follow(uri)):
        pass


@pytest.mark.parametrize("uri", ["s3://", "s3://B_ad/x", "s3://bucket//x", "s3://bucket/../x"])
def test_what_is_no_uri(uri: str) -> None:
    with pytest.raises(ConfigError):
        open_store(uri).find_manifest(uri)


def test_the_store_comes_first(filled_store: str) -> None:
    with only_connects_to() as attempts, follow_store(follow(filled_store)), collect_data_files() as files:
        model = get_model("org/tiny")
        assert model.source == "store"
        assert fetch_data_files("org/data", [DATA])[0].read_bytes() == b'{"x": 1}\n'
        assert get_model("org/tiny") == model
    assert attempts == []
    assert [(file.source, file.name) for file in files] == [("org/data", DATA)]


def test_what_the_store_lacks_is_asked_of_the_hub_and_said(filled_store: str) -> None:
    with only_connects_to() as attempts, follow_store(follow(filled_store)):
        with pytest.raises(HubUnreachable):
            get_model("org/absent")
        assert len(attempts) == 1
        with pytest.raises(HubUnreachable, match=r"datasets/org/absent.* is unreachable"):
            fetch_data_files("org/absent", [DATA])
        assert len(attempts) > 1


def test_store_only_asks_no_hub(filled_store: str) -> None:
    with only_connects_to() as attempts, follow_store(follow(filled_store, "store-only")):
        assert get_model("org/tiny").source == "store"
        for _ in range(2):
            with pytest.raises(RemoteMissing, match="models/org/absent"):
                get_model("org/absent")
        with pytest.raises(RemoteMissing, match="datasets/org/absent"):
            fetch_data_files("org/absent", [DATA])
        with pytest.raises(RemoteMissing, match="datasets/org/absent"):
            list_data_files("org/absent")
    assert attempts == []


def test_hub_first_falls_back_to_the_store(filled_store: str) -> None:
    with only_connects_to() as attempts, follow_store(follow(filled_store, "hub-first")):
        assert get_model("org/tiny").source == "store"
        num_for_model = len(attempts)
        assert num_for_model >= 1
        assert fetch_data_files("org/data", [DATA])[0].is_file()
        assert len(attempts) > num_for_model
        with pytest.raises(RemoteMissing):
            get_model("org/absent")
        with pytest.raises(RemoteMissing):
            fetch_data_files("org/absent", [DATA])


def test_a_full_disk_and_a_read_only_home_are_refusals_that_leave_nothing(
    filled_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_disk(tmp_path / "home") as home, follow_store(follow(filled_store, "store-only")):
        for name in ("STROP_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(home))
        rows = write_files(tmp_path / "big", {"train.jsonl": b"x" * (2 << 20)})
        open_store(filled_store).put(rows, f"{filled_store}/datasets/org/big")
        with pytest.raises(StoreError, match="disk is full"):
            fetch_data_files("org/big", ["train.jsonl"])
        assert not list(home.rglob("train.jsonl*"))
        assert fetch_data_files("org/data", [DATA])[0].is_file()
        subprocess.run(["mount", "-o", "remount,ro", str(home)], check=True)
        with pytest.raises(StoreError, match="STROP_CACHE"):
            get_model("org/tiny")
        # A model that is here needs no cache.
        assert get_model(str(tmp_path / "model")).source == "directory"


def test_a_model_in_s3_by_its_uri(s3_root: str, tmp_path: Path) -> None:
    uri = f"{s3_root}/models/mine"
    open_store(uri).put(write_model(tmp_path / "m"), uri)
    model = get_model(uri)
    assert (model.source, model.uri) == ("store", uri)
    assert model.digest == get_model(str(tmp_path / "m")).digest
    # A newer one in the store is what the URI now means.
    open_store(uri).sync(write_model(tmp_path / "m", tokenizer_json=b'{"new": 1}'), uri)
    assert get_model(uri).digest != model.digest
    other = f"{s3_root}/models/none"
    open_store(other).put(write_files(tmp_path / "x", {"a.txt": b"a"}), other)
    with pytest.raises(RemoteMissing, match=r"config\.json"):
        get_model(other)
    with pytest.raises(RemoteMissing):
        get_model(f"{s3_root}/models/absent")


def test_data_in_s3_by_its_uri(s3_root: str, tmp_path: Path) -> None:
    uri = f"{s3_root}/somewhere/data"
    with only_local() as missing, pytest.raises(RemoteMissing):
        locate_named(uri)
    assert missing == [uri]
    open_store(uri).put(write_files(tmp_path / "d", {"train.jsonl": b"1", "test.jsonl": b"2"}), uri)
    folder = locate_named(f"{uri}/")
    assert (folder / "test.jsonl").read_bytes() == b"2"
    single = f"{uri}/train.jsonl"
    file = locate_named(single)
    assert (file.suffix, file.read_bytes()) == (".jsonl", b"1")
    with only_local() as missing:
        assert (locate_named(uri), locate_named(single)) == (folder, file)
    assert missing == []
    # An object that changed means its new content.
    (tmp_path / "d" / "train.jsonl").write_bytes(b"11")
    open_store(single).put_file(tmp_path / "d" / "train.jsonl", single)
    assert locate_named(single).read_bytes() == b"11"


def test_variables_are_what_they_were_after_a_block_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_TEST_SET", "before")
    monkeypatch.delenv("STROP_TEST_UNSET", raising=False)
    with suppress(KeyError), set_variables({"STROP_TEST_SET": "in", "STROP_TEST_UNSET": "in"}):
        assert (os.environ["STROP_TEST_SET"], os.environ["STROP_TEST_UNSET"]) == ("in", "in")
        raise KeyError
    assert os.environ["STROP_TEST_SET"] == "before"
    assert "STROP_TEST_UNSET" not in os.environ
