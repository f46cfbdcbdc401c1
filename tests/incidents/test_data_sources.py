"""Incidents of the group on data that sources of models and data can cause, by id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strop.errors import (
    CorruptRecord,
    HubUnreachable,
    RemoteMissing,
    RemoteUnreachable,
    StoreError,
)
from strop.store import follow_store, get_model, is_offline
from strop.store.data_files import fetch_data_files
from strop.store.hub import list_dataset_files
from tests.fixtures.object_store import use_store
from tests.fixtures.sockets import only_connects_to
from tests.fixtures.sources import DATA, follow

pytestmark = pytest.mark.usefixtures("away_from_home")


@pytest.mark.parametrize("variable", ["STROP_OFFLINE", "HF_HUB_OFFLINE"])
@pytest.mark.parametrize("order", ["store-first", "hub-first", "store-only"])
def test_dat_3_offline_never_opens_a_hub_connection(
    variable: str, order: str, filled_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: offline with missing data is a refusal, with no connection attempted."""
    monkeypatch.setenv(variable, "1")
    assert is_offline()
    with only_connects_to() as attempts:
        with follow_store(follow(filled_store, order)):
            assert get_model("org/tiny").source == "store"
            assert fetch_data_files("org/data", [DATA])[0].is_file()
            for name in ("org/absent", "org/absent@main"):
                with pytest.raises(StoreError):
                    get_model(name)
            with pytest.raises(StoreError):
                fetch_data_files("org/absent", [DATA])
        with pytest.raises(HubUnreachable, match="offline mode"):
            get_model("org/tiny")
        with pytest.raises(HubUnreachable, match="offline mode forbids"):
            fetch_data_files("org/data", [DATA])
        with pytest.raises(HubUnreachable, match="offline mode forbids"):
            list_dataset_files("org/data")
    assert attempts == []


def test_dat_3_a_half_staged_data_set_is_not_there(filled_store: str, tmp_path: Path) -> None:
    """Incident: empty or half-written caches accepted as data."""
    (Path(filled_store) / "datasets/org/data/COMPLETE").unlink()
    with (
        follow_store(follow(filled_store, "store-only")),
        pytest.raises(RemoteMissing, match="it has objects and no"),
    ):
        fetch_data_files("org/data", [DATA])
    (Path(filled_store) / "models/org/tiny/COMPLETE").unlink()
    with (
        follow_store(follow(filled_store, "store-only")),
        pytest.raises(RemoteMissing, match="it has objects and no"),
    ):
        get_model("org/tiny")


def test_dat_3_a_flipped_byte_in_the_cache_is_fetched_again_and_in_the_store_refused(
    filled_store: str, tmp_path: Path
) -> None:
    """Incident: flipped byte: refused, then rebuilt."""
    with follow_store(follow(filled_store)):
        (cached,) = fetch_data_files("org/data", [DATA])
        cached.write_bytes(b'{"x": 7}\n')
        assert fetch_data_files("org/data", [DATA])[0].read_bytes() == b'{"x": 1}\n'
        (Path(filled_store) / "datasets/org/data" / DATA).write_bytes(b'{"x": 7}\n')
        cached.unlink()
        with pytest.raises(CorruptRecord, match=r"train\.jsonl"):
            fetch_data_files("org/data", [DATA])
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
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
    with follow_store(follow("s3://strop-test/x")):
        with pytest.raises(RemoteUnreachable):
            get_model("org/tiny")
        with pytest.raises(RemoteUnreachable):
            fetch_data_files("org/data", [DATA])


KILLED = """
import os, signal, sys
from strop.spec import StoreSpec
from strop.store import follow_store
from strop.store.data_files import fetch_data_files

def die(event, arguments):
    # Just before the copy gets its name: all of its bytes are there, under another one.
    if event == "os.rename" and str(arguments[1]).endswith("train.jsonl"):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(die)
with follow_store(StoreSpec(uri=sys.argv[1], order="store-only")):
    fetch_data_files("org/data", ["main/train.jsonl"])
"""


def test_dat_3_a_copy_whose_write_was_killed_is_not_there(filled_store: str, tmp_path: Path) -> None:
    """Incident: half-written caches accepted as data."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, filled_store],
        env={**os.environ, "STROP_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] != []
    assert list((tmp_path / "cache").rglob("train.jsonl")) == []
    with follow_store(follow(filled_store, "store-only")):
        assert fetch_data_files("org/data", [DATA])[0].read_bytes() == b'{"x": 1}\n'


IMPORTING = """
import importlib, pkgutil, sys
seen = []
sys.addaudithook(lambda event, arguments: seen.append(event) if event.startswith("socket.") else None)
import strop
names = [module.name for module in pkgutil.walk_packages(strop.__path__, "strop.")]
# Programs for environments of others: nothing of strop imports them.
inside = "strop.environments.guests."
guests = (f"{inside}for_",)
guests += ("strop.environments.taskset.strop_taskset", "strop.evaluate.lm_eval_models")
names = [name for name in names if not name.startswith(guests)]
for name in names:
    importlib.import_module(name)
asked = [event for event in seen if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto")]
assert not asked, asked
print(len(names))
"""


@pytest.mark.slow
def test_dat_3_no_module_of_strop_touches_the_network_on_import(tmp_path: Path) -> None:
    """Incident: a package downloaded data when it was imported. Other libraries are imported along."""
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        env={**os.environ, "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[-1]) > 200
