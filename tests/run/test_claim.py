"""What a training on this machine holds, and whom it leaves alone."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused
from strop.hardware import preflight, take_lease
from strop.hardware.gpus import TorchBuild
from strop.hardware.leases import FOLDER_VARIABLE, LEASE_VARIABLE, find_holder
from strop.record.parts import describe_environment, list_changes
from strop.run import training
from strop.run.training import claim_machine, list_parts
from strop.spec import RunSpec
from strop.store import get_model
from strop.tasks import build_task
from tests.fixtures.commands import Run, folder, run
from tests.fixtures.devices import GIB, whole
from tests.fixtures.dying_runs import find_marked, prolific_run
from tests.fixtures.nvml import install_fake_nvml, use_nvml

__all__ = ["folder", "run"]

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with leases of its own; the folder of its NVML."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "runtime"))
    use_nvml(tmp_path / "bin", monkeypatch)
    # With a torch that would use them.
    for module in (training, preflight):
        monkeypatch.setattr(module, "read_torch_build", lambda: TorchBuild(version="2.13.0", cuda="12.6"))
    for name in (VISIBLE, "CUDA_DEVICE_ORDER", LEASE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "bin"


def seen_by_children() -> list[str]:
    text = f'echo "${{{VISIBLE}-unset}} ${{CUDA_DEVICE_ORDER-unset}} ${{{LEASE_VARIABLE}-unset}}"'
    return subprocess.run(["sh", "-c", text], check=True, capture_output=True, text=True).stdout.split()


def test_a_training_holds_the_emptiest_gpu_while_it_runs(machine: Path, tmp_path: Path) -> None:
    install_fake_nvml(machine, [whole(0, 60), whole(1, 79)])
    with claim_machine(tmp_path / "first", need_bytes=GIB) as held:
        assert find_holder("GPU-0") is None
        assert f"process {os.getpid()} " in str(find_holder("GPU-1"))
        visible, order, lease_id = seen_by_children()
        assert (visible, order, len(lease_id)) == ("1", "PCI_BUS_ID", 12)
        assert held.devices["roles"] == {"train": {"uuids": ["GPU-1"], "visible": "1"}}
        # Started from this process, a second training belongs to the first: nothing more is taken.
        with claim_machine(tmp_path / "inner", need_bytes=GIB) as inner:
            assert (inner.notices, inner.devices) == ((), {})
    assert find_holder("GPU-1") is None
    assert seen_by_children() == ["unset", "unset", "unset"]


def test_a_second_training_takes_another_gpu_and_a_third_is_told_who_has_them(
    machine: Path, tmp_path: Path
) -> None:
    install_fake_nvml(machine, [whole(0, 60), whole(1, 79)])
    said = rf"GPU-0 .* held by process {os.getpid()} .*GPU-1 .* held by process {os.getpid()} "
    with (
        take_lease(["GPU-1"]),
        claim_machine(tmp_path / "second", need_bytes=GIB),
        pytest.MonkeyPatch.context() as elsewhere,
    ):
        # As in another terminal.
        elsewhere.delenv(LEASE_VARIABLE)
        elsewhere.delenv(VISIBLE)
        with pytest.raises(CheckRefused, match=said), claim_machine(tmp_path / "third", need_bytes=GIB):
            pass


def test_a_named_gpu_is_shared_knowingly_and_an_unnamed_one_is_not(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "63"]) as stranger:
        install_fake_nvml(machine, [whole(0, 60)], [("GPU-0", stranger.pid, GIB)])
        with (
            pytest.raises(CheckRefused, match=rf"used by process {stranger.pid} \(of \w+: sleep 63\)"),
            claim_machine(tmp_path / "run", need_bytes=GIB),
        ):
            pass
        monkeypatch.setenv(VISIBLE, "0,1")
        install_fake_nvml(machine, [whole(0, 60), whole(1, 70)], [("GPU-0", stranger.pid, GIB)])
        with claim_machine(tmp_path / "run", need_bytes=GIB) as held:
            beyond, shared = held.notices
            assert beyond.startswith("2 GPUs are visible and 1 asked for")
            assert f"used by process {stranger.pid}" in shared
        assert os.environ[VISIBLE] == "0,1"
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_a_training_on_the_cpu_holds_no_gpu(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    install_fake_nvml(machine, [whole(0, 60)])
    monkeypatch.setenv(VISIBLE, value)
    with claim_machine(tmp_path / "run", need_bytes=GIB) as held:
        assert find_holder("GPU-0") is None
        assert os.environ[VISIBLE] == value
        assert held.notices == ()


@pytest.fixture
def dead_run(machine: Path) -> Iterator[str]:
    """What the processes carry in their command line that a killed run has left."""
    mark = f"claim-{os.getpid()}"
    with prolific_run(mark) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "started\n"
        run.kill()
        run.wait()
        yield mark


def test_a_start_ends_what_a_dead_run_left_and_says_so(dead_run: str, tmp_path: Path) -> None:
    left = find_marked(dead_run)
    with claim_machine(tmp_path / "next", need_bytes=GIB) as held:
        (notice,) = held.notices
    assert left
    assert all(str(pid) in notice for pid in left)
    assert find_marked(dead_run) == []


@pytest.mark.slow
def test_a_training_notes_its_gpu_and_what_it_ended(
    machine: Path, folder: Path, run: Run, dead_run: str
) -> None:
    install_fake_nvml(machine, [whole(0, 60)])
    ended = run("train", "run.toml")
    assert ended.code == 0, ended.err
    assert "dead runs had left processes" in ended.err
    (attempt,) = (folder / "runs").glob("*/attempts/1/attempt.json")
    devices = json.loads(attempt.read_text())["facts"]["devices"]
    assert devices["roles"] == {"train": {"uuids": ["GPU-0"], "visible": "0"}}
    assert find_holder("GPU-0") is None
    install_fake_nvml(machine, [whole(0, 0)])
    refused = run("train", "run.toml", "--new")
    assert refused.code == 76
    assert "0.00 GiB free of 80.00 GiB, 0.0" in refused.err


def parts_of(model_dir: Path, **sections: Any) -> dict[str, str]:
    spec = RunSpec.model_validate({"name": "made", "model": {"uri": str(model_dir)}, **sections})
    return list_parts(spec, build_task(spec.task), {"model": get_model(str(model_dir))}, {})


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def test_a_judges_rubric_is_a_part_of_a_run(tmp_path: Path, own_cache: Path, tiny_model_dir: Path) -> None:
    rubric, questions = (tmp_path / name for name in ("rubric.txt", "rows.jsonl"))
    rubric.write_text("Question: {{prompt}}\nReply: {{reply}}\nScore it from 0 to 1.")
    questions.write_text("".join(json.dumps({"prompt": f"{n}?", "gold": str(n)}) + "\n" for n in range(20)))
    task = {
        "name": "rows",
        "prompt": "prompt",
        "reward": "judge",
        "source": str(questions),
        "rubric": str(rubric),
        "judge_url": "http://127.0.0.1:9/v1",
        "judge_model": "judge",
        "judge_revision": "1",
        "num_held_out": 2,
    }
    first = parts_of(tiny_model_dir, task=task)
    rubric.write_text(rubric.read_text() + " Be strict.")
    assert changed(first, parts_of(tiny_model_dir, task=task)) == {"version of its task"}


def test_an_order_of_training_examples_is_a_part_although_no_score_depends_on_it(
    tmp_path: Path, own_cache: Path, tiny_model_dir: Path
) -> None:
    task = {"name": "arithmetic", "max_value": 4, "num_held_out": 2}
    spec = RunSpec.model_validate({"name": "made", "task": task})
    ids = [example.example_id for example in build_task(spec.task).examples("train")]  # type: ignore[arg-type]
    order = tmp_path / "order.jsonl"
    found = []
    for listed in (ids, ids[::-1]):
        order.write_text("".join(json.dumps({"example_id": one}) + "\n" for one in listed))
        found.append(parts_of(tiny_model_dir, task={**task, "order_file": str(order)}))
    assert changed(*found) == {"set of examples"}


def test_other_software_is_told_by_name() -> None:
    now = describe_environment()
    assert list_changes(now) == []
    then = "\n".join("torch==1.0" if line.startswith("torch==") else line for line in now.splitlines())
    (change,) = list_changes(then.replace("pytest==", "pytest==0"))
    assert change.startswith("torch 1.0 is now ")
