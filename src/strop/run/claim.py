"""What a training on this machine holds while it runs: its GPUs under a lease, and its directory.

Under an agent the lease is the agent's, and the training inherits it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from strop.errors import CheckRefused
from strop.hardware import clear_leftovers, find_inherited
from strop.hardware.allocation import DEVICE_ORDER, PCI_BUS_ID, GpuRequest, lease_gpus
from strop.hardware.findings import Finding, Severity, require_none
from strop.hardware.gpus import read_gpus, read_torch_build
from strop.hardware.preflight import PreflightRequest, run_preflight
from strop.hardware.visible_devices import (
    VISIBLE_DEVICES,
    DeviceForm,
    parse_visible_devices,
    part_variables,
)
from strop.io import user_cache_dir
from strop.io.variables import set_variables
from strop.record import RunDir, find_resumable
from strop.record.parts import PARTS_FACT, require_same_parts
from strop.record.run_dir import STATE_NAME
from strop.rollout import Split
from strop.spec import ResolvedSpec, RunSpec, spec_digest, write_spec
from strop.spec.judge import judge_sections
from strop.spec.layout import ENV, SANDBOX
from strop.store import ModelHandle
from strop.store.data_files import locate_named
from strop.store.model_files import digest_parts
from strop.tasks import Task
from strop.user_code import CodeRef, hash_sources, is_code

_ROLE = "train"
"""Learner and engine together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What was found and taken."""

    notices: tuple[str, ...] = ()
    devices: Mapping[str, object] = field(default_factory=dict)
    """For the start record; empty where an agent keeps its own."""


@contextmanager
def claim_machine(
    run_path: Path, attempt: str, *, need_bytes: int, wanted: Mapping[str, int] | None = None
) -> Iterator[Claim]:
    """Clear what dead runs of this user left, and hold GPUs for a training, if it uses any.

    `need_bytes` is what must be free on each but those for environments. `wanted`: how many GPUs each part
    of `spec.layout` gets; without it learner and engine share the first one that torch sees. Every process
    that is started meanwhile carries the lease's id, and sees these GPUs alone.
    Raises: CheckRefused naming the run or the processes that have the GPUs; ConfigError if
        CUDA_VISIBLE_DEVICES cannot be read; StoreError if leases cannot be kept.
    """
    if find_inherited() is not None:
        yield Claim()
        return
    cleared = [f"a dead run had left something: {one}" for one in clear_leftovers()]
    inherited = os.environ.get(VISIBLE_DEVICES)
    shares = dict(wanted or {_ROLE: 1 if _uses_gpu(inherited) else 0})
    needs = {part: 0 if part in (ENV, SANDBOX) else need_bytes for part in shares}
    request = GpuRequest(wanted=shares, inherited=inherited, need_bytes=needs)
    held, allocation = lease_gpus(run_path.name, attempt, request)
    with held, set_variables(held.variables):
        warnings: list[str] = []
        if allocation.uuids:
            asked = PreflightRequest(
                run_path=run_path,
                allocation=allocation,
                gpu_need_bytes=needs,
                own_lease_id=held.lease.lease_id,
            )
            found = [_judge(finding, inherited) for finding in run_preflight(asked)]
            warnings = [str(finding) for finding in require_none(found)]
        variables: dict[str, str] = {}
        if allocation.uuids:
            visible = {part: devices.visible for part, devices in allocation.roles.items()}
            variables = {**part_variables(visible), DEVICE_ORDER: PCI_BUS_ID}
        # Early enough: CUDA reads its variable when it is first used.
        with set_variables(variables):
            notices = (*cleared, *allocation.notices, *warnings)
            yield Claim(notices=notices, devices=allocation.record())


def _uses_gpu(inherited: str | None) -> bool:
    """Whether torch would compute on a GPU here."""
    if parse_visible_devices(inherited).form is DeviceForm.NONE or not read_gpus():
        return False
    build = read_torch_build()
    return build is not None and (build.cuda or build.hip) is not None


def _judge(finding: Finding, inherited: str | None) -> Finding:
    """Let a person who names a GPU share it: that is then a warning."""
    if finding.code != "foreign_process" or inherited is None:
        return finding
    next_step = f"nothing, if that is meant: {VISIBLE_DEVICES} names this GPU"
    return replace(finding, next_step=next_step, severity=Severity.WARNING)


def open_run(resolved: ResolvedSpec, facts: dict[str, object], *, is_new: bool) -> RunDir:
    """Return the run's directory with its lock held: an unfinished one, or a new one.

    An unfinished run of other parts, such as another version of its task, is left alone where it has trained
    nothing.

    Raises: CheckRefused if `output.dir` is in use, finished, or holds another spec's run; if the run that
        would go on has trained with other parts, naming them.
    """
    run_dir = _open_run(resolved, facts, is_new=is_new)
    before, now = run_dir.state.facts.get(PARTS_FACT, {}), cast(dict[str, str], facts[PARTS_FACT])
    try:
        require_same_parts(run_dir.path, before, now)
    except CheckRefused:
        run_dir.release()
        if resolved.spec.output.dir is None and not run_dir.metrics.read():
            return _open_run(resolved, facts, is_new=True)
        raise
    return run_dir


def _open_run(resolved: ResolvedSpec, facts: dict[str, object], *, is_new: bool) -> RunDir:
    spec, digest = resolved.spec, spec_digest(resolved.spec)
    if spec.output.dir is not None:
        path = Path(spec.output.dir)
        if (path / "attempts").is_dir() and not (path / STATE_NAME).exists():
            # A launcher has prepared the folder, and no run has begun in it.
            return RunDir.adopt(path, spec.name, write_spec(resolved), digest, facts)
        if not path.exists():
            run_dir = RunDir.create(path.parent, spec.name, write_spec(resolved), digest, facts)
            run_dir.move_to(path)
            return run_dir
        if is_new:
            raise CheckRefused(
                f"a new run was asked for, and output.dir={path} is there already",
                allowed="a directory that does not exist yet",
                next_step="choose another output.dir, or leave --new out to continue the run in it",
            )
        run_dir = RunDir.open(path)
        run_dir.acquire()
        if run_dir.state.spec_digest == digest and not run_dir.is_finished:
            return run_dir
        run_dir.release()
        given = "holds a finished run" if run_dir.is_finished else "holds a run of another spec"
        raise CheckRefused(
            f"output.dir={path} {given}; nothing is left to do there",
            allowed="a new directory, or the unfinished run of this very spec",
            next_step="choose another output.dir, or remove it to get a dated directory",
        )
    root = Path(spec.output.root)
    resumable = None if is_new else find_resumable(root, spec.name, digest)
    return resumable or RunDir.create(root, spec.name, write_spec(resolved), digest, facts)


def list_parts(
    spec: RunSpec, task: Task, models: Mapping[str, ModelHandle], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the digest of every part of a training by a name that a person understands.

    They are recorded in run.json and compared whenever a run goes on; see `strop.record.parts`.

    `models` are those that take part, by their role; `given` the digests of other data that is learned from.

    Raises: DataError, StoreError or CorruptRecord if a part cannot be read.
    """
    # The ids are hashes of what is asked and answered.
    examples = hashlib.sha256()
    for split in [Split.TRAIN, Split.HELD_OUT] if spec.train.has_rl else [Split.HELD_OUT]:
        examples.update("\n".join([split, *(one.example_id for one in task.examples(split))]).encode())
    found = {"version of its task": task.version, "set of examples": examples.hexdigest(), **given}
    for role, model in models.items():
        parts = digest_parts(model.path, user_cache_dir() / "digests")
        found |= {f"{role} ({part})": digest for part, digest in parts.items()}
    if is_code(spec.algorithm.name):
        found["algorithm"] = hash_sources(CodeRef.parse(spec.algorithm.name).path)
    for section in judge_sections(spec.task):
        path = None if section.calibration is None else locate_named(section.calibration)
        # A missing file is refused where it is read.
        if path is not None and path.is_file():
            found[f"calibration of {section.judge_model}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
