"""Environments of strop's as packages of verifiers: written, installed, and played by verifiers 0.4.0."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from strop.agents.verifiers import environment_of
from strop.environments.export.playing import Player
from strop.environments.export.writing import write_package
from strop.errors import ConfigError
from strop.rollout import Split
from strop.run.tasks import read_task
from strop.tasks import build_task
from strop.tasks.task import TURN
from tests.conftest import require_system_part
from tests.environments.test_worlds import COUNTING, call
from tests.fixtures.commands import Run, run
from tests.fixtures.judging import verdict

__all__ = ["run"]
ROLE_JUDGE = ("judge_url=role", "judge_model=x", "judge_revision=a1")
PLAYS = Path(__file__).with_name("verifiers_play.py")


def described(folder: Path) -> dict[str, Any]:
    """Return what a package says of its environment."""
    (path,) = folder.glob("src/*/environment.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


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


def test_a_package_holds_the_module_and_the_settings(run: Run, own: Path, tmp_path: Path) -> None:
    folder = tmp_path / "counting-v1"
    ended = run("envs", "export", f"{own}/own.py:Counting", "max_turns=3", str(folder))
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[0] == f"wrote {folder}"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    inner = {"__init__.py", "process.py", "environment.json"}
    assert files == {"pyproject.toml", *(f"src/counting_v1/{name}" for name in inner)}
    said = described(folder)
    assert (said["section"]["max_turns"], said["section"]["name"]) == (3, f"{own}/own.py:Counting")
    assert f'version = "1+{said["version"]}"' in (folder / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("words", "folder", "said"),
    [
        (("arithmetic", "agent=python agent.py"), "x", "a program conducts its attempts"),
        (("verifiers", "taskset=other"), "x", "conducts its attempts already"),
        (("rows", "source=x", "prompt=p", "reward=judge", *ROLE_JUDGE), "x", "a run starts its judge"),
        (("guess-number", "thinking=on"), "x", "task.thinking"),
        (("guess-number", "no_such=1"), "x", "no_such"),
        (("no-such-thing",), "x", "no-such-thing"),
        (("guess-number",), "Upper Case", "small letters and digits"),
        (("guess-number",), "taken", "exists, and is no empty folder"),
        (("guess-number",), "file", "exists, and is no empty folder"),
        (("guess-number",), "", "the last word is the folder"),
        (("guess-number", "max_value=3"), "", "the last word is the folder"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    run: Run, tmp_path: Path, words: tuple[str, ...], folder: str, said: str
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "kept").write_text("kept")
    (tmp_path / "file").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    ended = run("envs", "export", *words, *([str(tmp_path / folder)] if folder else []))
    assert ended.code == 2
    assert said in " ".join(ended.err.split())
    assert sorted(tmp_path.rglob("*")) == before


def test_another_version_than_was_exported_is_refused(own: Path, tmp_path: Path) -> None:
    write_package(read_task("guess-number", []), tmp_path / "guess")
    said = described(tmp_path / "guess")
    with pytest.raises(ConfigError, match="was exported as"):
        Player({**said["section"], "max_value": 9}, said["version"])


def test_an_attempt_is_played_without_verifiers_and_a_fault_is_no_score(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = read_task(f"{own}/own.py:Counting", [])
    player = Player(section.model_dump(mode="json"), build_task(section).version)

    def play(*replies: Any, reason: str = "stop") -> tuple[list[Any], dict[str, Any]]:
        """Return what the model was asked, and what came of it."""
        asked: list[Any] = []
        left = iter(replies)

        async def answer(request: httpx.Request) -> httpx.Response:
            asked.append(json.loads(request.content)["messages"])
            said = next(left, None)
            if said is None:
                return httpx.Response(400, json={"error": "out of turns"})
            message = {"role": "assistant", **({"content": said} if isinstance(said, str) else said)}
            return httpx.Response(200, json={"choices": [{"message": message, "finish_reason": reason}]})

        served = partial(httpx.AsyncClient, transport=httpx.MockTransport(answer))
        monkeypatch.setattr("strop.environments.export.playing.httpx.AsyncClient", served)
        return asked, asyncio.run(player.play("train", 1, "m", "http://x", "key"))

    two_calls = native(("add", '{"number": 1}'), ("add", '{"num'))
    (_, second, third), outcome = play(two_calls, call("add", number=1))
    roles = [(one["role"], one.get("tool_call_id")) for one in second[-2:]]
    assert roles == [("tool", "c0"), ("tool", "c1")]
    assert "unreadable" in second[-1]["content"]
    assert third[-1] == {"role": "user", "content": "add returned:\nThe total is 2."}
    assert outcome["parts"] == {"reward": 1.0}
    assert (outcome["metrics"]["num_tool_calls"], outcome["metrics"]["num_format_errors"]) == (3.0, 1.0)
    hermes = '<tool_call>\n{"name": "add", "arguments": {"number": 2}}\n</tool_call>'
    asked, outcome = play(hermes, hermes, reason="length")
    assert (len(asked), outcome["parts"]) == (1, {"reward": 1.0})
    failure = play(call("break_it", how="raise"))[1]["failure"]
    assert (failure["owner"], failure["kind"]) == ("task", "RuntimeError")


@pytest.mark.slow
def test_verifiers_plays_them_and_its_rewards_are_strops(own: Path, tmp_path: Path) -> None:
    """A game of turns, an environment with tools and a task of one turn; right, wrong, broken and cut."""
    verifiers = environment_of(())
    require_system_part("the environment of verifiers (make guest-deps)", verifiers.is_ready())
    targets = {
        "guess-v1": ("guess-number", ["max_value=9", "num_train=3"]),
        "counting-v1": (f"{own}/own.py:Counting", []),
        "saying-v1": (f"{own}/own.py:Saying", []),
    }
    sections = {name: read_task(target, words) for name, (target, words) in targets.items()}
    for name, section in sections.items():
        write_package(section, tmp_path / name)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", site, *(tmp_path / name for name in targets)], check=True)

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
    limited = {"id": "counting-v1", "example": 1, "replies": [native(("add", '{"number": 2}'))] * 4}
    broken = {"id": "counting-v1", "example": 1, "replies": [call("break_it", how="raise")]}
    asked = [{"id": name, "example": n, "replies": replies} for name, n, replies, _ in jobs]
    asked += [{**limited, "agent": {"max_turns": 1}}, broken]
    asked.append(
        {"id": "saying-v1", "example": 0, "replies": ["held_out0"], "taskset": {"split": "held_out"}}
    )
    ended = subprocess.run(
        [verifiers.python, PLAYS],
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
    )
    *played, one_turn, failed, held_out = [json.loads(line) for line in ended.stdout.splitlines()]
    for (name, example, _, replies), found in zip(jobs, played, strict=True):
        section = sections[name]
        outcome = verdict(build_task(section), _example(section, example), TURN.join(replies))
        assert (found["ok"], found["errors"]) == (True, [])
        assert found["rewards"] == outcome.parts
        assert found["metrics"]["is_correct"] == float(bool(outcome.is_correct))
    assert one_turn["rewards"] == {"reward": 1.0}
    assert len(one_turn["asked"]) == 1
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
