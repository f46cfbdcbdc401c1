"""Incidents of the group on data that sources of models and data can cause, by id."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.errors import CorruptRecord, HubUnreachable, RemoteMissing, RemoteUnreachable, StoreError
from strop.store import fetch_data_file, follow_store, get_model, is_offline
from strop.store.hub_store import HubStore
from tests.fixtures.object_store import use_store
from tests.fixtures.sockets import only_connects_to
from tests.fixtures.sources import DATA, fill_store, follow, leave_home


@pytest.fixture(autouse=True)
def away_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_home(tmp_path, monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> str:
    return fill_store(tmp_path)


@pytest.mark.parametrize("variable", ["STROP_OFFLINE", "HF_HUB_OFFLINE"])
@pytest.mark.parametrize("order", ["store-first", "hub-first", "store-only"])
def test_dat_3_offline_never_opens_a_hub_connection(
    variable: str, order: str, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: offline with missing data is a refusal, with no connection attempted."""
    monkeypatch.setenv(variable, "1")
    assert is_offline()
    with only_connects_to() as attempts:
        with follow_store(follow(root, order)):
            assert get_model("org/tiny").source == "store"
            assert fetch_data_file("org/data", DATA).is_file()
            for name in ("org/absent", "org/absent@main"):
                with pytest.raises(StoreError):
                    get_model(name)
            with pytest.raises(StoreError):
                fetch_data_file("org/absent", DATA)
        with pytest.raises(HubUnreachable, match="offline mode"):
            get_model("org/tiny")
        with pytest.raises(HubUnreachable, match="offline mode forbids"):
            fetch_data_file("org/data", DATA)
        hub = HubStore()
        for ask in (lambda: hub.exists("hf://org/tiny"), lambda: list(hub.list("hf://org/tiny"))):
            with pytest.raises(HubUnreachable, match="offline mode forbids"):
                ask()
        for uri in ("hf://org/tiny", "hf://datasets/org/data/main/train.jsonl"):
            with pytest.raises(HubUnreachable, match="offline mode forbids"):
                hub.get(uri, tmp_path / "got")
    assert attempts == []


def test_dat_3_a_half_staged_data_set_is_not_there(root: str, tmp_path: Path) -> None:
    """Incident: empty or half-written caches accepted as data."""
    (Path(root) / "datasets/org/data/COMPLETE").unlink()
    with (
        follow_store(follow(root, "store-only")),
        pytest.raises(RemoteMissing, match="it has objects and no"),
    ):
        fetch_data_file("org/data", DATA)
    (Path(root) / "models/org/tiny/COMPLETE").unlink()
    with (
        follow_store(follow(root, "store-only")),
        pytest.raises(RemoteMissing, match="it has objects and no"),
    ):
        get_model("org/tiny")


def test_dat_3_a_flipped_byte_in_the_cache_is_fetched_again_and_in_the_store_refused(
    root: str, tmp_path: Path
) -> None:
    """Incident: flipped byte: refused, then rebuilt."""
    with follow_store(follow(root)):
        cached = fetch_data_file("org/data", DATA)
        cached.write_bytes(b'{"x": 7}\n')
        assert fetch_data_file("org/data", DATA).read_bytes() == b'{"x": 1}\n'
        (Path(root) / "datasets/org/data" / DATA).write_bytes(b'{"x": 7}\n')
        cached.unlink()
        with pytest.raises(CorruptRecord, match=r"train\.jsonl"):
            fetch_data_file("org/data", DATA)
        assert not cached.exists()
        model = get_model("org/tiny")
        (model.path / "config.json").write_text("{}")
        assert get_model("org/tiny").digest == model.digest
        assert (model.path / "config.json").read_text() != "{}"


def test_dat_3_a_store_that_fails_is_no_reason_to_ask_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Incident: silent fallback from object store to hub."""
    use_store(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr("strop.store.retries.RetryRules.pause_s", lambda self, attempt_index: 0.0)
    with follow_store(follow("s3://strop-test/x")):
        with pytest.raises(RemoteUnreachable):
            get_model("org/tiny")
        with pytest.raises(RemoteUnreachable):
            fetch_data_file("org/data", DATA)
