"""What tasks ask and their versions, to the letter; and what tasks around tasks pass on."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from strop.rollout import Split
from strop.spec.built_in import built_in_tasks
from strop.spec.parts import MixtureSpec
from strop.tasks import Task, build_task
from strop.tasks.rows.judged_rows import ProgramSpec
from strop.tasks.task import describe_counts
from tests.fixtures.every_task import CASES, section_of, table_of
from tests.fixtures.row_files import write_rows

KNOWN: dict[str, list[str]] = json.loads(Path(__file__).with_name("known_versions.json").read_text("utf-8"))
"""By case: the version, a hash over all prompts, and what was counted in the data."""


def prompts_digest(task: Task) -> str:
    """Hash what a model is asked, as a chat and in plain text, for all examples."""
    splits = (
        [Split.HELD_OUT]
        if task.name in {"aime", "humaneval", "ifbench", "ifeval", "math500"}
        else list(Split)
    )
    asked = [
        [split, message.role, message.text, getattr(message, "base", None)]
        for split in splits
        for example in task.examples(split)
        for message in task.render(example)
    ]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


GUESTS = {"verifiers", "openenv"}


def test_every_built_in_task_is_known() -> None:
    # Those of other packages have the versions of these.
    assert {case.partition(" ")[0] for case in CASES} == set(built_in_tasks()) - GUESTS
    # Its version is that of the installed package too.
    assert CASES.keys() - KNOWN.keys() == {"reasoning-gym"}


@pytest.mark.parametrize("case", KNOWN)
def test_versions_and_prompts_are_as_they_were(tmp_path: Path, case: str) -> None:
    """If a change is meant, scores before and after it are not comparable: say so in CHANGELOG.md."""
    task = build_task(section_of(case, tmp_path))
    assert [task.version, prompts_digest(task), describe_counts(task)] == KNOWN[case]


NOT_PASSED_ON = {
    # Attempts of a mixture take one reply.
    ("mixture", "attempt_tokens"),
    # An environment is no part of another task.
    ("mixture", "world"),
    # A mixture is no single task of many, and says which part an example is of instead.
    ("mixture", "variant"),
    # Rows are numbered within the data of one part.
    ("mixture", "row_keys"),
}


def wrap(kind: str, folder: Path) -> Task:
    part = table_of("mbpp", folder)
    if kind == "mixture":
        return build_task(MixtureSpec(name="mixture", parts={"code": part}))
    spec = ProgramSpec(**part)
    # The file is read to see whether the task counts what is left out.
    example_id = build_task(spec).examples(Split.TRAIN)[0].example_id
    write_rows(folder / "order.jsonl", [{"example_id": example_id}])
    return build_task(spec.model_copy(update={"order_file": str(folder / "order.jsonl")}))


@pytest.mark.parametrize("kind", ["mixture", "curriculum"])
def test_nothing_that_a_task_has_beside_is_lost_in_another(kind: str, tmp_path: Path) -> None:
    task = wrap(kind, tmp_path)
    members = {name for name in vars(Task) if not name.startswith("_")}
    kept = {name for name in members if getattr(type(task), name) is getattr(Task, name)}
    missing = kept - vars(task).keys()
    assert {(kind, name) for name in missing} - NOT_PASSED_ON == set()


def test_a_run_file_imports_the_module_of_its_own_task_alone(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "one"\n[task]\nname = "gsm8k"\nsource = "./rows"\n')
    code = (
        "import sys; from strop.spec import load_spec, write_spec; write_spec(load_spec('run.toml'));"
        " print(*sorted(name for name in sys.modules if name.startswith('strop.tasks.')))"
    )
    loaded = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True).split()
    assert "strop.tasks.rows.judged_rows" in loaded
    names = ("code", "generated.arithmetic", "instructions", "mixture")
    assert not {f"strop.tasks.{name}" for name in names} & set(loaded)
