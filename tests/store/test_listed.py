"""Buckets that another tool filled: read once their listing proves that nothing is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import boto3
import numpy as np
import pytest
from boto3.s3.transfer import TransferConfig
from safetensors.numpy import save_file

from strop.errors import ConfigError, CorruptRecord, HubUnreachable, RemoteMissing, StoreError
from strop.io.notices import listen
from strop.store import fetch_data_file, fetch_data_source, follow_store, get_model, open_store
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
    sync(shard_model(tmp_path / "m"), uri)
    notices: list[str] = []
    with follow_store(follow(s3_root, "store-only")), listen(notices.append):
        model = get_model("org/big")
    assert model.source == "store"
    assert len(notices) == 1
    assert f"{uri} has no COMPLETE" in notices[0]
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
    "missing", [SHARDS[1], "config.json", "tokenizer.json", "model.safetensors.index.json"]
)
def test_a_model_that_lacks_a_file_is_refused_by_its_name(s3_root: str, tmp_path: Path, missing: str) -> None:
    uri = f"{s3_root}/models/big"
    sync(shard_model(tmp_path / "m"), uri, without=missing)
    with pytest.raises(RemoteMissing, match=f"cannot be proven whole: {missing}.* missing"):
        get_model(uri)


def test_a_shard_of_another_model_does_not_pass(s3_root: str, tmp_path: Path) -> None:
    shard_model(tmp_path / "m")
    save_file({"c": np.zeros((4, 8), np.float32)}, tmp_path / "m" / SHARDS[1])
    sync(tmp_path / "m", f"{s3_root}/m")
    with pytest.raises(RemoteMissing, match=f"tensors in {SHARDS[1]}"):
        get_model(f"{s3_root}/m")


@pytest.mark.parametrize("change", [lambda data: data[:-7], lambda data: b"\xff" * 8 + data])
def test_a_shard_that_was_cut_before_it_was_sent_is_refused(
    s3_root: str, tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    shard = shard_model(tmp_path / "m") / SHARDS[0]
    shard.write_bytes(change(shard.read_bytes()))
    sync(tmp_path / "m", f"{s3_root}/m")
    with pytest.raises(CorruptRecord, match=f"{SHARDS[0]} was cut or damaged before it was sent"):
        get_model(f"{s3_root}/m")


def test_an_unfinished_record_of_strops_own_stays_refused(s3_root: str, tmp_path: Path) -> None:
    uri = f"{s3_root}/models/mine"
    store = open_store(uri)
    store.put(write_model(tmp_path / "m"), uri)
    S3Objects().remove(f"{uri}/COMPLETE")
    with pytest.raises(RemoteMissing, match="objects that strop sent, and no COMPLETE"):
        get_model(uri)


def test_a_directory_that_changes_while_it_is_read_is_refused(
    s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"{s3_root}/m"
    sync(shard_model(tmp_path / "m"), uri)
    real = S3Objects.download

    def change(self: S3Objects, *given: object) -> str:
        found = real(self, *given)  # type: ignore[arg-type]
        S3Objects().write(f"{uri}/config.json", b'{"model_type": "other"}')
        return found

    monkeypatch.setattr(S3Objects, "download", change)
    with pytest.raises(StoreError, match=r"changed while it was read|was fetched 3 times|config\.json"):
        get_model(uri)


def test_large_files_are_proven_by_the_etags_of_their_parts(s3_root: str, tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(18 << 20)
    write_files(tmp_path / "d", {"train.jsonl": data})
    sync(tmp_path / "d", f"{s3_root}/d")
    objects = S3Objects()
    (stored,) = objects.list(f"{s3_root}/d")
    assert stored.version.strip('"').endswith("-3")
    assert objects.is_proven(stored, tmp_path / "d" / "train.jsonl")
    (tmp_path / "d" / "train.jsonl").write_bytes(data[:-1] + b"!")
    assert not objects.is_proven(stored, tmp_path / "d" / "train.jsonl")
    # In parts of no usual size nothing can be told, and the file is read twice.
    (tmp_path / "d" / "train.jsonl").write_bytes(data)
    sync(tmp_path / "d", f"{s3_root}/d", part_bytes=7 << 20)
    (stored,) = objects.list(f"{s3_root}/d")
    assert not objects.is_proven(stored, tmp_path / "d" / "train.jsonl")
    assert (fetch_data_source(f"{s3_root}/d") / "train.jsonl").read_bytes() == data


# The layout of other launchers: models/NAME without the organisation.


def test_a_model_is_found_under_its_name_alone(s3_root: str, tmp_path: Path) -> None:
    sync(shard_model(tmp_path / "m"), f"{s3_root}/models/big")
    notices: list[str] = []
    with follow_store(follow(s3_root)), listen(notices.append):
        model = get_model("org/big")
        assert model.source == "store"
        assert "models/big has no COMPLETE" in notices[0]
        with pytest.raises(ConfigError, match="models/big stands for org/big on this machine"):
            get_model("other/big")
        # No revision is known of it.
        with pytest.raises(HubUnreachable, match=r"neither place: .*models/org/big@v1 is not in the store"):
            get_model("org/big@v1")


def test_a_namesake_is_refused_by_what_its_configuration_says(s3_root: str, tmp_path: Path) -> None:
    write_model(tmp_path / "m", config_json=b'{"_name_or_path": "org/big"}')
    sync(tmp_path / "m", f"{s3_root}/models/big")
    with (
        follow_store(follow(s3_root)),
        pytest.raises(ConfigError, match=r"stands for org/big as its config\.json says"),
    ):
        get_model("other/big")


def test_a_directory_that_has_it_under_its_name_alone(tmp_path: Path) -> None:
    root = tmp_path / "store"
    model = shard_model(root / "models" / "big")
    notices: list[str] = []
    with follow_store(follow(str(root), "store-only")), listen(notices.append):
        found = get_model("org/big")
        assert (found.path, found.source) == (model, "store")
        assert "models/big has no COMPLETE" in notices[0]
        with pytest.raises(ConfigError, match="models/big stands for org/big"):
            get_model("other/big")
        # Where strop itself sends models, a folder without a record is unfinished.
        shard_model(root / "models" / "org" / "new")
        with pytest.raises(RemoteMissing, match="models/org/new is no complete record"):
            get_model("org/new")
        (model / SHARDS[0]).unlink()
        with pytest.raises(ConfigError, match=f"{SHARDS[0]} missing"):
            get_model("org/big")


# Data


def test_data_that_another_tool_sent(s3_root: str, tmp_path: Path) -> None:
    names = [f"main/train-0000{index}-of-00002.jsonl" for index in range(2)]
    write_files(tmp_path / "d", dict.fromkeys([*names, "main/test.jsonl"], b'{"x": 1}\n'))
    place = f"{s3_root}/datasets/org/data"
    sync(tmp_path / "d", place, without=names[1])
    notices: list[str] = []
    with follow_store(follow(s3_root, "store-only")), listen(notices.append):
        assert fetch_data_file("org/data", "main/test.jsonl").read_bytes() == b'{"x": 1}\n'
        with pytest.raises(RemoteMissing, match=re.escape(f"{names[1]} missing")):
            fetch_data_file("org/data", names[0])
        sync(tmp_path / "d", place)
        assert fetch_data_file("org/data", names[0]).is_file()
        assert all("has no COMPLETE" in one for one in notices)
        assert len(notices) == 1
    with pytest.raises(RemoteMissing, match=f"{s3_root}/datasets/absent is not in the store"):
        fetch_data_source(f"{s3_root}/datasets/absent")


def test_a_table_that_was_cut_is_refused(s3_root: str, tmp_path: Path) -> None:
    write_files(tmp_path / "d", {"train.parquet": b"PAR1 and not to its end"})
    sync(tmp_path / "d", f"{s3_root}/d")
    with pytest.raises(CorruptRecord, match="it ends before its last row"):
        fetch_data_source(f"{s3_root}/d/")
