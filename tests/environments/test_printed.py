"""What code of environments prints in the process of the rollouts: kept by attempt, bounded, not shown."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strop.environments import choose_environment, run_rollout
from strop.environments.printed import END_BYTES, CapturedOutput, forget_prints, keep_prints
from strop.rollout import Rollout
from tests.environments.test_worlds import build, plan_of, tokenizer_of
from tests.fixtures.dummy_engine import DummyEngine

LOUD = '''
import asyncio
import sys

class Loud:
    """Prints all that it hears."""

    max_turns = 2

    def examples(self, split):
        return [{"place": split}]

    def reset(self, example, seed):
        print("opened")
        return "Go."

    async def step(self, text):
        print(text)
        await asyncio.sleep(0)
        await asyncio.to_thread(print, text, "from a thread")
        print("gone wrong", file=sys.stderr)
        return "Go on."

    def score(self):
        print("scored")
        return 1.0

    def close(self):
        print("closed")
'''


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "environments.log"
    forget_prints()


def test_words_of_attempts_side_by_side_are_told_apart(
    tmp_path: Path, kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, tokenizer = build(LOUD, name="Loud"), tokenizer_of(tmp_path)
    scripts = [["a1", "a2"], ["b1", "b2"]]

    async def play() -> list[Rollout]:
        make_environment, plan = choose_environment(task), plan_of(task)
        return await asyncio.gather(
            *(
                run_rollout(make_environment(), DummyEngine(tokenizer, script), tokenizer, plan)
                for script in scripts
            )
        )

    # Not in a fixture: pytest puts its own streams in place again before a test begins.
    keep_prints(kept)
    rollouts = asyncio.run(play())
    sys.stdout.write("of nobody\n")
    assert capsys.readouterr().out == "of nobody\n"
    assert not any("opened" in turn.text for rollout in rollouts for turn in rollout.turns)
    lines = kept.read_text().splitlines()
    assert f"Loud {rollouts[0].example.example_id} seed" in lines[0]
    blocks: list[list[str]] = [[]]
    for line in lines:
        blocks[-1:] = [blocks[-1], [line]] if line.endswith(":") else [[*blocks[-1], line]]
    said = sorted(block[1:] for block in blocks if block and "stdout" in block[0])
    assert said == [
        ["opened", f"{who}1", f"{who}1 from a thread", f"{who}2", f"{who}2 from a thread", "scored", "closed"]
        for who in "ab"
    ]
    assert kept.read_text().count("stderr:\ngone wrong\ngone wrong\n") == 2


def test_an_attempt_keeps_beginning_and_end(kept: Path) -> None:
    keep_prints(kept)
    captured = CapturedOutput("it")
    for number in range(100_000):
        captured.add("stdout", b"%d\n" % number)
    captured.log()
    text = kept.read_text()
    assert len(text) < 2 * END_BYTES + 200
    assert "bytes left out in the middle):\n0\n1\n" in text
    assert text.endswith("99999\n")


def test_nothing_is_held_back_where_nobody_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, tokenizer = build(LOUD, name="Loud"), tokenizer_of(tmp_path)
    engine = DummyEngine(tokenizer, ["a1", "a2"])
    asyncio.run(run_rollout(choose_environment(task)(), engine, tokenizer, plan_of(task)))
    assert capsys.readouterr().out.startswith("opened\na1\n")
