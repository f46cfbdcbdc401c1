"""The rights that are asked for: all that are needed, on our own resources, and no more."""

from __future__ import annotations

from typing import Any

from strop.launch.sagemaker.options import SageMakerSite
from strop.launch.sagemaker.probe import actions_of, execution_policy, submitter_policy
from tests.launch.sagemaker.building import PROFILE

SITE = SageMakerSite(**PROFILE)


def statement(policy: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in policy["Statement"] if one["Sid"] == name)


def test_the_submitter_has_the_rights_of_the_written_list() -> None:
    wanted = {
        "ecr:GetAuthorizationToken",
        *(f"ecr:{word}" for word in ("CreateRepository", "DescribeRepositories", "DescribeImages")),
        *(f"ecr:{word}" for word in ("BatchCheckLayerAvailability", "GetDownloadUrlForLayer")),
        *(f"ecr:{word}" for word in ("BatchGetImage", "InitiateLayerUpload", "UploadLayerPart")),
        *(f"ecr:{word}" for word in ("CompleteLayerUpload", "PutImage")),
        *(f"sagemaker:{word}TrainingJob" for word in ("Create", "Describe", "Stop")),
        *("sagemaker:ListTrainingJobs", "sagemaker:AddTags", "sagemaker:ListTags", "iam:PassRole"),
        *("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"),
        *("logs:DescribeLogStreams", "logs:FilterLogEvents", "logs:GetLogEvents"),
    }
    assert wanted <= set(actions_of(submitter_policy(SITE)))


def test_rights_are_on_our_own_resources() -> None:
    policy = submitter_policy(SITE)
    assert statement(policy, "PassRole")["Resource"] == PROFILE["role"]
    assert statement(policy, "PassRole")["Condition"] == {
        "StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}
    }
    assert statement(policy, "Objects")["Resource"] == "arn:aws:s3:::strop-test/strop/*"
    assert statement(policy, "EcrRepository")["Resource"] == (
        "arn:aws:ecr:us-east-1:123456789012:repository/strop"
    )
    assert statement(policy, "Jobs")["Resource"] == (
        "arn:aws:sagemaker:us-east-1:123456789012:training-job/job*"
    )
    everywhere = {one["Sid"] for one in policy["Statement"] if one["Resource"] == "*"}
    assert everywhere == {"EcrLogin", "ListJobs", "Optional"}


def test_the_role_has_the_rights_of_the_written_list_and_no_others() -> None:
    arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hub"
    wanted = {
        *(f"s3:{word}" for word in ("GetObject", "PutObject", "ListBucket", "DeleteObject")),
        *("s3:AbortMultipartUpload", "s3:ListBucketMultipartUploads"),
        *("ecr:GetAuthorizationToken", "ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer"),
        "ecr:BatchGetImage",
        *(f"logs:{word}" for word in ("CreateLogGroup", "CreateLogStream", "PutLogEvents")),
        *("logs:DescribeLogStreams", "cloudwatch:PutMetricData"),
    }
    assert set(actions_of(execution_policy(SITE))) == wanted
    wanted |= {"secretsmanager:GetSecretValue", "kms:Decrypt", "kms:GenerateDataKey", "kms:CreateGrant"}
    wanted |= {
        f"ec2:{word}"
        for word in (
            *("CreateNetworkInterface", "CreateNetworkInterfacePermission", "DeleteNetworkInterface"),
            *("DeleteNetworkInterfacePermission", "DescribeNetworkInterfaces", "DescribeVpcs"),
            *("DescribeDhcpOptions", "DescribeSubnets", "DescribeSecurityGroups"),
        )
    }
    full = SageMakerSite(
        **PROFILE, secret_arns={"HF_TOKEN": arn}, kms_key="alias/mine", subnets=("subnet-1",)
    )
    assert set(actions_of(execution_policy(full))) == wanted


def test_secrets_keys_and_networks_only_where_the_site_has_them() -> None:
    arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hub"
    full = SageMakerSite(
        **PROFILE, secret_arns={"HF_TOKEN": arn}, kms_key="alias/mine", subnets=("subnet-1",)
    )
    policy = execution_policy(full)
    assert statement(policy, "Secrets")["Resource"] == [arn]
    assert statement(policy, "Key")["Resource"] == "arn:aws:kms:us-east-1:123456789012:alias/mine"
    assert "ec2:CreateNetworkInterface" in statement(policy, "Vpc")["Action"]
    assert len(execution_policy(SITE)["Statement"]) == 6


def test_a_profile_without_values_gives_patterns() -> None:
    policy = submitter_policy(SageMakerSite())
    assert statement(policy, "PassRole")["Resource"] == "arn:aws:iam::*:role/*"
    assert statement(policy, "EcrRepository")["Resource"] == "arn:aws:ecr:*:*:repository/*"


def test_a_base_image_of_another_account_may_be_pulled() -> None:
    base = "999999999999.dkr.ecr.us-west-2.amazonaws.com/bases/python:3.11"
    policy = submitter_policy(SageMakerSite(**PROFILE, base_image=base))
    assert statement(policy, "EcrBase")["Resource"] == (
        "arn:aws:ecr:us-west-2:999999999999:repository/bases/python"
    )
    assert "ecr:PutImage" not in statement(policy, "EcrBase")["Action"]
    # Other credentials for it: then this identity needs nothing there.
    other = SageMakerSite(**PROFILE, base_image=base, base_image_aws_profile="bases")
    for profile in (other, SageMakerSite(**PROFILE, base_image="python:3.11-slim")):
        assert "EcrBase" not in [one["Sid"] for one in submitter_policy(profile)["Statement"]]
