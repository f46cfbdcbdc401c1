"""Run a run file on this machine: find or make its directory, take GPUs, compose its parts, train.

The same command again continues an unfinished run of the same name and spec, the newest first. GPUs are
held under a lease while the run trains; under an agent the training inherits the agent's lease.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from strop.errors import EXIT_DONE, EXIT_FAILED, StoreError, StropError
from strop.hardware import (
    clear_leftovers,
    describe_machine,
    importing,
    require_writable,
    tune_process,
)
from strop.hardware.allocation import DEVICE_ORDER, PCI_BUS_ID, GpuRequest, lease_gpus
from strop.hardware.findings import Severity, require_none
from strop.hardware.gpus import read_gpus, read_torch_build
from strop.hardware.leases import is_inherited
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
from strop.plan.known import require_held_out
from strop.plan.planning import predict_run
from strop.plan.roles import split_memory
from strop.policy.footprint import read_model_size
from strop.record import Event, EventKind, RunDir
from strop.record.parts import PARTS_FACT, list_changes
from strop.record.prediction import Prediction, write_prediction
from strop.record.run_dir import TOKENIZER_NAME
from strop.rollout import Split
from strop.run.held_out import Evaluation, TrainOutcome, read_outcome
from strop.run.mirroring import Mirroring, probe_mirror
from strop.run.resuming import DATE_FACT, check_record, find_date, open_run
from strop.spec import ResolvedSpec, RunSpec
from strop.spec.judge import role_judges
from strop.spec.layout import ENV, settle_layout
from strop.store import ModelHandle, follow_store, get_model
from strop.store.model_files import digest_parts
from strop.tasks import Task, build_task, task_builder
from strop.tasks.judging import Judge
from strop.tokenizer import dated
from strop.train.data.offline import find_offline_source, read_demonstrations, read_framing, read_pairs
from strop.train.observer import Observer
from strop.user_code import CodeRef, hash_sources, is_code

if TYPE_CHECKING:
    from strop.train.data.offline import Demonstrations
    from strop.train.data.preferences import Preferences

RESERVE_NAME = ".reserve"
RESERVE_BYTES = 1 << 16
"""Room that a running attempt holds on the run's disk: once that is full, its end can still be recorded."""


