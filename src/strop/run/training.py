"""Running a run file on this machine: find or make its directory, take GPUs, compose its parts, train.

The same command again continues a run that did not finish: same name, same spec, newest first. Its GPUs are
held under a lease while it runs; under an agent the lease is the agent's, and the training inherits it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from strop.errors import EXIT_DONE, EXIT_FAILED, CheckRefused, StropError
from strop.hardware import (
    clear_leftovers,
    describe_machine,
    find_inherited,
    importing,
    read_calibration,
    require_writable,
    tune_process,
)
from strop.hardware.allocation import DEVICE_ORDER, PCI_BUS_ID, GpuRequest, lease_gpus
from strop.hardware.findings import Finding, Severity, require_none
from strop.hardware.gpus import read_gpus, read_torch_build
from strop.hardware.number_format import (
    AUTO,
    DTYPE_FACT,
    REASON_FACT,
    NumberFormat,
    compute_device,
    settle_format,
)
from strop.hardware.ports import count_nodes
from strop.hardware.preflight import PreflightRequest, run_preflight
from strop.hardware.visible_devices import (
    VISIBLE_DEVICES,
    DeviceForm,
    parse_visible_devices,
    part_variables,
)
from strop.io import user_cache_dir, write_bytes_atomically
from strop.io.notices import listen
from strop.io.variables import log_from, log_level_of, set_variables
from strop.kernels import kernel_status
from strop.plan.planning import predict_run
from strop.plan.roles import split_memory
from strop.policy.footprint import read_model_size
from strop.record import Event, EventKind, RunDir, find_resumable
from strop.record.parts import PARTS_FACT, list_changes, require_same_parts
from strop.record.prediction import Prediction, write_prediction
from strop.record.run_dir import STATE_NAME, TOKENIZER_NAME
from strop.rollout import Split
from strop.run.held_out import Evaluation, TrainOutcome, read_outcome
from strop.run.mirroring import Mirroring, probe_mirror
from strop.spec import ResolvedSpec, RunSpec, spec_digest, write_spec
from strop.spec.judge import judge_sections, role_judges
from strop.spec.layout import ENV, EVAL, SANDBOX, settle_layout
from strop.store import ModelHandle, follow_store, get_model
from strop.store.data_files import locate_named
from strop.store.model_files import digest_parts
from strop.tasks import Task, build_task, task_builder
from strop.tasks.judging import open_judge
from strop.tasks.traits import require_written
from strop.train.data.offline import (
    find_offline_source,
    read_demonstrations,
    read_framing,
    read_pairs,
)
from strop.train.observer import Observer
from strop.user_code import CodeRef, hash_sources, is_code

if TYPE_CHECKING:
    from strop.train.data.offline import Demonstrations
    from strop.train.data.preferences import Preferences


def train_here(
    resolved: ResolvedSpec,
    observer: Observer,
    *,
    is_new: bool = False,
    on_run: Callable[[RunDir], None],
    on_trained: Callable[[TrainOutcome], None] = lambda outcome: None,
) -> TrainOutcome:
    """Train a run on this machine, from its last checkpoint if it has one.

    `is_new` starts a new run even where an unfinished one could go on. `on_run` gets the run
    directory once it is locked, before anything heavy happens; `on_trained` the outcome, while what it
    writes there still reaches the run's mirror.

    Raises: CheckRefused if the directory is in use, finished or not writable, if others have the GPUs,
        or the gate refuses;
        Interrupted after a signal; StropError for everything else that strop refuses.
    """
    # Inherited by every child: one that hangs can be asked where.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    spec = resolved.spec
    # Before a model is fetched: that may take an hour.
    require_writable(Path(spec.output.dir or spec.output.root), "the run's directory")
    with ExitStack() as stack:
        stack.enter_context(follow_store(spec.store))
        mirror_root = probe_mirror(spec.store)
        log_from(log_level_of(spec.output.log_level, "train"))
        num_threads = set_threads(spec.placement.threads)
        # A Ray cluster that is running has nodes that are not this job's.
        is_attached = spec.ray.address is not None
        laid_out = settle_layout(spec, None if is_attached else count_nodes(os.environ))
        parts = _read_parts(laid_out)
        run_dir = stack.enter_context(open_run(resolved, parts.facts(num_threads), is_new=is_new))
        on_run(run_dir)
        if run_dir.state.num_attempts:
            settled, number_format = _settle(laid_out, run_dir.state.facts)
            parts = replace(parts, spec=settled, number_format=number_format)
        gpus = {part: n for part, n in parts.spec.layout.nodes[0].gpus.items() if part != EVAL}
        attempt = str(run_dir.state.num_attempts + 1)
        wanted = {"train": 0} if is_attached else gpus
        claim = stack.enter_context(
            claim_machine(run_dir.path, attempt, need_bytes=parts.need_bytes, wanted=wanted)
        )
        mirroring = stack.enter_context(Mirroring(mirror_root, spec.store, run_dir, observer))
        with _note_attempt(run_dir, mirroring, claim.devices):
            mirroring.begin()
            of_parts = _list_notices(parts, run_dir, is_auto=spec.model.dtype == AUTO)
            for notice in (*resolved.notices, *claim.notices, *of_parts):
                event = Event(kind=EventKind.NOTICE, step=0, cause="notice", detail=notice)
                run_dir.events.append(event)
                observer.on_event(event)
            prediction = predict_run(parts.spec, parts.task, parts.model.path, parts.offline_data)
            if prediction is not None:
                write_prediction(run_dir.path, prediction)
            outcome = asyncio.run(_train(parts, run_dir, mirroring, prediction))
        on_trained(outcome)
        return outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """What a training is made of, on this disk."""

    spec: RunSpec
    """Laid out, and in the number format of this machine."""
    number_format: NumberFormat
    task: Task
    task_version: str
    model: ModelHandle
    frozen: Mapping[str, ModelHandle]
    """The reference and the teacher that are models of their own, by role."""
    judges: Mapping[str, ModelHandle]
    """Those that the run starts, by name."""
    demonstrations: Demonstrations | None
    preferences: Preferences | None
    notices: tuple[str, ...]
    """What was said while the parts were fetched."""

    @property
    def offline_data(self) -> Demonstrations | Preferences | None:
        """What is learned from beside rollouts."""
        return self.demonstrations or self.preferences

    @property
    def need_bytes(self) -> int:
        """Bytes that learner and engine hold at their peak, as the plan counts them."""
        others = {**self.frozen, **self.judges}
        sizes = {name: read_model_size(one.path) for name, one in others.items()}
        limit = self.task.limits.max_reply_tokens
        needed = split_memory(self.spec, read_model_size(self.model.path), limit, frozen=sizes)
        return int(sum(part.amount for part in needed))

    def facts(self, num_threads: int) -> dict[str, object]:
        """Return what run.json says of the parts."""
        data = {"demonstrations": self.demonstrations, "preferences": self.preferences}
        models = {"model": self.model, **self.frozen}
        models |= {f"judge {name}": one for name, one in self.judges.items()}
        return {
            "model_uri": self.spec.model.uri,
            "model_digest": self.model.digest,
            "model_source": self.model.source,
            "task": self.task.name,
            "task_version": self.task_version,
            "num_threads": num_threads,
            DTYPE_FACT: self.number_format.dtype,
            REASON_FACT: self.number_format.reason,
            PARTS_FACT: list_parts(
                self.spec,
                self.task,
                models,
                {name: one.digest for name, one in data.items() if one is not None},
            ),
        }


def _read_parts(laid_out: RunSpec) -> _Parts:
    """Fetch the models, and read the task and the data that the run learns from."""
    notices: list[str] = []
    with listen(notices.append):
        model = get_model(laid_out.model.uri)
        spec, number_format = _settle(laid_out)
        task = build_task(spec.task)
        require_written(task)
        demonstrations, preferences = None, None
        if (source := find_offline_source(spec)) is not None:
            framing = read_framing(model.path, task, spec.model.prompt_format)
            if source.kind == "demonstrations":
                demonstrations = read_demonstrations(spec.sft, framing)
            else:
                # Here: packing them takes torch, whose threads are fixed by now.
                from strop.train.data.preferences import pack_pairs

                preferences = pack_pairs(read_pairs(spec.dpo, framing))
        return _Parts(
            spec=spec,
            number_format=number_format,
            task=task,
            task_version=task.version,
            model=model,
            # Before anything is started: a reference or teacher may have to be fetched, too.
            frozen={role: get_model(uri) for role, uri in spec.frozen_models.items() if uri is not None},
            judges={one.judge_model: get_model(one.judge_model) for one in role_judges(spec.task)},
            demonstrations=demonstrations,
            preferences=preferences,
            notices=tuple(notices),
        )


def _settle(spec: RunSpec, facts: Mapping[str, object] | None = None) -> tuple[RunSpec, NumberFormat]:
    """Choose the number format for this process's device; `facts` are those of a run that goes on."""
    machine = describe_machine()
    return settle_format(spec, machine, compute_device(machine), calibration=read_calibration(), facts=facts)


