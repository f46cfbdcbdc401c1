"""The validator that is made from the service's own model, field by field."""

from __future__ import annotations

import copy
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.launch.sagemaker.limits import check_request, check_value, does_match, load_model, load_shapes

GOOD: dict[str, Any] = {
    "TrainingJobName": "job-20261121-120000",
    "RoleArn": "arn:aws:iam::123456789012:role/strop-execution",
    "AlgorithmSpecification": {"TrainingImage": "registry/strop@sha256:0", "TrainingInputMode": "File"},
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/strop/output"},
    "ResourceConfig": {"InstanceType": "ml.p4de.24xlarge", "InstanceCount": 1, "VolumeSizeInGB": 100},
    "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    request = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    place = request
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    return request


def codes(request: dict[str, Any]) -> list[str]:
    return [finding.code for finding in check_request(request)]


def test_a_good_request_finds_nothing() -> None:
    assert check_request(GOOD) == []


@pytest.mark.parametrize(
    ("path", "value", "code"),
    [
        ("TrainingJobName", "qwen3-1.7B-gsm8k", "pattern"),
        ("TrainingJobName", "a_b", "pattern"),
        ("TrainingJobName", "ends-", "pattern"),
        ("TrainingJobName", "", "min"),
        ("TrainingJobName", "a" * 64, "max"),
        # The pattern alone accepts this one: each hyphen run counts once.
        ("TrainingJobName", "a" + "-" * 100 + "b", "max"),
        ("TrainingJobName", 7, "type"),
        ("RoleArn", "arn:aws:iam::1:role", "min"),
        ("RoleArn", "arn:aws:iam::12345678901:role/a-long-name", "pattern"),
        ("ResourceConfig.InstanceType", "ml.invented.24xlarge", "enumeration"),
        ("ResourceConfig.InstanceCount", True, "type"),
        ("ResourceConfig.KeepAlivePeriodInSeconds", 21_601, "max"),
        ("ResourceConfig.Color", "red", "unknown"),
        ("HyperParameters", {f"k{i}": "v" for i in range(101)}, "max"),
        ("HyperParameters", {"k": "v" * 257}, "max"),
        ("HyperParameters", {"k": 3}, "type"),
        ("Environment", {"NAME": "v" * 600}, "max"),
        ("Environment", {f"K{i}": "v" for i in range(101)}, "max"),
        ("Environment", {"1NAME": "v"}, "pattern"),
        ("Tags", [{"Key": f"k{i}", "Value": ""} for i in range(51)], "max"),
        ("Tags", [{"Key": "a", "Value": ""}, {"Key": "a", "Value": ""}], "tags"),
        ("Tags", [{"Key": "aws:mine", "Value": ""}], "tags"),
        ("Tags", [{"Key": "a*", "Value": ""}], "pattern"),
        ("InputDataConfig", [], "min"),
        ("StoppingCondition.MaxRuntimeInSeconds", 29 * 86_400, "max"),
        ("StoppingCondition.MaxWaitTimeInSeconds", 3599, "wait"),
        ("EnableManagedSpotTraining", True, "spot"),
        ("RetryStrategy", {"MaximumRetryAttempts": 31}, "max"),
        ("AlgorithmSpecification.TrainingImage", "i" * 256, "max"),
        ("AlgorithmSpecification", {"TrainingInputMode": "File"}, "required"),
        ("ResourceConfig", {"InstanceType": "ml.m5.large"}, "required"),
        ("VpcConfig", {"Subnets": ["subnet-1"], "SecurityGroupIds": [f"sg-{i}" for i in range(6)]}, "max"),
        (
            "ResourceConfig",
            {
                "InstanceType": "ml.m5.large",
                "InstanceGroups": [
                    {"InstanceGroupName": "a", "InstanceType": "ml.m5.large", "InstanceCount": 1}
                ],
            },
            "groups",
        ),
    ],
)
def test_what_the_service_would_refuse(path: str, value: Any, code: str) -> None:
    found = check_request(changed(path, value))
    assert found[0].code == code
    # What is too short or too long may have the wrong form besides.
    assert {finding.code for finding in found} <= {code, "pattern"}
    assert path.partition(".")[0] in found[0].given


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("TrainingJobName", "a" * 63),
        ("TrainingJobName", "7"),
        ("HyperParameters", {"a.b": "quote ' \" and größe", **{f"k{i}": "v" for i in range(99)}}),
        ("HyperParameters", {"k": "v" * 256}),
        ("Environment", {"NAME": "v" * 512}),
        ("Tags", [{"Key": "größe 1", "Value": "a/b:c=d+e-f@g_h"}]),
        ("StoppingCondition.MaxWaitTimeInSeconds", 3600),
        ("StoppingCondition.MaxRuntimeInSeconds", 28 * 86_400),
    ],
)
def test_what_is_just_allowed(path: str, value: Any) -> None:
    assert check_request(changed(path, value)) == []