def train_here(
    resolved: ResolvedSpec,
    observer: Observer,
    *,
    is_new: bool = False,
    on_run: Callable[[RunDir], None],
    on_trained: Callable[[TrainOutcome], None] = lambda outcome: None,
) -> TrainOutcome:
    """Train a run on this machine, from its last checkpoint if it has one.

    `is_new` starts a new run even if an unfinished one could be resumed. `on_run` is called with the run
    directory once it is locked, before any heavy work; `on_trained` with the outcome, while files that it
    writes into the directory still reach the run's mirror.

    Raises: CheckRefused if the directory is in use, finished or not writable, if other processes have the
        GPUs, or the gate refuses; Interrupted after a signal; StropError for every other refusal.
    """
    # Every child inherits it: one that hangs can be made to print its stack.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    spec = resolved.spec
    # Checked before a model is fetched, which may take an hour.
    require_writable(Path(spec.output.dir or spec.output.root), "the run's directory")
    with ExitStack() as stack:
        stack.enter_context(follow_store(spec.store))
        mirror_root = probe_mirror(spec.store)
        log_from(log_level_of(spec.output.log_level, "train"))
        # The nodes of a running Ray cluster are not those of this job.
        is_attached = spec.ray.address is not None
        laid_out = settle_layout(spec, None if is_attached else count_nodes(os.environ))
        if laid_out.layout.kind == "inline":
            set_threads(spec.placement.threads)
        date = find_date(spec, is_new=is_new)
        stack.enter_context(dated(date))
        parts = _read_parts(laid_out)
        threads = spec.placement.threads or describe_machine().num_physical_cores
        facts = {**parts.facts(threads), DATE_FACT: date}
        run_dir = stack.enter_context(open_run(resolved, facts, is_new=is_new))
        on_run(run_dir)
        # Before a GPU is asked for: a damaged record would end the run later, or be gone on with.
        lost = check_record(run_dir, parts.task.name, spec.eval.every)
        if run_dir.state.num_attempts:
            settled, number_format = _settle(laid_out, run_dir.state.facts)
            parts = replace(parts, spec=settled, number_format=number_format)
        gpus = parts.spec.layout.nodes[0].gpus
        wanted = {"train": 0} if is_attached else gpus
        claim = stack.enter_context(claim_machine(run_dir.path, need_bytes=parts.need_bytes, wanted=wanted))
        mirroring = stack.enter_context(Mirroring(mirror_root, spec.store, run_dir, observer))
        with _note_attempt(run_dir, mirroring, claim.devices):
            mirroring.begin()
            notices = _list_notices(parts, run_dir, is_auto=spec.model.dtype == AUTO)
            for notice in (*resolved.notices, *lost, *claim.notices, *notices):
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
    """The inputs of a training, fetched to this disk."""

    spec: RunSpec
    """With its layout settled, in the number format of this machine."""
    number_format: NumberFormat
    task: Task
    task_version: str
    model: ModelHandle
    frozen: Mapping[str, ModelHandle]
    """Reference and teacher by role, where they are other models than the policy."""
    judges: Mapping[str, ModelHandle]
    """Models of the judges that the run starts, by name."""
    demonstrations: Demonstrations | None
    preferences: Preferences | None
    notices: tuple[str, ...]
    """Notices from fetching the parts."""

    @property
    def offline_data(self) -> Demonstrations | Preferences | None:
        """Training data beside the rollouts."""
        return self.demonstrations or self.preferences

    @property
    def need_bytes(self) -> int:
        """Peak bytes of learner and engine, as the plan estimates them."""
        others = {**self.frozen, **self.judges}
        sizes = {name: read_model_size(handle.path) for name, handle in others.items()}
        limit = self.task.limits.max_reply_tokens
        needed = split_memory(self.spec, read_model_size(self.model.path), limit, frozen=sizes)
        return int(sum(part.amount for part in needed))

    def facts(self, num_threads: int) -> dict[str, object]:
        """Return the facts about the parts for run.json."""
        data = {"demonstrations": self.demonstrations, "preferences": self.preferences}
        models = {"model": self.model, **self.frozen}
        models |= {f"judge {name}": handle for name, handle in self.judges.items()}
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
                {name: rows.digest for name, rows in data.items() if rows is not None},
            ),
        }


def _read_parts(laid_out: RunSpec) -> _Parts:
    """Fetch the models; read the task and the offline data."""
    notices: list[str] = []
    with listen(notices.append):
        model = get_model(laid_out.model.uri)
        spec, number_format = _settle(laid_out)
        task = build_task(spec.task)
        require_held_out(spec, task)
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
            frozen={role: get_model(uri) for role, uri in spec.frozen_models.items() if uri is not None},
            judges={judge.judge_model: get_model(judge.judge_model) for judge in role_judges(spec.task)},
            demonstrations=demonstrations,
            preferences=preferences,
            notices=tuple(notices),
        )


def _settle(spec: RunSpec, facts: Mapping[str, object] | None = None) -> tuple[RunSpec, NumberFormat]:
    """Choose the number format for this process's device; `facts` are those of a resumed run."""
    machine = describe_machine()
    return settle_format(spec, machine, compute_device(machine), facts=facts)


