"""From a request to a plan: pure, so that the same request gives the same bytes.

The hash covers everything that decides what is run (spec, code, site, resources, roles, variables), and
not when and where it was submitted. It makes a second submission of the same thing findable.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

from strop.errors import ConfigError, explain_refusal
from strop.launch.contract import Backend, JobPlan, JobRequest, MemberPlan, Resources
from strop.spec import spec_digest
from strop.spec.display import show_text

MEMBERS_FOLDER = "members"
TAG_PREFIX = "strop:"
"""Before the plan's hash, in whatever a scheduler lets a job be labelled with."""
_HASH_LENGTH = 16


def make_plan(request: JobRequest, backend: Backend) -> JobPlan:
    """Return what would be submitted. No disk, network, clock or random.

    Raises: ConfigError for what can be known to be impossible.
    """
    _check_home(request.home)
    spec, job = request.resolved.spec, request.resolved.spec.job
    gpu_hours = _count_gpu_hours(request.resources, len(request.sweep) or 1)
    price = request.site.profile.usd_per_gpu_hour
    plan = JobPlan(
        name=spec.name,
        site=request.site.name,
        backend=backend.name,
        profile=request.site.profile.model_dump(mode="json"),
        command=request.command,
        home=request.home,
        members=_list_members(request),
        resources=request.resources,
        roles=request.roles,
        python=request.python,
        plan_hash=hash_request(request),
        code_sha256=request.snapshot.sha256 if request.snapshot else None,
        spec_digest=spec_digest(spec),
        user=request.user,
        submitted_at=request.submitted_at,
        environment=request.environment,
        max_requeue=job.max_requeue,
        num_past=request.num_past,
        grace_s=job.grace_s,
        preflight=job.preflight,
        max_silence_s=job.max_silence_s,
        gpu_hours=gpu_hours,
        cost_usd=None if gpu_hours is None or price is None else gpu_hours * price,
        details={"project_path": str(request.project_path), "submitted_from": str(request.project_path)},
        conflicts=request.conflicts,
        notices=request.resolved.notices,
    )
    return backend.complete(plan, request)


def hash_request(request: JobRequest) -> str:
    """Return the plan's hash. Values of variables enter it as digests."""
    content: dict[str, Any] = {
        "spec": spec_digest(request.resolved.spec),
        # Of an evaluation's file counts what it says, and not where it lies.
        "job": request.resolved.spec.job.model_dump(mode="json", exclude={"eval_config"}),
        "store": request.resolved.spec.store.model_dump(mode="json"),
        "site": request.site.model_dump(mode="json"),
        "command": request.command,
        "resources": asdict(request.resources),
        "roles": [asdict(role) for role in request.roles],
        "code": request.snapshot.sha256 if request.snapshot else str(request.project_path),
        "variables": {name: _digest(value) for name, value in request.environment.variables.items()},
        "secrets": sorted(request.environment.secrets),
        "python": request.python,
        "sweep": request.sweep,
        "options": dict(request.options),
        "evaluation": request.evaluation.to_text() if request.evaluation else None,
    }
    return _digest(json.dumps(content, sort_keys=True, ensure_ascii=False, default=str))[:_HASH_LENGTH]


def tag_of(plan_hash: str) -> str:
    """Return the label that a plan's job carries."""
    return TAG_PREFIX + plan_hash


def move_plan(request: JobRequest, home: str) -> JobRequest:
    """Return the same request for another home."""
    return replace(request, home=home)


def _list_members(request: JobRequest) -> tuple[MemberPlan, ...]:
    if not request.sweep:
        return (MemberPlan(index=0, path=request.home),)
    return tuple(
        MemberPlan(index=index, path=f"{request.home}/{MEMBERS_FOLDER}/{index}", overrides=overrides)
        for index, overrides in enumerate(request.sweep)
    )


def _count_gpu_hours(resources: Resources, num_members: int) -> float | None:
    """Return the GPU hours that a job can use at most, if it is never requeued; None without a limit."""
    if resources.time_limit_s is None:
        return None
    return resources.num_nodes * resources.gpus_per_node * num_members * resources.time_limit_s / 3600.0


def _check_home(home: str) -> None:
    if any(ord(character) < 32 or ord(character) == 127 for character in home):
        raise ConfigError(
            explain_refusal(
                f"the job's directory {show_text(home)} holds a control character",
                allowed="a path of printable characters; spaces, quotes and $ are fine",
                next_step="change output.root or output.dir",
            )
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
