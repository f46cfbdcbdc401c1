"""MLGym's tasks: a checkout is read, attempts are graded out of reach, and known hacks earn nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.environments.mlgym import MlgymSpec, list_tasks
from strop.errors import ConfigError, DataError
from strop.rollout import FailureOwner, Split
from strop.tasks import Task, build_task
from tests.environments.test_worlds import call
from tests.environments.test_worlds import play_here as play
from tests.fixtures.judging import failed
from tests.fixtures.mlgym_checkout import FILES, write_checkout
from tests.fixtures.sandboxes import needs_bubblewrap

SUBMIT = call("submit")
PROCESS = {"sandbox": "process", "min_isolation": "rlimit"}


def make(folder: Path, task: str = "nearTen", **settings: Any) -> Task:
    root = folder / "checkout"
    if not root.exists():
        write_checkout(root)
    given = {**PROCESS, "memory_gib": 0.25, "disk_gib": 0.0625, **settings}
    return build_task(
        MlgymSpec(name="mlgym", root=str(root), tasks=(task,), num_train=1, num_held_out=1, **given)
    )


def write(text: str, path: str = "target.py") -> str:
    return call("create", path=path, text=text)


@pytest.mark.parametrize(
    "settings",
    [PROCESS, pytest.param({"sandbox": "bubblewrap", "min_isolation": "namespace"}, marks=needs_bubblewrap)],
)
def test_what_is_better_than_the_baseline_earns_its_gain(tmp_path: Path, settings: dict[str, Any]) -> None:
    task = make(tmp_path, **settings)
    opening = task.render(task.examples(Split.TRAIN)[0])[0].text
    assert "the nearer {its sum} with" in opening
    rollout = play(
        tmp_path, task, call("bash", command="sed -i s/1/3/ target.py; ls"), call("validate"), SUBMIT
    )
    assert "partner.py\ntarget.py" in rollout.turns[2].text
    assert "can be graded" in rollout.turns[4].text
    # From 4 to 6, of a baseline of 4.
    assert rollout.outcome.reward == 0.5, rollout.outcome
    assert rollout.outcome.metrics["metric"] == 6.0
    assert (tmp_path / "checkout/data/nearTen/target.py").read_text() == FILES["data/nearTen/target.py"]


WALKS = """
import os, sys
frame = sys._getframe()
while frame is not None and "nonce" not in frame.f_globals:
    frame = frame.f_back
print('{"Score": 10}', frame and frame.f_globals["nonce"], flush=True)
os._exit(0)
"""
RENAMES = """
import os, sys
if "runpy" in sys.modules:
    print('{"Score": 10}', sys.modules["__main__"].nonce, flush=True)
    os._exit(0)
