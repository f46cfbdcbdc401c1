"""mini-swe-agent and OpenHands' SDK, as the page says they are trained."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from strop.engine import GenerationRequest
from strop.rollout import CONVERSATION
from strop.runtime.agent_server import OPENHANDS
from tests.agents.test_agents import attempt, gold
from tests.conftest import require_system_part
from tests.environments.test_repair import make, repository
from tests.environments.test_worlds import attempt as attempt_at
from tests.environments.test_worlds import call, tokenizer_of
from tests.fixtures.real_agents import MINI_SWE_AGENT
from tests.fixtures.sandboxes import needs_bubblewrap

__all__ = ["repository"]
FORM = "hermes"
PAIR = ("prompt", "assistant")
# Where they are is asked before a test has a home of its own.
MINI, MINI_IS_READY = MINI_SWE_AGENT.path / "bin", MINI_SWE_AGENT.is_ready()
OPENHANDS_PYTHON, OPENHANDS_IS_READY = OPENHANDS.python, OPENHANDS.is_ready()
PAGE = Path(__file__).parents[2] / "docs" / "environments.md"


def documented(language: str, mark: str) -> str:
    """The example of the page in which a mark stands."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if mark in block]
    return str(found)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without another's settings, and nobody to ask for prices."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_mini_swe_agent_is_trained_by_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_system_part("mini-swe-agent (make agents-deps)", MINI_IS_READY)
    monkeypatch.setenv("PATH", str(MINI), prepend=":")
    command = tomllib.loads(documented("toml", "mini.yaml"))["task"]["agent"]
    script = [
        "I look. " + call("bash", FORM, command="ls -a; printf 'é ✓'"),
        "This is no call.",
        call("bash", FORM, command=f"echo {shlex.quote(gold())} > answer.txt; cat answer.txt"),
        call("bash", FORM, command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    rollout = attempt(tmp_path, command, [*script], form=FORM)
    assert rollout.outcome.reward == 1.0, rollout.outcome
    # What it does not keep, and the call that it makes in its place, are samples of their own.
    roles = [turn.role for turn in rollout.turns]
    assert roles == [*PAIR, *PAIR, CONVERSATION, "assistant", *PAIR]
    assert [turn.text for turn in rollout.turns if turn.is_sampled] == script
    assert gold() in rollout.turns[6].text


@pytest.mark.slow
def test_an_agent_of_openhands_is_trained_and_its_condensations_are_segments(tmp_path: Path) -> None:
    require_system_part("OpenHands' client (make openhands-deps)", OPENHANDS_IS_READY)
    path = tmp_path / "openhands_agent.py"
    path.write_text(documented("python", "openhands.sdk"))
    tokenizer = tokenizer_of(tmp_path, FORM)
    asked = 0

    def script(request: GenerationRequest) -> str:
        nonlocal asked
        if '"name": "terminal"' not in tokenizer.decode(request.prompt_ids):
            return "It looked."
        asked += 1
        arguments = {"security_risk": "LOW", "summary": "look"}
        if asked < 5:
            return "So: " + call("terminal", FORM, command=f"echo $(({asked} * 111))", **arguments)
        return call("finish", FORM, message=gold(), **arguments)

    rollout = attempt(tmp_path, f"{OPENHANDS_PYTHON} {path}", script, form=FORM)
    assert rollout.outcome.reward == 1.0, rollout.outcome
    roles = [turn.role for turn in rollout.turns]
    assert roles == [*PAIR * 4, CONVERSATION, "assistant", CONVERSATION, "assistant"]
    assert ["333" in turn.text for turn in rollout.turns[:8]] == [False] * 6 + [True, False]
    assert rollout.turns[9].text == "It looked."
    assert "It looked." in rollout.turns[10].text


@pytest.mark.slow
@needs_bubblewrap
def test_an_agent_of_openhands_repairs_a_repository_in_its_sandbox(tmp_path: Path, repository: Path) -> None:
    """With its own terminal and editor, where the attempt's files are; what it did there is graded."""
    require_system_part("OpenHands' client (make openhands-deps)", OPENHANDS_IS_READY)
    (tmp_path / "program").mkdir()
    path = tmp_path / "program" / "agent.py"
    program = documented("python", "TerminalTool").replace('os.environ["TMPDIR"]', "os.getcwd()")
    path.write_text(program)
    settings = {
        "sandbox": "bubblewrap",
        "min_isolation": "namespace",
        "memory_gib": 4.0,
        "agent": f"env LITELLM_LOCAL_MODEL_COST_MAP=True {OPENHANDS_PYTHON} {path}",
        "agent_paths": [str(OPENHANDS_PYTHON.parents[1]), str(path.parent)],
    }
    arguments = {"security_risk": "LOW", "summary": "work"}
    script = [
        "I look. " + call("terminal", FORM, command="cat lib/add.sh; ls /root", **arguments),
        call("terminal", FORM, command="sed -i 's/ - / + /' lib/add.sh", **arguments),
        call("finish", FORM, message="It is done.", **arguments),
    ]
    tokenizer = tokenizer_of(tmp_path, FORM)
    rollout = attempt_at(make(tmp_path, repository, settings), tokenizer, script, max_reply_tokens=400)
    assert rollout.outcome.reward == 1.0, rollout.outcome
    assert [turn.role for turn in rollout.turns] == [*PAIR] * 3
    assert "$(($1 - $2))" in rollout.turns[2].text