@contextmanager
def _note_attempt(run_dir: RunDir, observer: Observer, devices: Mapping[str, object]) -> Iterator[None]:
    """Begin an attempt; record how it ended when the block is left."""
    kernels = kernel_status().describe()
    attempt = run_dir.begin_attempt(
        {"machine": describe_machine().cpu_name, "kernels": kernels, "devices": devices}
    )

    reserve = run_dir.path / RESERVE_NAME
    write_bytes_atomically(reserve, os.urandom(RESERVE_BYTES))

    def note_end(kind: object, error: BaseException | None, traceback: object) -> None:
        reserve.unlink(missing_ok=True)
        cause = "done" if error is None else type(error).__name__
        exit_code = error.exit_code if isinstance(error, StropError) else EXIT_FAILED
        try:
            steps = [int(line["step"]) for line in run_dir.metrics.read()]
            run_dir.end_attempt(
                attempt,
                cause=cause,
                exit_code=EXIT_DONE if error is None else exit_code,
                step=max(steps, default=0),
            )
        except StoreError:
            # The first error is the one to show: its cause, such as a full disk, is this one's too.
            if error is None:
                raise
        observer.on_end(cause=cause)

    with ExitStack() as stack:
        stack.push(note_end)
        yield


def _list_notices(parts: _Parts, run_dir: RunDir, *, is_auto: bool) -> Iterator[str]:
    """Yield notices for the user about the parts, the machine and the software of this attempt.

    `is_auto`: the run file does not set the number format.
    """
    yield from parts.notices
    status = kernel_status()
    if status.path is None and not describe_machine().gpus:
        yield f"the kernels are {status.describe()}; install one and make sure `cc` or $CC finds it"
    if parts.offline_data is not None:
        yield parts.offline_data.describe()
    environment = run_dir.path / "env.txt"
    # Changed software is allowed, because a fix may need it.
    for change in list_changes(environment.read_text()) if environment.is_file() else ():
        yield f"the run goes on with other software, which may round otherwise: {change}"
    if is_auto or parts.number_format.cost is not None:
        yield f"model.dtype: {parts.number_format}"


def set_threads(wanted: int | None) -> None:
    """Set the number of compute threads and the memory allocator's options.

    None: as many as the physical cores that this process may use.
    """
    tune_process()  # Before torch is imported.
    with importing():
        import torch

    torch.set_num_threads(wanted or describe_machine().num_physical_cores)


def import_loop() -> None:
    """Import what trains."""
    tune_process()
    with importing():
        import strop.train.loop  # noqa: F401


async def _train(
    parts: _Parts, run_dir: RunDir, observer: Observer, prediction: Prediction | None
) -> TrainOutcome:
    """Start the roles and train; stop the roles in any case."""
    from strop.cluster.contract import build_placement, with_frozen
    from strop.cluster.servers import check_judges, guard
    from strop.runtime.role import RuntimeRole

    spec, task = parts.spec, parts.task
    source = parts.model
    sources = {handle.uri: handle for handle in (source, *parts.frozen.values(), *parts.judges.values())}
    # With it rollouts can be read token by token on a machine without the model.
    kept, tokenizer = run_dir.path / TOKENIZER_NAME, source.path / TOKENIZER_NAME
    if tokenizer.is_file() and not kept.exists():
        write_bytes_atomically(kept, tokenizer.read_bytes())
    check_judges(spec, source, sources)
    runtime = RuntimeRole(spec.runtime, run_dir.path, run_dir.path / "roles" / "servers")
    placement = build_placement(spec, source, run_dir.path / "roles", sources)
    judge = Judge(task, task_builder(spec.task))
    try:
        # Before the placement: its processes inherit the address of this server.
        await runtime.start()
        # Ray starts meanwhile, and its roles import as much.
        started, _ = await asyncio.gather(placement.start(), asyncio.to_thread(import_loop))
        set_threads(spec.placement.threads)
        from strop.train.loop import TrainInput, TrainLoop

        roles = await with_frozen(started, spec, source, sources.__getitem__)
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
        await guard(loop.run(), runtime.find_failure)
    finally:
        await placement.stop()
        await judge.close()
        await runtime.stop()
    return read_outcome(run_dir, task, spec.train.steps)


