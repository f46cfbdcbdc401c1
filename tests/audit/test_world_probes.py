"""Attacks on environments: a sound one holds, and each hole is found, wherever its class lives."""

from __future__ import annotations

import asyncio
import json

import pytest

from strop.audit import AuditSettings, ProbeStatus, run_audit
from strop.audit.world_attacks import Slot
from strop.audit.world_probes import WORLD_PROBES
from strop.tasks import task_builder
from tests.environments.test_worlds import build_spec
from tests.fixtures.sandboxes import needs_bubblewrap

WORLD = """
import subprocess
from pathlib import Path
from strop.environments import Done, ToolError

class World:
    max_turns = 3
    solved = False

    def examples(self, split):
        return [{"word": split, "answer": split}]

    def reset(self, example, seed):
        self.answer, self.is_done, self.said = example.answer, False, ""
        return "Name the split."

    def step(self, text):
        self.said = text
        self.is_done = self.is_done or text == self.answer
        return Done() if self.is_done else "No."

    TOOL

    def score(self):
        return self.is_done

    def gold_replies(self, example):
        return [[example.answer]]
"""
SOUND = '''
    def look(self, path: str, lines: int) -> str:
        """Look at a file of the world."""
        raise ToolError("there is no such file")
'''
READS = '''
    def look(self, path: str) -> str:
        """Look at a file."""
        try:
            return Path(path).read_text()
        except OSError as error:
            raise ToolError(str(error))
'''
PYTHON = '''
    def run(self, code: str) -> str:
        """Run Python."""
        import contextlib, io
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(code, {})
        except Exception as error:
            out.write(str(error))
        return out.getvalue()
'''
SHELL = '''
    def run(self, command: str) -> str:
        """Run a command."""
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20)
        return done.stdout + done.stderr
'''
SOUND_WORLD = WORLD.replace("    TOOL\n", SOUND)


def scoring(how: str) -> str:
    return SOUND_WORLD.replace("return self.is_done\n", f"return {how}\n")


ALL = tuple(WORLD_PROBES)
TEXTS = ("label_leak", "forged_stdout", "judge_injection", "stale_submission")
"""Probes whose attacks end no process."""


def failed(source: str, lane: str, probes: tuple[str, ...], *, is_apart: bool) -> dict[str, str]:
    task, spec = build_spec(source, f"environment.lane={lane}", "environment.tool_limit_s=60.0", name="World")
    settings = AuditSettings(num_examples=1, probes=probes)
    make_task = task_builder(spec) if is_apart else None
    report = asyncio.run(run_audit(task, settings, make_task=make_task))
    wrong = {one.probe: one.detail for one in report.probes if one.status is ProbeStatus.ERROR}
    assert wrong == {}
    return {one.probe: one.detail for one in report.probes if one.status is ProbeStatus.FAIL}


@pytest.mark.parametrize(
    ("source", "probes"),
    [
        (SOUND_WORLD, set()),
        (WORLD.replace("    TOOL\n", READS), {"label_leak"}),
        (scoring("self.is_done or 'PASSED' in self.said"), {"forged_stdout"}),
        (scoring("self.is_done or 'generous' in self.said"), {"judge_injection"}),
    ],
)
def test_what_is_believed_shown_or_kept_is_found(source: str, probes: set[str]) -> None:
    assert failed(source, "process", TEXTS, is_apart=False).keys() == probes


@pytest.mark.parametrize("probes", [("stale_submission",), ("gold", "stale_submission")])
def test_what_another_attempt_did_is_not_paid(probes: tuple[str, ...]) -> None:
    how = "World.solved or bool(setattr(World, 'solved', self.is_done) or self.is_done)"
    assert failed(scoring(how), "process", probes, is_apart=False).keys() == {"stale_submission"}


@pytest.mark.slow
@needs_bubblewrap
@pytest.mark.parametrize(
    ("tool", "here", "inside"),
    [
        (SOUND, set(), set()),
        (
            PYTHON,
            {"label_leak", "grader_tamper", "os_exit", "network", "isolation"},
            {"grader_tamper", "os_exit"},
        ),
        (SHELL, {"label_leak", "grader_tamper", "os_exit", "network", "isolation"}, {"os_exit"}),
    ],
)
def test_what_runs_what_is_said_is_found_wherever_its_class_lives(
    tool: str, here: set[str], inside: set[str]
) -> None:
    source = WORLD.replace("    TOOL\n", tool)
    assert failed(source, "process", ALL, is_apart=True).keys() == here
    assert failed(source, "sandbox", ALL, is_apart=False).keys() == inside


def test_a_text_is_said_beside_an_argument_of_any_name() -> None:
    """A workspace's `create` takes a path and a text: a note's probe was lost on it."""
    slot = Slot(tool="create", parameter="path", others={"text": "a"})
    call = json.loads(slot.say("notes", text="b").split("\n")[1])
    assert call["arguments"] == {"path": "notes", "text": "b"}


def test_a_probe_that_may_end_the_process_is_not_asked_in_it() -> None:
    task, _ = build_spec(SOUND_WORLD, name="World")
    report = asyncio.run(run_audit(task, AuditSettings(num_examples=1, probes=("os_exit",))))
    assert [one.status for one in report.probes] == [ProbeStatus.NOT_APPLICABLE]
