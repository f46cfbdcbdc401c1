"""`strop.train` swapped the settings of two calls, and a first script of a Dataset and a function failed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import strop
from strop.errors import ConfigError
from strop.record import RunDir
from strop.spec import load_spec

ROWS = [{"prompt": f"What follows {n}?", "answer": str(n + 1)} for n in range(12)]
REFUSED: dict[str, Any] = {"train": {"steps": 0}}
"""Refused once the files are written, and before a process is started."""


class Dataset:
    """Rows as `datasets.Dataset` has them."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def written_by(folder: Path, task: Any, model: str = "some/model", **settings: Any) -> dict[str, Any]:
    """Return the run file that a call writes."""
    before = set(folder.glob("*.toml"))
    with pytest.raises(ConfigError):
        strop.train(task, model, root=folder, **{**REFUSED, **settings})
    (path,) = set(folder.glob("*.toml")) - before
    return tomllib.loads(path.read_text())


@pytest.mark.parametrize(
    "source",
    [ROWS, tuple(ROWS), Dataset(ROWS), (row for row in ROWS)],
    ids=["list", "tuple", "Dataset", "generator"],
)
def test_rows_of_any_kind_are_a_source(tmp_path: Path, source: Any) -> None:
    task = written_by(tmp_path, {"source": source, "answer": "answer", "reward": "exact"})["task"]
    assert (task["name"], task["prompt"]) == ("rows", "prompt")
    assert [json.loads(line) for line in Path(task["source"]).read_text().splitlines()] == ROWS


