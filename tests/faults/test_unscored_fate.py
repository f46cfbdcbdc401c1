"""An unscored rollout of a trained group is listed as trained."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.request import urlopen

from tests.fixtures.commands import Run, folder, run
from tests.view.served import served

__all__ = ["folder", "run"]

REWARD = """
def score(reply, answer, n):
    # Of four replies one has no score, and the others differ.
    score.calls = getattr(score, "calls", 0) + 1
    return None if score.calls % 4 == 0 else float(score.calls % 4 == 1)
"""


def test_a_rollout_without_a_score_is_not_called_trained(run: Run, folder: Path) -> None:
    (folder / "own.py").write_text(REWARD)
    rows = [json.dumps({"q": f"{n}?", "a": str(n), "n": n}) for n in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    text = (folder / "run.toml").read_text()
    settings = '"rows"\nsource = "./rows.jsonl"\nprompt = "q"\nanswer = "a"\nreward = "own.py:score"'
    (folder / "run.toml").write_text(text.replace('"arithmetic"', settings))
    accepted = "train.accept=weights: random; verifier: random; audit: random"
    ended = run("train", "run.toml", accepted, "train.group_size=4", "task.max_reply_tokens=16")
    assert ended.code == 0, ended.err
    with served(folder / "runs") as address:
        (listed,) = json.load(urlopen(f"{address}/api/runs"))
        asked = json.load(urlopen(f"{address}/api/rollouts?run={listed['key']}&step=1"))
    statuses = {(row["reward"] is None, row["status"]) for row in asked["rows"]}
    assert (True, "unscored") in statuses, statuses
    assert (True, "trained") not in statuses
