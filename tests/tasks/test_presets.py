"""Presets: published data sets as files describe them, beside rewards of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.rollout import Split
from strop.tasks import build_task
from strop.tasks.rows import row_task
from strop.tasks.rows.judged_rows import PresetSpec
from strop.tasks.rows.row_task import read_preset
from tests.fixtures.judging import judge_replies
from tests.fixtures.row_files import write_rows


def test_every_preset_of_the_package_can_be_read() -> None:
    files = sorted((Path(row_task.__file__).parents[1] / "presets").glob("*.toml"))
    assert len(files) == 13
    assert all(read_preset(path.stem).source for path in files)


def test_a_preset_takes_rewards_beside_its_own(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": f"Count.\n#### {n + 1}"} for n in range(20)]
    (tmp_path / "brief.py").write_text("def brief(reply, question): return len(reply) < len(question)\n")
    given: dict[str, Any] = {"reward": ["number", f"{tmp_path}/brief.py:brief"], "reward_weights": [1.0, 0.5]}
    source = str(write_rows(tmp_path / "rows.jsonl", rows))
    spec = PresetSpec(name="gsm8k", source=source, max_reward=1.5, **given)
    gold = build_task(spec).examples(Split.TRAIN)[0].answer
    found = judge_replies(spec, f"{gold}", f"The answer is {gold}.", "no")
    assert [one.parts for one in found] == [
        {"number": 1.0, "brief": 0.5},
        {"number": 1.0, "brief": 0.0},
        {"number": 0.0, "brief": 0.5},
    ]
    assert [one.is_correct for one in found] == [True, False, False]
    with pytest.raises(ValueError, match=r"python-tests"):
        PresetSpec(name="gsm8k", reward="python-tests")
