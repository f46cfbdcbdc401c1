"""A damaged or changed record is found before a resumed run trains a step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.errors import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED
from strop.record import RunDir
from tests.fixtures.commands import Run


@pytest.fixture
def there(trained_runs: Path, folder: Path) -> Path:
    """A run of two steps whose last one is not trained yet, as output.dir=there."""
    (made,) = (path.parent for path in trained_runs.glob("*/run.json"))
    path = Path(shutil.copytree(made, folder / "there", symlinks=True))
    state = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(state | {"finished_at": None}))
    shutil.rmtree(path / "checkpoints" / "step-000002")
    return path


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(bytes(data))


def _flip_page(path: Path) -> None:
    # Behind the magic number begins the first page; the file's end is its index.
    data = bytearray(path.read_bytes())
    data[64] ^= 0x55
    path.write_bytes(bytes(data))


def _drop_first_line(path: Path) -> None:
    path.write_bytes(path.read_bytes().split(b"\n", 1)[1])


def _spoil_first_line(path: Path) -> None:
    path.write_bytes(b"x" + path.read_bytes())


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    ("metrics.jsonl", _drop_first_line),
    ("metrics.jsonl", _spoil_first_line),
    ("metrics.jsonl", Path.unlink),
    ("events.jsonl", _spoil_first_line),
    ("timeline.jsonl", _spoil_first_line),
    ("rollouts/step-000001.parquet", _flip_page),
    ("rollouts/step-000001.parquet", _cut),
    ("eval/arithmetic-step-000000.json", _cut),
    ("eval/arithmetic-step-000000.json", _flip),
    ("eval/arithmetic-step-000000/*.parquet", _flip_page),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_damage_is_named_before_a_step(
    there: Path, run: Run, name: str, damage: Callable[[Path], None]
) -> None:
    """Lost lines passed without a word, and a damaged evaluation ended the run before its last checkpoint."""
    (path,) = there.glob(name)
    damage(path)
    ended = run("train", "run.toml", "output.dir=there")
    assert ended.code == EXIT_FAILED
    assert str(path.relative_to(there.parent)) in ended.err
    assert RunDir.open(there).checkpoint_steps() == [1]


def test_run_goes_on_with_a_restored_file(there: Path, run: Run) -> None:
    """The refusal costs nothing: with the file back, the same command ends the run."""
    path = there / "eval" / "arithmetic-step-000000.json"
    copy = path.read_bytes()
    _cut(path)
    assert run("train", "run.toml", "output.dir=there").code == EXIT_FAILED
    path.write_bytes(copy)
    assert run("train", "run.toml", "output.dir=there").code == EXIT_DONE
    assert [line["step"] for line in RunDir.open(there).metrics.read()] == [1, 2]


@pytest.mark.parametrize("name", ["rollouts/step-000001.parquet", "eval/arithmetic-step-000000.json"])
def test_run_goes_on_without_a_removed_file(there: Path, run: Run, name: str) -> None:
    """A file that was removed to save room was missed by nobody."""
    (there / name).unlink()
    assert run("train", "run.toml", "output.dir=there").code == EXIT_DONE
    notices = [event.detail for event in RunDir.open(there).events.read() if event.kind == "notice"]
    assert any("step 1" in text or "step 0" in text for text in notices)


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("optimizer.lr=0.25", ("optimizer.lr", "0.25", "1e-05")),
        ("train.steps=7", ("train.steps", "=2", "7")),
        ("tripwires.on_alarm=stop", ("tripwires.on_alarm", "'stop-on-collapse'", "'stop'")),
        ("task.num_held_out=9", ("task.num_held_out", "9")),
    ],
)
def test_changed_settings_are_named(there: Path, run: Run, word: str, shown: tuple[str, ...]) -> None:
    """Of a run directory with other settings the refusal said neither which nor their values."""
    ended = run("train", "run.toml", "output.dir=there", word)
    assert ended.code == EXIT_REFUSED
    assert all(text in ended.err for text in shown), ended.err
    assert "checkpoint_every" not in ended.err