def list_parts(
    spec: RunSpec, task: Task, models: Mapping[str, ModelHandle], data: Mapping[str, str]
) -> dict[str, str]:
    """Return the digest of every input of a training, by a readable name.

    They are recorded in run.json and compared whenever the run is resumed; see `strop.record.parts`.
    `models` are by role; `data` are the digests of the offline data by kind.

    Raises: DataError, StoreError or CorruptRecord if a part cannot be read.
    """
    # An example's id is a hash of its question and answer.
    examples = hashlib.sha256()
    for split in [Split.TRAIN, Split.HELD_OUT] if spec.train.has_rl else [Split.HELD_OUT]:
        ids = (example.example_id for example in task.examples(split))
        examples.update("\n".join([split, *ids]).encode())
    digests = {"version of its task": task.version, "set of examples": examples.hexdigest(), **data}
    for role, model in models.items():
        parts = digest_parts(model.path, user_cache_dir() / "digests")
        digests |= {f"{role} ({part})": digest for part, digest in parts.items()}
    if is_code(spec.algorithm.name):
        digests["algorithm"] = hash_sources(CodeRef.parse(spec.algorithm.name).path)
    return digests


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The devices that a training holds."""

    notices: tuple[str, ...] = ()
    devices: Mapping[str, object] = field(default_factory=dict)
    """For the record of the attempt; empty under an agent, which has a record itself."""


@contextmanager
def claim_machine(
    run_path: Path, *, need_bytes: int, wanted: Mapping[str, int] | None = None
) -> Iterator[Claim]:
    """Remove leftovers of this user's dead runs, and hold the GPUs of a training inside the block.

    `need_bytes` must be free on each GPU but those of environments and sandboxes. `wanted`: number of GPUs by
    part of `spec.layout`; without it learner and engine share the first GPU that torch sees. Processes
    started inside the block carry the id of the lease, and see these GPUs only.
    Raises: CheckRefused naming the run or the processes that have the GPUs; ConfigError if
        CUDA_VISIBLE_DEVICES cannot be read; StoreError if leases cannot be kept.
    """
    if is_inherited():
        yield Claim()
        return
    ended = clear_leftovers()
    cleared = (
        [f"dead runs had left processes, which were ended: {', '.join(map(str, ended))}"] if ended else []
    )
    inherited = os.environ.get(VISIBLE_DEVICES)
    # "train": learner and engine together.
    has_gpu = parse_visible_devices(inherited).form is not DeviceForm.NONE and bool(read_gpus())
    build = read_torch_build() if has_gpu else None
    is_used = build is not None and (build.cuda or build.hip) is not None
    shares = dict(wanted or {"train": 1 if is_used else 0})
    needs = {part: 0 if part == ENV else need_bytes for part in shares}
    request = GpuRequest(wanted=shares, inherited=inherited, need_bytes=needs)
    with lease_gpus(request) as (lease, allocation), set_variables(lease.variables):
        warnings: list[str] = []
        variables: dict[str, str] = {}
        if allocation.uuids:
            preflight = PreflightRequest(
                run_path=run_path,
                allocation=allocation,
                gpu_need_bytes=needs,
            )
            findings = run_preflight(preflight)
            if inherited is not None:
                # The user has named GPUs that others use.
                step = f"nothing, if that is meant: {VISIBLE_DEVICES} names this GPU"
                findings = [
                    replace(finding, next_step=step, severity=Severity.WARNING)
                    if finding.code == "foreign_process"
                    else finding
                    for finding in findings
                ]
            warnings = [str(finding) for finding in require_none(findings)]
            visible = {part: devices.visible for part, devices in allocation.roles.items()}
            variables = {**part_variables(visible), DEVICE_ORDER: PCI_BUS_ID}
        # Early enough: CUDA reads its variable when it is first used.
        with set_variables(variables):
            notices = (*cleared, *allocation.notices, *warnings)
            yield Claim(notices=notices, devices=allocation.record())
