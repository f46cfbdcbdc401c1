"""Jobs in a container on this machine: one container per job, whose process 1 is its supervisor.

Covered: podman and docker; no network by default; limits of memory, cores and processes; GPUs by id; files
owned by the submitting user; a time limit; preemption (USR2) and cancellation (TERM, KILL) to process 1;
killed containers, whose end `watch` or the next submission records; single trials of a sweep, which run
one after the other in one container and are ended by its process 1. Not covered: several nodes; engines on
other machines. Model-written code needs a sandbox inside the container (`sandboxes` of the profile); without
one such a run is refused. Tried with podman 4.3.1 and runc 1.1.5 as root.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from strop.errors import CheckRefused, StoreError, StropError
from strop.hardware import free_disk_bytes, read_gpu_users, read_gpus
from strop.hardware.findings import Finding, Severity, find_refusal
from strop.hardware.identity import find_user_name
from strop.launch.container.command import (
    DEVICES,
    HOST,
    IMAGE,
    LABEL,
    LABEL_DEVICES,
    Mount,
    choose_devices,
    complete_plan,
    count_cpus,
    device_words,
    fill_argv,
    leased_devices,
    mounts_of,
    name_container,
    parse_memory_bytes,
)
from strop.launch.container.engine import (
    Engine,
    engine_from_json,
    locate_engine,
    prove_engine,
    quote_words,
)
from strop.launch.container.image import (
    Variant,
    environment_mounts,
    find_image,
    list_images,
    plan_image,
    strop_folder,
)
from strop.launch.container.options import ContainerSite
from strop.launch.container.watch import (
    END_NAME,
    LOG_NAME,
    START_NAME,
    STOP_NAME,
    answer_for,
    inspect_containers,
    is_over,
    note_stop,
    read_container_file,
    secrets_mtime_ns,
    settle,
    start_watcher,
    write_container_file,
)
from strop.launch.contract import JobPlan, JobRef, JobRequest, JobState, SchedulerStatus
from strop.launch.job_dir import job_path_of, read_plan
from strop.launch.local.supervisor_files import answer_trials, forget_orders, order_end, read_identity
from strop.record.files import DirectoryRecord, LogSource, RecordFiles

START_LIMIT_S = 60.0
"""Longest time until process 1 has written its identity."""
KILL_LIMIT_S = 10.0
_POLL_S = 0.1
_MIN_STORAGE_BYTES = 1 << 30
_IMPORT_CHECK = "import strop.launch.local.supervisor"


class ContainerBackend:
    """Implements `Backend` with a container engine."""

    name = "container"

    def __init__(self, profile: ContainerSite) -> None:
        self._profile = profile

    def render(self, plan: JobPlan, request: JobRequest) -> JobPlan:
        """Add the command line of the container."""
        return complete_plan(plan, request, self._profile)

    def probe(self, plan: JobPlan) -> list[Finding]:
        """Check engine, image, folders, cores, memory and devices."""
        return probe_plan(plan, self._profile)

    def submit(self, plan: JobPlan) -> JobRef:
        """Start the container, and wait until its process 1 has written its identity."""
        job_path, name = job_path_of(plan.home), name_container(plan)
        located = locate_engine(self._profile.engine)
        remove_leftovers(located)
        # An earlier container of this home is removed unless it is running.
        settle(job_path)
        facts = inspect_containers(located, [name]).get(name)
        if facts is not None and bool(facts["State"]["Running"]):
            raise CheckRefused(
                f"container {name} of {plan.home} is running",
                allowed="one container for a home",
                next_step="wait for its end, or cancel it",
            )
        if facts is not None:
            located.ask("rm", "--volumes", name)
        image_name = str(plan.details["image"]) or own_image(self._profile)
        image_id = require_image(located, image_name)
        engine = prove_engine(located, image_id)
        devices = self._choose_devices(engine, plan)
        before = read_identity(job_path)
        details = {
            "engine": asdict(engine),
            "container": name,
            "image": image_name,
            "image_id": image_id,
            "devices": list(devices),
            "started_at": time.time(),
            "secrets_mtime_ns": secrets_mtime_ns(job_path),
        }
        for stale in (END_NAME, STOP_NAME):
            (job_path / stale).unlink(missing_ok=True)
        forget_orders(job_path)
        write_container_file(job_path, START_NAME, details)
        done = engine.ask(*self._words(engine, plan, image_id, devices), limit_s=START_LIMIT_S)
        if done.returncode != 0:
            # A container that failed to start may exist as created. --force would end a running one.
            engine.ask("rm", "--volumes", name)
            raise _refuse_start(plan, engine, quote_words(done))
        self._wait_for_start(engine, plan, before)
        try:
            start_watcher(job_path)
        except StropError:
            # A refused job must not run on without a watcher that ends it in time.
            _end_at_once(engine, name, job_path)
            raise
        return _refer_to(plan, details)

    def recover(self, plan: JobPlan) -> JobRef | None:
        """Return the job whose container was started in this home, even if it has ended."""
        job_path = job_path_of(plan.home)
        start = read_container_file(job_path, START_NAME)
        if start is None:
            return None
        name = name_container(plan)
        facts = inspect_containers(engine_from_json(start["engine"]), [name]).get(name)
        if facts is None and read_identity(job_path) is None:
            return None
        start_watcher(job_path)
        return _refer_to(plan, start)

    def poll(self, refs: Sequence[JobRef]) -> Mapping[tuple[str, int], SchedulerStatus]:
        """Query each engine once for all containers; read the recorded ends of those that are gone."""
        starts = {ref.job_id: read_container_file(job_path_of(ref.home), START_NAME) for ref in refs}
        facts: dict[str, dict[str, Any]] = {}
        for program in {str(start["engine"]["program"]) for start in starts.values() if start}:
            of_engine = [
                start for start in starts.values() if start and start["engine"]["program"] == program
            ]
            engine = engine_from_json(of_engine[0]["engine"])
            facts |= inspect_containers(engine, [str(start["container"]) for start in of_engine])
        answers: dict[tuple[str, int], SchedulerStatus] = {}
        for ref in refs:
            answer = answer_for(job_path_of(ref.home), facts.get(ref.job_id))
            if answer is not None:
                answers |= answer_trials(ref, answer)
        return answers

    def open_record(self, ref: JobRef, trial: int) -> RecordFiles:
        """Return the trial's directory."""
        return DirectoryRecord(Path(read_plan(job_path_of(ref.home)).trials[trial].path))

    def open_logs(self, ref: JobRef, trial: int) -> LogSource | None:
        """Return None: logs are files of the record."""
        return None

    def stop(self, ref: JobRef, trial: int | None, *, grace_s: float) -> None:
        """Send TERM to process 1, or without a grace KILL, which ends everything in the container at once.

        Process 1 ends one trial of several, and the others go on.
        """
        job_path = job_path_of(ref.home)
        if trial is not None and len(read_plan(job_path).trials) > 1:
            order_end(job_path, trial, grace_s=grace_s)
            return
        note_stop(job_path, JobState.CANCELLED)
        self._signal(ref, "TERM" if grace_s > 0.0 else "KILL")

    def preempt(self, ref: JobRef, trial: int) -> str:
        """Send process 1 the signal of a preemption."""
        self._signal(ref, "USR2")
        return "SIGUSR2"

    def list_tagged(self) -> Iterator[JobRef]:
        """Yield the jobs of this user's containers, from the containers' labels."""
        engine = locate_engine(self._profile.engine)
        for name, facts in list_containers(engine, f"label=strop.user={find_user_name()}").items():
            labels = facts["Config"]["Labels"]
            yield JobRef(
                name=labels["strop.name"],
                site=labels["strop.site"],
                backend=self.name,
                home=labels["strop.home"],
                job_id=name,
                plan_hash=labels[LABEL],
                submitted_at=float(labels["strop.submitted"]),
            )

    def _words(self, engine: Engine, plan: JobPlan, image_id: str, devices: Sequence[str]) -> list[str]:
        """Return the arguments of the engine."""
        mounts = mounts_of(plan.details)
        missing = [
            mount.to_words()[1] for mount in mounts if mount.is_optional and not Path(mount.source).exists()
        ]
        # Without this flag the kernel denies a sandbox inside its own /proc.
        unmask = "unmask=ALL" if engine.kind == "podman" else "systempaths=unconfined"
        sandbox = ["--security-opt", unmask] if self._profile.sandboxes else []
        host = [
            *user_words(engine),
            *sandbox,
            "--label",
            f"{LABEL_DEVICES}={','.join(devices)}",
        ]
        if self._profile.environment == "mounted":
            for folder in environment_mounts():
                host += Mount(source=folder, target=folder, is_read_only=True).to_words()
            # Python finds a checkout by this path; it finds an installed strop anyway.
            host += ["--env", f"PYTHONPATH={strop_folder()}"]
        places = {IMAGE: [image_id], HOST: host, DEVICES: device_words(engine.kind, devices)}
        return fill_argv(plan.argv[1:], places, missing)

    def _choose_devices(self, engine: Engine, plan: JobPlan) -> tuple[str, ...]:
        num_wanted, requested = plan.resources.gpus_per_node, plan.details.get("devices", ())
        if not num_wanted and not requested:
            return ()
        taken = leased_devices()
        for facts in list_containers(engine, f"label={LABEL_DEVICES}").values():
            taken |= {*facts["Config"]["Labels"].get(LABEL_DEVICES, "").split(",")}
        return choose_devices(
            read_gpus(), read_gpu_users(), num_wanted=num_wanted, requested=requested, taken=taken
        )

    def _wait_for_start(self, engine: Engine, plan: JobPlan, before: object) -> None:
        """Wait for the identity of process 1. Raises: CheckRefused with its output if it ends without one."""
        job_path, name = job_path_of(plan.home), name_container(plan)
        deadline = time.monotonic() + START_LIMIT_S
        while read_identity(job_path) == before:
            facts = inspect_containers(engine, [name]).get(name)
            is_running = facts is not None and bool(facts["State"]["Running"])
            if is_running and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            if read_identity(job_path) != before:
                return
            if is_running:
                _end_at_once(engine, name, job_path)
            settle(job_path)
            words = (
                (job_path / LOG_NAME).read_text(errors="replace")[-2000:]
                if (job_path / LOG_NAME).exists()
                else ""
            )
            raise _refuse_start(plan, engine, words.strip() or "process 1 printed nothing")

    def _signal(self, ref: JobRef, signal_name: str) -> None:
        start = read_container_file(job_path_of(ref.home), START_NAME)
        if start is None:
            raise StoreError(
                f"{ref.home} has no {START_NAME}",
                allowed="the home of a job that this machine started",
                next_step=f"look for its container by hand: podman ps --all --filter label={LABEL}",
            )
        engine, name = engine_from_json(start["engine"]), str(start["container"])
        done = engine.ask("kill", "--signal", signal_name, name)
        if done.returncode == 0:
            return
        facts = inspect_containers(engine, [name]).get(name)
        if facts is not None and bool(facts["State"]["Running"]):
            raise StoreError(
                f"{engine.kind} did not send SIG{signal_name} to {name}: {quote_words(done)}",
                allowed="an engine that answers",
                next_step=f"try it by hand: {engine.kind} kill --signal {signal_name} {name}",
            )


