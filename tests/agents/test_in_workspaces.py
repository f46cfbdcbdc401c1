"""Agent programs that work in the sandbox of a workspace: the repository of an issue."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from strop.audit import self_test
from strop.errors import StropError
from strop.rollout import FailureOwner, Split
from strop.spec.reader import load_spec
from strop.tasks import Task, build_task
from tests.environments.test_repair import PROCESS, make, repository
from tests.environments.test_worlds import play_here as play
from tests.fixtures.devices import whole
from tests.fixtures.gpus import MakeGpus
from tests.fixtures.sandboxes import needs_bubblewrap

__all__ = ["repository"]
AGENT = """\
import json, os, subprocess, sys, urllib.request

problem = json.load(sys.stdin)
messages = problem["messages"]
assert "submit" not in messages[-1]["content"]
while True:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    if reply == "done":
        break
    result = subprocess.run(["sh", "-c", reply], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    messages += [
        {"role": "assistant", "content": reply},
        {"role": "user", "content": result.stdout.decode() or "nothing"},
    ]
"""
FIX = "sed -i 's/ - / + /' lib/add.sh"
BUBBLEWRAP = {"sandbox": "bubblewrap", "min_isolation": "namespace"}


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """A program that does what the model says, until it says that it is done."""
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    return folder


def make_with(tmp_path: Path, repository: Path, folder: Path, **settings: Any) -> Task:
    settings = {
        **BUBBLEWRAP,
        "agent": f"{sys.executable} {folder}/agent.py",
        "agent_paths": [str(folder), sys.prefix],
        **settings,
    }
    return make(tmp_path, repository, settings)


@needs_bubblewrap
def test_a_program_repairs_a_repository_in_its_sandbox(tmp_path: Path, repository: Path, agent: Path) -> None:
    task = make_with(tmp_path, repository, agent)
    rollout = play(tmp_path, task, "pwd; ls /root; ls", FIX, "done")
    assert rollout.outcome.reward == 1.0, rollout.outcome
    assert [turn.role for turn in rollout.turns] == ["prompt", "assistant"] * 3
    assert "/repository\n" in rollout.turns[2].text
    assert "conftest.py" in rollout.turns[2].text


@needs_bubblewrap
@pytest.mark.parametrize(
    ("replies", "metric"),
    [
        (["sed -i 's/ - / * /' lib/add.sh", "done"], "fail_to_pass_frac"),
        (["done"], "no_patch"),
        # What it leaves running ends before its work is taken.
        ([f"(sleep 1; {FIX}) > /dev/null 2>&1 &", "done"], "no_patch"),
        # The model's commands may end the program, which takes no attempt back.
        (["kill -9 $PPID; sleep 9"], "no_patch"),
    ],
)
def test_nothing_else_earns_it(
    tmp_path: Path, repository: Path, agent: Path, replies: list[str], metric: str
) -> None:
    outcome = play(tmp_path, make_with(tmp_path, repository, agent), *replies).outcome
    assert outcome.reward == 0.0, outcome
    assert outcome.metrics[metric] in (0.0, 1.0)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("program", "kind", "detail"),
    [
        ("/nowhere/agent", "agent_missing", "No such file"),
        ("sh -c 'echo no keys >&2; exit 3'", "agent_failed", "code 3: no keys"),
        ("true", "no_call", "without asking the model"),
    ],
)
def test_a_program_that_fails_is_the_tasks_failure(
    tmp_path: Path, repository: Path, agent: Path, program: str, kind: str, detail: str
) -> None:
    outcome = play(tmp_path, make_with(tmp_path, repository, agent, agent=program)).outcome
    assert outcome.failure is not None
    assert (outcome.reward, outcome.failure.owner, outcome.failure.kind) == (None, FailureOwner.TASK, kind)
    assert detail in outcome.failure.detail


@needs_bubblewrap
def test_what_was_done_in_its_time_counts(tmp_path: Path, repository: Path, agent: Path) -> None:
    for limit_s in (1.5, 6.0, 60.0):
        task = make_with(tmp_path, repository, agent, agent_limit_s=limit_s)
        outcome = play(tmp_path, task, f"{FIX}; sleep 600").outcome
        # Else the time was over before it had asked, or had done what it was told.
        if outcome.reward == 1.0:
            break
    assert (outcome.reward, outcome.truncated) == (1.0, True), outcome


def test_a_sandbox_without_a_network_of_its_own_will_do(tmp_path: Path, repository: Path) -> None:
    code = tmp_path / "agent.py"
    code.write_text(AGENT)
    shown = f"sh -c 'exec python3 -c \"$0\"' '{AGENT.replace(chr(39), chr(34))}'"
    task = make_with(tmp_path, repository, tmp_path, **PROCESS, agent=shown, agent_paths=[])
    rollout = play(tmp_path, task, FIX, "done")
    assert rollout.outcome.reward == 1.0, rollout.outcome


@needs_bubblewrap
def test_the_self_test_plays_the_workspaces_own_tools(tmp_path: Path, repository: Path, agent: Path) -> None:
    task = make_with(tmp_path, repository, agent)
    assert asyncio.run(self_test(task, task.examples(Split.TRAIN))) == []


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["name=guess-number", "agent=env"], "consist of turns and have no workspace"),
        (["name=repo-repair", "source=x", "agent=env", "sandbox=ray"], "the model is not reached"),
        (["name=repo-repair", "source=x", "agent=env", 'mcp_servers=["x"]'], "with its own tools"),
        (["name=humaneval", "agent=env", 'agent_paths=["/usr"]', "source=x"], "works in no sandbox"),
        (["name=mlgym", "root=x", 'tasks=["a"]', 'agent_paths=["/usr"]'], "no program is named"),
    ],
)
def test_what_could_not_act_there_is_refused(tmp_path: Path, words: list[str], error: str) -> None:
    (tmp_path / "a.py").write_text("def solve(): ...")
    settings = [word if "." in word.split("=")[0] else f"task.{word}" for word in words]
    settings = [word.replace("a.py", f"{tmp_path}/a.py") for word in settings]
    with pytest.raises(StropError, match=error):
        build_task(load_spec(None, ["name=x", *settings]).spec.task)


@needs_bubblewrap
def test_a_program_has_the_gpus_for_environments(
    tmp_path: Path, repository: Path, agent: Path, gpus_of: MakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus_of([whole(index, 79) for index in range(3)])
    monkeypatch.setenv("STROP_ENV_DEVICES", "1")
    show = "ls /dev | grep -E '^nvidia[0-9]'; echo sees $CUDA_VISIBLE_DEVICES"
    rollout = play(tmp_path, make_with(tmp_path, repository, agent), show, "done")
    assert "nvidia1\nsees GPU-1" in rollout.turns[2].text
