from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from strop.errors import CheckRefused
from strop.hardware import Gpu, GpuUser, MigSlice, take_lease
from strop.hardware.leases import leases_dir, path_of
from strop.launch.container.command import choose_devices, device_words, leased_devices


def gpu(index: int, *slices: str) -> Gpu:
    parts = tuple(MigSlice(uuid=uuid, profile="1g.10gb") for uuid in slices)
    return Gpu(
        index=str(index), uuid=f"GPU-{index}", name="x", memory_bytes=None, has_mig=bool(slices), slices=parts
    )


FOUR = [gpu(0), gpu(1), gpu(2), gpu(3)]
STRANGER = GpuUser(gpu_uuid="GPU-1", pid=1, memory_bytes=None, user=None, command=None)


def test_free_devices_are_taken_in_order_and_others_left_alone() -> None:
    chosen = choose_devices(FOUR, [STRANGER], num_wanted=2, requested=(), taken={"GPU-0"})
    assert chosen == ("GPU-2", "GPU-3")
    assert choose_devices(FOUR, [], num_wanted=0, requested=(), taken=()) == ()


def test_too_few_free_ones_are_refused_with_the_numbers() -> None:
    with pytest.raises(CheckRefused, match="3 GPUs are asked for, and 2 of 4 here are free"):
        choose_devices(FOUR, [STRANGER], num_wanted=3, requested=(), taken={"GPU-0"})


def test_devices_are_asked_for_by_index_or_id() -> None:
    assert choose_devices(FOUR, [], num_wanted=2, requested=("3", "GPU-0"), taken=()) == ("GPU-3", "GPU-0")
    for asked, why in ((("7",), "7 not known here"), (("1",), "1 in use"), ((), "")):
        if asked:
            with pytest.raises(CheckRefused, match=why):
                choose_devices(FOUR, [STRANGER], num_wanted=1, requested=asked, taken=())
    with pytest.raises(CheckRefused, match="devices 0: the run asks for 2"):
        choose_devices(FOUR, [], num_wanted=2, requested=("0",), taken=())
    with pytest.raises(CheckRefused, match="none, this machine has no GPU"):
        choose_devices([], [], num_wanted=1, requested=("0",), taken=())


def test_a_divided_gpu_is_only_its_slices_and_they_are_one_roles_alone() -> None:
    divided = [gpu(0, "MIG-a", "MIG-b"), gpu(1)]
    assert choose_devices(divided, [], num_wanted=1, requested=(), taken=()) == ("MIG-a",)
    assert choose_devices(divided, [], num_wanted=1, requested=("MIG-b",), taken=()) == ("MIG-b",)
    with pytest.raises(CheckRefused, match="0 not known here"):
        choose_devices(divided, [], num_wanted=1, requested=("0",), taken=())
    with pytest.raises(CheckRefused, match="2 GPUs are asked for, and 1 of 2 here are free"):
        choose_devices(divided, [], num_wanted=2, requested=(), taken=())


def test_engines_are_told_in_their_own_words() -> None:
    assert device_words("podman", ["GPU-1", "GPU-2"]) == [
        *("--device", "nvidia.com/gpu=GPU-1", "--device", "nvidia.com/gpu=GPU-2"),
        *("--env", "CUDA_VISIBLE_DEVICES=GPU-1,GPU-2"),
    ]
    docker = device_words("docker", ["GPU-1", "GPU-2"])
    assert docker[:2] == ["--gpus", '"device=GPU-1,GPU-2"']
    assert device_words("podman", []) == []


def test_what_a_run_in_another_container_holds_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: its process is not seen here, so that its lease read as dead, and its GPU was given twice."""
    monkeypatch.setenv("STROP_RUNTIME_DIR", str(tmp_path / "runtime"))
    with take_lease("run", "1", gpus=["GPU-1"]) as held:
        holder = replace(held.lease.holder, pid_namespace="pid:[1]")
        elsewhere = replace(held.lease, holder=holder)
        path_of(elsewhere, leases_dir()).write_text(json.dumps(asdict(elsewhere)))
        # The lock says so: it is held as long as that process lives, whatever its number means here.
        assert leased_devices() == {"GPU-1"}
    assert leased_devices() == set()
