"""Wrong input and wrong data for every command: a code, one message that names the place, and no result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.commands import Ended, Run
from tests.fixtures.tiny_tokenizer import tiny_tokenizer
from tests.store.test_listed import sync

# Words, exit code, and a piece of the message.
WRONG = [
    (("train",), 2, "Missing argument"),
    (("train", "absent.toml"), 2, "run file absent.toml does not exist"),
    (("train", "run.tml"), 2, "a TOML file, which ends in .toml"),
    (("train", "runs.toml"), 2, "did you mean run.toml"),
    (("train", "run.toml", "train.step=3"), 2, "did you mean train.steps"),
    (("train", "run.toml", "train.steps"), 2, "key=value with a dotted key"),
    (("train", "run.toml", "model.uri=./absent"), 2, "absent does not exist"),
    (("train", "run.toml", "model.uri=."), 2, "is not a model directory: config.json"),
    (("plan", "run.toml", "--hardware", "tpu"), 2, "gb200, b200, h200, h100, h100-pcie, h20"),
    (("plan", "run.toml", "--hardware", "run.toml"), 2, "bf16_tflops: Field required"),
    (("plan", "run.toml", "model.uri=org/absent", "--measure"), 2, "fetch it with `strop model get"),
    (("explain", "train.step"), 2, "did you mean train.steps"),
    (("eval", "MODEL", "--task", "arithmetic", "--split", "test"), 2, "'held_out'"),
    (("eval", "MODEL", "--task", "sums", "--split", "train"), 2, "task.name='sums'"),
    (
        ("eval", "MODEL", "--task", "arithmetic", "--split", "train", "max_valu=3"),
        2,
        "did you mean task.max_v",
    ),
    (("eval", "MODEL", "--task", "arithmetic", "--split", "train", "sampling.top_p=3"), 2, "at most 1"),
    (("eval", "MODEL", "--task", "arithmetic", "--split", "train", "--num-examples", "999"), 2, "1 to 300"),
    (("eval", "./absent", "--task", "arithmetic", "--split", "train"), 2, "absent does not exist"),
    (("sample", "MODEL"), 2, "give one of --task NAME and --prompt TEXT"),
    (("sample", "MODEL", "--task", "arithmetic", "num=0"), 2, "'num=0' is no number of examples"),
    (("sample", "MODEL", "--prompt", "x", "max_value=3"), 2, "task.max_value=3 plays no part"),
    (("model", "get", "./absent"), 2, "absent does not exist"),
    (("model", "get", "pypi:no version"), 2, "pypi:"),
    (("model", "export", "MODEL", "out"), 2, "is no run and no checkpoint"),
    (("ls", "absent"), 1, "absent is no folder"),
    (("report", "absent"), 2, "names no job"),
    (("view", "./absent"), 1, "holds no run"),
    (("view", "--address", "127.0.0.1:port"), 2, "HOST:PORT"),
    (("compare", "absent", "absent"), 1, "is not a run directory"),
    (("compare", "run.toml", "run.toml"), 1, "is not a complete result"),
    (("trian",), 2, "Did you mean 'train'"),
]


@pytest.mark.parametrize(("words", "code", "piece"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_input_ends_in_a_code_a_message_and_no_files(
    words: tuple[str, ...], code: int, piece: str, folder: Path, run: Run, tiny_model_dir: Path
) -> None:
    ended = run(*(str(tiny_model_dir) if word == "MODEL" else word for word in words))
    assert (ended.code, ended.out) == (code, "")
    assert piece in " ".join(ended.err.split())
    assert "Traceback" not in ended.err
    assert [path.name for path in folder.iterdir()] == ["run.toml"]


@pytest.mark.parametrize("command", ["train", "plan"])
def test_tok_3_a_chat_without_a_template_is_refused(
    command: str, folder: Path, run: Run, tiny_model_dir: Path
) -> None:
    bare = folder / "bare"
    bare.mkdir()
    for path in tiny_model_dir.iterdir():
        (bare / path.name).write_bytes(path.read_bytes())
    (bare / "chat_template.jinja").unlink()
    tiny_tokenizer(bare, with_chat_template=False)
    ended = run(command, "run.toml", "model.uri=./bare", "model.prompt_format=chat")
    assert ended.code == 2
    assert "has no chat template" in ended.err
    assert "model.prompt_format=base" in ended.err


Row = dict[str, Any]
GOOD: list[Row] = [{"question": f"What is {n} + 1?", "answer": f"It is.\n#### {n + 1}"} for n in range(20)]
ASK = ("model.dtype=float32", "placement.threads=1", "--split", "held_out")


def write(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))


def evaluate(run: Run, model: Path, *words: object) -> Ended:
    return run("eval", model, "--task", "gsm8k", "source=./rows.jsonl", *ASK, "--limit", "2", *words)


@pytest.mark.parametrize(
    ("rows", "piece"),
    [
        ([*GOOD, "{not JSON\n"], "rows.jsonl cannot be read (line 21: "),
        ([*GOOD, "7\n"], "rows.jsonl cannot be read (line 21: int instead of a table)"),
        ([*GOOD, {"question": "1 + 1?"}], "rows.jsonl, row 21 has answer=None"),
        ([*GOOD, {"question": "1 + 1?", "answer": None}], "row 21 has answer=None; its columns"),
        ([*GOOD, {"question": "1 + 1?", "answer": "two"}], "rows.jsonl, row 21"),
        ([], "has 0 rows"),
    ],
    ids=["no JSON", "no table", "missing column", "null", "no readable answer", "empty"],
)
def test_malformed_data_is_refused_by_its_place(
    rows: list[Any], piece: str, run: Run, folder: Path, tiny_model_dir: Path
) -> None:
    write(folder / "rows.jsonl", rows)
    before = {path.name for path in folder.iterdir()}
    for ended in (
        evaluate(run, tiny_model_dir),
        run("plan", "run.toml", "task.name=gsm8k", "task.source=./rows.jsonl"),
        run("train", "run.toml", "task.name=gsm8k", "task.source=./rows.jsonl"),
    ):
        assert (ended.code, ended.out) == (2, ""), ended.err
        assert piece in ended.err
        assert "Allowed: " in ended.err
        assert "Traceback" not in ended.err
    assert {path.name for path in folder.iterdir()} - before <= {"evals", "runs"}
    assert list(folder.rglob("*.json")) == []


@pytest.mark.usefixtures("away_from_home")
def test_data_that_another_tool_sent_has_a_notice_in_every_command(
    s3_root: str, run: Run, folder: Path, tiny_model_dir: Path
) -> None:
    data = folder / "data"
    data.mkdir()
    write(data / "train.jsonl", GOOD)
    write(data / "test.jsonl", GOOD[:4])
    sync(data, f"{s3_root}/data")
    setting = f"source={s3_root}/data"
    lines = [f'task.source = "{s3_root}/data"', "eval.num_examples = 2", 'eval.num_samples = "none"']
    lines += ['name = "n"', 'task.name = "gsm8k"', 'model.dtype = "float32"']
    (folder / "n.toml").write_text("\n".join(lines))
    commands: list[tuple[object, ...]] = [
        ("tasks", "check", "gsm8k", setting, "num=2"),
        ("sample", tiny_model_dir, "--task", "gsm8k", setting, "model.dtype=float32", "num=1"),
        ("eval", tiny_model_dir, "--task", "gsm8k", setting, *ASK, "--limit", "2", "--out", "a"),
        ("eval", tiny_model_dir, "--config", "n.toml", "--out", "b"),
    ]
    for words in commands:
        ended = run(*words)
        told = [line for line in ended.err.splitlines() if line.startswith("notice: ")]
        assert len([line for line in told if f"{s3_root}/data has no COMPLETE" in line]) == 1, (
            words,
            ended.err,
        )