def probe_plan(plan: JobPlan, profile: ContainerSite) -> list[Finding]:
    """Return every finding about a plan; errors of the engine are findings too."""
    findings = [*_probe_mounts(plan), *_probe_resources(plan)]
    try:
        findings += _probe_engine(plan, profile)
    except CheckRefused as error:
        findings.append(find_refusal("engine", error))
    except StoreError as error:
        findings.append(find_refusal("engine", error, severity=Severity.UNKNOWN))
    return findings


def _probe_engine(plan: JobPlan, profile: ContainerSite) -> Iterator[Finding]:
    engine = locate_engine(profile.engine)
    profile_image = str(plan.details["image"])
    name = profile_image or own_image(profile)
    image = find_image(engine, name)
    if image is None:
        prove_engine(engine)
        shown = ", ".join(list_images(engine)) or "none yet"
        yield Finding(
            code="image",
            given=f"{engine.kind} has no image {name!r}",
            allowed=f"an image that it has; of this project: {shown}",
            next_step="correct `image` in the site profile, or remove it"
            if profile_image
            else f"build it: python -m strop.launch.container --variant {_own_variant(profile)}",
        )
        return
    proven = prove_engine(engine, image[0])
    # Containers write into the engine's storage, except into the job's home.
    word = "{{.Store.GraphRoot}}" if proven.kind == "podman" else "{{.DockerRootDir}}"
    done = proven.ask("info", "--format", word)
    free = free_disk_bytes(Path(done.stdout.strip())) if done.returncode == 0 else None
    shown = "an unknown amount" if free is None else f"{free / 1e9:.2f} GB"
    if free is None or free < _MIN_STORAGE_BYTES:
        yield Finding(
            code="storage",
            given=f"the storage of {proven.kind} has {shown} free",
            allowed=f"{_MIN_STORAGE_BYTES / 1e9:.1f} GB or more for what is written beside the job's home",
            next_step="free some: remove images that are not needed",
            severity=Severity.UNKNOWN if free is None else Severity.ERROR,
        )
    if profile.environment == "mounted":
        return
    words = ("--rm", "--pull", "never", "--network", "none", "--entrypoint", plan.python, image[0])
    done = proven.ask("run", *words, "-c", _IMPORT_CHECK, limit_s=120.0)
    if done.returncode != 0:
        yield Finding(
            code="python",
            given=f"{plan.python} of image {name!r} cannot be the supervisor: {quote_words(done)}",
            allowed="an image with an interpreter that has strop",
            next_step="build the project's own image, or set `python` in the site profile",
        )


