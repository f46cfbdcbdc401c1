"""Tasks around tasks: what the inner one has beside the contract, the outer one passes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.rollout import Split
from strop.tasks import Task, build_task
from strop.tasks.blend import BlendSpec
from strop.tasks.code.mbpp import MbppSpec
from strop.tasks.mixture import MixtureSpec
from strop.tasks.traits import OPTIONAL, has

NOT_PASSED_ON = {
    # An environment is no part of another task.
    ("mixture", "world"),
    ("blend", "world"),
    # A mixture is no single task of many, and says which part an example is of instead.
    ("mixture", "variant"),
    # Rows are numbered within the data of one part.
    ("mixture", "row_keys"),
    # The parts are asked in the run's own words, and a task that is made of them is not.
    ("mixture", "prompt_fields"),
    ("blend", "prompt_fields"),
    # A plain task has no order to pass on; one that has is in tests/tasks/test_prompting.py.
    ("prompted", "epoch_order"),
    # Its data has no parts, an order of its own is the blend's, and judging by several is never quick.
    ("blend", "part_of"),
    ("blend", "epoch_order"),
    ("blend", "verify_quick"),
}


def write_rows(folder: Path) -> Path:
    folder.mkdir()
    rows = [
        {
            "task_id": number,
            "text": f"Write a function that adds {number}.",
            "code": f"def add{number}(x):\n    return x + {number}",
            "test_list": [f"assert add{number}(1) == {number + 1}", f"assert add{number}(0) == {number}"],
            "test_setup_code": "",
            "challenge_test_list": [],
        }
        for number in range(4)
    ]
    for name, chosen in (("train", rows[:3]), ("test", rows[3:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    return folder


def wrap(kind: str, folder: Path) -> Task:
    part: dict[str, Any] = {"name": "mbpp", "source": str(folder)}
    if kind == "mixture":
        return build_task(MixtureSpec(name="mixture", parts={"code": part}))
    if kind == "blend":
        return build_task(BlendSpec(name="blend", parts={"code": part}))
    spec = MbppSpec(
        name="mbpp", source=str(folder), system_prompt="Be brief." if kind == "prompted" else None
    )
    if kind == "prompted":
        return build_task(spec)
    order = folder.with_suffix(".jsonl")
    # The file is read to see whether the task counts what is left out.
    order.write_text(json.dumps({"example_id": build_task(spec).examples(Split.TRAIN)[0].example_id}))
    return build_task(spec.model_copy(update={"order_file": str(order)}))


@pytest.mark.parametrize("kind", ["mixture", "blend", "curriculum", "prompted"])
def test_nothing_that_a_task_has_beside_is_lost_in_another(kind: str, tmp_path: Path) -> None:
    task = wrap(kind, write_rows(tmp_path / "rows"))
    missing = {name for name in OPTIONAL if not has(task, name)}
    assert {(kind, name) for name in missing} - NOT_PASSED_ON == set()
