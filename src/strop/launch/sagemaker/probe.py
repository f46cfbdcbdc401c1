"""Find obstacles to a job by AWS calls that only read, and write the IAM documents of a site.

A check that cannot run gives `unknown`, neither success nor refusal. The documents are filled from the site
profile and grant as little as possible. Source of the actions: the service authorization reference of AWS,
and the SageMaker developer guide on execution roles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from strop.errors import ConfigError, RemoteDenied, RemoteMissing, StropError
from strop.hardware.findings import Finding, Severity, find_refusal
from strop.launch.contract import JobPlan
from strop.launch.sagemaker.client import AwsClients, JobObjects, all_pages
from strop.launch.sagemaker.ecr import find_digest, parse_reference
from strop.launch.sagemaker.options import SageMakerSite
from strop.launch.sagemaker.places import LOG_GROUP
from strop.launch.sagemaker.request import count_hosts
from strop.launch.sagemaker.settings import find_unstaged

_SERVICE = "sagemaker.amazonaws.com"
_POLICY_HINT = "`strop policy` prints the rights that are needed"
_MAX_ACTIONS = 50
"""Actions of one call of the simulator. Source: no limit is documented; one answer has 100 results."""
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


def probe_site(
    plan: JobPlan, profile: SageMakerSite, clients: AwsClients, objects: JobObjects
) -> list[Finding]:
    """Run all checks, the credentials first, because no other check works without them."""
    findings = list(_ask("credentials", lambda: _check_identity(clients)))
    if any(finding.severity is Severity.ERROR for finding in findings):
        return findings
    request = plan.details["jobs"][0]["request"]
    is_offline = request["Environment"].get("STROP_OFFLINE") == "1"
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        "image": lambda: _check_image(clients, request["AlgorithmSpecification"]["TrainingImage"]),
        "role": lambda: _check_role(clients, profile),
        "bucket": lambda: _check_bucket(clients, profile),
        "rights": lambda: _check_rights(clients, profile),
        "quota": lambda: _check_quota(clients, request),
        "vpc": lambda: _check_vpc(request),
        "asset": lambda: find_unstaged(
            plan.details["named_assets"], plan.details["store"], objects, offline=is_offline
        ),
    }
    for code, check in checks.items():
        findings += _ask(code, check)
    return findings


def _ask(code: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check, or a finding that it cannot run."""
    try:
        yield from check()
    except (RemoteMissing, ConfigError) as error:
        yield find_refusal(code, error)
    except RemoteDenied as error:
        severity = Severity.ERROR if code in {"credentials", "bucket"} else Severity.UNKNOWN
        yield find_refusal(code, error, severity=severity)
    except StropError as error:
        yield find_refusal(code, error, severity=Severity.UNKNOWN)


def _check_identity(clients: AwsClients) -> Iterator[Finding]:
    clients.call("sts", "get_caller_identity")
    yield from ()


def _check_image(clients: AwsClients, text: str) -> Iterator[Finding]:
    image = parse_reference(text)
    if image is None or image.registry is None:
        yield _finding(
            "image",
            f"image {text} is in no registry of ECR, so it was not looked up",
            "an image that the execution role may pull",
            Severity.UNKNOWN,
        )
        return
    find_digest(clients, image)


def _check_role(clients: AwsClients, profile: SageMakerSite) -> Iterator[Finding]:
    name = (profile.role or "").rpartition("/")[2]
    role = clients.call("iam", "get_role", resource=profile.role or "", RoleName=name)["Role"]
    trust = role.get("AssumeRolePolicyDocument", {})
    document = json.loads(unquote(trust)) if isinstance(trust, str) else trust
    if _SERVICE not in json.dumps(document):
        yield _finding(
            "role",
            f"role {name} does not trust {_SERVICE}",
            "a role that the service may act as",
            Severity.ERROR,
        )


def _check_bucket(clients: AwsClients, profile: SageMakerSite) -> Iterator[Finding]:
    bucket = profile.bucket or ""
    listed = clients.call(
        "s3",
        "list_objects_v2",
        resource=f"s3://{bucket}",
        Bucket=bucket,
        Prefix=f"{profile.prefix}/",
        MaxKeys=1,
    )
    region = listed.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    if region and profile.region and region != profile.region:
        yield _finding(
            "bucket",
            f"bucket {bucket} is in {region}, and the job in {profile.region}",
            "a bucket in the job's region",
            Severity.ERROR,
        )


