"""Environments of strop's as a taskset of verifiers, played by verifiers 0.4.0."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import TypeAdapter

from strop.agents.verifiers import environment_of
from strop.rollout import Split
from strop.spec.task import TaskSpec
from strop.tasks import build_task
from strop.tasks.task import TURN
from tests.conftest import require_system_part
from tests.environments.test_worlds import COUNTING, call
from tests.fixtures.judging import verdict

PLAYS = Path(__file__).with_name("verifiers_play.py")
SOURCE = Path(__file__).parents[2] / "src"


def native(*calls: tuple[str, str]) -> dict[str, Any]:
    """Return a reply whose calls a server has read: names and arguments."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    listed = [{"id": f"c{n}", "type": "function", "function": one} for n, one in enumerate(functions)]
    return {"content": "", "tool_calls": listed}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with tools, which imports a file beside it, and a task of one turn."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "goals.py").write_text("FIRST = {'train': 1, 'held_out': 3}\n")
    source = COUNTING.replace("import asyncio\n", "import asyncio\nfrom goals import FIRST\n")
    source = source.replace('first = 1 if split == "train" else 3', "first = FIRST[split]")
    source += """
class Saying:
    def examples(self, split):
        return [{"word": f"{split}{n}"} for n in range(2)]
    def render(self, example):
        return [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Say it."}]
    def verify(self, example, text):
        return {"said": 0.75 * (example.fields["word"] in text), "short": 0.25 * (len(text) < 20)}
"""
    (folder / "own.py").write_text(source)
    return folder


@pytest.mark.slow
def test_verifiers_plays_them_and_its_rewards_are_strops(own: Path, tmp_path: Path) -> None:
    """A game of turns, an environment with tools and a task of one turn; right, wrong, broken and cut."""
    verifiers = environment_of(())
    require_system_part("the environment of verifiers (make guest-deps)", verifiers.is_ready())
    tables: dict[str, dict[str, Any]] = {
        "guess-v1": {"name": "guess-number", "max_value": 9, "num_train": 3},
        "counting-v1": {"name": f"{own}/own.py:Counting"},
        "saying-v1": {"name": f"{own}/own.py:Saying"},
    }
    sections = {name: TypeAdapter[Any](TaskSpec).validate_python(table) for name, table in tables.items()}
    right = str(build_task(sections["guess-v1"]).gold_replies(_example(sections["guess-v1"], 1))[0])
    add = call("add", number=2)
    jobs: list[tuple[str, int, list[Any], list[str]]] = [
        ("guess-v1", 1, [right], [right]),
        ("guess-v1", 1, ["none", "5\nand 7", "10", "4", "6"], ["none", "5", "10", "4", "6"]),
        ("counting-v1", 1, [native(("add", '{"number": 2}')), "Done."], [add, "Done."]),
        ("counting-v1", 1, ["```tool\n{", native(("add", "{")), native(("no", "{}")), add], ["```tool\n{"]),
        ("counting-v1", 0, [add, add, "Done."], [add, add, "Done."]),
        ("saying-v1", 1, ["It is train1"], ["It is train1"]),
        ("saying-v1", 0, ["It is train1, as far as I know."], ["It is train1, as far as I know."]),
    ]
    counting, saying = tables["counting-v1"], tables["saying-v1"]
    add_two = native(("add", '{"number": 2}'))
    asked = [{"environment": tables[name], "example": n, "replies": said} for name, n, said, _ in jobs]
    asked += [
        {"environment": counting, "example": 1, "replies": [add_two] * 4, "agent": {"max_turns": 1}},
        {"environment": {**counting, "max_attempt_tokens": 1}, "example": 1, "replies": [add_two] * 4},
        {"environment": counting, "example": 1, "replies": [call("break_it", how="raise")]},
        {"environment": saying, "example": 0, "replies": ["held_out0"], "split": "held_out"},
        {"environment": {"name": "guess-number", "thinking": "on"}, "example": 0, "replies": []},
        {"environment": {"name": "arithmetic", "agent": "env"}, "example": 0, "replies": []},
    ]
    # The only dependency of strop's that verifiers does not have itself.
    (tmp_path / "psutil").symlink_to(Path(psutil.__file__).parent)
    ended = subprocess.run(
        [verifiers.python, PLAYS],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": f"{SOURCE}:{SOURCE}/strop/environments/taskset:{tmp_path}"},
        cwd=tmp_path,
    )
    *played, one_turn, one_reply, failed, held_out, thinking, agent = [
        json.loads(line) for line in ended.stdout.splitlines()
    ]
    for (name, example, _, replies), found in zip(jobs, played, strict=True):
        section = sections[name]
        outcome = verdict(build_task(section), _example(section, example), TURN.join(replies))
        assert (found["ok"], found["errors"]) == (True, [])
        assert found["rewards"] == outcome.parts
        assert found["metrics"]["is_correct"] == float(bool(outcome.is_correct))
    for limited in (one_turn, one_reply):
        assert limited["rewards"] == {"reward": 1.0}
        assert len(limited["asked"]) == 1
    assert [one["refused"] for one in (thinking, agent)] == ["ConfigError"] * 2
    assert failed["rewards"] == {}
    assert {(kind, said.partition(":")[0]) for kind, said in failed["errors"]} == {
        ("TaskError", "RuntimeError")
    }
    assert held_out["rewards"] == {"reward.said": 0.75, "reward.short": 0.25}
    first = played[5]["asked"][0]
    assert [one["content"] for one in first["messages"]] == ["Be short.", "Say it."]
    assert played[2]["asked"][0]["tools"][0]["function"]["name"] == "add"


def _example(section: Any, number: int) -> Any:
    return build_task(section).examples(Split.TRAIN)[number]
