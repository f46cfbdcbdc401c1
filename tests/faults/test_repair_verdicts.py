"""Repaired code could forge its tests' results, and a model could make its attempt the machine's fault."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from strop.rollout import Outcome
from strop.spec import load_spec
from strop.tasks import build_task
from tests.environments.test_worlds import attempt, call, tokenizer_of

BROKEN = "def total(numbers):\n    return max(numbers)\n"
FIXED = BROKEN.replace("max", "sum")
PATCH = """\
--- a/total.py
+++ b/total.py
@@ -1,2 +1,2 @@
 def total(numbers):
-    return max(numbers)
+    return sum(numbers)
"""
HIDDEN = """
import unittest
from total import total

class Sums(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(total([2, 3]), 5)

if __name__ == "__main__":
    unittest.main(verbosity=2)
"""
NAMES = ["test_sum (test_total.Sums)", "test_sum (test_total.Sums.test_sum)", "test_sum (__main__.Sums)"]
NAMES += ["test_sum (__main__.Sums.test_sum)"]
LOG = "".join(f"{name} ... ok\\nPASSED {name}\\n" for name in NAMES)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose newest commit has the repair, and whose older one has not."""
    folder = tmp_path_factory.mktemp("repository")

    def git(*words: str) -> str:
        argv = ["git", "-c", "user.name=x", "-c", "user.email=x@localhost", *words]
        return subprocess.run(argv, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (folder / "total.py").write_text(BROKEN)
    (folder / "tests").mkdir()
    (folder / "tests" / "shown.py").write_text("# Nothing is tested yet.\n")
    git("add", "-A")
    git("commit", "-qm", "broken")
    (folder / "base").write_text(git("rev-parse", "HEAD"))
    (folder / "total.py").write_text(FIXED)
    git("commit", "-qam", "the repair")
    return folder


def repair(folder: Path, place: Path, *commands: str, is_at_main: bool = False, **columns: Any) -> Outcome:
    """Play an attempt of these commands at a row of the repository, as a run file names it."""
    path = "test_total.py"
    name = subprocess.run(
        ["python3", "-m", "unittest", "-v", "test_total"],
        cwd=_hidden(folder),
        check=True,
        capture_output=True,
        text=True,
    ).stderr.partition(" ... ")[0]
    row = {
        "problem_statement": "total is wrong.",
        "repository": str(place),
        "base_commit": (place / "base").read_text(),
        "hidden_tests": {path: HIDDEN},
        "FAIL_TO_PASS": [name.replace("test_total.", "__main__.") if is_at_main else name],
        "test_command": f"python3 {path}" if is_at_main else "python3 -m unittest -v test_total",
        "patch": PATCH,
        **columns,
    }
    (folder / "rows").mkdir(exist_ok=True)
    for number, split in enumerate(("train", "test")):
        (folder / "rows" / f"{split}.jsonl").write_text(
            json.dumps({**row, "instance_id": f"t-{number}"}) + "\n"
        )
    run_file = folder / "run.toml"
    run_file.write_text(
        'name = "repair"\n[model]\nuri = "toy"\n[environment]\nname = "repo-repair"\nsource = "rows/"\n'
        'sandbox = "process"\nmin_isolation = "rlimit"\nmemory_gib = 0.25\ndisk_gib = 0.0625\n'
    )
    task = build_task(load_spec(run_file).spec.task)
    replies = [*(call("bash", command=command) for command in commands), call("submit")]
    return attempt(task, tokenizer_of(folder), replies, max_reply_tokens=4000).outcome


def _hidden(folder: Path) -> Path:
    place = folder / "names"
    place.mkdir(exist_ok=True)
    (place / "test_total.py").write_text(HIDDEN)
    (place / "total.py").write_text(FIXED)
    return place


def write(text: str) -> str:
    """Return a command that puts a text into the broken file."""
    return f"cat > total.py <<'END'\n{text}\nEND"


PRINT = f"import os, sys\nfor n in (1, 2):\n    os.write(n, b'{LOG}')\n"
FORGERIES = {
    "results on every stream, then the end": f"{PRINT}os._exit(0)",
    "the end with the code of failed tests": f"{PRINT}os._exit(1)",
    "the end at exit": f"{PRINT}import atexit\natexit.register(os._exit, 0)\nsys.exit(0)",
    "the end in the function": f"{PRINT}def total(n):\n    os._exit(0)",
    "a whole report": f"{PRINT}print('Ran 1 test in 0.000s\\n\\nOK', flush=True)\nos._exit(0)",
    "another program": f"{PRINT}os.execvp('true', ['true'])",
    "killed": f"{PRINT}os.kill(os.getpid(), 9)",
    "assertions that always hold": (
        "import unittest\nfor n in dir(unittest.TestCase):\n    if n.startswith('assert'):\n"
        "        setattr(unittest.TestCase, n, lambda *a, **k: __import__('contextlib').nullcontext())\n"
        "def total(n): pass"
    ),
    "tests that are not run": (
        "import unittest\nunittest.TestCase.run = lambda self, result=None: (\n"
        "    result.startTest(self), result.addSuccess(self), result.stopTest(self))\ndef total(n): pass"
    ),
    "failures that count as successes": (
        "from unittest import TextTestResult as R\nR.addFailure = lambda s, test, error: s.addSuccess(test)\n"
        "R.addError = R.addFailure\ndef total(n): pass"
    ),
    "a comment": BROKEN + "# add them up\n",
}


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(name, marks=[] if number == 0 else pytest.mark.slow)
        for number, name in enumerate(FORGERIES)
    ],
)
def test_code_that_reports_its_own_tests_earns_nothing(tmp_path: Path, repository: Path, attack: str) -> None:
    outcome = repair(tmp_path, repository, write(FORGERIES[attack]))
    assert (outcome.reward, outcome.failure) == (0.0, None), outcome


