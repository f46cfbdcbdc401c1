"""Which checkpoint is evaluated when, and what becomes of one that fails, is refused, or goes away."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused, ConfigError, StoreError
from strop.evaluate import write_result
from strop.hardware import spawn
from strop.io.atomic import AtomicDirectory
from strop.record import RunDir
from strop.record.fence import NUMBER_VARIABLE, raise_fence
from strop.run import following
from strop.run.following import choose_step, follow_run
from strop.spec import load_spec, write_spec
from tests.evaluate.stored_results import make_result

EVAL_TEXT = 'name = "short"\ntask.name = "arithmetic"\n'


@pytest.mark.parametrize(
    ("steps", "done", "begun", "is_finished", "expected"),
    [
        ([], [], [], False, None),
        ([20, 40], [], [], False, 40),
        # Older ones while there is time.
        ([20, 40], [40], [], False, 20),
        ([20, 40], [20, 40], [], False, None),
        # What was begun first; it is half done.
        ([20, 40, 60], [], [20, 40], False, 40),
        ([20, 40, 60], [40], [40], False, 60),
        # After the end only the last one, begun or not.
        ([20, 40], [], [20], True, 40),
        ([20, 40], [40], [], True, None),
        ([], [], [], True, None),
    ],
)
def test_the_newest_without_a_result_is_next(
    steps: list[int], done: list[int], begun: list[int], is_finished: bool, expected: int | None
) -> None:
    assert choose_step(steps, done, begun, is_finished=is_finished) == expected


Say = list[str]


def a_finished_run(folder: Path, steps: Sequence[int], *words: str) -> Path:
    """Return a run with checkpoints of these steps, whose content nobody reads here."""
    settings = ("name=run", "task.name=arithmetic", "model.uri=Org/Small", *words)
    run = RunDir.create(folder / "runs", "run", write_spec(load_spec(None, settings)), "digest", {})
    for step in steps:
        with AtomicDirectory(run.checkpoint_path(step), facts={}) as partial:
            (partial / "weights").write_text(str(step))
    run.mark_finished()
    run.release()
    return run.path


def write_eval_file(folder: Path, text: str = EVAL_TEXT) -> Path:
    path = folder / "short.toml"
    path.write_text(text)
    return path


def let_children_run(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let a checkpoint's evaluation be a program of the test; it is given the checkpoint."""

    def spawn_other(argv: Sequence[str], log_path: Path) -> Any:
        return spawn([sys.executable, "-c", program, argv[4]], log_path)

    monkeypatch.setattr(following, "spawn", spawn_other)


def let_children_answer(monkeypatch: pytest.MonkeyPatch, run_path: Path) -> None:
    """Let every evaluation of a checkpoint have a result."""

    def evaluate(argv: Sequence[str], log_path: Path) -> Any:
        checkpoint = Path(argv[4])
        assert list(argv[3:5]) == ["eval", str(run_path / "checkpoints" / checkpoint.name)]
        step = int(checkpoint.name.rpartition("-")[2])
        path = run_path / "eval" / f"short.arithmetic-{checkpoint.name}.json"
        write_result(make_result({"a": 1.0, "b": 0.0}, step=step), path)
        return spawn(["true"], log_path)

    monkeypatch.setattr(following, "spawn", evaluate)


def follow(run_path: Path, eval_path: Path) -> tuple[Say, Exception | None]:
    said: Say = []
    try:
        follow_run(run_path, eval_path, say=said.append)
    except (StoreError, CheckRefused, ConfigError) as error:
        return said, error
    return said, None


def test_a_checkpoint_that_is_pruned_meanwhile_is_left_out_with_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_path = a_finished_run(tmp_path, [20, 40])
    let_children_run(monkeypatch, "import shutil, sys; shutil.rmtree(sys.argv[1]); sys.exit(1)")
    said, error = follow(run_path, write_eval_file(tmp_path))
    # Step 40 goes, then 20 is the last one, and goes too.
    notices = [line.partition(" is ")[0] for line in said if line.startswith("notice")]
    assert notices == ["notice: step 40", "notice: step 20"]
    assert isinstance(error, StoreError)


def test_an_evaluation_that_fails_is_repeated_once_and_the_end_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_path = a_finished_run(tmp_path, [20])
    let_children_run(monkeypatch, "raise SystemExit(1)")
    said, error = follow(run_path, write_eval_file(tmp_path))
    assert [line[:14] for line in said if "alarm" in line] == ["alarm: step 20"] * 2
    assert isinstance(error, StoreError)
    assert "step 20" in str(error)
    assert f"strop eval {run_path} --config" in str(error)


