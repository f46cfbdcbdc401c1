"""GPUs of a SageMaker job, as numbers and as lists of indices."""

from __future__ import annotations

import pytest

from strop.errors import ConfigError
from strop.launch.sagemaker.options import read_gpu_shares


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