def _probe_mounts(plan: JobPlan) -> Iterator[Finding]:
    shown = mounts_of(plan.details)
    for mount in shown:
        # The home is made when the job is submitted.
        if mount.source == plan.home or Path(mount.source).exists():
            continue
        yield Finding(
            code="mount",
            given=f"{mount.source} is not there, and was to be shown as {mount.target}",
            allowed="folders of this machine",
            next_step="make it, or correct mounts or the variable in the site profile",
            severity=Severity.WARNING if mount.is_optional else Severity.ERROR,
        )
    inside = [mount.target for mount in shown]
    for path in plan.details.get("paths", ()):
        if not Path(path).exists() or any(PurePosixPath(path).is_relative_to(target) for target in inside):
            continue
        yield Finding(
            code="path",
            given=f"the run file names {path}, which the container will not see",
            allowed="paths in the job's home or in a folder that is shown inside",
            next_step=f"add '{path}:{path}:ro' to mounts in the site profile",
            severity=Severity.WARNING,
        )


def _probe_resources(plan: JobPlan) -> Iterator[Finding]:
    num_cpus, has_cpus = count_cpus(plan), os.cpu_count() or 1
    if num_cpus is not None and num_cpus > has_cpus:
        yield Finding(
            code="cpus",
            given=f"{num_cpus} cores are asked for, and this machine has {has_cpus}",
            allowed=f"{has_cpus} at most",
            next_step="change job.cpus or job.cpus_per_gpu",
        )
    has_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if plan.resources.memory is not None and parse_memory_bytes(plan.resources.memory) > has_bytes:
        yield Finding(
            code="memory",
            given=f"{plan.resources.memory} is asked for, and this machine has {has_bytes / 1e9:.1f} GB",
            allowed="no more than there is",
            next_step="change job.memory",
        )
    num_gpus = plan.resources.gpus_per_node
    if num_gpus and num_gpus > (has_gpus := len(read_gpus())):
        yield Finding(
            code="gpus",
            given=f"{num_gpus} GPUs are asked for, and this machine has {has_gpus}",
            allowed=f"{has_gpus} at most",
            next_step="ask for fewer, or send the run to another site",
        )


