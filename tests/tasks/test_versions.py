"""What tasks ask and their versions, to the letter: whoever changes one of them does so on purpose."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from strop.rollout import Split
from strop.tasks import Task, build_task, task_summaries
from strop.tasks.traits import describe_counts
from tests.fixtures.every_task import CASES, section_of

KNOWN: dict[str, list[str]] = json.loads(Path(__file__).with_name("known_versions.json").read_text("utf-8"))
"""By case: the version, a hash over all prompts, and what was counted in the data."""


def prompts_digest(task: Task) -> str:
    """Hash what a model is asked, as a chat and in plain text, for all examples."""
    splits = [Split.HELD_OUT] if task.name in {"aime", "ifbench", "ifeval", "math500"} else list(Split)
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
    assert {case.partition(" ")[0] for case in CASES} == set(task_summaries()) - GUESTS
    # Its version is that of the installed package too.
    assert CASES.keys() - KNOWN.keys() == {"reasoning-gym"}


@pytest.mark.parametrize("case", KNOWN)
def test_versions_and_prompts_are_as_they_were(tmp_path: Path, case: str) -> None:
    """If a change is meant, scores before and after it are not comparable: say so in CHANGELOG.md."""
    task = build_task(section_of(case, tmp_path))
    assert [task.version, prompts_digest(task), describe_counts(task)] == KNOWN[case]