def test_splits_and_missing_values_are_kept(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    source = {"train": Dataset(ROWS[:8]), "test": pandas.DataFrame([{**ROWS[8], "note": float("nan")}])}
    task = written_by(tmp_path, {"source": source, "answer": "answer", "reward": "exact"})["task"]
    files = {path.name: path.read_text().splitlines() for path in Path(task["source"]).iterdir()}
    assert [len(files[name]) for name in ("train.jsonl", "test.jsonl")] == [8, 1]
    assert json.loads(files["test.jsonl"][0]) == {**ROWS[8], "note": None}


@pytest.mark.parametrize("row", [{"prompt": {1, 2}}, {"prompt": float("inf")}, 3])
def test_rows_that_are_no_json_are_refused(tmp_path: Path, row: Any) -> None:
    with pytest.raises(ConfigError):
        strop.train({"source": [row], "reward": "exact"}, "some/model", root=tmp_path)


def test_paths_start_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    task: dict[str, Any] = {
        "source": "rows.jsonl",
        "prompt": "{q}",
        "answer": "a",
        "reward": ["own.py:score", "exact"],
    }
    task["order_file"] = "o"
    written = written_by(Path("runs"), task, "model", sft={"source": "shown.jsonl"})
    assert written["model"]["uri"] == str(tmp_path / "model")
    assert written["task"]["source"] == str(tmp_path / "rows.jsonl")
    assert written["task"]["reward"] == [f"{tmp_path}/own.py:score", "exact"]
    assert (written["task"]["order_file"], written["sft"]["source"]) == (
        str(tmp_path / "o"),
        str(tmp_path / "shown.jsonl"),
    )
    mixed = {"name": "mixture", "parts": {"mine": {"name": "gsm8k", "source": Path("data")}}}
    assert written_by(tmp_path, mixed)["task"]["parts"]["mine"]["source"] == str(tmp_path / "data")


@pytest.mark.parametrize("reward", [lambda reply: 1.0, len])
def test_a_function_without_a_name_in_a_file_is_refused(tmp_path: Path, reward: Any) -> None:
    with pytest.raises(ConfigError):
        strop.train({"source": ROWS, "reward": reward}, "some/model", root=tmp_path)


def test_a_call_is_the_same_whether_its_room_was_imported_or_not() -> None:
    """Incident: `import strop.train` put the room in the place of the function."""
    call = "try: strop.train('x', 'y', x={})\nexcept Exception as error: print(repr(error))\n"
    code = f"import strop\nfrom strop.train import Observer\n{call}import strop.train.loop\n{call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.partition("(")[0] for line in done.stdout.splitlines()] == ["ConfigError"] * 2


REWARD = """
import re
import statistics as stats
from collections.abc import Sequence
import strop

WORD = re.compile(r"\\w+")
BONUS = {"right": 1.0}

class Finder:
    def find(self, text: str) -> Sequence[str]:
        return WORD.findall(text)

def reward(completions, answer, **columns):
    return [stats.fmean([BONUS["right"] * (a in Finder().find(c[0]["content"]))])
            for c, a in zip(completions, answer)]
"""
CALL = """
strop.train({"source": [{"prompt": "2?", "answer": "3"}] * 1, "reward": reward}, "some/model",
            root="runs", train={"steps": 0})
"""
CELLS = """
import ast, asyncio, linecache, sys
del __file__
async def run_cell(number, text):
    name = f"/tmp/ipykernel_1/{number}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    exec(compile(text, name, "exec"), globals())
for number, text in enumerate(cells):
    asyncio.run(run_cell(number, text))
"""


def refused_program(folder: Path, text: str, expected: str = "ConfigError: train.steps=0") -> str:
    """Run a program that ends at its training, and return the reward of its run file as FILE.py:NAME."""
    (folder / "script.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert expected in done.stderr, done.stderr
    (path,) = (folder / "runs").glob("*.toml")
    (reward,) = tomllib.loads(path.read_text())["task"]["reward"]
    return str(reward)


def score_by(place: str) -> Any:
    """Import a function as another process would, and call it."""
    path, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location("written", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)([[{"role": "assistant", "content": "It is 3."}]], ["3"])


@pytest.mark.parametrize(
    "text",
    [f"{REWARD}\nopened = open(__file__)\n{CALL}", f"cells = {[REWARD, CALL]!r}\n{CELLS}"],
    ids=["script", "notebook"],
)
def test_a_function_of_the_program_is_a_reward(tmp_path: Path, text: str) -> None:
    place = refused_program(tmp_path, text)
    assert Path(place.rpartition(":")[0]).parent.parent == tmp_path / "runs"
    assert score_by(place) == [1.0]


@pytest.mark.parametrize("used", ["opened = open(__file__)", "from beside import opened"])
def test_a_script_is_imported_where_its_function_needs_it(tmp_path: Path, used: str) -> None:
    """No guard of `__main__`: the processes of the run import what stands above the call."""
    (tmp_path / "beside.py").write_text("opened = open(__file__)\nclass Other: pass\n")
    head = f"import strop\nfrom beside import Other\n{used}\n"
    text = f"{head}def reward(reply):\n    return float(not opened.closed and bool(Other))\n"
    # The reward is looked at first: it can be imported, although the script trains.
    call = CALL.replace('train={"steps": 0}', "name='!!'") + "\nraise SystemExit(3)\n"
    assert refused_program(tmp_path, text + call, "name=") == f"{tmp_path / 'script.py'}:reward"


TWICE = """
import asyncio
import strop

dataset = [{"prompt": f"What follows {n}?", "answer": str(n + 1)} for n in range(12)]

def reward(completions, answer, **columns):
    return [float(a in text) for text, a in zip(completions, answer)]

def train(seed, lr):
    run = strop.train(
        {"source": dataset, "reward": reward, "max_reply_tokens": 8, "num_held_out": 2},
        "tiny", seed=seed, optimizer={"lr": lr}, placement={"threads": 1}, eval={"num_examples": 1},
        train={"steps": 1, "prompts_per_step": 2, "group_size": 2, "accept": "weights: random"},
    )
    return [seed, lr, str(run.path), len(run.metrics), len(run.results)]

async def main():
    return await asyncio.gather(*(asyncio.to_thread(train, *each) for each in ((7, 5e-6), (8, 1e-3))))

print(["trained", *asyncio.run(main())])
"""


@pytest.mark.slow
def test_two_calls_at_once_train_with_their_own_settings(
    tmp_path: Path, own_cache: Path, tiny_model_dir: Path
) -> None:
    (tmp_path / "tiny").symlink_to(tiny_model_dir)
    (tmp_path / "script.py").write_text(TWICE)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("['trained'"))
    _, *calls = json.loads(line.replace("'", '"'))
    assert len({path for _, _, path, _, _ in calls}) == 2
    for seed, lr, path, num_steps, num_results in calls:
        spec = load_spec(Path(path) / "spec.toml").spec
        assert (spec.seed, spec.optimizer.lr) == (seed, lr)
        assert (num_steps, num_results) == (1, 2)
        assert RunDir.open(Path(path)).is_finished
    # A log is kept where something failed.
    assert list((tmp_path / "runs").glob("*.log")) == []
