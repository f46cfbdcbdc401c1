"""Accelerators by name, by file and by what the driver calls them."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.hardware.accelerators import ACCELERATORS, find_accelerator, match_gpu

FILE = """name = "mine"
bf16_tflops = 100.0
fp32_tflops = 10.0
memory_gb = 16.0
memory_gb_per_s = 500.0
link_gb_per_s = 25.0
"""


def test_the_table_has_each_name_once_and_a_source_for_it() -> None:
    assert all((device.name, bool(device.source)) == (name, True) for name, device in ACCELERATORS.items())
    # The reference's figures: 989 TFLOP/s; 3.35 and 4.8 TB/s; 141 GB.
    h100, h200 = find_accelerator("H100"), find_accelerator("h200")
    assert (h100.bf16_tflops, h100.memory_gb_per_s) == (989.0, 3350.0)
    assert (h200.memory_gb_per_s, h200.memory_bytes) == (4800.0, 141 * 10**9)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"tpu.*mi300x"):
        find_accelerator("tpu")


def test_a_file_describes_another_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE + "learn_frac = 0.4\n")
    accelerator = find_accelerator(str(path))
    assert (accelerator.name, accelerator.bf16_tflops) == ("mine", 100.0)
    assert (accelerator.learn_frac, accelerator.decode_frac) == (0.4, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FILE + "price = 1.0\n", "price"),
        (FILE.replace("memory_gb = 16.0\n", ""), "memory_gb: "),
        (FILE.replace("16.0", "-1.0"), "memory_gb: "),
        (FILE + "learn_frac = 1.5\n", "learn_frac: "),
        ("name = ", ""),
    ],
)
def test_a_file_that_describes_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"mine\.toml.*{said}"):
        find_accelerator(str(path))


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 5090", "5090"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_the_drivers_names_are_known(driver: str, name: str) -> None:
    accelerator = match_gpu(driver)
    assert accelerator is not None
    assert accelerator.name == name


@pytest.mark.parametrize(
    "driver", ["NVIDIA L40", "NVIDIA A10M", "Tesla T4", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", ""]
)
def test_one_that_is_only_alike_is_not_taken_for_it(driver: str) -> None:
    assert match_gpu(driver) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("h100", "h100"), ("H200", "h200"), ("nvidia_h100_80gb_hbm3", "h100"), ("h100-pcie", "h100-pcie")),
        *(("nvidia_a100-sxm4-80gb", "a100-80"), ("a100_40gb", "a100-40"), ("a100-80", "a100-80")),
        *(("l40s", "l40s"), ("nvidia_l4", "l4"), ("rtx_4090", "4090")),
        # Two of the table, slices, and others.
        *(("a100", None), ("1g.10gb", None), ("a100_1g.5gb", None), ("h100_mig_1g.10gb", None)),
        *(("v100", None), ("gpu", None), ("l40", None), ("", None)),
    ],
)
def test_a_schedulers_name_of_a_gpu(name: str, expected: str | None) -> None:
    accelerator = match_gpu(name)
    assert (None if accelerator is None else accelerator.name) == expected