@contextmanager
def _note_attempt(run_dir: RunDir, observer: Observer, devices: Mapping[str, object]) -> Iterator[None]:
    """Begin an attempt, and note its end with the cause, whatever ends it."""
    kernels = kernel_status().describe()
    attempt = run_dir.begin_attempt(
        {"machine": describe_machine().cpu_name, "kernels": kernels, "devices": devices}
    )

    def note_end(kind: object, error: BaseException | None, traceback: object) -> None:
        cause = "done" if error is None else type(error).__name__
        exit_code = error.exit_code if isinstance(error, StropError) else EXIT_FAILED
        steps = [int(line["step"]) for line in run_dir.metrics.read()]
        run_dir.end_attempt(
            attempt,
            cause=cause,
            exit_code=EXIT_DONE if error is None else exit_code,
            step=max(steps, default=0),
        )
        observer.on_end(cause=cause)

    with ExitStack() as stack:
        stack.push(note_end)
        yield


def _list_notices(parts: _Parts, run_dir: RunDir, *, is_auto: bool) -> Iterator[str]:
    """Yield what the user should know of the parts, the machine and the software of this attempt.

    `is_auto`: the run file leaves the number format open.
    """
    yield from parts.notices
    status = kernel_status()
    if status.path is None and not describe_machine().gpus:
        yield f"the kernels are {status.describe()}; install one and make sure `cc` or $CC finds it"
    if parts.offline_data is not None:
        yield parts.offline_data.describe()
    environment = run_dir.path / "env.txt"
    # Other software is allowed, since a fix may need it.
    for change in list_changes(environment.read_text()) if environment.is_file() else ():
        yield f"the run goes on with other software, which may round otherwise: {change}"
    if is_auto or parts.number_format.cost is not None:
        yield f"model.dtype: {parts.number_format}"


