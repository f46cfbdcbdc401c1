"""The request of a plan, byte by byte, and what is refused before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError
from strop.launch.contract import JobEnvironment, Resources
from strop.launch.sagemaker.options import SageMakerSite
from strop.launch.sagemaker.settings import find_unstaged
from strop.spec.job import JobSpec
from strop.store import open_store
from strop.store.s3_objects import S3Objects
from tests.launch.sagemaker.building import make_plan, make_request, plan_of, request_of
from tests.store.test_listed import shard_model, sync
from tests.store.test_models import write_model


def channel(name: str, folder: str) -> dict[str, Any]:
    source = {
        "S3DataType": "S3Prefix",
        "S3Uri": f"s3://strop-test/strop/{folder}/job-20261121-120000/",
        "S3DataDistributionType": "FullyReplicated",
    }
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": "File"}


GOLDEN = {
    "TrainingJobName": "job-20261121-120000",
    "RoleArn": "arn:aws:iam::123456789012:role/strop-execution",
    "AlgorithmSpecification": {
        "TrainingImage": "123456789012.dkr.ecr.us-east-1.amazonaws.com/strop:tag-1",
        "TrainingInputMode": "File",
        "ContainerEntrypoint": ["python3", "-m", "strop.launch.sagemaker.node"],
    },
    # 'r' and the first 12 digits of sha256("small-try\nsmall-try-20261121-120000").
    "HyperParameters": {"strop_run": "r93abc6a01f1d", "strop_plan": "abcdef0123456789"},
    "InputDataConfig": [channel("config", "config"), channel("code", "source")],
    "OutputDataConfig": {"S3OutputPath": "s3://strop-test/strop/output", "CompressionType": "GZIP"},
    "ResourceConfig": {"VolumeSizeInGB": 100, "InstanceType": "ml.p4de.24xlarge", "InstanceCount": 1},
    "StoppingCondition": {"MaxRuntimeInSeconds": 432000},  # 5 days.
    "CheckpointConfig": {
        "S3Uri": "s3://strop-test/strop/state/r93abc6a01f1d/",
        "LocalPath": "/opt/ml/checkpoints",
    },
    "EnableManagedSpotTraining": False,
    "EnableInterContainerTrafficEncryption": False,
    "Environment": {
        "AWS_REGION": "us-east-1",
        "NCCL_DEBUG": "WARN",
        "STROP_STORE_URI": "s3://strop-test/strop",
    },
    "Tags": [
        {"Key": "strop-run", "Value": "r93abc6a01f1d"},
        {"Key": "strop-plan", "Value": "abcdef0123456789"},
        {"Key": "strop-member", "Value": "0"},
        {"Key": "strop-user", "Value": "ann"},
    ],
}


def test_the_request_byte_by_byte() -> None:
    plan = plan_of(image_tag="tag-1")
    assert json.dumps(request_of(plan), indent=1) == json.dumps(GOLDEN, indent=1)
    assert plan.files == {"request.json": json.dumps(GOLDEN, indent=1)}


def test_everything_that_a_flag_may_say() -> None:
    plan = plan_of(
        profile={
            "kms_key": "alias/mine",
            "subnets": ("subnet-1",),
            "security_groups": ("sg-1",),
            "encrypt_traffic": True,
            "tags": {"team": "a"},
            "max_runtime": "1d",
        },
        instance_type="ml.g6e.48xlarge",
        instance_count=2,
        name_prefix="annotations-adhoc",
        spot=True,
        max_wait="3d",
        volume_gb=500,
        image="own@sha256:1",
    )
    request = request_of(plan)
    assert request["TrainingJobName"] == "annotations-adhoc-20261121-120000"
    assert request["ResourceConfig"] == {
        "VolumeSizeInGB": 500,
        "InstanceType": "ml.g6e.48xlarge",
        "InstanceCount": 2,
        "VolumeKmsKeyId": "alias/mine",
    }
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 86400, "MaxWaitTimeInSeconds": 259200}
    assert request["EnableManagedSpotTraining"] is True
    assert request["VpcConfig"] == {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    assert request["InfraCheckConfig"] == {"EnableInfraCheck": True}
    assert request["AlgorithmSpecification"]["TrainingImage"] == "own@sha256:1"
    assert {"Key": "team", "Value": "a"} in request["Tags"]
    assert request["InputDataConfig"][0]["ChannelName"] == "config"
    assert "120 s" in plan.notices[-1]


def test_the_wall_time_of_the_run_beats_the_sites() -> None:
    given = plan_of(resources=Resources(time_limit_s=7200.0), max_runtime="1h")
    assert request_of(given)["StoppingCondition"]["MaxRuntimeInSeconds"] == 7200
    # Without a limit of its own, waiting and running may take twice the wall time.
    assert (
        request_of(plan_of(max_runtime="1h", spot=True))["StoppingCondition"]["MaxWaitTimeInSeconds"] == 7200
    )


def test_nodes_without_gpus_are_an_instance_group() -> None:
    request = request_of(plan_of(resources=Resources(num_nodes=2, num_cpu_nodes=3)))
    assert request["ResourceConfig"]["InstanceGroups"] == [
        {"InstanceGroupName": "main", "InstanceType": "ml.p4de.24xlarge", "InstanceCount": 2},
        {"InstanceGroupName": "cpu", "InstanceType": "ml.m5.4xlarge", "InstanceCount": 3},
    ]
    assert "InstanceType" not in request["ResourceConfig"]


def test_each_trial_of_a_sweep_is_a_job_with_its_own_state() -> None:
    plan = make_plan(make_request(), num_trials=3)
    jobs = plan.details["jobs"]
    assert [job["name"] for job in jobs] == [f"job-20261121-120000-00{i}" for i in range(3)]
    assert len({job["state_uri"] for job in jobs}) == 3
    assert [job["request"]["Tags"][2]["Value"] for job in jobs] == ["0", "1", "2"]


def test_state_is_kept_by_run_and_a_continued_run_finds_it() -> None:
    first = plan_of()
    again = plan_of(run_key=first.details["run_key"], parent="job-20261121-120000", job_name="job-2")
    assert again.details["jobs"][0]["name"] == "job-2"
    assert again.details["jobs"][0]["state_uri"] == first.details["jobs"][0]["state_uri"]
    assert again.details["parent"] == "job-20261121-120000"


def test_the_request_says_nothing_about_the_run() -> None:
    plan = plan_of(overrides=("model.uri=Qwen/Qwen3-1.7B",), run_file="runs/qwen3-1.7B-gsm8k.toml")
    text = json.dumps(plan.details["jobs"]).lower()
    for word in ("small-try", "qwen", "arithmetic", "gsm8k"):
        assert word not in text
    assert plan.details["config"] == "runs/qwen3-1.7B-gsm8k.toml"


def test_a_telling_prefix_is_noticed() -> None:
    plan = plan_of(name_prefix="small-try", image_tag="small-try-1")
    assert sum("everybody who may list jobs" in notice for notice in plan.notices) == 2


TOKEN = JobEnvironment(secrets=("HF_TOKEN",))
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"job_name": "qwen3-1.7B"}, "'qwen3-1.7B'"),
    ({"job_name": "a" * 64}, r"\(64 characters\)"),
    ({"name_prefix": "a" * 48}, "site.name_prefix='a{48}' .* at most 47"),
    ({"name_prefix": "a_b"}, "name_prefix='a_b'"),
    ({"max_runtime": "29d"}, "MaxRuntimeInSeconds=2505600. Allowed: 2419200"),
    ({"max_runtime": "soon"}, "site.max_runtime='soon'"),
    ({"spot": True, "keep_alive_s": 60}, "keep_alive_s=60 together with spot"),
    ({"keep_alive_s": 21_601}, "site.keep_alive_s=21601 .* 21600"),
    ({"profile": {"tags": {f"k{i}": "v" for i in range(60)}}}, "Tags=<64> has 64 items"),
    ({"partition": "gpu"}, "partition is no option"),
    ({"profile": {"role": None}}, "has no role"),
    ({"profile": {"region": None}}, "has no region"),
    ({"profile": {"repository": None}}, "has no image or repository"),
    ({"image": "i" * 256}, "site.image='i+...' .* 255"),
    ({"environment": TOKEN}, "HF_TOKEN: secrets"),
    ({"profile": {"secret_arns": {"HF_TOKEN": "hf_x"}}}, "no ARN"),
    ({"python": "a" * 257}, "ContainerEntrypoint.*257 characters"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_a_plan_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(**changes)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(instance_type="ml.none.large", max_runtime="29d")
    assert len(str(caught.value).splitlines()) == 2


def test_sec_4_secrets_go_by_arn_and_not_into_the_request() -> None:
    arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hub"
    plan = plan_of(profile={"secret_arns": {"HF_TOKEN:train": arn, "OTHER": arn}})
    assert plan.details["secrets"] == {"HF_TOKEN": arn, "OTHER": arn}
    assert plan.details["secret_roles"] == {"HF_TOKEN": ["train"]}
    assert "secretsmanager" not in json.dumps(request_of(plan))


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
        *("teacher.model", "reference.model", "task.order_file")
    ]


# What follows for a job from the type and the number of its instances.


def implied(job: dict[str, Any], **options: Any) -> dict[str, Any]:
    words = SageMakerSite().changed(options).implied_settings(JobSpec(**job))
    return {key: int(value) for key, _, value in (word.partition("=") for word in words)}


def test_a_job_that_says_nothing_gets_all_gpus_of_its_instances() -> None:
    # It had none: CUDA_VISIBLE_DEVICES was empty on an instance with 8.
    assert implied({}) == {"job.gpus": 8}
    assert implied({}, instance_type="ml.m5.xlarge") == {}
    assert implied({"train_gpus": 4, "infer_gpus": 4}) == {}
    assert implied({"nodes": 4}) == {"job.gpus": 8}
    assert implied({}, instance_type="ml.trn1.2xlarge") == {}
    assert implied({}, local=True, devices="0,1") == {"job.gpus": 2}
    assert implied({}, local=True) == {}


@pytest.mark.parametrize(
    ("job", "options", "words"),
    [
        ({"single_gpu": True}, {}, "1 GPU is asked for .* gives 8: 7 would"),
        ({"gpus": 0}, {}, "8 would be idle"),
        ({"gpus": 2}, {"instance_type": "ml.m5.xlarge"}, "2 GPUs are asked for"),
        ({"gpus": 1}, {"local": True, "devices": "0,1"}, "gives 2: 1 would be idle"),
    ],
)
def test_gpus_that_are_paid_for_and_idle_are_refused(
    job: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        implied(job, **options)
