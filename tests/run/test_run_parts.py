"""What a training is made of has a digest, whatever kind of task or judge it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strop.record.environment_facts import describe_environment, list_changes
from strop.run.run_parts import list_parts
from strop.spec import RunSpec
from strop.store import get_model
from strop.tasks import build_task


def parts_of(model_dir: Path, **sections: Any) -> dict[str, str]:
    spec = RunSpec.model_validate({"name": "made", "model": {"uri": str(model_dir)}, **sections})
    return list_parts(spec, build_task(spec.task), {"model": get_model(str(model_dir))}, {})


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def test_a_judges_rubric_and_its_calibration_are_parts_of_a_run(
    tmp_path: Path, own_cache: Path, tiny_model_dir: Path
) -> None:
    rubric, labelled, questions = (tmp_path / name for name in ("rubric.txt", "labelled.jsonl", "rows.jsonl"))
    rubric.write_text("Question: {{prompt}}\nReply: {{reply}}\nScore it from 0 to 1.")
    labelled.write_text(json.dumps({"prompt": "1?", "reply": "1", "label": True}) + "\n")
    questions.write_text("".join(json.dumps({"prompt": f"{n}?", "gold": str(n)}) + "\n" for n in range(20)))
    task = {
        "name": "llm-judge",
        "source": str(questions),
        "rubric": str(rubric),
        "calibration": str(labelled),
        "judge_url": "http://127.0.0.1:9/v1",
        "judge_model": "judge",
        "judge_revision": "1",
        "num_held_out": 2,
    }
    first = parts_of(tiny_model_dir, task=task)
    labelled.write_text(labelled.read_text().replace("true", "false"))
    second = parts_of(tiny_model_dir, task=task)
    assert changed(first, second) == {"calibration of judge"}
    rubric.write_text(rubric.read_text() + " Be strict.")
    assert changed(second, parts_of(tiny_model_dir, task=task)) == {"version of its task"}


def test_an_order_of_training_examples_is_a_part_although_no_score_depends_on_it(
    tmp_path: Path, own_cache: Path, tiny_model_dir: Path
) -> None:
    task = {"name": "reverse-text", "num_train": 8, "num_held_out": 2}
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
