"""`strop plan` for other hardware, as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fixtures.commands import Run


def test_a_plan_for_an_accelerator_names_it_and_its_source(folder: Path, run: Run) -> None:
    shown = " ".join(run("plan", "run.toml", "--hardware", "h100").out.split())
    assert "role on h100" in shown
    assert "of 80.0 GB" in shown
    assert "peak by NVIDIA H100 data sheet, SXM" in shown
    found = json.loads(run("plan", "run.toml", "placement.kind=process", "--hardware", "l4", "--json").out)
    assert found["hardware"] == "l4"
    assert [role["role"] for role in found["roles"]] == ["learner", "engine"]
    assert found["time"]["bottleneck_role"] in {"learner", "engine", "rollout worker"}


def test_a_measurement_is_made_once_and_read_by_the_next_plan(folder: Path, run: Run) -> None:
    ended = run("plan", "run.toml", "--measure", "train.micro_batch_tokens=400")
    assert ended.code == 0
    assert "measured here with " in ended.err
    again = " ".join(run("plan", "run.toml").out.split())
    assert "measured here with" in again
