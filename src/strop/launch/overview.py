"""Many jobs at once: one question to each scheduler, however many jobs it has."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.errors import StoreError, StropError
from strop.launch.backends import backend_of, open_backend
from strop.launch.contract import JobPlan, JobRef, JobState, JobStatus, StatusSource
from strop.launch.home import has_plan, has_ref, job_path_of, read_plan, read_ref
from strop.launch.index import list_homes, list_job_names
from strop.launch.last_known import recall_end
from strop.launch.launcher import Launcher
from strop.spec.sites import BACKENDS, KnownSite, find_site, list_sites


def list_statuses(roots: list[Path], environ: Mapping[str, str]) -> list[JobStatus]:
    """Return where all jobs of this user stand, newest first.

    A damaged home is `unknown` and hides no other one. Raises: StoreError if a folder cannot be listed.
    """
    groups: dict[str, tuple[JobPlan, list[JobRef]]] = {}
    found: list[JobStatus] = []
    for home in list_homes(roots, environ):
        if not has_ref(home):
            continue
        try:
            plan, ref = read_plan(job_path_of(home)), read_ref(job_path_of(home))
        except StoreError as error:
            found.append(_damaged(home, error))
            continue
        ended = recall_end(ref, [member.index for member in plan.members])
        if ended is not None:
            found += ended
            continue
        key = f"{plan.backend} {sorted(plan.profile.items(), key=str)}"
        groups.setdefault(key, (plan, []))[1].append(ref)
    found += [one for plan, refs in groups.values() for one in Launcher(backend_of(plan)).status(refs)]
    return sorted(found, key=lambda one: one.ref.submitted_at, reverse=True)


def _damaged(home: Path, error: StoreError) -> JobStatus:
    ref = JobRef(
        name=home.name, site="-", backend="-", home=str(home), job_id="-", plan_hash="", submitted_at=0.0
    )
    return JobStatus(
        ref=ref, member=0, state=JobState.UNKNOWN, reason=str(error), source=StatusSource.NOTHING
    )


def find_orphans(
    roots: list[Path], environ: Mapping[str, str], *, now: float | None = None
) -> list[tuple[str, str]]:
    """Return what has lost its other half: jobs whose home is gone, and homes whose job nobody knows.

    A scheduler that does not answer has no orphans that anybody knows of.
    """
    found = []
    known = list_job_names(roots, environ)
    for site in (
        *list_sites(Path.cwd(), environ),
        *(KnownSite(name=one, backend=one, files=()) for one in BACKENDS),
    ):
        backend = open_backend(find_site(site.name, Path.cwd(), environ))
        try:
            tagged = list(backend.list_tagged())
        except (StropError, ImportError):
            # A site that is not in use here has no scheduler to ask.
            continue
        found += [
            (
                f"job {ref.job_id} on {site.name}, submitted {_show_age(ref, now)} ago",
                f"its directory {ref.home or '(unknown)'} is not there",
            )
            for ref in tagged
            if ref.job_id not in known and not (ref.home and has_plan(Path(ref.home)))
        ]
    for status in list_statuses(roots, environ):
        if status.state is JobState.UNKNOWN:
            found.append((status.ref.home, f"job {status.ref.job_id}: {status.reason}"))
    return list(dict.fromkeys(found))


def _show_age(ref: JobRef, now: float | None) -> str:
    age_s = (time.time() if now is None else now) - ref.submitted_at
    return f"{max(0.0, age_s) / 3600.0:.1f} h"


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
