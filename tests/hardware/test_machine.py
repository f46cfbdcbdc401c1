"""The machine: cores, memory, disks, measured efficiency, and the number format that it computes in."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.errors import CheckRefused, StoreError
from strop.hardware import (
    Gpu,
    calibrate_machine,
    describe_machine,
    free_disk_bytes,
    peak_rss_bytes,
    require_writable,
    rss_bytes,
)
from strop.hardware.accelerators import find_accelerator
from strop.hardware.calibrate import (
    CPU_EFFICIENCY,
    best_rate,
    read_efficiency,
    write_efficiency,
)
from strop.hardware.disks import describe_disk
from strop.hardware.machine import group_dirs, read_cgroup_memory, read_cpu_quota
from strop.hardware.number_format import DTYPE_FACT, choose_format, settle_format
from strop.spec.run import RunSpec
from tests.fixtures.tiny_disk import tiny_disk


def test_the_machine_has_what_this_process_may_use() -> None:
    machine = describe_machine()
    assert 1 <= machine.num_physical_cores <= machine.num_logical_cpus <= (os.cpu_count() or 1)
    assert machine.python == ".".join(str(part) for part in sys.version_info[:3])
    if sys.platform == "linux":
        assert machine.memory_bytes is not None
        assert machine.free_memory_bytes is not None
        assert machine.memory_bytes > 1 << 28


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity (Linux)")
def test_a_process_confined_to_one_cpu_has_one_core() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        machine = describe_machine()
    finally:
        os.sched_setaffinity(0, before)
    assert (machine.num_physical_cores, machine.num_logical_cpus) == (1, 1)


@pytest.mark.parametrize(("quota", "most"), [(0.5, 1), (1.0, 1), (None, 1 << 20)])
def test_cores_are_those_that_a_container_has_time_for(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, most: int
) -> None:
    monkeypatch.setattr("strop.hardware.machine.read_cpu_quota", lambda: None)
    without = describe_machine().num_physical_cores
    monkeypatch.setattr("strop.hardware.machine.read_cpu_quota", lambda: quota)
    # Half a CPU's time is still one thread.
    assert describe_machine().num_physical_cores == min(without, most)


def test_the_peak_is_no_less_than_what_was_held() -> None:
    size = 64 << 20
    with mmap.mmap(-1, size) as block:
        block.write(bytes(size))
        assert peak_rss_bytes() >= (rss_bytes() or 0) >= size
    assert peak_rss_bytes() >= size


def test_free_space_is_that_of_the_disk_below_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk") as disk:
        assert free_disk_bytes(disk / "not" / "yet") == 1 << 20


class SlowProduct:
    """Products that take the time they are said to, on a clock that nothing else moves."""

    def __init__(self, operations_per_s: float) -> None:
        self.now_s = 0.0
        self.sizes: list[int] = []
        self._rate = operations_per_s

    def prepare(self, size: int) -> Callable[[], object]:
        def multiply() -> None:
            self.sizes.append(size)
            self.now_s += 2.0 * size**3 / self._rate

        return multiply


@pytest.mark.parametrize(
    ("operations_per_s", "largest", "reached"),
    # 512: 0.27e9 operations. Twice 1024 would be 4.3e9: within half a second at 100e9 a second, not at 2e9.
    [(100e9, 2048, 2048), (2e9, 2048, 512), (1e6, 2048, 128), (100e9, 64, 64)],
)
def test_a_slow_product_is_measured_by_a_smaller_one(
    operations_per_s: float, largest: int, reached: int
) -> None:
    """Incident: `strop doctor` took a minute where bfloat16 is emulated: one product of 2048 took 25 s."""
    product = SlowProduct(operations_per_s)
    rate = best_rate(product.prepare, 0.5, largest=largest, clock=lambda: product.now_s)
    assert rate == pytest.approx(operations_per_s)
    assert product.sizes[-1] == max(product.sizes) == reached
    # Growing, then as many tries as the limit has room for, or two of them if it has none.
    one_s = 2.0 * reached**3 / operations_per_s
    assert product.now_s <= max(2 * 0.5, 4 * one_s) + 2 * one_s


def test_a_cache_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    cache_dir = tmp_path / "cache" / "strop"
    with pytest.raises(StoreError, match=r"hardware\.json could not be written"):
        calibrate_machine(cache_dir=cache_dir, gemm_size=8, copy_bytes=1 << 10, time_limit_s=0.0)
    with pytest.raises(StoreError, match="cache"):
        write_efficiency(CPU_EFFICIENCY, cache_dir)


def test_a_place_that_cannot_be_written_is_refused_and_any_other_left_as_it_is(tmp_path: Path) -> None:
    require_writable(tmp_path / "not" / "yet", "a run")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(CheckRefused, match=r"taken/runs"):
        require_writable(tmp_path / "taken" / "runs", "a run")


def write(folder: Path, **texts: str) -> None:
    """Write files; `_` in a keyword before the first word ends is a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("_", ".", 1)).write_text(text + "\n")


