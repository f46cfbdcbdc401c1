"""The `CreateTrainingJob` request of a plan: pure, so that a dry run shows the exact bytes.

Names, tags, keys and hyperparameters reveal nothing about model, data or method; the run file is only in the
channel `config`. Secrets are ARNs here, never values.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from strop.errors import ConfigError
from strop.io.atomic import MANIFEST_NAME
from strop.launch.contract import JobPlan, JobRequest, TrialPlan
from strop.launch.sagemaker import places
from strop.launch.sagemaker.client import INSTALL
from strop.launch.sagemaker.limits import check_request
from strop.launch.sagemaker.places import (
    MAX_PREFIX_CHARACTERS,
    base_name,
    find_revealing,
    require_name,
    run_key,
    trial_name,
)
from strop.launch.sagemaker.settings import SageMakerSettings, list_assets, read_settings, refuse_local
from strop.store.policy import URI_VARIABLE

ENTRY_PYTHON = "python3"
REQUEST_FILE = "request.json"
_OFFLINE_VARIABLES = {"STROP_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
_SLOW_SAVE_NOTICE = "the platform kills 120 s after it says stop: a save must take less than 80 s"
_STAMP = re.compile(r"-\d{8}-\d{6}(-[0-9a-f]{3,4})*$")
_STATE = re.compile(rf"[^/]+/step-(\d+)/{MANIFEST_NAME}")


def complete_plan(plan: JobPlan, request: JobRequest) -> JobPlan:
    """Add the requests of all trials, their places in S3, and notices.

    Raises: ConfigError with everything that the service would refuse.
    """
    settings = read_settings(request)
    assets = list_assets(request.resolved.spec, request.evaluation)
    if not settings.profile.local:
        refuse_local(assets)
    _refuse_impossible(plan, request, settings)
    variables = dict(plan.environment.variables)
    added = {} if variables.get(URI_VARIABLE) else {URI_VARIABLE: settings.store}
    if settings.profile.offline:
        added |= _OFFLINE_VARIABLES
    if settings.profile.region and "AWS_REGION" not in variables:
        added["AWS_REGION"] = settings.profile.region
    sources = {**plan.environment.sources, **dict.fromkeys(added, "launcher")}
    plan = replace(
        plan,
        environment=replace(
            plan.environment, variables=dict(sorted({**variables, **added}.items())), sources=sources
        ),
    )
    base = settings.profile.job_name or base_name(settings.profile.name_prefix, plan.submitted_at)
    require_name(base)
    key = settings.profile.run_key or run_key(plan.name, plan.home)
    jobs = [_build_job(plan, request, settings, trial, base, key) for trial in plan.trials]
    notices = (*plan.notices, *_notices(plan, request, settings, jobs))
    config = _config_name(request)
    details = {
        **plan.details,
        "jobs": jobs,
        "run_key": key,
        "region": settings.profile.region,
        "image": settings.image,
        "store": settings.store,
        "description": settings.profile.description or "",
        "config": config,
        "job_log": str(request.project_path / settings.profile.job_log),
        "parent": settings.profile.parent,
        "secrets": dict(settings.secrets),
        "secret_roles": {name: list(roles) for name, roles in settings.secret_roles.items()},
        "named_assets": [{"key": asset.key, "value": asset.value, "place": asset.place} for asset in assets],
    }
    files = {**plan.files, REQUEST_FILE: show_requests(jobs)}
    return replace(plan, details=details, notices=notices, files=files)


def show_requests(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Return all trials' requests as JSON, for a dry run and for the job's folder."""
    return json.dumps([job["request"] for job in jobs] if len(jobs) > 1 else jobs[0]["request"], indent=1)


def _build_job(
    plan: JobPlan,
    request: JobRequest,
    settings: SageMakerSettings,
    trial: TrialPlan,
    base: str,
    key: str,
) -> dict[str, Any]:
    name = trial_name(base, trial.index, len(plan.trials))
    trial_key = trial_name(key, trial.index, len(plan.trials))
    return {
        "name": name,
        "trial": trial.index,
        "run_key": trial_key,
        "config_uri": places.config_uri(settings.root, name),
        "source_uri": places.source_uri(settings.root, name) if plan.code_sha256 else None,
        "state_uri": places.state_uri(settings.root, trial_key),
        "record_uri": places.record_uri(settings.store, name),
        "request": build_request(plan, request, settings, name=name, trial=trial, run_key=trial_key),
    }


