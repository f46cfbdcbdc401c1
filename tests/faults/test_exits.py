"""A user's code that calls `sys.exit(0)` or `os._exit(0)` ended a run as a success, with nothing trained.

Only a run that did its steps ends with exit code 0; a call is a failure of the user's code, by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strop.record import RunDir
from tests.fixtures.attempts import start_command, wait_for_end

WORLD = """
import ctypes, os, sys
from pathlib import Path

CALLS = {{"sys": lambda: sys.exit(0), "os": lambda: os._exit(0), "C": lambda: ctypes.CDLL(None)._exit(0)}}
PLACE = Path({place!r})


class Quits:
    max_turns = 2

    def examples(self, split):
        return [{{"goal": number + 100 * (split == "train")}} for number in range(1, 21)]

    def reset(self, example, seed):
        return f"Count to {{example.fields['goal']}}."

    def _end(self, method):
        steps = [path.read_text() for path in PLACE.glob("**/metrics.jsonl")]
        if method == {method!r} and ({is_early} or any(steps)):
            CALLS[{how!r}]()

    def step(self, text):
        self._end("step")
        return "go on"

    def score(self):
        self._end("score")
        return len(repr(self)) % 2 + 0.1
"""


@pytest.fixture
def project(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a run of an environment of its own, whose jobs and leases are this test's."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "STROP_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    text = (folder / "run.toml").read_text()
    text = text.replace('name = "arithmetic"', 'name = "world.py:Quits"\nmax_reply_tokens = 8')
    (folder / "run.toml").write_text(text.replace('test"', 'test; audit: anything is right"'))
    return folder


def write_world(project: Path, how: str, method: str, *, is_early: bool) -> None:
    world = WORLD.format(place=str(project.parent), how=how, method=method, is_early=is_early)
    (project / "world.py").write_text(world)


def strop(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "strop.cli", *words]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=500, check=False)


def read_run(project: Path) -> RunDir:
    (state,) = project.parent.glob("**/run.json")
    return RunDir.open(state.parent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "method", "is_early"),
    [("sys", "step", True), ("os", "score", True), ("os", "step", False)],
)
def test_a_run_whose_environment_exits_fails_by_name(
    project: Path, how: str, method: str, is_early: bool
) -> None:
    write_world(project, how, method, is_early=is_early)
    exit_code = wait_for_end(start_command(["train", "run.toml"], project / "log"))
    assert exit_code not in (0, 2, 75)
    run_dir = read_run(project)
    assert not run_dir.is_finished
    # The failure has the class of the exit and the user's line, and the attempt an end.
    said = (project / "log").read_text()
    assert "SystemExit" in said
    assert "world.py:" in said
    attempt = json.loads((run_dir.path / "attempts" / "1" / "attempt.json").read_text())
    assert attempt["exit_code"] == exit_code
    assert len(list(run_dir.metrics.read())) == (0 if is_early else 1)


@pytest.mark.slow
def test_a_job_whose_environment_exits_has_not_succeeded(project: Path) -> None:
    write_world(project, "C", "step", is_early=False)
    submitted = strop(project, "submit", "run.toml", "--on", "local", "--wait")
    assert submitted.returncode not in (0, 2)
    (job,) = json.loads(strop(project, "status", "tiny", "--json").stdout)
    assert job["state"] == "failed"
    assert not read_run(project).is_finished


@pytest.mark.slow
def test_a_run_from_python_whose_code_ends_the_process_raises(project: Path) -> None:
    write_world(project, "C", "step", is_early=False)
    script = (
        "import strop, tomllib\n"
        "from strop.errors import StropError\n"
        "tree = tomllib.load(open('run.toml', 'rb'))\n"
        "try:\n"
        "    strop.train(tree.pop('task'), tree.pop('model')['uri'], **tree)\n"
        "except StropError:\n"
        "    print('raised')\n"
    )
    (project / "script.py").write_text(script)
    command = [sys.executable, "script.py"]
    ended = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=500, check=False)
    assert ended.stdout.splitlines()[-1] == "raised", ended.stderr


def test_other_processes_end_as_they_like(project: Path) -> None:
    """A fork, such as a library makes, still ends at once with its own code."""
    from strop.io.exits import guarding_exit

    with guarding_exit():
        pid = os.fork()
        if pid == 0:
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        with pytest.raises(SystemExit):
            os._exit(0)