def _check_rights(clients: AwsClients, profile: SageMakerSite) -> Iterator[Finding]:
    """Query the policy simulator, which executes nothing, whether each action would be allowed."""
    caller = clients.identity()
    if ":assumed-role/" in caller:
        role = caller.split("/")[1]
        caller = f"{':'.join(caller.split(':')[:2])}:iam::{caller.split(':')[4]}:role/{role}"
    policy = submitter_policy(profile)
    results: list[Mapping[str, Any]] = []
    for statement in policy["Statement"]:
        if statement["Sid"] in {"Optional", "List"}:
            continue  # The bucket has been listed; a simulation would need the context of a real request.
        resources = statement["Resource"]
        conditions = statement.get("Condition", {}).get("StringEquals", {})
        answer = clients.call(
            "iam",
            "simulate_principal_policy",
            resource=caller,
            PolicySourceArn=caller,
            ActionNames=list(statement["Action"])[:_MAX_ACTIONS],
            ResourceArns=resources if isinstance(resources, list) else [resources],
            ContextEntries=[
                {"ContextKeyName": key, "ContextKeyValues": [value], "ContextKeyType": "string"}
                for key, value in conditions.items()
            ],
        )
        results += answer["EvaluationResults"]
    denied = sorted({result["EvalActionName"] for result in results if result["EvalDecision"] != "allowed"})
    if denied:
        actions = set(actions_of(policy))
        assert set(denied) <= actions | {name.lower() for name in actions}
        yield _finding(
            "rights",
            f"{clients.identity()} may not {', '.join(denied)}",
            "an identity with every right that a submission needs",
            Severity.ERROR,
        )


def _check_quota(clients: AwsClients, request: Mapping[str, Any]) -> Iterator[Finding]:
    resources = request["ResourceConfig"]
    groups = resources.get("InstanceGroups") or [resources]
    is_spot = request["EnableManagedSpotTraining"]
    quotas = all_pages(
        clients, "service-quotas", "list_service_quotas", "Quotas", ServiceCode="sagemaker", MaxResults=100
    )
    limits = {quota["QuotaName"]: float(quota["Value"]) for quota in quotas}
    for group in groups:
        use = "spot training job usage" if is_spot else "training job usage"
        name = f"{group['InstanceType']} for {use}"
        if name in limits and limits[name] < group["InstanceCount"]:
            yield _finding(
                "quota",
                f"{group['InstanceCount']} x {group['InstanceType']}, and the account's quota"
                f" '{name}' is {limits[name]:g}",
                "as many instances as the quota, those of other jobs included",
                Severity.ERROR,
                next_step="ask for fewer, another type, or a higher quota",
            )


def _check_vpc(request: Mapping[str, Any]) -> Iterator[Finding]:
    num_instances = count_hosts(request)
    if num_instances > 1 and "VpcConfig" not in request:
        yield _finding(
            "vpc",
            f"{num_instances} instances and no subnets or security_groups in the site profile",
            "several instances in a VPC whose security group allows itself, in and out",
            Severity.WARNING,
            next_step="set subnets and security_groups, or go on without EFA",
        )


def _finding(
    code: str, problem: str, allowed: str, severity: Severity, *, next_step: str = _POLICY_HINT
) -> Finding:
    return Finding(code=code, given=problem, allowed=allowed, next_step=next_step, severity=severity)


def submitter_policy(profile: SageMakerSite) -> dict[str, Any]:
    """Return the policy for the submitting identity."""
    region, account = profile.region or "*", _account(profile)
    jobs = f"arn:{_partition(profile)}:sagemaker:{region}:{account}:training-job/{profile.name_prefix}*"
    statements = [
        _allow("EcrLogin", ("ecr:GetAuthorizationToken",), "*"),
        _allow("EcrRepository", _named("ecr", _PUSH), _repository(profile.repository, profile)),
        _allow("Jobs", _named("sagemaker", _JOBS), jobs),
        # The action has no resource.
        _allow("ListJobs", ("sagemaker:ListTrainingJobs",), "*"),
        {
            **_allow("PassRole", ("iam:PassRole",), profile.role or f"arn:aws:iam::{account}:role/*"),
            "Condition": {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}},
        },
        _allow("ReadRole", ("iam:GetRole",), profile.role or f"arn:aws:iam::{account}:role/*"),
        *_store(profile),
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
        # The repository's owner must allow it too, in the repository's policy.
        repository = _repository(profile.base_image, profile)
        statements.append(_allow("EcrBase", _named("ecr", _PULL), repository))
    if profile.kms_key:
        statements.append(_allow("Key", _named("kms", ("Decrypt", "GenerateDataKey")), _key(profile)))
    return {"Version": VERSION, "Statement": statements}


def execution_policy(profile: SageMakerSite) -> dict[str, Any]:
    """Return the policy for the job's role."""
    write_logs = ("CreateLogGroup", "CreateLogStream", "PutLogEvents", "DescribeLogStreams")
    statements = [
        *_store(profile),
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
    """Return the trust policy of the role."""
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
    """Return every action of a document except the optional ones, sorted."""
    actions = [
        action
        for statement in policy["Statement"]
        if statement["Sid"] != "Optional"
        for action in statement["Action"]
    ]
    return sorted(set(actions))


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


def _store(profile: SageMakerSite) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a store needs: the same for who stages and who mirrors.

    Lists are of the whole bucket: with a condition on the prefix S3 answers a look for an object that is not
    there with 403. Objects are deleted where a checkpoint is pruned or an upload arrived altered.
    """
    objects = ("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload")
    return (
        _allow("List", _named("s3", ("ListBucket", "ListBucketMultipartUploads")), _bucket(profile)),
        _allow("Objects", _named("s3", objects), f"{_bucket(profile)}/{profile.prefix}/*"),
    )


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
