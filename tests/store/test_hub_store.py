"""A hub read as a store: the real client, against a hub of a few files on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.errors import ConfigError, HubUnreachable, RemoteMissing, StoreError
from strop.io.atomic import verify_directory
from strop.store import Store, open_store
from tests.fixtures.tiny_hub import COMMIT, tiny_hub
from tests.store.contract_suite import read_files

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def hub(away_from_home: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with tiny_hub(FILES) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        # What its functions and its HfApi took from the constants when they were made.
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield open_store("hf://org/tiny")


def test_a_snapshot_becomes_a_record(hub: Store, tmp_path: Path) -> None:
    got = hub.get("hf://org/tiny", tmp_path / "got")
    assert read_files(tmp_path / "got") == FILES
    assert verify_directory(tmp_path / "got").facts == {"uri": "hf://org/tiny", "revision": COMMIT}
    assert set(got.moved) == set(FILES)
    with pytest.raises(StoreError, match="got exists already"):
        hub.get("hf://org/tiny", tmp_path / "got")


def test_what_a_hub_lists(hub: Store) -> None:
    found = list(hub.list(f"hf://org/tiny@{COMMIT}"))
    assert [stored.uri.rpartition("/")[2] for stored in found] == ["config.json", "model.safetensors"]
    assert [stored.size_bytes for stored in found] == [2, 7]
    assert hub.exists(f"hf://org/tiny@{COMMIT}")
    assert hub.exists(f"hf://org/tiny@{COMMIT}/config.json")
    assert not hub.exists(f"hf://org/tiny@{COMMIT}/absent.json")
    assert not hub.exists("hf://org/absent")


def test_what_a_hub_does_not_have(hub: Store, tmp_path: Path) -> None:
    with pytest.raises(RemoteMissing, match="the hub has no such repository"):
        hub.get("hf://org/absent", tmp_path / "got")
    with pytest.raises(ConfigError, match="is not a place of a store"):
        hub.get("hf://tiny", tmp_path / "got")
    assert not (tmp_path / "got").exists()


def test_nothing_is_published(hub: Store, tmp_path: Path) -> None:
    for send in (hub.put, hub.sync):
        with pytest.raises(StoreError, match="strop publishes nothing on a hub"):
            send(tmp_path, "hf://org/tiny")


@pytest.mark.usefixtures("away_from_home")
def test_a_hub_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubUnreachable, match="the hub did not give it"):
        open_store("hf://org/tiny").get("hf://org/tiny", tmp_path / "got")
