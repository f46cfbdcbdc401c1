"""GPUs of a SageMaker job, as numbers and as lists of indices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError
from strop.launch.sagemaker.options import read_gpu_shares
from strop.launch.sagemaker.settings import find_unstaged
from strop.store import open_store
from strop.store.s3_objects import S3Objects
from tests.store.test_listed import shard_model, sync
from tests.store.test_models import write_model


@pytest.mark.parametrize(
    ("train", "evaluation", "has_split", "expected"),
    [
        (None, None, False, {}),
        ("2", None, False, {"train_gpus": 2}),
        ("2", "1", False, {"train_gpus": 2, "eval_gpus": 1}),
        (None, "6", False, {"eval_gpus": 6}),
        # 0 to 5 are six.
        ("0-5", "6,7", False, {"gpus": 6, "eval_gpus": 2}),
        ("0,2,4-5", None, False, {"gpus": 4}),
        # Beside a list, 7 is the eighth GPU and not seven of them.
        ("0-6", "7", False, {"gpus": 7, "eval_gpus": 1}),
        ("3", "4-7", False, {"gpus": 1, "eval_gpus": 4}),
        ("0-3", "6,7", True, {"train_gpus": 4, "eval_gpus": 2}),
    ],
)
def test_lists_become_numbers(
    train: str | None, evaluation: str | None, has_split: bool, expected: dict[str, int]
) -> None:
    assert read_gpu_shares(train, evaluation, has_split=has_split) == expected


@pytest.mark.parametrize(
    ("train", "evaluation", "message"),
    [
        ("0-5", "5,6", "--train-gpus 0-5 and --eval-gpus 5,6: both name GPU 5, and two roles cannot share"),
        ("0-7", "6,7", "both name GPU 6, 7"),
        ("0,0", None, "--train-gpus 0,0: it names GPU 0 twice"),
        ("0-3,2", None, "it names GPU 2 twice"),
        ("5-0", None, "5-0 runs backwards"),
        ("0-16", None, "instances have GPUs 0 to 15"),
        ("0-5", "x", "--eval-gpus 'x': it is neither a number of GPUs nor a list of indices"),
        ("-1", None, "--train-gpus '-1': it is neither"),
        ("1,", None, "--train-gpus '1,': it is neither"),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(train: str, evaluation: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_gpu_shares(train, evaluation, has_split=False)
    assert message in str(caught.value)
    assert "lists without a GPU in common (--train-gpus 0-5 --eval-gpus 6,7)" in str(caught.value)


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
