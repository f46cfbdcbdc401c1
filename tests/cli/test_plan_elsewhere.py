"""`strop plan` for other hardware, as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fixtures.commands import Run


def test_a_plan_for_an_accelerator_names_it_and_its_source(folder: Path, run: Run) -> None:
    shown = " ".join(run("plan", "run.toml", "--hardware", "h100", "--all").out.split())
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
    again = " ".join(run("plan", "run.toml", "--all").out.split())
    assert "measured here with" in again


def test_what_judging_costs_is_planned(folder: Path, run: Run) -> None:
    shown = " ".join(run("plan", "run.toml", "task.name=mbpp", "train.steps=10", "--all").out.split())
    # Two prompts of two replies; nobody has the data here, and it is planned all the same.
    assert "programs run 4" in shown
    assert "their time, if each ran into its limit" in shown
    assert "program_s (assumed) 0.036" in shown
    judge = [
        *("task.name=llm-judge", "task.source=org/questions", "task.judge_url=https://judge.example/v1"),
        *("task.judge_model=big", "task.judge_revision=r1", "task.max_judge_calls=10"),
    ]
    ended = run("plan", "run.toml", *judge, "train.steps=10", "--json")
    assert ended.code == 0
    found = json.loads(ended.out)
    assert found["judging"]["calls_per_step"] == 4
    assert found["judging"]["served"] == ["big"]
    # Four answers, eight at once, of five seconds each.
    verify = {part["name"]: part["amount"] for part in found["time"]["step_parts"]}["verify"]
    assert verify == 4 * 5.0 / 8
    assert "price of judging: big reads some " in ended.err
    assert "task.max_judge_calls=10 ends its questions before" in ended.err
