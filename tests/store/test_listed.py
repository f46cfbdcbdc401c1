"""Folders that another tool filled, such as `aws s3 sync`: read as they are listed, with a notice."""

from __future__ import annotations

import json
from pathlib import Path

import boto3
import numpy as np
import pytest
from boto3.s3.transfer import TransferConfig
from safetensors.numpy import save_file

from strop.errors import ConfigError, CorruptRecord, HubUnreachable, RemoteMissing, StoreError
from strop.io.notices import listen
from strop.store import follow_store, get_model, open_store
from strop.store.data_files import fetch_data_files, list_data_files, locate_named
from strop.store.s3_objects import S3Objects
from tests.fixtures.sources import follow
from tests.store.contract_suite import write_files
from tests.store.test_models import write_model

pytestmark = pytest.mark.usefixtures("away_from_home")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def sync(folder: Path, uri: str, *, without: str = "", part_bytes: int = 8 << 20) -> None:
    """Send a folder as `aws s3 sync` does: the same mover, no digests, no COMPLETE."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    client = boto3.client("s3", region_name="us-east-1")
    config = TransferConfig(multipart_threshold=part_bytes, multipart_chunksize=part_bytes)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != without:
            client.upload_file(str(path), bucket, f"{prefix}/{name}", Config=config)


def shard_model(path: Path, scale: float = 1.0) -> Path:
    """Write a model whose weights are two shards and their index."""
    write_model(path, model_safetensors=None)
    tensors = {name: np.full((4, 8), scale, np.float32) for name in ("a", "b")}
    for (name, tensor), shard in zip(tensors.items(), SHARDS, strict=True):
        save_file({name: tensor}, path / shard)
    index = {"metadata": {"total_size": 256}, "weight_map": dict(zip(tensors, SHARDS, strict=True))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_a_model_that_aws_s3_sync_sent_is_read_with_a_notice(s3_root: str, tmp_path: Path) -> None:
    uri = f"{s3_root}/models/org/big"
    write_files(shard_model(tmp_path / "m"), {"pytorch_model.bin": b"pickle", "original/a.json": b"{}"})
    sync(tmp_path / "m", uri, part_bytes=5 << 20)
    notices: list[str] = []
    with follow_store(follow(s3_root, "store-only")), listen(notices.append):
        model = get_model("org/big")
        assert get_model("org/big") == model
    assert model.source == "store"
    assert [uri in notice for notice in notices] == [True]
    assert not list(model.path.rglob("pytorch_model.bin"))
    assert model.digest == get_model(str(tmp_path / "m")).digest
    # By its URI too; and what is sent over it is what it means from then on.
    assert get_model(uri).digest == model.digest
    sync(shard_model(tmp_path / "m", scale=2.0), uri)
    assert get_model(uri).digest == get_model(str(tmp_path / "m")).digest != model.digest


def test_what_is_here_already_is_not_fetched_again(
    s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"{s3_root}/models/big"
    sync(shard_model(tmp_path / "m"), uri)
    first = get_model(uri)
    monkeypatch.setattr(S3Objects, "download", None)
    assert get_model(uri) == first
    (first.path / SHARDS[0]).write_bytes(b"damaged")
    with pytest.raises(TypeError):
        get_model(uri)


@pytest.mark.parametrize(
    ("missing", "kind"),
    [(SHARDS[1], ConfigError), ("config.json", RemoteMissing), ("tokenizer.json", ConfigError)],
)
def test_a_model_that_lacks_a_file_is_refused_by_its_name(
    s3_root: str, tmp_path: Path, missing: str, kind: type[Exception]
) -> None:
    uri = f"{s3_root}/models/big"
    sync(shard_model(tmp_path / "m"), uri, without=missing)
    with pytest.raises(kind, match=missing):
        get_model(uri)


@pytest.mark.parametrize("place", ["bucket", "directory"])
def test_a_checkpoint_that_was_cut_short_is_refused(s3_root: str, tmp_path: Path, place: str) -> None:
    shard = shard_model(tmp_path / "m") / SHARDS[0]
    for data in (shard.read_bytes()[:-7], b"\xff" * 8 + shard.read_bytes(), b""):
        shard.write_bytes(data)
        if place == "bucket":
            sync(tmp_path / "m", f"{s3_root}/m")
        with pytest.raises(CorruptRecord, match=SHARDS[0]):
            get_model(f"{s3_root}/m" if place == "bucket" else str(tmp_path / "m"))


def test_an_unfinished_record_of_strops_own_stays_refused(s3_root: str, tmp_path: Path) -> None:
    uri = f"{s3_root}/models/mine"
    open_store(uri).put(write_model(tmp_path / "m"), uri)
    S3Objects().remove(f"{uri}/COMPLETE")
    with pytest.raises(RemoteMissing, match="COMPLETE"):
        get_model(uri)


def test_a_directory_that_changes_while_it_is_read_is_refused(
    s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"{s3_root}/m"
    sync(shard_model(tmp_path / "m"), uri)
    real = S3Objects.download

    def change(self: S3Objects, *given: object) -> str:
        found = real(self, *given)  # type: ignore[arg-type]
        (tmp_path / "changed").mkdir(exist_ok=True)
        (tmp_path / "changed" / "config.json").write_bytes(b'{"model_type": "more"}')
        sync(tmp_path / "changed", uri)
        return found

    monkeypatch.setattr(S3Objects, "download", change)
    with pytest.raises(StoreError):
        get_model(uri)


# The layout of other launchers: models/NAME without the organisation.


def test_a_model_is_found_under_its_name_alone(s3_root: str, tmp_path: Path) -> None:
    sync(shard_model(tmp_path / "m"), f"{s3_root}/models/big")
    with follow_store(follow(s3_root)):
        assert get_model("org/big").source == "store"
        # No revision is known of it.
        with pytest.raises(HubUnreachable, match="models/org/big@v1"):
            get_model("org/big@v1")


def test_a_directory_that_has_it_under_its_name_alone(tmp_path: Path) -> None:
    root = tmp_path / "store"
    model = shard_model(root / "models" / "big")
    notices: list[str] = []
    with follow_store(follow(str(root), "store-only")), listen(notices.append):
        found = get_model("org/big")
        assert (found.path, found.source) == (model, "store")
        assert [str(model) in notice for notice in notices] == [True]
        # Where strop itself sends models, a folder without a record is unfinished.
        shard_model(root / "models" / "org" / "new")
        with pytest.raises(RemoteMissing, match="models/org/new"):
            get_model("org/new")
        (model / SHARDS[0]).unlink()
        with pytest.raises(ConfigError, match=SHARDS[0]):
            get_model("org/big")


def test_data_that_another_tool_sent(s3_root: str, tmp_path: Path) -> None:
    names = ["main/test.jsonl", "main/train.jsonl"]
    write_files(tmp_path / "d", dict.fromkeys(names, b'{"x": 1}\n'))
    place = f"{s3_root}/datasets/org/data"
    sync(tmp_path / "d", place, without=names[1])
    notices: list[str] = []
    with follow_store(follow(s3_root, "store-only")), listen(notices.append):
        assert fetch_data_files("org/data", names[:1])[0].read_bytes() == b'{"x": 1}\n'
        with pytest.raises(RemoteMissing, match=names[1]):
            fetch_data_files("org/data", names)
        sync(tmp_path / "d", place)
        assert [path.is_file() for path in fetch_data_files("org/data", names)] == [True, True]
        assert list_data_files("org/data") == tuple(names)
    assert len(notices) == 1
    assert (locate_named(place) / names[0]).is_file()
    with pytest.raises(RemoteMissing, match="datasets/absent"):
        locate_named(f"{s3_root}/datasets/absent")
