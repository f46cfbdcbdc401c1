"""The next job of a run: new names, and new places for what is kept by a job's name. Pure.

Its state is kept by run, so that it finds what the job before it saved; image, instances, variables and
limits are those of that job, to the letter.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

from strop.io.atomic import MANIFEST_NAME
from strop.launch.contract import JobPlan
from strop.launch.sagemaker import places
from strop.launch.sagemaker.names import MAX_PREFIX_CHARACTERS, base_name, member_name
from strop.launch.sagemaker.request import REQUEST_FILE, show_requests

_STAMP = re.compile(r"-\d{8}-\d{6}(-[0-9a-f]{3,4})*$")
_STATE = re.compile(rf"[^/]+/step-(\d+)/{MANIFEST_NAME}")


def renew_plan(plan: JobPlan, submitted_at: float) -> JobPlan:
    """Return a plan whose jobs have the names of another instant."""
    first = str(plan.details["jobs"][0]["name"])
    prefix = _STAMP.sub("", first)[:MAX_PREFIX_CHARACTERS].rstrip("-")
    base = base_name(prefix, submitted_at)
    jobs = [_rename(job, member_name(base, job["member"], len(plan.members))) for job in plan.details["jobs"]]
    return replace(
        plan,
        details={**plan.details, "jobs": jobs, "parent": plan.follows},
        files={**plan.files, REQUEST_FILE: show_requests(jobs)},
    )


def step_of_state(name: str) -> int | None:
    """Return the step of a state whose manifest this is, a name below the run's state in S3."""
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
