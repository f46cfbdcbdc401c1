"""Rows were not found where they are, or refused for another cause than the true one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from strop.cli import main
from strop.errors import ConfigError, DataError
from strop.rollout import Split
from strop.run.tasks import read_task, write_new_task
from strop.spec import load_spec
from strop.store import open_store
from strop.store.resolve import only_local
from strop.tasks import Task, build_task
from tests.fixtures.saved_data import save_split

RUN = """
name = "own"
[task]
name = "rows"
source = "{source}"
prompt = "{{q}}"
answer = "a"
reward = "exact"
"""


def write(folder: Path, text: str, source: str = "rows.jsonl") -> Path:
    (folder / source).write_text(text, encoding="utf-8")
    (folder / "run.toml").write_text(RUN.format(source=f"./{source}"))
    return folder / "run.toml"


def lines(num: int) -> str:
    return "".join(json.dumps({"q": f"{n} + {n}?", "a": str(2 * n)}) + "\n" for n in range(num))


def task_of(run_file: Path, *words: str) -> Task:
    return build_task(load_spec(run_file, list(words)).spec.task)


def strop(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "strop.cli", *words], cwd=cwd, capture_output=True, text=True, check=False
    )


def cause_of(task: Task) -> str:
    with pytest.raises(DataError) as raised:
        task.examples(Split.TRAIN)
    # A file that is whole was not interrupted.
    assert "download" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("num_rows", "words"), [(1, ()), (5, ("task.num_held_out=5",)), (5, ("task.num_held_out=9",))]
)
def test_rows_that_are_all_held_out_are_counted(
    tmp_path: Path, num_rows: int, words: tuple[str, ...]
) -> None:
    assert f"{num_rows} rows" in cause_of(task_of(write(tmp_path, lines(num_rows)), *words))
    assert "task.num_held_out" in cause_of(task_of(write(tmp_path, lines(num_rows)), *words))


def test_two_rows_with_one_prompt_are_all_held_out(tmp_path: Path) -> None:
    assert "2 rows" in cause_of(task_of(write(tmp_path, lines(1) * 2)))


@pytest.mark.parametrize("name", ["re", "json", "strop", "numpy", "class"])
def test_a_new_task_hides_no_module(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        write_new_task(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "meant"), [("gsm8", "gsm8k"), ("arithmetik", "arithmetic"), ("humanevel", "humaneval")]
)
def test_a_near_name_of_a_task_is_offered(given: str, meant: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_task(given, [])
    assert str(raised.value).rpartition("Next: ")[2].count(meant) == 1


def test_an_audit_takes_the_run_file(tmp_path: Path) -> None:
    run_file = write(tmp_path, lines(30))
    ended = strop("audit", run_file.name, "num=2", "--json", cwd=tmp_path)
    assert json.loads(ended.stdout)["task"] == "rows", ended.stderr


def test_a_plan_warns_of_random_replies(tmp_path: Path) -> None:
    write(tmp_path, lines(30))
    warnings = [
        json.loads(strop("plan", "run.toml", "--json", f"sampling.temperature={value}", cwd=tmp_path).stdout)[
            "warnings"
        ]
        for value in (1, 100)
    ]
    assert [sum("sampling.temperature" in text for text in found) for found in warnings] == [0, 1]


def examples_of(folder: Path, source: str) -> int:
    (folder / "run.toml").write_text(RUN.format(source=source))
    with only_local() as missing:
        number = len(task_of(folder / "run.toml").examples(Split.TRAIN))
    assert not missing
    return number


@pytest.mark.parametrize(
    "source", ["rows/", "rows", "g/gsm", "g/gsm/", "./rows", "g/gsm/train.jsonl", "a/b/c"]
)
def test_a_folder_beside_the_run_file_is_read_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    for place in ("rows", "g/gsm", "a/b/c"):
        (tmp_path / place).mkdir(parents=True)
        for name in ("train", "test"):
            (tmp_path / place / f"{name}.jsonl").write_text(lines(20).replace("?", f" of {name}?"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert examples_of(tmp_path, source) >= 18


@pytest.mark.parametrize("source", ["rows/", "a/b/c", "./rows", "rows.jsonl"])
def test_a_path_without_anything_is_refused_by_its_name(tmp_path: Path, source: str) -> None:
    with pytest.raises(DataError) as refusal:
        examples_of(tmp_path, source)
    assert str(tmp_path / source.strip("./")) in str(refusal.value)


@pytest.mark.parametrize("command", [("tasks", "check"), ("audit",)])
def test_commands_on_a_run_file_use_its_store(
    command: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`strop tasks check RUN.toml` ignored the file's `[store]` and asked the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows, root = tmp_path / "sums", str(tmp_path / "store")
    rows.mkdir()
    lines = [json.dumps({"question": f"{n} + {n}?", "answer": str(2 * n)}) for n in range(40)]
    (rows / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "store").mkdir()
    open_store(root).put(rows, f"{root}/datasets/own/sums")
    Path("run.toml").write_text(
        f'[store]\nuri = "{root}"\n[task]\nname = "rows"\nsource = "own/sums"\nprompt = "question"\n'
        'answer = "answer"\nreward = "exact"\ngold = "{answer}"\n[train]\nprompts_per_step = 2\n'
    )
    assert main([*command, "run.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "rows"


def test_the_only_split_of_an_evaluation_is_found_by_its_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bucket's `datasets/ifeval_train` was not found: IFEval has no other split."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STROP_STORE_URI", str(tmp_path / "store"))
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = [
        {
            "key": n,
            "prompt": f"Write about {n}. Answer in JSON.",
            "instruction_id_list": ["detectable_format:json_format"],
            "kwargs": [{"num_words": None}],
        }
        for n in range(8)
    ]
    save_split(rows, tmp_path / "store" / "datasets" / "ifeval_train")
    assert main(["tasks", "check", "ifeval", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == []
