"""The job directory: its files, and how they are written and read.

    <home>/job/{plan.json, spec.toml, resolved.json, code.tar.zst, code.diff, env.json, secrets.json}
    <home>/job/{ray.token, ref.json, state.json, job.sh ...}  <home>/members/<i>/job/spec.toml of a sweep
    <trial>/attempts/<attempt>/{agent-<node>.json, <node>/<role>.log, exit/<node>, verdict.json}

It is complete before the job is submitted, because a scheduler may start the job at once. plan.json holds no
value of a variable, because an environment may hold private values. In code a job directory is called `home`,
and its `job` folder `job_path`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from strop.errors import CheckRefused, CorruptRecord, StoreError
from strop.io import FileLock
from strop.io.atomic import explain_write_failure, write_bytes_atomically
from strop.launch.contract import JobPlan, JobRef, JobRequest
from strop.launch.environment import write_environment
from strop.launch.secrets import write_ray_token
from strop.launch.snapshot import pack_code, read_diff
from strop.spec.display import dotted, walk_values

if TYPE_CHECKING:
    from strop.spec import ResolvedSpec

JOB_FOLDER = "job"
PLAN_NAME = "plan.json"
REF_NAME = "ref.json"
STATE_NAME = "state.json"
SPEC_NAME = "spec.toml"
RESOLVED_NAME = "resolved.json"
EVALUATION_NAME = "eval.toml"
CODE_NAME = "code.tar.zst"
DIFF_NAME = "code.diff"
REFUSED_NAME = "refused.txt"
"""The scheduler's message, if it refused the job."""
CANCELLED_NAME = "cancelled.txt"
"""Holds the id of the job that was cancelled."""
ATTEMPTS_FOLDER = "attempts"
HIDDEN = "***"
"""Replaces the value of a variable."""
T = TypeVar("T")


