"""The home of a job on a disk: where everything of it is, and how plan and reference are kept there.

    <home>/job/{plan.json, spec.toml, resolved.json, code.tar.zst, code.diff, env.json, secrets.json}
    <home>/job/{ref.json, state.json, job.sh ...}             <home>/members/<i>/job/spec.toml of a sweep
    <member>/attempts/<attempt>/{agent-<node>.json, <node>/<role>.log, exit/<node>, verdict.json}

No value of a variable stands in plan.json: an environment may hold what nobody else should read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from strop.errors import CorruptRecord, StoreError, explain_refusal
from strop.io.atomic import write_bytes_atomically
from strop.launch.contract import JobPlan, JobRef

JOB_FOLDER = "job"
PLAN_NAME = "plan.json"
REF_NAME = "ref.json"
STATE_NAME = "state.json"
SPEC_NAME = "spec.toml"
RESOLVED_NAME = "resolved.json"
EVALUATION_NAME = "eval.toml"
CODE_NAME = "code.tar.zst"
DIFF_NAME = "code.diff"
ATTEMPTS_FOLDER = "attempts"
HIDDEN = "***"
"""Stands for the value of a variable."""
T = TypeVar("T")


# On first use: making the two takes longer than all else of this module's import.
@cache
def _plan_form() -> TypeAdapter[JobPlan]:
    return TypeAdapter(JobPlan)


@cache
def _ref_form() -> TypeAdapter[JobRef]:
    return TypeAdapter(JobRef)


def job_path_of(home: str | Path) -> Path:
    """Return the folder of what was submitted."""
    return Path(home) / JOB_FOLDER


def plan_to_json(plan: JobPlan) -> str:
    """Return a plan as text, without the values of its variables."""
    hidden = dict.fromkeys(plan.environment.variables, HIDDEN)
    shown = replace(plan, environment=replace(plan.environment, variables=hidden))
    if "env" in plan.profile:
        shown = replace(shown, profile={**plan.profile, "env": dict.fromkeys(plan.profile["env"], HIDDEN)})
    return json.dumps(asdict(shown), indent=1, ensure_ascii=False, sort_keys=True)


def write_plan(plan: JobPlan) -> None:
    """Keep a plan in its home. Raises: StoreError if the disk fails."""
    write_bytes_atomically(job_path_of(plan.home) / PLAN_NAME, plan_to_json(plan).encode())


def read_plan(job_path: Path) -> JobPlan:
    """Read the plan of a job. Its variables have no values: `environment.read_environment` has them.

    Raises: StoreError if there is none; CorruptRecord if it is damaged.
    """
    return _read(job_path / PLAN_NAME, _plan_form())


def write_ref(ref: JobRef) -> None:
    """Keep the reference of a job in its home. Raises: StoreError if the disk fails."""
    text = json.dumps(asdict(ref), indent=1, ensure_ascii=False)
    write_bytes_atomically(job_path_of(ref.home) / REF_NAME, text.encode())


def read_ref(job_path: Path) -> JobRef:
    """Read the reference of a job. Raises: StoreError if there is none; CorruptRecord if it is damaged."""
    return _read(job_path / REF_NAME, _ref_form())


def has_plan(home: Path) -> bool:
    """Whether a folder is the home of a job."""
    return (home / JOB_FOLDER / PLAN_NAME).is_file()


def has_ref(home: Path) -> bool:
    """Whether a scheduler accepted the job of a home."""
    return (home / JOB_FOLDER / REF_NAME).is_file()


def _read(path: Path, kind: TypeAdapter[T]) -> T:
    try:
        content: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise StoreError(
            explain_refusal(
                f"{path} cannot be read ({error.strerror})",
                allowed="the home of a job that strop submitted",
                next_step="name another one; `strop ls` lists them",
            )
        ) from error
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    try:
        return kind.validate_python(content)
    except ValidationError as error:
        raise _damaged(path, f"{error.error_count()} values have another form") from error


def _damaged(path: Path, why: str) -> CorruptRecord:
    return CorruptRecord(
        explain_refusal(
            f"{path} is damaged ({why})",
            allowed="the file as strop wrote it",
            next_step="submit again under another name; the run's checkpoints are not concerned",
        )
    )
