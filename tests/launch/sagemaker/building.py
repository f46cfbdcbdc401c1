"""Builds plans for SageMaker, as `strop submit` would hand them to the backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.launch.contract import JobEnvironment, JobPlan, JobRequest, Resources, RolePlan, TrialPlan
from strop.launch.options import Site
from strop.launch.sagemaker.options import SageMakerSite
from strop.launch.sagemaker.request import complete_plan
from strop.spec import load_spec

NOON = 1_795_262_400.0  # 2026-11-21 12:00:00 UTC.
PROFILE: Mapping[str, Any] = {
    "region": "us-east-1",
    "role": "arn:aws:iam::123456789012:role/strop-execution",
    "bucket": "strop-test",
    "repository": "123456789012.dkr.ecr.us-east-1.amazonaws.com/strop",
    "job_log": "docs/job_log.md",
}
PROGRAM = ("python3", "{code}/program.py", "{run}")


def make_request(
    *,
    project: Path = Path("/project"),
    profile: Mapping[str, Any] | None = None,
    overrides: tuple[str, ...] = (),
    environment: JobEnvironment | None = None,
    resources: Resources | None = None,
    instance_count: int = 1,
    run_file: str = "",
    **options: Any,
) -> JobRequest:
    task = () if any(text.startswith("task.name=") for text in overrides) else ("task.name=arithmetic",)
    resolved = load_spec(None, ("name=small-try", *task, *overrides))
    return JobRequest(
        resolved=resolved,
        site=Site(name="cloud", profile=SageMakerSite(**{**PROFILE, **(profile or {})})).changed(**options),
        command="train",
        resources=resources or Resources(num_nodes=instance_count),
        roles=(RolePlan(name="train", argv=PROGRAM),),
        environment=environment or JobEnvironment(variables={"NCCL_DEBUG": "WARN"}),
        snapshot=None,
        project_path=project,
        home=str(project / "runs/small-try-20261121-120000"),
        python="python3",
        user="ann",
        submitted_at=NOON,
        run_file=run_file,
    )


def make_plan(request: JobRequest, *, num_trials: int = 1, code_sha256: str | None = "c" * 64) -> JobPlan:
    paths = [request.home] if num_trials == 1 else [f"{request.home}/members/{i}" for i in range(num_trials)]
    bare = JobPlan(
        name=request.resolved.spec.name,
        site=request.site.name,
        backend="sagemaker",
        command=request.command,
        home=request.home,
        trials=tuple(TrialPlan(index=index, path=path) for index, path in enumerate(paths)),
        resources=request.resources,
        roles=request.roles,
        python=request.python,
        plan_hash="abcdef0123456789",
        code_sha256=code_sha256,
        spec_digest="d" * 64,
        user=request.user,
        submitted_at=request.submitted_at,
        environment=request.environment,
    )
    return complete_plan(bare, request)


def plan_of(**changes: Any) -> JobPlan:
    return make_plan(make_request(**changes))


def request_of(plan: JobPlan, trial: int = 0) -> dict[str, Any]:
    built: dict[str, Any] = plan.details["jobs"][trial]["request"]
    return built
