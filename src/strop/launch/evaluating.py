"""Evaluations as jobs: their files and their roles."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from strop.errors import ConfigError
from strop.launch.contract import RolePlan
from strop.launch.job_dir import EVALUATION_NAME
from strop.launch.options import SiteOptions
from strop.spec import ResolvedSpec, RunSpec
from strop.spec.eval_file import EvalFile, resolve_job

EVALUATION = "eval"
"""The command, and the role, of a job that only evaluates."""


def read_job_file(
    path: str, overrides: Sequence[str], *, may_run_code: bool, has_sweep: bool
) -> tuple[ResolvedSpec, EvalFile]:
    """Return the job settings of an evaluation's file, and the evaluation itself.

    Raises: ConfigError as the readers do, for a file without a model, and for settings of a training run.
    """
    from strop.run.shares import require_readable

    file, resolved = resolve_job(path, overrides)
    job = resolved.spec.job
    foreign = ("train_gpus", "infer_gpus", "judge_gpus", "env_gpus", "infer_nodes", "single_gpu")
    settings = [name for name in (*foreign, "cpu_command") if getattr(job, name)]
    if settings or has_sweep:
        raise ConfigError(
            f"{', '.join([*(f'job.{name}' for name in settings), *(['--sweep'] if has_sweep else [])])} in a"
            " job that evaluates",
            allowed="job.nodes and job.gpus: each GPU, or group of tensor_parallel of them, has a copy of the"
            " model",
            next_step="remove it",
        )
    if file.model_uri is None:
        raise ConfigError(
            f"{file.origin} names no model",
            allowed="a run, a checkpoint, an export, or whatever model.uri takes",
            next_step="set model.uri, in the file or behind it",
        )
    require_readable(file, may_run_code=may_run_code)
    return resolved, file


def evaluating_role(spec: RunSpec, file: EvalFile, python: str, *, may_run_code: bool) -> RolePlan:
    """Return the process on each node of an evaluation, which starts one process for each GPU.

    Raises: ConfigError for lm-eval on several nodes.
    """
    job = spec.job
    if file.is_by_harness and job.nodes > 1:
        raise ConfigError(
            f"harness.tasks with job.nodes={job.nodes}",
            allowed="one node: lm-eval is one process, whose engine uses all its GPUs",
            next_step="leave job.nodes out, or submit a file for each task",
        )
    words = ["eval", "--config", f"{{job}}/{EVALUATION_NAME}", "--out", "{run}/eval"]
    words += ["--node", f"{{node}}/{job.nodes}", *(["--confirm-run-unsafe-code"] if may_run_code else [])]
    gpus = {"eval": job.gpus_per_node} if job.gpus_per_node else {}
    return RolePlan(name=EVALUATION, argv=(python, "-m", "strop.cli", *words), gpus=gpus, nodes="all")


def carry_baselines(file: EvalFile) -> EvalFile:
    """Return a file whose baselines travel with the job: results next to it, named by their content.

    Raises: ConfigError as `read_file_baselines` does.
    """
    from strop.run.shares import read_file_baselines

    words, carried = [], {}
    for baseline in read_file_baselines(file):
        for path in baseline.results:
            name = f"baseline-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.json"
            carried[name] = path
            words.append(f"{baseline.name}={name}")
    counts = file.counts.model_copy(update={"baselines": tuple(words)})
    return replace(file, counts=counts, carried=carried)


def refuse_unreachable(file: EvalFile, num_nodes: int, site: str, profile: SiteOptions) -> None:
    """Refuse an evaluation whose hosts share no disk, or whose job would not find lm-eval's tasks.

    Raises: ConfigError naming it.
    """
    if num_nodes > 1 and not profile.has_shared_disk:
        raise ConfigError(
            f"an evaluation with job.nodes={num_nodes} on {site}, whose hosts see no common disk",
            allowed="one node there: its GPUs share the examples",
            next_step="leave job.nodes out, or submit a file for each task",
        )
    include = file.values.get(("harness", "include"))
    has_folder = profile.has_shared_disk or getattr(profile, "local", False)
    if include and "://" not in str(include) and not has_folder:
        raise ConfigError(
            f"harness.include={include} on {site}: a path of this machine, which its jobs cannot reach",
            allowed="an s3:// prefix, or a folder that they see",
            next_step="send the folder to S3 and name it there, or leave it out",
        )