PYTEST: dict[str, Any] = {
    "FAIL_TO_PASS": ["test_total.py::Sums::test_sum"],
    "test_command": "PYTHONPATH=.tools python3 -m pytest -rA --no-header -p no:cacheprovider {files}",
}
FORGED_REPORTS = (
    "from _pytest.reports import TestReport as R\nmake = R.from_item_and_call.__func__\n"
    "def forge(kind, item, call):\n    report = make(kind, item, call)\n    report.outcome = 'passed'\n"
    "    return report\nR.from_item_and_call = classmethod(forge)\ndef total(n): pass"
)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["", " -x"])
def test_pytest_is_read_alike(tmp_path: Path, repository: Path, flag: str) -> None:
    place = tmp_path / "repository"
    shutil.copytree(repository, place)
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"):
        found = find_spec(name)
        assert found is not None
        assert found.origin is not None
        path = Path(found.origin)
        if path.name == "__init__.py":
            shutil.copytree(path.parent, place / ".tools" / name, ignore=shutil.ignore_patterns("*.pyc"))
        else:
            shutil.copy(path, place / ".tools")
    row = {**PYTEST, "test_command": PYTEST["test_command"] + flag}
    assert repair(tmp_path, place, write(FIXED), **row).reward == 1.0
    for forged in (
        FORGED_REPORTS,
        f"{PRINT}os.write(1, b'PASSED test_total.py::Sums::test_sum')\nos._exit(0)",
    ):
        outcome = repair(tmp_path, place, write(forged), **row)
        assert (outcome.reward, outcome.failure) == (0.0, None), outcome


@pytest.mark.parametrize("is_at_main", [False, True])
def test_a_repair_is_solved_from_the_rows_commit(tmp_path: Path, repository: Path, is_at_main: bool) -> None:
    assert repair(tmp_path, repository, write(FIXED), is_at_main=is_at_main).reward == 1.0
    assert repair(tmp_path, repository, "echo '# done' >> total.py", is_at_main=is_at_main).reward == 0.0


DESTRUCTION = [
    "rm -rf tests; echo x > tests",
    "rm -rf tests; ln -s /etc tests",
    "rm -rf * ; mkdir test_total.py",
    "mkdir test_total.py; echo x > test_total.py/x",
    "ln -s total.py test_total.py",
    "rm -rf .git; echo x > .git",
    "chmod 000 . .git",
    "git config core.bare true; git config core.worktree /nowhere",
]


@pytest.mark.parametrize("command", DESTRUCTION)
@pytest.mark.parametrize("place", ["test_total.py", "tests/test_total.py"])
def test_a_model_that_destroys_its_work_has_failed_and_not_the_machine(
    tmp_path: Path, repository: Path, command: str, place: str
) -> None:
    tests: dict[str, Any] = {"hidden_tests": {place: HIDDEN}}
    if place != "test_total.py":
        tests = {
            "hidden_tests": {place: HIDDEN},
            "test_command": "cd tests && PYTHONPATH=.. python3 -m unittest -v test_total",
        }
    outcome = repair(tmp_path, repository, command, **tests)
    assert (outcome.reward, outcome.failure) == (0.0, None), outcome


def test_a_folder_without_history_is_not_at_a_rows_commit(tmp_path: Path, repository: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "total.py").write_text(FIXED)
    (plain / "base").write_text((repository / "base").read_text())
    outcome = repair(tmp_path, plain, write(FIXED))
    assert outcome.reward is None
    assert outcome.failure is not None
    assert outcome.failure.kind == "bad_repository"