@pytest.mark.parametrize("code", [2, 76])
def test_a_first_evaluation_that_is_refused_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    run_path = a_finished_run(tmp_path, [20])
    let_children_run(monkeypatch, f"raise SystemExit({code})")
    _, error = follow(run_path, write_eval_file(tmp_path))
    assert isinstance(error, CheckRefused)
    assert f"(exit code {code})" in str(error)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (EVAL_TEXT + 'model.uri = "Org/Large"\n', ConfigError, "trains 'Org/Small'"),
        # Other examples are held out of 200 sums than of the run's: it trained on some of them.
        (EVAL_TEXT + "task.num_held_out = 200\n", CheckRefused, "called held_out were trained on"),
    ],
)
def test_what_no_checkpoint_could_be_evaluated_by_is_refused_at_once(
    tmp_path: Path, text: str, kind: type[Exception], message: str
) -> None:
    run_path = a_finished_run(tmp_path, [20])
    said, error = follow(run_path, write_eval_file(tmp_path, text))
    assert isinstance(error, kind)
    assert message in str(error)
    assert not [line for line in said if "begins" in line]


def test_an_attempt_that_was_overtaken_evaluates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was lost and lives: the next attempt's evaluator writes to the same places."""
    run_path = a_finished_run(tmp_path, [20])
    monkeypatch.setenv(NUMBER_VARIABLE, "0")
    raise_fence(run_path, 1, "17-1")
    let_children_run(monkeypatch, "raise SystemExit(1)")
    said, error = follow(run_path, write_eval_file(tmp_path))
    assert isinstance(error, CheckRefused)
    assert "was overtaken by attempt 1 (17-1)" in str(error)
    assert not [line for line in said if "begins" in line]


def test_a_run_that_ends_during_a_look_has_its_last_checkpoint_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("name=run", "task.name=arithmetic", "model.uri=Org/Small")
    run = RunDir.create(tmp_path / "runs", "run", write_spec(load_spec(None, settings)), "digest", {})
    list_steps = RunDir.checkpoint_steps

    def write(step: int) -> None:
        with AtomicDirectory(run.checkpoint_path(step), facts={}) as partial:
            (partial / "weights").write_text(str(step))

    def end_meanwhile(self: RunDir) -> list[int]:
        found = list_steps(self)
        if not run.is_finished:
            write(40)
            run.mark_finished()
        return found

    write(20)
    write_result(make_result({"a": 1.0}, step=20), run.path / "eval" / "short.arithmetic-step-000020.json")
    monkeypatch.setattr(RunDir, "checkpoint_steps", end_meanwhile)
    let_children_answer(monkeypatch, run.path)
    said, error = follow(run.path, write_eval_file(tmp_path))
    run.release()
    assert error is None
    assert [line for line in said if "begins" in line] == ["step 40: evaluation begins"]


def test_a_result_is_in_the_mirror_although_the_trainer_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    run_path = a_finished_run(tmp_path, [20], f"store.uri={store}", "store.mirror=true")
    result_path = run_path / "eval" / "short.arithmetic-step-000020.json"
    let_children_answer(monkeypatch, run_path)
    said, error = follow(run_path, write_eval_file(tmp_path))
    assert error is None
    assert said[-1].startswith("step 20: greedy accuracy of ")
    (mirrored,) = store.rglob("eval/*.json")
    assert mirrored.parts[-3:] == (run_path.name, "eval", result_path.name)
    assert mirrored.read_bytes() == result_path.read_bytes()
    # What has a result is not evaluated once more.
    assert follow(run_path, write_eval_file(tmp_path)) == (said[:1], None)


def test_a_resume_removes_results_and_replies_of_later_steps(tmp_path: Path) -> None:
    run_path = a_finished_run(tmp_path, [20, 40])
    for step in (20, 40):
        (run_path / "eval" / f"short.arithmetic-step-{step:06d}").mkdir()
        (run_path / "eval" / f"short.arithmetic-step-{step:06d}" / "replies").write_text("kept")
        (run_path / "eval" / f"short.arithmetic-step-{step:06d}.json").write_text("{}")
    with RunDir.open(run_path) as run:
        run.truncate_after(20)
    assert sorted(path.name for path in (run_path / "eval").iterdir()) == [
        "short.arithmetic-step-000020",
        "short.arithmetic-step-000020.json",
    ]
