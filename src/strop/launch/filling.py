"""Filling the home of a job before anything is handed over: a scheduler may start it at once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, explain_refusal
from strop.io.atomic import explain_write_failure, write_bytes_atomically
from strop.launch.contract import JobPlan, JobRequest, MemberPlan
from strop.launch.env_files import write_environment
from strop.launch.home import (
    ATTEMPTS_FOLDER,
    CODE_NAME,
    DIFF_NAME,
    EVALUATION_NAME,
    RESOLVED_NAME,
    SPEC_NAME,
    has_plan,
    job_path_of,
    read_plan,
    write_plan,
)
from strop.launch.snapshot import pack_code, read_diff
from strop.spec import ResolvedSpec, load_spec, write_spec
from strop.spec.display import dotted, walk_values


def name_home(root: Path, name: str, submitted_at: float) -> Path:
    """Return a free home: the run's name and the time, UTC."""
    stamp = datetime.fromtimestamp(submitted_at, tz=UTC).strftime("%Y%m%d-%H%M%S")
    path, number = root / f"{name}-{stamp}", 1
    while path.exists():
        number += 1
        path = root / f"{name}-{stamp}-{number}"
    return path


def find_homes_of(root: Path, name: str) -> list[tuple[Path, JobPlan]]:
    """Return the homes below a folder whose job has this name, newest first."""
    if not root.is_dir():
        return []
    found = [
        (home, read_plan(job_path_of(home))) for home in sorted(root.glob(f"{name}-*")) if has_plan(home)
    ]
    mine = [(home, plan) for home, plan in found if plan.name == name]
    return sorted(mine, key=lambda item: item[1].submitted_at, reverse=True)


def fill_home(plan: JobPlan, request: JobRequest, environ: Mapping[str, str]) -> None:
    """Write everything that the job needs into its home; the plan last.

    Raises: CheckRefused if the code changes meanwhile; ConfigError for a member of a sweep that cannot work,
        and a secret that has no value any more; StoreError if the disk fails.
    """
    home, job_path = Path(plan.home), job_path_of(plan.home)
    try:
        job_path.mkdir(parents=True, exist_ok=True)
        for member in plan.members:
            (Path(member.path) / ATTEMPTS_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_failure(error, home) from error
    _write_spec(job_path, request)
    for member in plan.members:
        if member.overrides:
            _write_member(home, member, job_path / SPEC_NAME)
    if request.snapshot is not None:
        pack_code(request.snapshot, job_path / CODE_NAME)
        write_bytes_atomically(job_path / DIFF_NAME, read_diff(request.snapshot).encode(errors="replace"))
    write_files(plan)
    # The values of secrets as late as can be: a kill before leaves none behind.
    write_environment(
        job_path,
        plan.environment,
        environ,
        project_path=request.project_path,
        env_file=request.env_file,
    )
    write_plan(plan)


def refill_home(plan: JobPlan) -> None:
    """Make a filled home that of the run's next job: code, spec and variables stay. Raises: StoreError."""
    write_files(plan)
    write_plan(plan)


def write_preview(plan: JobPlan, request: JobRequest) -> None:
    """Write what a submission would hand over, and nothing that makes a folder the home of a job.

    Raises: CheckRefused if a job has this home; StoreError if the disk fails.
    """
    home, job_path = Path(plan.home), job_path_of(plan.home)
    if has_plan(home):
        raise CheckRefused(
            explain_refusal(
                f"{home} is the home of a job",
                allowed="a directory of its own: what a job was made of stays as it was",
                next_step="name another --output-dir, or leave it out to see everything and write nothing",
            )
        )
    try:
        job_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_failure(error, job_path) from error
    _write_spec(job_path, request)
    write_files(plan)


def _write_spec(job_path: Path, request: JobRequest) -> None:
    write_bytes_atomically(job_path / SPEC_NAME, write_spec(request.resolved).encode())
    write_bytes_atomically(job_path / RESOLVED_NAME, describe_resolved(request.resolved).encode())
    if request.evaluation is not None:
        write_bytes_atomically(job_path / EVALUATION_NAME, request.evaluation.to_text().encode())


def refuse_foreign_home(plan: JobPlan) -> None:
    """Refuse to write into the home of another job. Raises: CheckRefused."""
    home = Path(plan.home)
    if has_plan(home) and read_plan(job_path_of(home)).plan_hash != plan.plan_hash:
        raise CheckRefused(
            explain_refusal(
                f"{home} is the home of another job",
                allowed="a directory of its own for every job",
                next_step="name another output.dir, or remove it to get a dated directory",
            )
        )


def write_files(plan: JobPlan) -> None:
    """Write what the backend hands to its scheduler. Raises: StoreError if the disk fails."""
    job_path = job_path_of(plan.home)
    for name, content in plan.files.items():
        try:
            (job_path / name).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_write_failure(error, job_path / name) from error
        write_bytes_atomically(job_path / name, content.encode())
        if content.startswith("#!"):
            os.chmod(job_path / name, 0o755)


def describe_resolved(resolved: ResolvedSpec) -> str:
    """Return every setting with its value and its source as JSON; a setting that is unset is null."""
    values: dict[str, Any] = {}
    for path, value in walk_values(resolved.spec.model_dump(mode="json")):
        values[dotted(path)] = value
    content = {
        key: {"value": value, "source": resolved.origins.get(key, "default")} for key, value in values.items()
    }
    return json.dumps(content, indent=1, ensure_ascii=False)


def _write_member(home: Path, member: MemberPlan, spec_path: Path) -> None:
    # Members are called 0, 1, ...: in a store they stand below the name of their job.
    folder = re.sub(r"[^A-Za-z0-9._-]", "-", home.name).lstrip("._-") or "job"
    resolved = load_spec(spec_path, [*member.overrides, f"store.mirror_as={folder}/{member.index}"])
    member_path = Path(member.path)
    job_path_of(member_path).mkdir(exist_ok=True)
    write_bytes_atomically(job_path_of(member_path) / SPEC_NAME, write_spec(resolved).encode())
