"""Limits of control groups, of both versions, at whatever depth the process stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.hardware.container import group_dirs, read_cgroup_memory, read_cpu_quota


def write(folder: Path, **texts: str) -> None:
    """Write files; `_` in a keyword before the first word ends is a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("_", ".", 1)).write_text(text + "\n")


def test_a_jobs_limit_above_its_own_group_holds(tmp_path: Path) -> None:
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
