"""Incidents of the group on data that this path can meet, by id."""

from __future__ import annotations

import json
import random
from pathlib import Path

from strop.rollout import Split
from strop.spec import Gsm8kSpec
from strop.tasks import build_task


def ids_of(folder: Path, rows: list[dict[str, str]], num_train: int | None = None) -> dict[str, str]:
    """Write the rows as training data and return the ids by question."""
    folder.mkdir()
    test = {"question": "0 + 0?", "answer": "#### 0"}
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text(json.dumps(test) + "\n")
    task = build_task(Gsm8kSpec(name="gsm8k", source=str(folder), num_train=num_train))
    return {example.fields["question"]: example.example_id for example in task.examples(Split.TRAIN)}


def test_dat_1_ids_survive_filtering_and_reordering(tmp_path: Path) -> None:
    """Incident: ids were positional, so 1,960 of 4,691 listed ones matched nothing after a filter."""
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(20)]
    all_ids = ids_of(tmp_path / "all", rows)
    assert len(set(all_ids.values())) == 20
    filtered = ids_of(tmp_path / "filtered", rows[1::3])
    shuffled = ids_of(tmp_path / "shuffled", random.Random(0).sample(rows, 20))
    assert shuffled == all_ids
    assert filtered == {question: all_ids[question] for question in filtered}
    assert ids_of(tmp_path / "limited", rows, num_train=5).items() <= all_ids.items()


def test_dat_1_another_answer_is_another_example(tmp_path: Path) -> None:
    """Incident: an id that names a position keeps its name when the content changes."""
    first = ids_of(tmp_path / "first", [{"question": "1 + 1?", "answer": "#### 2"}])
    mended = ids_of(tmp_path / "mended", [{"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}])
    assert first["1 + 1?"] != mended["1 + 1?"]
