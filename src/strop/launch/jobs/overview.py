"""Many jobs at once: one question to each scheduler, however many jobs it has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.launch.backends import backend_of
from strop.launch.jobs.contract import JobPlan, JobRef, JobStatus
from strop.launch.jobs.home import has_ref, job_path_of, read_plan, read_ref
from strop.launch.jobs.index import list_homes
from strop.launch.jobs.launcher import Launcher


def list_statuses(roots: list[Path], environ: Mapping[str, str]) -> list[JobStatus]:
    """Return where all jobs of this user stand, newest first. Raises: StoreError, CorruptRecord."""
    groups: dict[str, tuple[JobPlan, list[JobRef]]] = {}
    for home in list_homes(roots, environ):
        if has_ref(home):
            plan = read_plan(job_path_of(home))
            key = f"{plan.backend} {sorted(plan.profile.items(), key=str)}"
            groups.setdefault(key, (plan, []))[1].append(read_ref(job_path_of(home)))
    found = [one for plan, refs in groups.values() for one in Launcher(backend_of(plan)).status(refs)]
    return sorted(found, key=lambda one: one.ref.submitted_at, reverse=True)


def status_to_json(status: JobStatus) -> dict[str, Any]:
    """Return a status for programs."""
    attempt = status.attempt
    return {
        "name": status.ref.name,
        "member": status.member,
        "state": status.state.value,
        "reason": status.reason,
        "source": status.source.value,
        "age_s": status.age_s,
        "site": status.ref.site,
        "job_id": status.ref.job_id,
        "home": status.ref.home,
        "nodes": status.nodes,
        "attempt": None
        if attempt is None
        else {"name": attempt.name, "number": attempt.number, "exit_code": attempt.exit_code},
    }