os.rename(__file__, "colorsys.py")
def act(): return 1
"""


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        (write(WALKS), -1.0),
        ("I am done.", 0.0),
        (call("bash", command="echo 'def act(): return 7' > partner.py; touch evaluate.py json.py"), 0.0),
        (write("def act(): return -3"), -1.0),
        (write("def act(:"), -1.0),
        (call("bash", command="rm target.py"), -1.0),
        (write("import os\nprint('{\"Score\": 10}', flush=True)\nos._exit(0)"), -1.0),
        (write("print('{\"Score\": 10}')\nraise SystemExit(0)"), -1.0),
        (write("print('{\"Score\": 10}')\ndef act(): return 1"), 0.0),
        (write("def act(): raise SystemExit"), -1.0),
        (write("import os, signal\nos.kill(os.getppid(), 9)\ndef act(): return 1"), -1.0),
    ],
)
def test_hacks_earn_nothing(tmp_path: Path, reply: str, reward: float) -> None:
    outcome = play(tmp_path, make(tmp_path), reply, SUBMIT).outcome
    assert outcome.failure is None, outcome
    assert outcome.reward is not None
    assert outcome.reward <= reward


@pytest.mark.parametrize(
    ("grader", "reply", "reward"),
    [
        # One that loads the artefact by its path would share its process with it: it cannot.
        ("import runpy\ntarget = runpy.run_path('target.py')\n", write(WALKS), None),
        # What the artefact put into the folder is not imported by it.
        ("import target\ntarget.act()\nimport colorsys\n", write(RENAMES), 0.0),
    ],
)
def test_no_grader_shares_a_process_with_the_artefact(
    tmp_path: Path, grader: str, reply: str, reward: float | None
) -> None:
    task = make(tmp_path)
    (tmp_path / "checkout/data/nearTen/evaluate.py").write_text(grader + "print('{\"Score\": 4}')\n")
    assert play(tmp_path, task, reply, SUBMIT).outcome.reward == reward


def test_a_table_is_graded_by_answers_that_the_model_does_not_have(tmp_path: Path) -> None:
    look = call("bash", command="find . -type f | sort; grep -r secret . ; tail -n 2 data/train.csv")
    rollout = play(
        tmp_path,
        make(tmp_path, "fitLine"),
        look,
        call("validate"),
        write("y\n6\n", "submission.csv"),
        call("validate"),
        write("y\n6\n9\n", "submission.csv"),
        call("validate"),
        SUBMIT,
    )
    said = [turn.text for turn in rollout.turns if not turn.is_sampled]
    assert "./data/train.csv\n./sample_submission.csv\n" in said[1]
    for hidden in ("answer", "evaluate", "secret", "notes"):
        assert hidden not in said[1]
    assert ["cannot" in said[place] for place in (2, 4, 6)] == [True, True, False]
    assert rollout.outcome.reward == pytest.approx((2 - 0.5**0.5) / 2)
    assert "LINE:\ny is twice x." in said[0]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("print('no result')\n", "grader_broken"),
        ("print('{\"a\":' * 3000)\n", "grader_broken"),
    ],
)
def test_a_grader_that_cannot_grade_is_the_tasks_failure(tmp_path: Path, source: str, kind: str) -> None:
    task = make(tmp_path)
    (tmp_path / "checkout/data/nearTen/evaluate.py").write_text(source)
    outcome = play(tmp_path, task, SUBMIT).outcome
    assert failed(outcome) == (FailureOwner.TASK, kind)


def test_a_value_above_the_ceiling_is_no_score(tmp_path: Path) -> None:
    checkout = write_checkout(tmp_path / "checkout")
    config = checkout / "configs/tasks/nearTen.yaml"
    config.write_text(config.read_text().replace("id: nearTen", "id: blotto"))
    outcome = play(tmp_path, make(tmp_path, "blotto"), SUBMIT).outcome
    assert failed(outcome) == (FailureOwner.TASK, "ceiling")


def test_what_cannot_be_graded_fairly_is_refused(tmp_path: Path) -> None:
    root = write_checkout(tmp_path)
    tasks = list_tasks(root, ("fitLine", "nearTen", "pennies"))
    assert sorted(tasks) == ["fitLine", "nearTen", "pennies"]
    data = next(path for name, path in tasks["fitLine"].files.items() if name.startswith("data/"))
    data.write_bytes(data.read_bytes()[::-1])
    assert list_tasks(root, ("fitLine",))["fitLine"].digest != tasks["fitLine"].digest
    for name, said in (("titanic", "sex"), ("big", "unpickles")):
        with pytest.raises(DataError, match=said):
            list_tasks(root, (name,))
    for folder, wanted in ((root, "nowhere"), (tmp_path / "data", "nearTen")):
        with pytest.raises(ConfigError):
            list_tasks(folder, (wanted,))
    config = root / "configs/tasks/nearTen.yaml"
    whole = config.read_text()
    for old, new, said in (
        ("data/nearTen/partner.py", "../outside.py", "is not in the checkout"),
        ("evaluation_paths: [evaluate.py]", "", "is not among its starter_code"),
        ("[{Score: 4.0}]", "[]", "no baseline_scores"),
    ):
        config.write_text(whole.replace(old, new))
        (tmp_path.parent / "outside.py").touch()
        with pytest.raises(DataError, match=said):
            list_tasks(root, ("nearTen",))