def build_request(
    plan: JobPlan,
    request: JobRequest,
    settings: SageMakerSettings,
    *,
    name: str,
    trial: TrialPlan,
    run_key: str,
) -> dict[str, Any]:
    """Return the request for one trial. Pure; equal plans give equal requests."""
    profile = settings.profile
    entry = [profile.python or ENTRY_PYTHON, "-m", places.ENTRY_MODULE]
    output: dict[str, Any] = {"S3OutputPath": f"{settings.root}/output", "CompressionType": "GZIP"}
    if profile.kms_key:
        output["KmsKeyId"] = profile.kms_key
    stopping = {"MaxRuntimeInSeconds": settings.max_runtime_s}
    if settings.max_wait_s is not None:
        stopping["MaxWaitTimeInSeconds"] = settings.max_wait_s
    built: dict[str, Any] = {
        "TrainingJobName": name,
        "RoleArn": profile.role,
        "AlgorithmSpecification": {
            "TrainingImage": settings.image,
            "TrainingInputMode": "File",
            # Not through a shell, which as first process would swallow SIGTERM.
            "ContainerEntrypoint": list(entry),
        },
        "HyperParameters": {places.RUN_PARAMETER: run_key, places.PLAN_PARAMETER: plan.plan_hash},
        "InputDataConfig": _channels(plan, settings, name),
        "OutputDataConfig": output,
        "ResourceConfig": _resources(settings),
        "StoppingCondition": stopping,
        "CheckpointConfig": {
            "S3Uri": f"{places.state_uri(settings.root, run_key)}/",
            "LocalPath": places.CHECKPOINT_PATH,
        },
        "EnableManagedSpotTraining": settings.is_spot,
        "EnableInterContainerTrafficEncryption": profile.encrypt_traffic,
        "Environment": dict(plan.environment.variables),
        "Tags": _tags(plan, settings, trial, run_key),
    }
    subnets, groups = profile.subnets, profile.security_groups
    if subnets or groups:
        built["VpcConfig"] = {"Subnets": list(subnets), "SecurityGroupIds": list(groups)}
    if settings.instance_count > 1:
        built["InfraCheckConfig"] = {"EnableInfraCheck": True}
    return built


def count_hosts(request: Mapping[str, Any]) -> int:
    """Return the number of hosts in all groups of a request."""
    resources = request["ResourceConfig"]
    groups = resources.get("InstanceGroups") or [resources]
    return sum(int(group["InstanceCount"]) for group in groups)


def _channels(plan: JobPlan, settings: SageMakerSettings, name: str) -> list[dict[str, Any]]:
    sources = {places.CONFIG_CHANNEL: f"{places.config_uri(settings.root, name)}/"}
    if plan.code_sha256:
        sources[places.CODE_CHANNEL] = f"{places.source_uri(settings.root, name)}/"
    return [
        {
            "ChannelName": channel,
            "DataSource": {
                "S3DataSource": {
                    "S3DataType": "S3Prefix",
                    "S3Uri": uri,
                    # If sharded, some hosts would get no objects.
                    "S3DataDistributionType": "FullyReplicated",
                }
            },
            "InputMode": "File",
        }
        for channel, uri in sources.items()
    ]


def _resources(settings: SageMakerSettings) -> dict[str, Any]:
    resources: dict[str, Any] = {"VolumeSizeInGB": settings.profile.volume_gb}
    if settings.num_cpu_nodes:
        resources["InstanceGroups"] = [
            {
                "InstanceGroupName": group,
                "InstanceType": instance_type,
                "InstanceCount": count,
            }
            for group, instance_type, count in (
                ("main", settings.profile.instance_type, settings.instance_count),
                ("cpu", settings.profile.cpu_instance_type, settings.num_cpu_nodes),
            )
        ]
    else:
        resources["InstanceType"] = settings.profile.instance_type
        resources["InstanceCount"] = settings.instance_count
    if settings.profile.kms_key:
        resources["VolumeKmsKeyId"] = settings.profile.kms_key
    keep_alive_s = settings.profile.keep_alive_s
    if keep_alive_s:
        resources["KeepAlivePeriodInSeconds"] = keep_alive_s
    return resources


