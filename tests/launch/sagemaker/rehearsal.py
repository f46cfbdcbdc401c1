"""A submitted job whose instances are emulators: everything is real but the platform."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from strop.launch.build_request import make_plan
from strop.launch.contract import JobEnvironment, RolePlan
from strop.launch.job_dir import write_job_dir
from strop.launch.sagemaker.backend import SageMakerBackend
from strop.launch.sagemaker.client import AwsClients, JobObjects
from strop.launch.sagemaker.local_mode import Emulator, EmulatorSettings
from strop.launch.sagemaker.local_platform import FolderObjects
from strop.launch.sagemaker.options import SageMakerSite
from strop.launch.snapshot import take_snapshot
from tests.fixtures.sagemaker import FakeSageMaker
from tests.fixtures.sockets import free_port
from tests.launch.sagemaker.building import NOON, PROFILE, make_request
from tests.launch.sagemaker.trainee import advance

SOURCE = Path(__file__).parents[3] / "src"
ENDLESS = 10**9
"""Steps of a trainee that goes on until it is told to end, however long the test takes to do so."""


@dataclass
class Rehearsal:
    """One project, one store in a folder, and starts of its job."""

    root: Path
    objects: JobObjects | None = None
    emulators: list[Emulator] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.project = self.root / "project"
        self.project.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("trainee.py"), self.project / "program.py")
        self.folder = FolderObjects(self.root / "s3")
        self.objects = self.objects or self.folder

    def submit(self, *, roles: tuple[RolePlan, ...] = (), **changes: Any) -> dict[str, Any]:
        """Submit and return the request that arrived."""
        numbers = {f"TRAINEE_{key}": str(value) for key, value in changes.pop("trainee", {}).items()}
        profile = SageMakerSite(**{**PROFILE, **changes.pop("profile", {})})
        fake = FakeSageMaker(now=NOON)
        clients = AwsClients(profile=profile, by_service={"sagemaker": fake})
        backend = SageMakerBackend(profile, clients=clients, objects=self.objects)
        num_past, evaluation = changes.pop("num_past", 0), changes.pop("evaluation", None)
        command = changes.pop("command", "train")
        request = make_request(
            project=self.project,
            profile=profile.model_dump(exclude_defaults=True),
            environment=JobEnvironment(variables={**numbers, **changes.pop("variables", {})}),
            **{"image": "elsewhere.example/strop:1", **changes},
        )
        request = replace(request, snapshot=take_snapshot(self.project, excluded=[self.project / "runs"]))
        home = f"{request.home}{'-2' if 'job_name' in changes else ''}"
        request = replace(request, roles=roles or request.roles, home=home, num_past=num_past)
        request = replace(request, evaluation=evaluation, command=command)
        plan = make_plan(request, backend)
        write_job_dir(plan, request, {})
        backend.submit(plan)
        return fake.sent("create_training_job")[0]

    def start(self, request: dict[str, Any], **settings: Any) -> Emulator:
        """Start the instances of a job once more, as the platform would.

        `num_steps`: how far the trainee of this start goes, where the job does not say.
        """
        environment = {"PYTHONPATH": str(SOURCE), "STROP_CACHE": str(self.root / "cache")}
        if (num_steps := settings.pop("num_steps", None)) is not None:
            environment["TRAINEE_STEPS"] = str(num_steps)
        # The stop's window is the platform's own: a busy machine needs more than a few seconds.
        given = {"sync_every_s": 0.2, "ray_port": free_port(), **settings}
        given["environment"] = {**environment, **given.get("environment", {})}
        # The record goes beside the checkpoints: these jobs reach no S3.
        given["environment"].setdefault("STROP_STORE_URI", "")
        emulator = Emulator(
            self.root / f"start-{len(self.emulators)}", self.objects or self.folder, EmulatorSettings(**given)
        )
        self.emulators.append(emulator)
        emulator.start(request)
        return emulator

    def close(self) -> None:
        for emulator in self.emulators:
            emulator.kill()

    def states(self, request: dict[str, Any]) -> list[str]:
        """Return the complete states in the store, oldest first."""
        assert self.objects is not None
        root = request["CheckpointConfig"]["S3Uri"].rstrip("/")
        names = [stored.uri[len(root) + 1 :] for stored in self.objects.list(root)]
        found = [name.split("/")[1] for name in names if name.endswith("/COMPLETE") and name.count("/") == 2]
        return sorted({name for name in found if name.startswith("step-")})

    def read_record(self, request: dict[str, Any], name: str) -> Any:
        assert self.objects is not None
        root = request["CheckpointConfig"]["S3Uri"].rstrip("/")
        return json.loads(self.objects.read(f"{root}/record/{name}"))

    def metrics(self, request: dict[str, Any], host: str) -> list[dict[str, int]]:
        assert self.objects is not None
        root = request["CheckpointConfig"]["S3Uri"].rstrip("/")
        text = self.objects.read(f"{root}/{host}/run/metrics.jsonl").decode()
        return [json.loads(line) for line in text.splitlines()]


def step_of(state: str) -> int:
    """Return the step of a state by its name."""
    return int(state.removeprefix("step-"))


def handles_term(pid: int, *, is_first: bool = False) -> bool:
    """Whether a process has a handler for SIGTERM; `is_first`: and is the first one of a container."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    numbers = status["NSpid"].split()
    is_caught = bool(int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1)
    return is_caught and (not is_first or (len(numbers) > 1 and numbers[-1] == "1"))


def expected_metrics(num_steps: int) -> list[dict[str, int]]:
    """Return what an undisturbed training writes."""
    found, state = [], 1
    for step in range(1, num_steps + 1):
        state = advance(state, step)
        found.append({"step": step, "state": state})
    return found
