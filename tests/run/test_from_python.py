"""Training from Python: what it writes, runs and refuses; an event loop may run already."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import strop
from strop.errors import CheckRefused, ConfigError
from strop.run import from_python
from strop.spec import load_spec
from strop.user_code import CodeRef, inspect_function

REWARD = "def score(reply, answer):\n    return answer == reply.strip()\n"
SETTINGS: Mapping[str, Any] = {
    "train": {
        "steps": 1,
        "prompts_per_step": 2,
        "group_size": 2,
        "accept": "weights: a random model for a test",
    },
    "eval": {"num_examples": 2},
    "placement": {"threads": 1},
}


def own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str = REWARD) -> Any:
    """Return a function as whoever imported it from a file has it."""
    (tmp_path / "own_reward_of_a_test.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_reward_of_a_test", raising=False)
    from importlib import import_module

    return import_module("own_reward_of_a_test").score


def task_of(reward: Any) -> dict[str, Any]:
    rows = [{"q": f"What follows {number}?", "a": str(number + 1)} for number in range(8)]
    table = {"source": rows, "prompt": "q", "answer": "a", "reward": reward, "num_held_out": 2}
    return {"name": "rows", "max_reply_tokens": 8, **table}


@pytest.mark.slow
def test_a_function_trains_where_an_event_loop_runs_already(
    tmp_path: Path, own_cache: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = own_function(tmp_path, monkeypatch)

    async def notebook() -> strop.Run:
        return strop.train(task_of(score), str(tiny_model_dir), root=tmp_path / "runs", **SETTINGS)

    run = asyncio.run(notebook())
    assert [line["step"] for line in run.metrics] == [1]
    assert [result.step for result in run.results] == [0, 1]
    assert (run.path / "report.html").is_file()
    written = load_spec(tmp_path / "runs" / "from-python.toml").spec
    assert written.train.steps == 1
    with pytest.raises(CheckRefused, match="the gate refused to train: weights"):
        strop.train(
            task_of(score),
            str(tiny_model_dir),
            root=tmp_path / "others",
            **{**SETTINGS, "train": {"steps": 1, "prompts_per_step": 2, "group_size": 2}},
        )


def test_what_a_notebook_has_goes_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = from_python._make_table(task_of(own_function(tmp_path, monkeypatch)), tmp_path)
    assert asked["reward"] == [f"{tmp_path / 'own_reward_of_a_test.py'}:score"]
    rows = [json.loads(line) for line in Path(asked["source"]).read_text().splitlines()]
    assert rows[3] == {"q": "What follows 3?", "a": "4"}
    assert from_python._make_table("arithmetic", tmp_path) == {"name": "arithmetic"}


def test_it_is_called_whether_its_room_was_imported_or_not() -> None:
    """Incident: `import strop.train` put the room in the place of the function."""
    call = "try: strop.train('x', 'y', x={})\nexcept Exception as error: print(repr(error))\n"
    code = f"import strop\nfrom strop.train import Observer\n{call}import strop.train.loop\n{call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.partition("unknown key x")[0] for line in done.stdout.splitlines()] == ["ConfigError('"] * 2


@pytest.mark.parametrize("reward", [lambda reply: 1.0, len])
def test_a_function_without_a_file_is_refused(tmp_path: Path, reward: Any) -> None:
    with pytest.raises(ConfigError, match=r"is in no file.*%%writefile"):
        strop.train(task_of(reward), "some/model", root=tmp_path)


def test_wrong_settings_are_refused_before_a_process_is_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key train\.stepz.*did you mean train\.steps"):
        strop.train("arithmetic", "some/model", root=tmp_path, train={"stepz": 3})
    with pytest.raises(ConfigError, match="not JSON"):
        strop.train(task_of("exact") | {"source": [{"q": {1, 2}}]}, "some/model", root=tmp_path)


def test_a_file_that_trains_while_it_is_imported_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import strop\n\ndef score(reply):\n    return 1\n\nstrop.train('arithmetic', 'some/model')\n"
    )
    with pytest.raises(ConfigError, match=r"while it is imported.*__main__.*\(script\.py:6\)"):
        inspect_function(CodeRef(place=str(path), name="score"))