def test_prc_8_a_jobs_limit_above_its_own_group_holds(tmp_path: Path) -> None:
    # As SLURM makes them: the step's group has no limit, the job's above it has.
    write(tmp_path / "job" / "step", memory_max="max", memory_current="3000")
    write(tmp_path / "job", memory_max="10000", memory_current="4000")
    dirs = group_dirs("memory", root=tmp_path, membership="0::/job/step\n")
    assert dirs[:3] == [tmp_path / "job" / "step", tmp_path / "job", tmp_path]
    assert read_cgroup_memory(dirs) == (10_000, 6_000)


def test_version_1_has_a_hierarchy_for_each_controller(tmp_path: Path) -> None:
    write(tmp_path / "memory" / "box", memory_limit_in_bytes="5000", memory_usage_in_bytes="1000")
    write(tmp_path / "memory", memory_limit_in_bytes="9223372036854771712", memory_usage_in_bytes="7000")
    membership = "4:memory:/box\n1:cpu,cpuacct:/other\n0::/\n"
    dirs = group_dirs("memory", root=tmp_path, membership=membership)
    assert dirs == [tmp_path / "memory" / "box", tmp_path / "memory", tmp_path]
    assert read_cgroup_memory(dirs) == (5_000, 4_000)
    assert tmp_path / "cpu" / "other" in group_dirs("cpu", root=tmp_path, membership=membership)


@pytest.mark.parametrize("membership", ["", "\n", "nonsense", "0::/gone/elsewhere\n", "0::/../..\n"])
def test_where_the_system_tells_little_the_root_is_looked_at(membership: str, tmp_path: Path) -> None:
    # As in a container that sees its own group as the root, and is told its name outside, or none.
    write(tmp_path, memory_max="8000", memory_current="1000", cpu_max="150000 100000")
    assert read_cgroup_memory(group_dirs("memory", root=tmp_path, membership=membership)) == (8_000, 7_000)
    assert read_cpu_quota(group_dirs("cpu", root=tmp_path, membership=membership)) == 1.5


def test_the_lowest_share_of_cpu_time_counts(tmp_path: Path) -> None:
    write(tmp_path / "a", cpu_max="400000 100000")
    write(tmp_path / "b", cpu_max="max 100000")
    write(tmp_path / "c", cpu_cfs_quota_us="250000", cpu_cfs_period_us="100000")
    write(tmp_path / "d", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    assert read_cpu_quota([tmp_path / name for name in "abcd"]) == 2.5
    assert read_cpu_quota([tmp_path / name for name in "bd"]) is None
    assert read_cpu_quota([tmp_path / "absent"]) is None


def mount(monkeypatch: pytest.MonkeyPatch, *mounts: tuple[Path | str, str]) -> None:
    """Let the system tell of these places and their file systems."""
    listed = [SimpleNamespace(mountpoint=str(place), fstype=kind) for place, kind in mounts]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: listed)