def _tags(plan: JobPlan, settings: SageMakerSettings, trial: TrialPlan, run_key: str) -> list[dict[str, str]]:
    ours = {
        places.RUN_TAG: run_key,
        places.PLAN_TAG: plan.plan_hash,
        places.TRIAL_TAG: str(trial.index),
        places.USER_TAG: plan.user,
    }
    return [{"Key": key, "Value": value} for key, value in {**settings.profile.tags, **ours}.items()]


def _refuse_impossible(plan: JobPlan, request: JobRequest, settings: SageMakerSettings) -> None:
    local = sorted(set(plan.environment.secrets) - set(settings.secrets))
    if local:
        raise ConfigError(
            f"{', '.join(local)}: secrets, and who may describe a job reads its variables",
            allowed="secrets that the job fetches itself, by ARN",
            next_step="name their ARNs in secret_arns of the site profile, and take them out of `secrets`"
            " and `.env`",
        )
    if settings.is_spot and settings.profile.keep_alive_s:
        raise ConfigError(
            f"keep_alive_s={settings.profile.keep_alive_s} together with spot instances",
            allowed="a warm pool, or spot instances",
            next_step="leave out one of them",
        )


def _notices(
    plan: JobPlan, request: JobRequest, settings: SageMakerSettings, jobs: list[dict[str, Any]]
) -> list[str]:
    """Check every request; return notices for the user. Raises: ConfigError."""
    spec = request.resolved.spec
    public = {
        "name_prefix": settings.profile.name_prefix,
        "prefix": settings.profile.prefix,
        "image": settings.image,
        **{f"tags.{key}": value for key, value in settings.profile.tags.items()},
    }
    words = [plan.name, *spec.model.uri.lower().split("/")]
    notices = find_revealing(public, words)
    if settings.is_spot:
        notices.append(f"spot: {_SLOW_SAVE_NOTICE}")
    if find_spec("botocore") is None:
        text = "the request is not checked against SageMaker's limits: boto3 is not installed"
        return [*notices, f"{text} ({INSTALL})"]
    findings = [finding for job in jobs for finding in check_request(job["request"])]
    if findings:
        unique = list({finding.given: finding for finding in findings}.values())
        raise ConfigError("\n".join(map(str, unique)))
    return notices


def _config_name(request: JobRequest) -> str:
    """Return the user's name of the run file, else the first file with a setting."""
    if request.run_file:
        return request.run_file
    origins = (origin.rpartition(":")[0] for origin in request.resolved.origins.values() if ":" in origin)
    return next((origin for origin in origins if origin), "")


def renew_plan(plan: JobPlan, submitted_at: float) -> JobPlan:
    """Return the plan of a run's next job, with new names and new folders that are named by the job. Pure.

    State is kept by run, so the new job finds it; image, instances, variables and limits are unchanged.
    """
    first = str(plan.details["jobs"][0]["name"])
    prefix = _STAMP.sub("", first)[:MAX_PREFIX_CHARACTERS].rstrip("-")
    base = base_name(prefix, submitted_at)
    jobs = [_rename(job, trial_name(base, job["trial"], len(plan.trials))) for job in plan.details["jobs"]]
    return replace(
        plan,
        details={**plan.details, "jobs": jobs, "parent": plan.follows},
        files={**plan.files, REQUEST_FILE: show_requests(jobs)},
    )


def step_of_state(name: str) -> int | None:
    """Return the step in the name of a manifest below the run's state in S3, or None."""
    match = _STATE.fullmatch(name)
    return None if match is None else int(match[1])


def _rename(job: dict[str, Any], name: str) -> dict[str, Any]:
    old = job["name"]
    moved = {
        key: job[key] and f"{str(job[key]).removesuffix(old)}{name}"
        for key in ("config_uri", "source_uri", "record_uri")
    }
    request = copy.deepcopy(job["request"])
    request["TrainingJobName"] = name
    sources = {places.CONFIG_CHANNEL: moved["config_uri"], places.CODE_CHANNEL: moved["source_uri"]}
    for channel in request["InputDataConfig"]:
        if channel["ChannelName"] in sources:
            channel["DataSource"]["S3DataSource"]["S3Uri"] = f"{sources[channel['ChannelName']]}/"
    return {**job, **moved, "name": name, "request": request}
