"""GPUs for roles: cut from what a job was given, or chosen among the free ones of a machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError
from strop.hardware import Gpu, take_lease
from strop.hardware.allocation import Allocation, GpuRequest, allocate_gpus
from strop.hardware.gpus import GpuReport, GpuUser
from strop.hardware.leases import FOLDER_VARIABLE
from tests.fixtures.devices import GIB, divided, whole

THREE = [whole(0, 70), whole(1, 13), whole(2, 79)]
SLICED = divided(3, "MIG-c6d4", "MIG-77aa")
STRANGER = GpuUser(pid=4711, name="of ada: python serve.py")


@pytest.fixture(autouse=True)
def _no_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "runtime"))


def found(*gpus: Gpu) -> GpuReport:
    return GpuReport(gpus=gpus)


def seen(allocation: Allocation) -> Mapping[str, str | None]:
    return {name: role.visible.text for name, role in allocation.roles.items()}


@pytest.mark.parametrize(
    ("inherited", "engine", "learner", "uuids"),
    [
        ("3,5", "3", "5", ("GPU-3", "GPU-5")),
        ("5,3", "5", "3", ("GPU-5", "GPU-3")),
        ("GPU-5,GPU-3", "GPU-5", "GPU-3", ("GPU-5", "GPU-3")),
        ("MIG-c6d4,MIG-77aa", "MIG-c6d4", "MIG-77aa", ("MIG-c6d4", "MIG-77aa")),
        # The old spelling: GPU, GPU instance, compute instance.
        ("MIG-GPU-6/7/0,MIG-GPU-6/8/0", "MIG-GPU-6/7/0", "MIG-GPU-6/8/0", ("MIG-c6d4", "MIG-77aa")),
    ],
)
def test_prc_7_a_given_list_is_cut_in_its_order_and_never_renumbered(
    inherited: str, engine: str, learner: str, uuids: tuple[str, ...]
) -> None:
    machine = found(whole(3, 70), whole(5, 70), divided(6, "MIG-c6d4", "MIG-77aa"))
    wanted = {"engine": 1, "learner": 1, "environments": 0}
    made = allocate_gpus(GpuRequest(wanted=wanted, inherited=inherited), machine)
    assert seen(made) == {"engine": engine, "learner": learner, "environments": ""}
    assert made.uuids == uuids
    assert made.roles["environments"].variables == {
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert made.record()["inherited"] == inherited
    assert made.record()["roles"] == {
        "engine": {"uuids": [uuids[0]], "visible": engine},
        "learner": {"uuids": [uuids[1]], "visible": learner},
        "environments": {"uuids": [], "visible": ""},
    }


def test_what_is_given_beyond_the_request_stays_unused_and_is_told() -> None:
    made = allocate_gpus(GpuRequest(wanted={"learner": 2}, inherited="2,0,1"), found(*THREE))
    assert seen(made) == {"learner": "2,0"}
    (notice,) = made.notices
    assert "used, 2, 0, and 1 stay unused" in notice


def test_the_beginning_of_a_uuid_is_its_gpu() -> None:
    machine = found(whole(12, 70), whole(13, 70))
    made = allocate_gpus(GpuRequest(wanted={"learner": 1}, inherited="GPU-12"), machine)
    assert made.uuids == ("GPU-12",)
    for inherited, shown in (
        ("GPU-1", "GPU-1, which is several GPUs"),
        ("GPU-7", "GPU-7, .*Allowed: .*GPU-12, GPU-13"),
        *((name, f"names {name}, which is no GPU") for name in ("7", "MIG-7")),
    ):
        with pytest.raises(ConfigError, match=shown):
            allocate_gpus(GpuRequest(wanted={"learner": 1}, inherited=inherited), machine)
    with pytest.raises(ConfigError, match="names one GPU twice"):
        allocate_gpus(GpuRequest(wanted={"learner": 2}, inherited="GPU-ab,GPU-a"), found(whole("ab", 70)))


@pytest.mark.parametrize(
    ("wanted", "inherited", "shown"),
    [
        ({"learner": 2, "engine": 1}, "0,1", r"\(learner 2, engine 1\), .* is 0,1"),
        ({"learner": 1}, "NoDevFiles", "CUDA_VISIBLE_DEVICES is none"),
        ({"learner": 1}, None, "CUDA_VISIBLE_DEVICES is not set"),
        ({"learner": 2}, "MIG-c6d4,MIG-77aa", "learner is to use several MIG slices"),
        ({"learner": 1}, "3", "GPU 3, .*MIG-c6d4, MIG-77aa"),
        ({"learner": 1}, "GPU-3", "GPU GPU-3, which is divided"),
    ],
)
def test_a_job_that_was_given_something_else_is_refused(
    wanted: Mapping[str, int], inherited: str | None, shown: str
) -> None:
    request = GpuRequest(wanted=wanted, inherited=inherited, is_granted=True)
    with pytest.raises(CheckRefused, match=shown) as caught:
        allocate_gpus(request, found(*THREE, SLICED))
    assert caught.value.exit_code == 76


def test_slices_and_whole_gpus_are_never_mixed() -> None:
    with pytest.raises(ConfigError, match="several forms"):
        allocate_gpus(GpuRequest(wanted={"learner": 2}, inherited="GPU-0,MIG-c6d4"), found(*THREE, SLICED))
    # One whole GPU and two slices are three devices, and no set of two of one kind for a role of two.
    with pytest.raises(CheckRefused, match="has 1 whole GPUs and 2 MIG slices; a role sees one MIG slice"):
        allocate_gpus(GpuRequest(wanted={"learner": 2}), found(THREE[0], SLICED))
    made = allocate_gpus(GpuRequest(wanted={"engine": 1, "learner": 1}), found(THREE[0], SLICED))
    assert seen(made) == {"engine": "MIG-c6d4", "learner": "MIG-77aa"}


def test_the_emptiest_gpus_are_taken_where_nothing_is_given() -> None:
    made = allocate_gpus(GpuRequest(wanted={"engine": 0, "learner": 2}), found(*THREE))
    # 79 and 70 GiB free: GPUs 2 and 0, in the order of the machine.
    assert seen(made) == {"engine": "", "learner": "0,2"}
    assert made.uuids == ("GPU-0", "GPU-2")
    # The one that needs most gets the emptiest, whatever the order of roles.
    needs = {"engine": 12 * GIB, "learner": 75 * GIB}
    made = allocate_gpus(GpuRequest(wanted={"engine": 1, "learner": 1}, need_bytes=needs), found(*THREE[1:]))
    assert seen(made) == {"engine": "1", "learner": "2"}


def test_prc_4_who_is_in_the_way_is_named_with_need_and_room() -> None:
    machine = found(replace(THREE[0], users=(STRANGER,)), *THREE[1:])
    with take_lease(["GPU-2"]), pytest.raises(CheckRefused) as caught:
        allocate_gpus(GpuRequest(wanted={"learner": 1}, need_bytes={"learner": 20 * GIB}), machine)
    said = str(caught.value)
    for part in (
        *("process 4711 (of ada: python serve.py); 70.00 GiB free", "13.00 GiB free of 80.00 GiB, 20.00 GiB"),
        "67.00 GiB are used by no process that can be seen",
        f"GPU-2 (Test, index 2) is held by process {os.getpid()} ",
    ):
        assert part in said
    # Once the lease has ended, the GPU is free.
    assert seen(allocate_gpus(GpuRequest(wanted={"learner": 1}), machine)) == {"learner": "2"}


def test_own_processes_are_no_strangers() -> None:
    machine = found(replace(THREE[0], users=(replace(STRANGER, pid=os.getpid()),)))
    assert seen(allocate_gpus(GpuRequest(wanted={"learner": 1}), machine)) == {"learner": "0"}


def test_a_slice_is_promised_its_own_memory_and_not_that_of_its_gpu() -> None:
    machine = found(divided(0, "MIG-c6d4"))
    # 10 GB of the slice are less than 12 GiB, although its GPU has 80.
    with pytest.raises(CheckRefused, match=r"learner on MIG slice MIG-c6d4 .* 9\.31 GiB, 12\.00 GiB needed"):
        allocate_gpus(GpuRequest(wanted={"learner": 1}, need_bytes={"learner": 12 * GIB}), machine)


def test_a_machine_whose_gpus_nobody_tells_of() -> None:
    missing = GpuReport(has_driver=False, complaint="no library")
    with pytest.raises(CheckRefused, match=r"1 GPU is asked for and NVML shows none \(no library\)"):
        allocate_gpus(GpuRequest(wanted={"learner": 1}), missing)
    # What a scheduler gave is still divided by name.
    made = allocate_gpus(GpuRequest(wanted={"learner": 1}, inherited="0,1"), missing)
    assert (seen(made), made.uuids) == ({"learner": "0"}, ())
    assert allocate_gpus(GpuRequest(wanted={"learner": 0}), missing).roles["learner"].visible.text == ""