def set_threads(wanted: int | None) -> int:
    """Fix the number of compute threads, and how memory is kept. Returns the number.

    None means the physical cores that this process may use.
    """
    tune_process()  # Before torch is imported.
    with importing():
        import torch

    threads = wanted or max(describe_machine().num_physical_cores, 1)
    torch.set_num_threads(threads)
    return threads


async def _train(
    parts: _Parts, run_dir: RunDir, observer: Observer, prediction: Prediction | None
) -> TrainOutcome:
    """Start the roles, train, and stop them whatever happens."""
    with importing():
        from strop.cluster.contract import ModelSource, build_placement, with_frozen
        from strop.cluster.servers import JudgeRoles, RuntimeRole, guard
        from strop.environments.printed import forget_prints, keep_prints
        from strop.train.loop import TrainInput, TrainLoop

    spec, task = parts.spec, parts.task
    sources = {
        one.uri: ModelSource(path=one.path, digest=one.digest, uri=one.uri)
        for one in (parts.model, *parts.frozen.values(), *parts.judges.values())
    }
    source = sources[parts.model.uri]
    # What was sampled can be read token by token where the model is not.
    kept, tokenizer = run_dir.path / TOKENIZER_NAME, source.path / TOKENIZER_NAME
    if tokenizer.is_file() and not kept.exists():
        write_bytes_atomically(kept, tokenizer.read_bytes())
    servers_dir = run_dir.path / "roles" / "servers"
    judges = JudgeRoles(spec, source, sources, servers_dir)
    runtime = RuntimeRole(spec.runtime, run_dir.path, servers_dir)
    placement = build_placement(spec, source, run_dir.path / "roles")
    judge = open_judge(task, task_builder(spec.task))
    keep_prints(run_dir.path / "latest" / "environments.log")
    try:
        # First: the judging processes inherit the addresses.
        await runtime.start()
        await judges.start()
        roles = await with_frozen(await placement.start(), spec, source, sources.__getitem__)
        loop = TrainLoop(
            TrainInput(
                spec=spec,
                task=task,
                roles=roles,
                run_dir=run_dir,
                model_dir=source.path,
                observer=observer,
                evaluate=Evaluation(spec, task, judge, roles, source.digest, run_dir),
                judge=judge,
                demonstrations=parts.demonstrations,
                preferences=parts.preferences,
                prediction=prediction,
            )
        )
        await guard(loop.run(), judges.find_failure, runtime.find_failure)
    finally:
        await placement.stop()
        await judge.close()
        await judges.stop()
        await runtime.stop()
        forget_prints()
    return read_outcome(run_dir, task, spec.train.steps)


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
