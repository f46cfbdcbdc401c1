"""A run file shares out a machine's GPUs: the training has its own, and attempts' sandboxes the others."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from strop.environments import gpus
from strop.hardware import find_leases
from strop.hardware.leases import FOLDER_VARIABLE
from strop.run.training import claim_machine
from strop.spec import RunSpec
from tests.environments.test_gpus import LOOK, attempt, make, seen
from tests.environments.test_worlds import tokenizer_of
from tests.fixtures.gpus import MakeGpus, fake_gpu
from tests.fixtures.sandboxes import needs_bubblewrap


@needs_bubblewrap
@pytest.mark.parametrize(
    ("devices", "own", "others"), [("2,1,0", "2", "01"), ("GPU-0,GPU-2,GPU-1", "GPU-0", "12")]
)
def test_a_run_file_shares_out_the_gpus_of_its_machine(
    gpus_of: MakeGpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str, own: str, others: str
) -> None:
    (tmp_path / "runtime").mkdir(mode=0o700)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "runtime"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    monkeypatch.setattr(gpus, "_pools", {})
    monkeypatch.setattr("strop.hardware.preflight.checks.read_torch_build", lambda: None)
    gpus_of([fake_gpu(index) for index in range(3)])
    task = {"name": "repo-repair", "source": "rows.jsonl", "sandbox_gpus": 1}
    spec = RunSpec.model_validate({"name": "x", "task": task, "job": {"gpus": 1, "env_gpus": 2}})
    tokenizer = tokenizer_of(tmp_path)

    async def play() -> list[str]:
        return [seen(one) for one in await asyncio.gather(*(attempt(make(), tokenizer, LOOK) for _ in "12"))]

    wanted = spec.layout.nodes[0].gpus
    with claim_machine(tmp_path / "run", "1", need_bytes=1 << 30, wanted=wanted):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == own
        (lease,) = find_leases()
        assert set(lease.gpus) == {"GPU-0", "GPU-1", "GPU-2"}
        said = asyncio.run(play())
    assert sorted(text.partition("sees GPU-")[2][0] for text in said) == sorted(others)
    assert find_leases() == []
    assert "STROP_SANDBOX_DEVICES" not in os.environ