@pytest.mark.parametrize(
    ("kind", "is_network"),
    [("nfs4", True), ("lustre", True), ("fuse.juicefs", True), ("xfs", False), ("fuse.ntfs", False)],
)
def test_the_innermost_mount_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_network: bool
) -> None:
    root = tmp_path.resolve()
    mount(monkeypatch, ("/", "ext4"), (root, kind), (root / "deep folder", "fuse.sshfs"))
    found = describe_disk(tmp_path / "runs" / "not-made-yet")
    assert (found.mount, found.kind, found.is_network) == (str(root), kind, is_network)
    assert (tmp_path / "runs").exists() is False
    (tmp_path / "deep folder").mkdir()
    assert describe_disk(tmp_path / "deep folder" / "x").kind == "fuse.sshfs"
    # A name that only begins alike is another place.
    assert describe_disk(tmp_path.with_name(f"{tmp_path.name}-beside")).mount == "/"


@pytest.mark.parametrize(
    ("place", "kind"), [(".", "ext4"), ("homework", "ext4"), ("home/me", "nfs4"), ("tmp/x", "xfs")]
)
def test_of_mounts_on_one_place_the_last_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, kind: str
) -> None:
    root = tmp_path.resolve()
    for name in ("home", "homework", "tmp"):
        (root / name).mkdir()
    mount(
        monkeypatch, (root, "ext4"), (root / "home", "nfs4"), (root / "tmp", "tmpfs"), (root / "tmp", "xfs")
    )
    assert describe_disk(root / place).kind == kind


def test_this_disk_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = describe_disk(tmp_path)
    assert found.total_bytes == shutil.disk_usage(tmp_path).total
    assert found.mount
    assert tmp_path.resolve().is_relative_to(found.mount)
    assert found.kind in str(found)
    # A system that tells no mounts.
    mount(monkeypatch)
    found = describe_disk(tmp_path)
    assert (found.mount, found.kind, found.is_network) == ("", "", False)


def test_what_was_measured_here_is_read_again(tmp_path: Path) -> None:
    assert read_efficiency(tmp_path / "absent") is None
    mine = replace(CPU_EFFICIENCY, cpu_name=describe_machine().cpu_name, is_measured=True)
    path = write_efficiency(mine, tmp_path / "cache")
    assert path == tmp_path / "cache" / "efficiency.json"
    assert read_efficiency(tmp_path / "cache") == mine
    # Another machine's, on a home directory that both share.
    write_efficiency(replace(mine, cpu_name="abacus"), tmp_path / "cache")
    assert read_efficiency(tmp_path / "cache") is None
    path.write_text("{}")
    assert read_efficiency(tmp_path / "cache") is None


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        (("avx2", "avx512f", "avx512_bf16"), "bfloat16"),
        (("avx2", "amx_tile", "amx_bf16"), "bfloat16"),
        (("asimd", "bf16"), "bfloat16"),
        (("avx2", "fma", "avx512f"), "float32"),
        ((), "float32"),
    ],
)
def test_a_processor_decides_by_its_instructions(flags: tuple[str, ...], dtype: str) -> None:
    found = choose_format("auto", replace(describe_machine(), cpu_flags=flags), None)
    assert (found.dtype, found.cost) == (dtype, None)


@pytest.mark.parametrize(("capability", "dtype"), [(7.5, "float32"), (8.0, "bfloat16"), (None, "bfloat16")])
def test_a_gpu_decides_by_its_compute_capability(capability: float | None, dtype: str) -> None:
    gpu = Gpu(index="0", uuid="u", name="G", memory_bytes=None, compute_capability=capability)
    assert choose_format("auto", describe_machine(), gpu).dtype == dtype
    # A planned accelerator decides by its peaks.
    assert choose_format("auto", describe_machine(), find_accelerator("l4")).dtype == "bfloat16"


def test_what_the_run_file_asks_for_stays_and_has_its_cost() -> None:
    machine = replace(describe_machine(), cpu_flags=("avx2",))
    assert choose_format("bfloat16", machine, None).cost is not None
    assert choose_format("float32", machine, None).cost is None
    # A run that goes on elsewhere keeps its format.
    given = RunSpec.model_validate({"name": "x", "task": {"name": "arithmetic"}})
    spec, found = settle_format(given, machine, None, facts={DTYPE_FACT: "bfloat16"})
    assert spec.model.dtype == "bfloat16"
    assert found.cost is not None
