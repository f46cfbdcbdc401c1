"""`--local`: the job of a plan on this machine, by the contract runner, without talking to AWS.

The same entry, the same files, the same channels. Its buckets are folders in the job's home, `local/s3`;
what a run fetches itself, models and data, comes from where the run file and STROP_STORE_URI here say.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

from strop.errors import EXIT_INTERRUPTED
from strop.hardware import Gpu, GpuUser
from strop.launch.container.devices import choose_devices, leased_devices
from strop.launch.container.engine import Engine
from strop.launch.contract import JobPlan
from strop.launch.home import job_path_of
from strop.launch.sagemaker.backend import SageMakerBackend
from strop.launch.sagemaker.emulator import ContractRunner, RunnerSettings
from strop.launch.sagemaker.folder_objects import FolderObjects
from strop.spec.site import SageMakerSite
from strop.store.policy import OFFLINE_VARIABLES, ORDER_VARIABLE, URI_VARIABLE

_POLL_S = 0.2
_KEPT = (
    *(URI_VARIABLE, ORDER_VARIABLE, *OFFLINE_VARIABLES, "STROP_CACHE", "HF_HOME", "PYTHONPATH"),
    *("AWS_PROFILE", "AWS_REGION", "AWS_ENDPOINT_URL"),
)
"""Of this shell's variables, what a run on this machine needs to find its inputs."""


def run_here(
    plan: JobPlan,
    profile: SageMakerSite,
    *,
    gpus: Sequence[str] = (),
    engine: Engine | None = None,
    image: str | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> int:
    """Run the first member of a plan whose home is filled; return its exit code. Ctrl-C is a stop.

    Raises: CheckRefused; StoreError; ConfigError as a submission.
    """
    folder = job_path_of(plan.home).parent / "local"
    objects = FolderObjects(folder / "s3")
    request = SageMakerBackend(profile, objects=objects).send_locally(plan)
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    # Not the bucket of the plan: a rehearsal reaches no AWS that the user did not name.
    environment.setdefault(URI_VARIABLE, "")
    settings = RunnerSettings(
        engine=engine,
        image=image,
        gpus=tuple(gpus),
        python=None if engine is not None else sys.executable,
        stop_window_s=plan.grace_s,
        environment=environment,
    )
    what = (
        f"a container of {image}" if engine is not None else "plain processes on this machine, no container"
    )
    say(f"local: {what}; its buckets are in {folder / 's3'}")
    runner = ContractRunner(folder / "hosts", objects, settings)
    runner.start(request)
    try:
        code = _follow(runner, say)
    except KeyboardInterrupt:
        say("stopping: SIGTERM, then the window")
        code = runner.stop() or EXIT_INTERRUPTED
    finally:
        runner.kill()
    for sentence in runner.check_end():
        say(f"contract: {sentence}")
    if failure := runner.failure():
        say(f"failure file: {failure}")
    return code


def choose_gpus(
    plan: JobPlan, asked: Sequence[str], gpus: Sequence[Gpu], users: Sequence[GpuUser]
) -> tuple[str, ...]:
    """Return the ids of the GPUs that a container of a plan gets here: those asked for, else free ones.

    Raises: CheckRefused if one is unknown or in use, or too few are free.
    """
    return choose_devices(
        gpus, users, num_wanted=plan.resources.gpus_per_node, asked=asked, taken=leased_devices()
    )


def _follow(runner: ContractRunner, say: Callable[[str], None]) -> int:
    shown = dict.fromkeys(runner.hosts, 0)
    while True:
        code = runner.poll()
        for host in runner.hosts:
            text = runner.log_of(host)[shown[host] :]
            whole = text if code is not None else text[: text.rfind("\n") + 1]
            shown[host] += len(whole)
            for line in whole.splitlines():
                say(f"{host}: {line}")
        if code is not None:
            return code
        time.sleep(_POLL_S)
