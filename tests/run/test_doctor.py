from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from benchmarks.rivals import settled_dtype
from strop.cli import main
from strop.hardware import describe_machine, read_calibration, take_lease
from strop.hardware.calibrate import read_efficiency
from strop.hardware.leases import FOLDER_VARIABLE
from strop.kernels import kernel_status
from strop.run.doctor import (
    EXTRAS,
    FEW_ROWS,
    MANY_ROWS,
    PROMPT_TOKENS,
    REPLY_TOKENS,
    Timings,
    derive_efficiency,
    diagnose,
    find_device_uses,
    make_groups,
    measure_machine,
)
from strop.spec import RunSpec
from tests.fixtures.devices import GIB, divided, whole
from tests.fixtures.dying_runs import find_marked, prolific_run
from tests.fixtures.nvml import install_fake_nvml, use_nvml
from tests.plan.test_estimate import SIZE

ROOT = Path(__file__).parents[2]
TEXTS = frozenset({".py", ".j2", ".md", ".sh", ".toml"})


def test_every_extra_that_strop_tells_people_to_install_exists() -> None:
    """Incident: the doctor told people to install `strop[query]`, which pip ignores with a warning."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = {
        name: {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}
        for name, requirements in project["optional-dependencies"].items()
    }
    texts = {
        path: path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.*") if path.suffix in TEXTS
    }
    advised = {
        extra.strip(): str(path.relative_to(ROOT))
        for path, text in texts.items()
        for extras in re.findall(r"\bstrop\[([a-z0-9_, -]+)\]", text)
        for extra in extras.split(",")
    }
    assert len(advised) > 2, "the advice is written in another way now"
    assert {extra: place for extra, place in advised.items() if extra not in promised} == {}
    lacking = {name: set(packages) - promised.get(name, set()) for name, packages in EXTRAS.items()}
    assert {name: packages for name, packages in lacking.items() if packages} == {}


@pytest.mark.slow
def test_the_doctor_measures_keeps_it_and_looks_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    found = diagnose(tmp_path / "runs", cache_dir=tmp_path / "cache", time_limit_s=0.01)
    assert read_calibration(tmp_path / "cache") == found.calibration
    checks = {check.name: check for check in found.checks}
    assert not checks["default model"].is_ok
    assert "strop model get" in checks["default model"].detail
    assert checks["compiled kernels"].is_ok == (kernel_status().path is not None)
    assert kernel_status().note in checks["compiled kernels"].detail
    assert {f"extra {name}" for name in EXTRAS} <= set(checks)
    # Looking made no folder for runs.
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with leases of its own, a place for NVML and one for what a run makes."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "runtime"))
    use_nvml(tmp_path / "bin", monkeypatch)
    return tmp_path


def test_the_doctor_says_who_has_the_gpus_and_ends_only_leftovers(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = f"doctor-{os.getpid()}"
    with (
        subprocess.Popen(["sleep", "64"]) as stranger,
        prolific_run(mark) as dead,
        take_lease(["MIG-a"]),
    ):
        gpus = [whole(0, 60), divided(1, "MIG-a")]
        install_fake_nvml(machine / "bin", gpus, [("GPU-0", stranger.pid, GIB)])
        used, held = find_device_uses()
        assert (used.device.uuid, used.holder) == ("GPU-0", None)
        (user,) = used.device.users
        assert (user.pid, user.name) == (stranger.pid, f"of {Path('/proc/self').owner()}: sleep 64")
        assert (held.device.uuid, held.device.users) == ("MIG-a", ())
        assert f"process {os.getpid()} " in str(held.holder)
        assert dead.stdout is not None
        assert dead.stdout.readline() == "started\n"
        dead.kill()
        dead.wait()
        left = find_marked(mark)
        assert main(["doctor", "--clean", "--json"]) == 0
        ended = {one["ended"] for one in json.loads(capsys.readouterr().out)}
        assert ended >= {*left} > set()
        assert main(["doctor", "--clean"]) == 0
        assert capsys.readouterr().out == "dead runs have left nothing\n"
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.slow
def test_the_doctors_tables_name_what_is_there(
    machine: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(machine)
    install_fake_nvml(machine / "bin", [whole(0, 60), divided(1, "MIG-a")])
    with take_lease(["MIG-a"]):
        assert main(["doctor"]) == 0
        said = capsys.readouterr()
    rows = [[word.strip() for word in line.split("  ") if word.strip()] for line in said.out.splitlines()]
    # 60 GiB = 64.4 GB, 80 GiB = 85.9 GB.
    assert ["GPU-0", "0", "Test", "64.4 GB", "85.9 GB", "nobody"] in rows
    held = next(row for row in rows if row[:1] == ["MIG-a"])
    assert held[1:5] == ["1, a MIG slice", "Test MIG 1g.10gb", "10.0 GB", "10.0 GB"]
    assert held[5].startswith(f"held by process {os.getpid()}")
    assert any(row and row[0] == str(machine / "runs") for row in rows)


def derive(timings: Timings) -> tuple[float, float, float, float]:
    found = derive_efficiency(
        timings, SIZE, dtype="bfloat16", gflops=1e-3, copy_gb_per_s=1e-6, cpu_name="c", source="by hand"
    )
    assert (found.cpu_name, found.source, found.is_measured) == ("c", "by hand", True)
    return found.learn_frac, found.decode_frac, found.decode_layer_s, found.update_frac


def test_shares_follow_from_the_difference_of_two_sizes() -> None:
    # A product does 1e6 operations a second. A reply of 24 tokens costs 2 x 2000 x 24 = 96,000: at half the
    # speed 0.192 s. Prefill of 16 tokens: 2 x 1000 x 16 = 32,000, 0.032 s. Overhead: 24 steps of 0.1 s.
    few_s, many_s = (2.4 + 0.032 + rows * 0.192 for rows in (FEW_ROWS, MANY_ROWS))
    # 100 positions and as many scores: 6 x 2000 x 100 = 1.2e6; at a quarter of the speed 4.8 s.
    # The optimizer moves 2000 x 18 bytes at half of 1000 a second: 72 s.
    timings = Timings(
        few_rows_s=few_s,
        many_rows_s=many_s,
        small_step_s=72 + 4.8,
        large_step_s=72 + 48.0,
        num_small=100,
        num_large=1000,
    )
    learn, decode, layer_s, update = derive(timings)
    assert (PROMPT_TOKENS, REPLY_TOKENS) == (16, 24)
    assert learn == pytest.approx(0.25)
    assert decode == pytest.approx(0.5)
    # SIZE has one layer.
    assert layer_s == pytest.approx(0.1)
    assert update == pytest.approx(0.5)


def test_timings_of_a_busy_machine_give_shares_all_the_same() -> None:
    # Many rows faster than few, a large step faster than a small one.
    timings = Timings(
        few_rows_s=2.0, many_rows_s=1.0, small_step_s=2.0, large_step_s=1.0, num_small=100, num_large=1000
    )
    learn, decode, layer_s, update = derive(timings)
    assert (learn, decode) == (1.0, 1.0)
    assert layer_s >= 0.0
    assert 0.0 < update <= 1.0


def test_nearly_all_positions_of_a_measured_step_are_scored() -> None:
    groups = make_groups(3, 50)
    assert len(groups) == 3
    # One prompt token and eight replies, whose last tokens are not fed: 1 + 8 x 23 = 185.
    assert groups[0].num_positions == 185
    assert sum(reply.weight * 24 for group in groups for reply in group.replies) == pytest.approx(1.0)


def test_a_machine_is_measured_once_and_remembered(tiny_model_dir: Path, tmp_path: Path) -> None:
    spec = RunSpec.model_validate(
        {"name": "x", "task": {"name": "arithmetic"}, "train": {"micro_batch_tokens": 400}}
    )
    found = measure_machine(spec, tiny_model_dir, cache_dir=tmp_path, time_limit_s=0.01)
    assert found == read_efficiency(tmp_path)
    assert found.is_measured
    assert found.cpu_name == describe_machine().cpu_name
    model = f"HuggingFaceTB/SmolLM2-135M-Instruct in {settled_dtype()}"
    assert found.source.startswith(f"measured here with {model}")
    assert read_calibration(tmp_path) is not None
