"""Sandboxes that have GPUs: which device files and names their programs find, and who has none to give."""

from __future__ import annotations

import asyncio
import os
import uuid
from pathlib import Path

import pytest

from strop.errors import SandboxRefused
from strop.hardware import gpu_files
from strop.hardware.gpu_files import GpuFiles
from strop.sandbox import IsolationLevel, SandboxSpec, local, make_backend
from tests.fixtures.gpus import MakeGpus, fake_gpu, make_device
from tests.fixtures.sandboxes import (
    IS_ROOT,
    needs_bubblewrap,
    needs_podman,
    on_every_engine,
    say,
    with_own_root,
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


@with_own_root
def test_programs_reach_their_own_gpus_and_no_others(gpus_of: MakeGpus, backend: str) -> None:
    gpus_of([fake_gpu(index) for index in range(4)])
    spec = SandboxSpec(gpus=("3", "GPU-1"), min_level=IsolationLevel.NAMESPACE)
    assert show(backend, spec, "/dev/nvidia3") == [
        *("/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidia3", "/dev/nvidiactl"),
        "GPU-3,GPU-1 PCI_BUS_ID unlimited 3",
    ]
    assert show(backend, SandboxSpec(), "/dev/zero") == [f"{524288} 3"]


@needs_bubblewrap
def test_a_slice_is_the_file_of_its_gpu_and_two_that_open_it(gpus_of: MakeGpus) -> None:
    gpus_of([fake_gpu(0), fake_gpu(1, num_slices=2)])
    *files, told = show("bubblewrap", SandboxSpec(gpus=("MIG-11",)), "/dev/nvidia-caps/nvidia-cap23")
    caps = [f"/dev/nvidia-caps/nvidia-cap{number}" for number in (22, 23)]
    assert files == ["/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidiactl", *caps]
    assert told == "MIG-11 PCI_BUS_ID unlimited 3"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An image of nothing."""
    root = tmp_path / "image"
    (root / "tmp").mkdir(parents=True)
    return root


@pytest.mark.slow
@on_every_engine
def test_an_image_gets_the_libraries_of_the_driver(
    gpus_of: MakeGpus, backend: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus_of([fake_gpu(0)])
    library = tree.parent / "libcuda.so.9"
    library.write_text("the driver's")
    monkeypatch.setattr(gpu_files, "_find_libraries", lambda: ({"libcuda.so.1": str(library)}, True))

    async def read() -> tuple[bytes, str]:
        spec = SandboxSpec(gpus=("0",), image=str(tree), env={"LD_LIBRARY_PATH": "/its/own"})
        async with await make_backend(backend).create(spec) as sandbox:
            return await sandbox.read("/usr/local/nvidia/lib64/libcuda.so.1"), sandbox._env["LD_LIBRARY_PATH"]

    assert asyncio.run(read()) == (b"the driver's", "/usr/local/nvidia/lib64:/its/own")


@pytest.mark.slow
@needs_podman
def test_a_container_s_own_root_reaches_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a user namespace runc shows a device where it is on the host.
    path = Path(f"/dev/strop-test-{uuid.uuid4().hex}")
    found = str(path)
    files = GpuFiles(visible="GPU-0", devices={found: found}, libraries={}, is_linked=True)
    monkeypatch.setattr(gpu_files, "find_gpu_files", lambda names: files)

    async def run() -> str:
        async with await make_backend("podman").create(SandboxSpec(gpus=("0",), user=0)) as sandbox:
            return await say(sandbox, f"head -c 3 {found} | wc -c; echo $CUDA_VISIBLE_DEVICES")

    try:
        make_device(path)
        assert asyncio.run(run()) == "3\nGPU-0\n"
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("backend", "gpus", "words"),
    [
        ("process", ("0",), "whose programs reach all GPUs of the machine"),
        ("bubblewrap", ("7",), "device files of GPU 7 are not known: nvidia-smi -q tells of GPU-0"),
        ("bubblewrap", ("GPU-",), "device files of GPU GPU- are not known"),
        ("bubblewrap", ("1",), "nvidia1 is no device file"),
        pytest.param(
            "bubblewrap",
            ("2",),
            r"nvidia2 is closed to others \(mode 660\)",
            marks=pytest.mark.skipif(not IS_ROOT, reason="makes device files"),
        ),
    ],
)
def test_what_cannot_be_given_is_refused(
    gpus_of: MakeGpus, backend: str, gpus: tuple[str, ...], words: str
) -> None:
    dev = gpus_of([fake_gpu(index) for index in range(3)])
    (dev / "nvidia1").unlink()
    if IS_ROOT:
        (dev / "nvidia2").unlink()
        make_device(dev / "nvidia2", mode=0o660)
    with pytest.raises(SandboxRefused, match=words) as refused:
        asyncio.run(make_backend(backend).create(SandboxSpec(gpus=gpus)))
    assert refused.value.kind == "gpus"


def test_no_gpu_is_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    gpu_files.find_gpu_files.cache_clear()
    with pytest.raises(SandboxRefused, match="nvidia-smi -q tells of no GPU"):
        local.give_gpus(SandboxSpec(gpus=("0",)), "bubblewrap")


def test_libraries_that_the_loader_does_not_know_are_named(
    gpus_of: MakeGpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpus_of([fake_gpu(0)])
    monkeypatch.undo()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libother.so.1"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpu_files, "_list_linked", lambda: iter(()))
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}{os.pathsep}")
    found, is_linked = gpu_files._find_libraries()
    assert (set(found) >= {"libcuda.so.1", "libnvidia-ml.so.1"}, "libother.so.1" in found, is_linked) == (
        True,
        False,
        False,
    )
