"""Whether a job of SageMaker finds in its store what its settings name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.launch.sagemaker.settings import find_unstaged
from strop.store import open_store
from strop.store.s3_objects import S3Objects
from tests.store.test_listed import shard_model, sync
from tests.store.test_models import write_model


def test_what_another_tool_sent_counts_as_staged_and_what_strop_left_unfinished_does_not(
    s3_root: str, tmp_path: Path
) -> None:
    sync(shard_model(tmp_path / "m"), f"{s3_root}/models/Big")
    sync(tmp_path / "m", f"{s3_root}/datasets/gsm8k_train")
    open_store(s3_root).put(write_model(tmp_path / "half"), f"{s3_root}/models/Org/Half")
    S3Objects().remove(f"{s3_root}/models/Org/Half/COMPLETE")
    assets: list[Mapping[str, Any]] = [
        {"key": "model.uri", "value": "Org/Big", "place": "models/Org/Big"},
        {"key": "task.source", "value": "openai/gsm8k", "place": "datasets/openai/gsm8k"},
        {"key": "teacher.model", "value": "Org/Half", "place": "models/Org/Half"},
        {"key": "reference.model", "value": "Org/Big@v1", "place": "models/Org/Big@v1"},
        {"key": "task.order_file", "value": f"{s3_root}/none.txt", "place": None},
    ]
    found = find_unstaged(assets, s3_root, S3Objects(), offline=True)
    assert [finding.given.partition("=")[0] for finding in found] == [
        "teacher.model",
        "reference.model",
        "task.order_file",
    ]