def own_image(profile: ContainerSite) -> str:
    """Return the name of the project's own image, as it would be built from this environment now."""
    return plan_image(_own_variant(profile), base_image=profile.base_image).name


def _own_variant(profile: ContainerSite) -> Variant:
    return Variant.BASE if profile.environment == "mounted" else Variant.FULL


def require_image(engine: Engine, name: str) -> str:
    """Return the id of an image. Raises: CheckRefused naming the existing images; StoreError."""
    image = find_image(engine, name)
    if image is not None:
        return image[0]
    raise CheckRefused(
        f"{engine.kind} has no image {name!r}",
        allowed=f"an image that it has; of this project: {', '.join(list_images(engine)) or 'none yet'}",
        next_step="build it: python -m strop.launch.container, or correct `image` in the site profile",
    )


def remove_leftovers(engine: Engine) -> list[str]:
    """Settle every ended container of this user that has lost its watcher; return their names.

    A container without a home is removed. Raises: StoreError if the engine does not answer.
    """
    removed: list[str] = []
    for name, facts in list_containers(engine, f"label=strop.user={find_user_name()}").items():
        if not is_over(facts):
            continue
        job_path = job_path_of(facts["Config"]["Labels"]["strop.home"])
        if read_container_file(job_path, START_NAME) is None:
            engine.ask("rm", "--force", "--volumes", name)
        else:
            settle(job_path)
        removed.append(name)
    return removed


def list_containers(engine: Engine, condition: str) -> dict[str, dict[str, Any]]:
    """Return the containers of strop's jobs that pass a filter of the engine, by name.

    Raises: StoreError if the engine does not answer.
    """
    done = engine.ask(
        "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}", "--filter", condition
    )
    if done.returncode != 0:
        raise StoreError(
            f"{engine.kind} ps did not answer: {quote_words(done)}",
            allowed="an engine that answers",
            next_step=f"try it by hand: {engine.kind} ps --all",
        )
    return inspect_containers(engine, done.stdout.split())


def user_words(engine: Engine) -> list[str]:
    """Return the flags that make files written inside belong to this user outside."""
    if os.getuid() == 0 and not engine.is_rootless:
        return []
    user = ["--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp"]
    return [*(["--userns", "keep-id"] if engine.is_rootless else []), *user]


def _end_at_once(engine: Engine, name: str, job_path: Path) -> None:
    """Kill a container and settle. Raises: StoreError if the engine does not answer."""
    engine.ask("kill", "--signal", "KILL", name)
    deadline = time.monotonic() + KILL_LIMIT_S
    while not settle(job_path) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _refuse_start(plan: JobPlan, engine: Engine, words: str) -> CheckRefused:
    return CheckRefused(
        f"{engine.kind} did not start {plan.name}: {words}",
        allowed="a container that starts",
        next_step="correct it, then submit again; `strop submit --check` tests without starting the job",
    )


def _refer_to(plan: JobPlan, start: Mapping[str, Any]) -> JobRef:
    return plan.refer_to(name_container(plan), {key: start[key] for key in ("image", "image_id", "devices")})
