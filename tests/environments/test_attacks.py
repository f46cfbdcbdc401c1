"""Texts of a model reach neither what scores them nor this machine, in strop's environments.

Each text parameter of a tool, and a plain reply, gets Python, shell commands, paths and addresses, in case
something interprets them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from strop.environments.worlds import BuiltInWorld, OwnWorld
from strop.rollout import Example, Failure, Outcome, Split
from strop.spec import load_spec
from strop.tasks import build_task
from tests.environments.test_worlds import build
from tests.faults.test_examples import code
from tests.fixtures import world_attacks as attacks
from tests.fixtures.sandboxes import needs_bubblewrap

World = BuiltInWorld | OwnWorld
AT_ONCE = 4
TALKING = """
class Talking:
    max_turns = 3

    def examples(self, split):
        return [{"word": split, "answer": split}]

    def reset(self, example, seed):
        self.said, self.answer = [], example.answer
        return "Name the split."

    def step(self, text):
        self.said.append(text)
        return "No."

    def find(self, word: str, place: str = "here") -> str:
        '''Find a word.'''
        return f"{word} is not {place}"

    def score(self):
        return self.answer in self.said
"""


def guess_number() -> World:
    task = build_task(load_spec(None, ["name=x", "task.name=guess-number"]).spec.task)
    assert isinstance(task, BuiltInWorld)
    return task


def own(task: Any) -> World:
    assert isinstance(task, OwnWorld)
    return task


WORLDS: Mapping[str, Callable[[], World]] = {
    "guess-number": guess_number,
    "a class": lambda: own(build(TALKING, name="Talking")),
    "the workspace of the docs": lambda: own(
        build(code("environments.md", "class Repair"), "environment.tool_limit_s=5", name="Repair")
    ),
}


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest) -> World:
    return WORLDS[request.param]()


def play(world: World, texts: Mapping[str, str]) -> list[tuple[str, str, Outcome]]:
    """Play each text in each place; return its name, what the world said, and the outcome."""
    example: Example = world.examples(Split.TRAIN)[0]
    slots = attacks.find_slots(world.tools, has_step=world.has_step)
    assert slots

    async def attempt(turn: asyncio.Semaphore, kind: str, script: list[str]) -> tuple[str, str, Outcome]:
        said: list[str] = []
        async with turn:
            environment = world.make_environment()
            try:
                outcome = await world.converse(environment, example, script, said)
            finally:
                await environment.close()
        return kind, "\n".join(said), outcome

    async def play_all() -> list[tuple[str, str, Outcome]]:
        turn = asyncio.Semaphore(AT_ONCE)
        scripts = [(kind, slot.script(text)) for kind, slot, text in attacks.pairs(slots, texts)]
        return await asyncio.gather(*(attempt(turn, kind, script) for kind, script in scripts))

    return asyncio.run(play_all())


def is_fine(outcome: Outcome) -> bool:
    """Whether an attempt has a score, and one that nothing earned."""
    failure: Failure | None = outcome.failure
    return failure is None and outcome.reward is not None and outcome.reward < 1.0


pytestmark = [pytest.mark.slow, needs_bubblewrap]


def test_who_claims_success_or_ends_is_scored_and_not_paid(world: World) -> None:
    texts = {**attacks.FORGERIES, **attacks.EXITS, **attacks.TAMPERS}
    found = {kind for kind, _, outcome in play(world, texts) if not is_fine(outcome)}
    assert found == set()


def test_the_file_of_its_class_cannot_be_written(world: World) -> None:
    writes = {kind: attacks.fill(text, FILE=f"'{world.file}'") for kind, text in attacks.WRITES.items()}
    assert {kind for kind, said, _ in play(world, writes) if attacks.SHOWN in said} == set()


def test_no_file_of_this_machine_is_read(world: World, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("a secret of this machine")
    os.chmod(canary, 0o644)
    reads = {
        kind: attacks.fill(text, PATH=f"'{canary}'", BARE=str(canary)) for kind, text in attacks.READS.items()
    }
    assert {kind for kind, said, _ in play(world, reads) if "a secret of this machine" in said} == set()


def test_no_server_of_this_machine_is_reached(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = str(server.getsockname()[1])
        calls = {
            kind: attacks.fill(text, URL=f"http://127.0.0.1:{port}/", PORT=port)
            for kind, text in attacks.CALLS.items()
        }
        lost = {kind for kind, _, outcome in play(world, calls) if outcome.failure is not None}
        with pytest.raises(BlockingIOError):
            server.accept()
    assert lost == set()


def test_no_attempt_finds_the_notes_of_another(world: World) -> None:
    slots = attacks.find_slots(world.tools, has_step=world.has_step)
    example = world.examples(Split.TRAIN)[0]

    async def both(note: str, read: str) -> str:
        said: list[str] = []
        first, second = world.make_environment(), world.make_environment()
        try:
            for slot in slots:
                await world.converse(first, example, slot.script(note), [])
            for slot in slots:
                await world.converse(second, example, slot.script(read), said)
        finally:
            await first.close()
            await second.close()
        return "\n".join(said)

    for path in ("note-of-another", "/tmp/note-of-another"):
        for kind, note in attacks.NOTES.items():
            written = attacks.fill(note, PATH=f"'{path}'", WORD="'left here'")
            read = attacks.fill(attacks.READS[kind], PATH=f"'{path}'", BARE=path)
            assert "left here" not in asyncio.run(both(written, read)), (kind, path)