def write_job_dir(plan: JobPlan, request: JobRequest, environ: Mapping[str, str]) -> None:
    """Write all files of a job into its directory, the plan last.

    Raises: CheckRefused if the code changes meanwhile; ConfigError for a trial of a sweep that cannot work,
        and a secret that no longer has a value; StoreError if the disk fails.
    """
    # Imported here: agents and supervisors only read the plan.
    from strop.spec import load_spec, write_spec

    home, job_path = Path(plan.home), job_path_of(plan.home)
    try:
        job_path.mkdir(parents=True, exist_ok=True)
        for trial in plan.trials:
            (Path(trial.path) / ATTEMPTS_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_failure(error, home) from error
    _write_spec(job_path, request)
    # In a store the trials 0, 1, ... are below the name of their job.
    folder = re.sub(r"[^A-Za-z0-9._-]", "-", home.name).lstrip("._-") or "job"
    for trial in plan.trials:
        if trial.overrides:
            mirror = f"store.mirror_as={folder}/{trial.index}"
            resolved = load_spec(job_path / SPEC_NAME, [*trial.overrides, mirror])
            trial_job_path = job_path_of(trial.path)
            trial_job_path.mkdir(exist_ok=True)
            write_bytes_atomically(trial_job_path / SPEC_NAME, write_spec(resolved).encode())
    if request.snapshot is not None:
        pack_code(request.snapshot, job_path / CODE_NAME)
        write_bytes_atomically(job_path / DIFF_NAME, read_diff(request.snapshot).encode(errors="replace"))
    _write_backend_files(plan)
    # Secrets are written as late as possible: a kill before this leaves none behind.
    write_environment(
        job_path,
        plan.environment,
        environ,
        project_path=request.project_path,
        env_file=request.env_file,
    )
    _write_ray_token(plan)
    write_plan(plan)


def update_job_dir(plan: JobPlan) -> None:
    """Write a run's next job into its directory; code, spec and variables stay. Raises: StoreError."""
    _write_backend_files(plan)
    _write_ray_token(plan)
    write_plan(plan)


def _write_ray_token(plan: JobPlan) -> None:
    """Write what the nodes of a job prove to each other. Raises: StoreError if the disk fails."""
    if plan.resources.num_nodes + plan.resources.num_cpu_nodes > 1:
        write_ray_token(job_path_of(plan.home))


def write_preview(plan: JobPlan, request: JobRequest) -> None:
    """Write the files that a submission would send, without making the folder a job directory.

    Raises: CheckRefused if a job has this directory; StoreError if the disk fails.
    """
    home, job_path = Path(plan.home), job_path_of(plan.home)
    if has_plan(home):
        raise CheckRefused(
            f"{home} is the directory of a job",
            allowed="a directory of its own: what a job was made of stays as it was",
            next_step="name another --output-dir, or leave it out to see everything and write nothing",
        )
    try:
        job_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_failure(error, job_path) from error
    _write_spec(job_path, request)
    _write_backend_files(plan)


def _write_spec(job_path: Path, request: JobRequest) -> None:
    """Write the run file, every setting with its source (null: unset), and the evaluation's file."""
    from strop.spec import write_spec

    resolved = request.resolved
    write_bytes_atomically(job_path / SPEC_NAME, write_spec(resolved).encode())
    write_bytes_atomically(job_path / RESOLVED_NAME, describe_resolved(resolved).encode())
    if request.evaluation is not None:
        write_bytes_atomically(job_path / EVALUATION_NAME, request.evaluation.to_text().encode())
        for name, path in request.evaluation.carried.items():
            write_bytes_atomically(job_path / name, path.read_bytes())


def describe_resolved(resolved: ResolvedSpec) -> str:
    """Return every setting with its value (null if unset) and its source as JSON."""
    content = {
        (key := dotted(path)): {"value": value, "source": resolved.origins.get(key, "default")}
        for path, value in walk_values(resolved.spec.model_dump(mode="json"))
    }
    return json.dumps(content, indent=1, ensure_ascii=False)


def _write_backend_files(plan: JobPlan) -> None:
    """Write the backend's files for its scheduler. Raises: StoreError if the disk fails."""
    job_path = job_path_of(plan.home)
    for name, content in plan.files.items():
        try:
            (job_path / name).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_write_failure(error, job_path / name) from error
        write_bytes_atomically(job_path / name, content.encode())
        if content.startswith("#!"):
            os.chmod(job_path / name, 0o755)


def name_job_dir(root: Path, name: str, submitted_at: float) -> Path:
    """Return an unused path: the run's name and the time in UTC."""
    stamp = datetime.fromtimestamp(submitted_at, tz=UTC).strftime("%Y%m%d-%H%M%S")
    path, number = root / f"{name}-{stamp}", 1
    while path.exists():
        number += 1
        path = root / f"{name}-{stamp}-{number}"
    return path


def find_job_dirs_of(root: Path, name: str) -> list[tuple[Path, JobPlan]]:
    """Return the directories and plans of the jobs of this name in a folder, newest first."""
    if not root.is_dir():
        return []
    homes = [home for home in sorted(root.glob(f"{name}-*")) if has_plan(home)]
    jobs = [(home, plan) for home in homes if (plan := read_plan(job_path_of(home))).name == name]
    return sorted(jobs, key=lambda job: job[1].submitted_at, reverse=True)


def lock_folder(home: Path) -> FileLock:
    """Return the lock of the folder that a job's directory is in: one submission there at a time.

    Raises: StoreError if the folder cannot be made.
    """
    root = home.resolve().parent
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_failure(error, root) from error
    return FileLock(root / ".submit.lock")


def refuse_foreign_job_dir(plan: JobPlan) -> None:
    """Refuse to write into the directory of another job. Raises: CheckRefused."""
    home = Path(plan.home)
    if has_plan(home) and read_plan(job_path_of(home)).plan_hash != plan.plan_hash:
        raise CheckRefused(
            f"{home} is the directory of another job",
            allowed="a directory of its own for every job",
            next_step="name another output.dir, or remove it to get a dated directory",
        )


def job_path_of(home: str | Path) -> Path:
    """Return the folder of the submitted files."""
    return Path(home) / JOB_FOLDER


def has_plan(home: Path) -> bool:
    """Whether a folder is the directory of a job."""
    return (home / JOB_FOLDER / PLAN_NAME).is_file()


def has_ref(home: Path) -> bool:
    """Whether a scheduler has accepted the job of a directory."""
    return (home / JOB_FOLDER / REF_NAME).is_file()


def plan_to_json(plan: JobPlan) -> str:
    """Return a plan as JSON, without the values of its variables."""
    hidden = dict.fromkeys(plan.environment.variables, HIDDEN)
    shown = replace(plan, environment=replace(plan.environment, variables=hidden))
    if "env" in plan.profile:
        shown = replace(shown, profile={**plan.profile, "env": dict.fromkeys(plan.profile["env"], HIDDEN)})
    return json.dumps(asdict(shown), indent=1, ensure_ascii=False, sort_keys=True)


def write_plan(plan: JobPlan) -> None:
    """Write a plan into its job directory. Raises: StoreError if the disk fails."""
    write_bytes_atomically(job_path_of(plan.home) / PLAN_NAME, plan_to_json(plan).encode())


def read_plan(job_path: Path) -> JobPlan:
    """Read the plan of a job, without the values of its variables: see `environment.read_environment`.

    Raises: StoreError if there is none; CorruptRecord if it is damaged.
    """
    return _read(job_path / PLAN_NAME, JobPlan)


def write_ref(ref: JobRef) -> None:
    """Write the reference of a job into its directory. Raises: StoreError if the disk fails."""
    text = json.dumps(asdict(ref), indent=1, ensure_ascii=False)
    write_bytes_atomically(job_path_of(ref.home) / REF_NAME, text.encode())


def read_ref(job_path: Path) -> JobRef:
    """Read the reference of a job. Raises: StoreError if there is none; CorruptRecord if it is damaged."""
    return _read(job_path / REF_NAME, JobRef)


# Created on first use, which takes longer than the rest of this module's import.
_form_of: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def _read(path: Path, kind: type[T]) -> T:
    try:
        content: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read ({error.strerror})",
            allowed="the directory of a job that strop submitted",
            next_step="name another one; `strop ls` lists them",
        ) from error
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    try:
        read: T = _form_of(kind).validate_python(content)
    except ValidationError as error:
        raise _damaged(path, f"{error.error_count()} values have another form") from error
    return read


def _damaged(path: Path, why: str) -> CorruptRecord:
    return CorruptRecord(
        f"{path} is damaged ({why})",
        allowed="the file as strop wrote it",
        next_step="submit again under another name; the run's checkpoints are not concerned",
    )