def test_every_missing_field_is_named() -> None:
    given_texts = [finding.given for finding in check_request({"TrainingJobName": "a"})]
    assert given_texts == [
        "RoleArn is missing",
        "OutputDataConfig is missing",
        "ResourceConfig is missing",
        "AlgorithmSpecification is missing",
    ]


def test_two_channels_of_one_name_are_refused() -> None:
    source = {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/a"}}
    channel = {"ChannelName": "config", "DataSource": source}
    assert codes({**GOOD, "InputDataConfig": [channel, channel]}) == ["channels"]


def test_a_message_has_its_three_parts_and_the_nearest_choices() -> None:
    finding = check_request(changed("ResourceConfig.InstanceType", "ml.p4de.24xlarg"))[0]
    assert str(finding).startswith(
        "ResourceConfig.InstanceType='ml.p4de.24xlarg'. Allowed: one of ml.p4de.24xlarge, "
    )
    assert str(finding).endswith("Next: change it in the site profile or by its flag.")


def test_all_patterns_of_the_request_can_be_compiled() -> None:
    shapes = load_shapes()
    todo, seen = ["CreateTrainingJobRequest"], set[str]()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            shape = shapes[name]
            todo += [member["shape"] for member in shape.get("members", {}).values()]
            todo += [shape[key]["shape"] for key in ("member", "key", "value") if key in shape]
    patterns = [shapes[name]["pattern"] for name in seen if "pattern" in shapes[name]]
    assert len(patterns) > 30
    for pattern in patterns:
        for text in ("a", "ä"):
            does_match(pattern, text)  # Raises re.error where a class was not translated.


def test_classes_of_unicode() -> None:
    assert does_match(r"[\p{L}\p{N}]+", "größe½")
    assert does_match(r"\p{Alnum}+".replace(r"\p{Alnum}", r"[\p{Alnum}]"), "aZ9")
    assert not does_match(r"[\p{L}]+", "a1")
    assert not does_match(r"[\p{Alnum}]+", "ä")
    # Java's \d is ASCII; Python's knows Arabic digits too.
    assert not does_match(r"\d+", "\u0663")


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=80))
def test_names_that_pass_are_names(text: str) -> None:
    is_accepted = check_value(text, "TrainingJobName", "name") == []
    alnum = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
    is_name = 1 <= len(text) <= 63 and set(text) <= alnum | {"-"} and text[:1] != "-" and text[-1:] != "-"
    assert is_accepted == is_name


def test_the_model_has_many_instance_types() -> None:
    types = load_shapes()["TrainingInstanceType"]["enum"]
    assert "ml.p4de.24xlarge" in types
    assert len(types) >= 145


def test_no_network_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    load_model.cache_clear()
    started_at = time.monotonic()
    assert check_request(GOOD) == []
    assert time.monotonic() - started_at < 30


def test_without_botocore_the_message_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['botocore'] = None; sys.modules['botocore.loaders'] = None\n"
        "from strop.launch.sagemaker.limits import check_request\n"
        "try: check_request({})\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("ConfigError the limits of SageMaker come with the package boto3")
    assert "pip install 'strop[s3]'" in ended.stdout
