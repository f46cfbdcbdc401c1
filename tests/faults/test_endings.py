"""Runs that end early, and what a user then reads: hangups, full disks, slow rewards, damaged weights."""

from __future__ import annotations

import json
import os
import pty
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from strop.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED
from strop.record import RunDir
from tests.fixtures.attempts import start_command, wait_for_end
from tests.fixtures.commands import Run
from tests.fixtures.tiny_disk import tiny_disk

TRAIN = (sys.executable, "-m", "strop.cli", "train", "run.toml")
LIMIT_S = 240.0


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def num_steps(path: Path) -> int:
    log = path / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def train_on_screen(folder: Path, *words: str) -> tuple[int, int]:
    """Train on a terminal of its own; return the process and the other end of the terminal."""
    pid, screen = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execv(sys.executable, [*TRAIN, *words])
    return pid, screen


@pytest.mark.slow
def test_a_closed_terminal_leaves_a_checkpoint(folder: Path) -> None:
    """SIGHUP ended a run without a checkpoint."""
    path = folder / "there"
    pid, screen = train_on_screen(folder, "output.dir=there", "train.steps=500", "train.checkpoint_every=500")
    os.set_blocking(screen, False)

    def has_begun() -> bool:
        with suppress(BlockingIOError):
            os.read(screen, 1 << 16)
        return num_steps(path) >= 1

    wait_until(has_begun)
    os.close(screen)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == EXIT_INTERRUPTED
    (step,) = RunDir.open(path).checkpoint_steps()
    attempt = json.loads((path / "attempts" / "1" / "attempt.json").read_bytes())
    assert (attempt["exit_code"], attempt["step"]) == (EXIT_INTERRUPTED, step)


@pytest.mark.slow
def test_a_notebook_gets_plain_lines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's cell, which has a terminal, was filled with redraws."""
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    pid, screen = train_on_screen(folder, "train.steps=1")
    shown = b""
    while True:
        try:
            shown += os.read(screen, 1 << 16)
        except OSError:
            break
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == EXIT_DONE
    assert b"step 1/1" in shown
    assert b"\x1b[" not in shown


def test_colours_do_not_make_a_log_a_screen(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """FORCE_COLOR filled logs with redraws."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    ended = run("train", "run.toml", "train.steps=1", "eval.num_samples=none", "eval.num_examples=1")
    assert ended.code == EXIT_DONE
    assert "step 1/1" in ended.err
    assert "\x1b[" not in ended.err


@pytest.mark.slow
def test_a_full_disk_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    """A disk that filled up in training ended in a raw traceback, and the record did not say how."""
    with tiny_disk(tmp_path / "disk", size_bytes=24 << 20) as disk:
        words = (f"output.dir={disk / 'there'}", "train.steps=500", "train.checkpoint_every=500")
        process = start_command(["train", "run.toml", *words], folder / "out")
        wait_until(lambda: num_steps(disk / "there") >= 1 or not process.is_alive())
        with suppress(OSError), (disk / "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(4096))
        assert wait_for_end(process) == EXIT_FAILED
        shutil.copytree(disk / "there", tmp_path / "copy", symlinks=True)
    text = (folder / "out").read_text()
    assert "Traceback" not in text
    refusals = [line for line in text.splitlines() if line.startswith("strop: ")]
    assert len(refusals) == 1
    assert str(disk / "there") in refusals[0]
    attempt = json.loads((tmp_path / "copy" / "attempts" / "1" / "attempt.json").read_bytes())
    assert (attempt["cause"], attempt["exit_code"]) == ("StoreError", EXIT_FAILED)
    assert attempt["step"] >= 1


def test_a_reward_that_sleeps_is_named(folder: Path, run: Run) -> None:
    """`strop tasks check` of a reward that sleeps printed nothing for many minutes."""
    (folder / "slow.py").write_text(
        "import time\n\ndef score(reply, answer, **columns):\n    time.sleep(3600)\n    return 1.0\n"
    )
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("source=rows.jsonl", "prompt=question", "answer=answer", "reward=slow.py:score")
    began_at = time.monotonic()
    ended = run("tasks", "check", "rows", *words, "judge_limit_s=0.3")
    assert ended.code == EXIT_REFUSED
    assert "0.3 s" in ended.err
    assert time.monotonic() - began_at < 60.0


def cut_by(path: Path, num_bytes: int) -> None:
    os.truncate(path, path.stat().st_size - num_bytes)


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, 0),
        lambda path: os.truncate(path, 5),
        lambda path: cut_by(path, 1),
        lambda path: cut_by(path, -1),
        lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    ],
    ids=["empty", "no header", "a byte less", "a byte more", "a pointer"],
)
def test_damaged_weights_are_named(
    folder: Path, run: Run, tiny_model_dir: Path, damage: Callable[[Path], object], command: str
) -> None:
    """Of a truncated or empty file of weights no message named the file, and the plan had no warning."""
    shutil.copytree(tiny_model_dir, folder / "model")
    damage(folder / "model" / "model.safetensors")
    ended = run(command, "run.toml", "model.uri=./model")
    assert ended.code == EXIT_FAILED
    assert str(folder / "model" / "model.safetensors") in ended.err
    assert "Traceback" not in ended.err
