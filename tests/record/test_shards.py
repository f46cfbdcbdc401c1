"""Files of an evaluation's rollouts, told by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.record.files import Shard, list_shards
from strop.train.data.sft_sources import find_rollouts_files


def test_a_name_says_which_examples_and_is_read_back() -> None:
    shard = Shard(examples=range(64, 70))
    assert shard.file_name == "examples-000064-000069.parquet"
    assert Shard.of_file(Path("a") / shard.file_name) == shard
    for other in ("examples-000064.parquet", "examples-000009-000001.parquet", "step-000001.parquet", "lock"):
        assert Shard.of_file(Path(other)) is None


def test_shards_are_in_the_order_of_their_examples(tmp_path: Path) -> None:
    # As texts, 1000000 comes before 999968.
    shards = [Shard(examples=range(start, start + 32)) for start in (0, 999968, 1000000)]
    for name in ("examples-rest.parquet", *(shard.file_name for shard in reversed(shards))):
        (tmp_path / name).touch()
    assert [path.name for path in list_shards(tmp_path)] == [shard.file_name for shard in shards]
    # Rejection sampling reads the same files, in the same order.
    assert find_rollouts_files(tmp_path) == list_shards(tmp_path)


def test_a_folder_without_shards_is_a_run_or_nothing(tmp_path: Path) -> None:
    assert list_shards(tmp_path / "missing") == []
    with pytest.raises(StoreError, match="missing"):
        find_rollouts_files(tmp_path / "missing")
