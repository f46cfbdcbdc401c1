"""Who needs which rights: the two IAM documents of a site, filled from its profile, as little as possible.

Source of the actions: the service authorization reference of AWS, and the SageMaker developer guide on
execution roles.
"""

from __future__ import annotations

from typing import Any

from strop.launch.sagemaker.ecr import parse_reference
from strop.launch.sagemaker.places import LOG_GROUP
from strop.spec.site import SageMakerSite

VERSION = "2012-10-17"
_PUSH = (
    *("CreateRepository", "DescribeRepositories", "DescribeImages", "BatchCheckLayerAvailability"),
    *("GetDownloadUrlForLayer", "BatchGetImage", "InitiateLayerUpload", "UploadLayerPart"),
    *("CompleteLayerUpload", "PutImage"),
)
_PULL = ("BatchCheckLayerAvailability", "GetDownloadUrlForLayer", "BatchGetImage")
_JOBS = (
    *("CreateTrainingJob", "DescribeTrainingJob", "StopTrainingJob"),
    *("AddTags", "ListTags"),
)
_VPC = (
    *("CreateNetworkInterface", "CreateNetworkInterfacePermission", "DeleteNetworkInterface"),
    *("DeleteNetworkInterfacePermission", "DescribeNetworkInterfaces", "DescribeVpcs"),
    *("DescribeDhcpOptions", "DescribeSubnets", "DescribeSecurityGroups"),
)
_KEY = ("Decrypt", "GenerateDataKey", "CreateGrant")


def submitter_policy(profile: SageMakerSite) -> dict[str, Any]:
    """Return what the identity that submits needs."""
    region, account = profile.region or "*", _account(profile)
    jobs = f"arn:{_partition(profile)}:sagemaker:{region}:{account}:training-job/{profile.name_prefix}*"
    statements = [
        _allow("EcrLogin", ("ecr:GetAuthorizationToken",), "*"),
        _allow("EcrRepository", _named("ecr", _PUSH), _repository(profile.repository, profile)),
        _allow("Jobs", _named("sagemaker", _JOBS), jobs),
        # A listing has no resource.
        _allow("ListJobs", ("sagemaker:ListTrainingJobs",), "*"),
        {
            **_allow("PassRole", ("iam:PassRole",), profile.role or f"arn:aws:iam::{account}:role/*"),
            "Condition": {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}},
        },
        _allow("ReadRole", ("iam:GetRole",), profile.role or f"arn:aws:iam::{account}:role/*"),
        _list_bucket(profile),
        _allow(
            "Objects",
            _named("s3", ("GetObject", "PutObject", "AbortMultipartUpload", "ListMultipartUploadParts")),
            _objects(profile),
        ),
        _allow(
            "Logs",
            _named("logs", ("DescribeLogStreams", "FilterLogEvents", "GetLogEvents")),
            _log_group(profile),
        ),
        _allow(
            "Optional",
            ("servicequotas:ListServiceQuotas", "iam:SimulatePrincipalPolicy", "pricing:GetProducts"),
            "*",
        ),
    ]
    base = parse_reference(profile.base_image or "")
    if base is not None and base.registry is not None and profile.base_image_aws_profile is None:
        # Its owner has to allow it too, in the repository's own policy.
        repository = _repository(profile.base_image, profile)
        statements.append(_allow("EcrBase", _named("ecr", _PULL), repository))
    if profile.kms_key:
        statements.append(_allow("Key", _named("kms", ("Decrypt", "GenerateDataKey")), _key(profile)))
    return {"Version": VERSION, "Statement": statements}


def execution_policy(profile: SageMakerSite) -> dict[str, Any]:
    """Return what the role of the job needs."""
    write_logs = ("CreateLogGroup", "CreateLogStream", "PutLogEvents", "DescribeLogStreams")
    statements = [
        _list_bucket(profile),
        # Deletion too: what is pruned in the checkpoint directory is pruned in S3.
        _allow(
            "Objects",
            _named("s3", ("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload")),
            _objects(profile),
        ),
        _allow("EcrLogin", ("ecr:GetAuthorizationToken",), "*"),
        _allow("EcrPull", _named("ecr", _PULL), _repository(profile.repository, profile)),
        _allow("Logs", _named("logs", write_logs), _log_group(profile)),
        {
            **_allow("Metrics", ("cloudwatch:PutMetricData",), "*"),
            "Condition": {"StringEquals": {"cloudwatch:namespace": LOG_GROUP}},
        },
    ]
    if profile.secret_arns:
        arns = sorted(set(profile.secret_arns.values()))
        statements.append(_allow("Secrets", ("secretsmanager:GetSecretValue",), arns))
    if profile.kms_key:
        statements.append(_allow("Key", _named("kms", _KEY), _key(profile)))
    if profile.subnets:
        statements.append(_allow("Vpc", _named("ec2", _VPC), "*"))
    return {"Version": VERSION, "Statement": statements}


def trust_policy() -> dict[str, Any]:
    """Return who may act as the role."""
    return {
        "Version": VERSION,
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"Service": "sagemaker.amazonaws.com"},
                "Action": "sts:AssumeRole",
            }
        ],
    }


def actions_of(policy: dict[str, Any]) -> list[str]:
    """Return every action of a document but the optional ones, sorted."""
    found = [
        action
        for statement in policy["Statement"]
        if statement["Sid"] != "Optional"
        for action in statement["Action"]
    ]
    return sorted(set(found))


def _allow(name: str, actions: tuple[str, ...], resources: str | list[str]) -> dict[str, Any]:
    return {"Sid": name, "Effect": "Allow", "Action": sorted(actions), "Resource": resources}


def _named(service: str, actions: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{service}:{action}" for action in actions)


def _partition(profile: SageMakerSite) -> str:
    return (profile.role or "arn:aws").split(":")[1]


def _account(profile: SageMakerSite) -> str:
    return profile.role.split(":")[4] if profile.role else "*"


def _bucket(profile: SageMakerSite) -> str:
    return f"arn:{_partition(profile)}:s3:::{profile.bucket or '*'}"


def _objects(profile: SageMakerSite) -> str:
    return f"{_bucket(profile)}/{profile.prefix}/*"


def _list_bucket(profile: SageMakerSite) -> dict[str, Any]:
    return {
        **_allow("List", ("s3:ListBucket",), _bucket(profile)),
        "Condition": {"StringLike": {"s3:prefix": [f"{profile.prefix}/*", profile.prefix]}},
    }


def _repository(name: str | None, profile: SageMakerSite) -> str:
    image = parse_reference(name or "")
    region, account = (image.region, image.account) if image else (None, None)
    place = f"{region or profile.region or '*'}:{account or _account(profile)}"
    return f"arn:{_partition(profile)}:ecr:{place}:repository/{image.name if image else '*'}"


def _log_group(profile: SageMakerSite) -> list[str]:
    group = (
        f"arn:{_partition(profile)}:logs:{profile.region or '*'}:{_account(profile)}:log-group:{LOG_GROUP}"
    )
    return [group, f"{group}:*"]


def _key(profile: SageMakerSite) -> str:
    key = profile.kms_key or ""
    if key.startswith("arn:"):
        return key
    kind = key if key.startswith("alias/") else f"key/{key}"
    return f"arn:{_partition(profile)}:kms:{profile.region or '*'}:{_account(profile)}:{kind}"
