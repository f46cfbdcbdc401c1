"""Sandboxes that have GPUs: which device files and names their programs find, and who has none to give."""

from __future__ import annotations

import asyncio

import pytest

from strop.errors import SandboxRefused
from strop.sandbox import IsolationLevel, SandboxSpec, local, make_backend
from tests.fixtures.devices import divided, whole
from tests.fixtures.gpus import MakeGpus
from tests.fixtures.sandboxes import (
    needs_bubblewrap,
)

SHOWN = """
for file in /dev/nvidia* /dev/nvidia-caps/*; do test ! -c $file || echo $file; done
echo $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $(ulimit -v) $(head -c 3 $0 | wc -c)
"""


def show(backend: str, spec: SandboxSpec, opened: str) -> list[str]:
    """Return the device files of GPUs that a program finds, then what it is told, and bytes of one file."""

    async def run() -> str:
        async with await make_backend(backend).create(spec) as sandbox:
            done = await sandbox.exec(["/bin/sh", "-c", SHOWN, opened], wall_limit_s=60)
            return done.stdout.decode()

    return asyncio.run(run()).splitlines()


@needs_bubblewrap
def test_programs_reach_their_own_gpus_and_no_others(gpus_of: MakeGpus) -> None:
    gpus_of([whole(index, 79) for index in range(4)])
    spec = SandboxSpec(gpus=("3", "GPU-1"), min_level=IsolationLevel.NAMESPACE)
    assert show("bubblewrap", spec, "/dev/nvidia3") == [
        *("/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidia3", "/dev/nvidiactl"),
        "GPU-3,GPU-1 PCI_BUS_ID unlimited 3",
    ]
    assert show("bubblewrap", SandboxSpec(), "/dev/zero") == [f"{524288} 3"]


@pytest.mark.parametrize("backend", ["podman", "docker"])
def test_containers_are_given_gpus_and_slices_by_name(gpus_of: MakeGpus, backend: str) -> None:
    gpus_of([whole(0, 79), divided(1, "MIG-10", "MIG-11")])
    spec, devices = local.give_gpus(SandboxSpec(gpus=("0", "MIG-11")), backend)
    assert devices == {"nvidia.com/gpu=GPU-0": "", "nvidia.com/gpu=MIG-11": ""}
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-0,MIG-11"


@needs_bubblewrap
def test_a_slice_is_the_file_of_its_gpu_and_two_that_open_it(gpus_of: MakeGpus) -> None:
    gpus_of([whole(0, 79), divided(1, "MIG-10", "MIG-11")])
    *files, told = show("bubblewrap", SandboxSpec(gpus=("MIG-11",)), "/dev/nvidia-caps/nvidia-cap23")
    caps = [f"/dev/nvidia-caps/nvidia-cap{number}" for number in (22, 23)]
    assert files == ["/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidiactl", *caps]
    assert told == "MIG-11 PCI_BUS_ID unlimited 3"


@pytest.mark.parametrize(
    ("backend", "gpus", "words"),
    [
        ("process", ("0",), "whose programs reach all GPUs of the machine"),
        ("bubblewrap", ("7",), "GPUs 7: .*found: GPU-0, GPU-1"),
        ("bubblewrap", ("GPU-",), "GPUs GPU-: "),
        ("bubblewrap", ("1",), "nvidia1 is no device file"),
    ],
)
def test_what_cannot_be_given_is_refused(
    gpus_of: MakeGpus, backend: str, gpus: tuple[str, ...], words: str
) -> None:
    dev = gpus_of([whole(index, 79) for index in range(2)])
    (dev / "nvidia1").unlink()
    with pytest.raises(SandboxRefused, match=words) as refused:
        asyncio.run(make_backend(backend).create(SandboxSpec(gpus=gpus)))
    assert refused.value.kind == "gpus"


def test_no_gpu_is_here() -> None:
    with pytest.raises(SandboxRefused, match="NVML") as refused:
        local.give_gpus(SandboxSpec(gpus=("0",)), "bubblewrap")
    assert refused.value.kind == "gpus"
