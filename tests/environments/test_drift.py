"""Ids of long conversations are extended, never rendered again, whatever the template and the text."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from strop.engine import GenerationRequest
from strop.environments import Environment, run_rollout
from strop.environments.contract import Action, StepResult
from strop.rollout import RESTART, Example, Message, Outcome, make_example
from strop.tasks.prompt import pose
from strop.tokenizer import Tokenizer
from tests.environments.test_worlds import TEMPLATES, call, tokenizer_of
from tests.fixtures.builders import plan_for
from tests.fixtures.dummy_engine import DummyEngine

NUM_DIALOGUES = 100
"""The benchmark `environments` has a thousand for each tokenizer."""
PIECES = (
    "word",
    " ",
    "\n",
    "  \n\n",
    "é",
    "日本",
    "🦜",
    "e\u0301",
    '"',
    "\\",
    "{",
    "}",
    "<b>",
    "\t",
    "0",
    "-1.50",
    "'",
)
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}}
LOOK = {"name": "look", "description": "Look.", "parameters": PLACE}
TOOL = json.dumps({"type": "function", "function": LOOK})
EXAMPLE = make_example("talk", {"a": 1}, None)


class Talk(Environment):
    """Answers whatever is said with random text: a tool's reply to each call, or a user's."""

    max_turns = 4
    stop_strings = ()

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        return pose(text(self._draw), tools=(TOOL,))

    async def step(self, action: Action) -> StepResult:
        assert action.spoken is not None
        told = tuple(
            Message(role="tool", content=text(self._draw), tool_call_id=one.call_id, name=one.name)
            for one in action.spoken.calls
        )
        return StepResult(messages=told or (Message(role="user", content=text(self._draw)),), done=False)

    async def score(self) -> Outcome:
        return Outcome(parts={"talk": 1.0})

    async def close(self) -> None:
        """Hold nothing."""


def text(draw: random.Random) -> str:
    """Return random text that begins and ends with a letter: templates strip white space there."""
    return "a" + "".join(draw.choices(PIECES, k=draw.randint(0, 12))) + "z"


def talk(draw: random.Random, form: str, tokenizer: Tokenizer) -> int:
    """Have one dialogue; return how many of its turns could not be extended."""
    replies = [
        call("look", form, place=text(draw)) if draw.random() < 0.5 else text(draw).replace("{", "(")
        for _ in range(Talk.max_turns)
    ]
    engine = DummyEngine(tokenizer, replies)
    plan = plan_for(EXAMPLE, max_reply_tokens=4000)
    make: Callable[[], Environment] = lambda: Talk(draw)  # noqa: E731
    rollout = asyncio.run(run_rollout(make(), engine, tokenizer, plan))
    assert rollout.outcome.reward == 1.0, rollout.outcome
    said = [turn for turn in rollout.turns if turn.is_sampled]
    assert [turn.text for turn in said] == replies
    check_requests(engine.requests, [turn.token_ids for turn in rollout.turns])
    return sum(turn.role == RESTART for turn in rollout.turns)


def check_requests(requests: list[GenerationRequest], parts: list[np.ndarray]) -> None:
    """Each prompt is, id by id, all that was fed and said before it."""
    for index, request in enumerate(requests):
        whole = np.concatenate(parts[: 2 * index + 1])
        assert np.array_equal(request.prompt_ids, whole)


@pytest.mark.parametrize("form", TEMPLATES)
def test_no_dialogue_is_rendered_again(tmp_path: Path, form: str) -> None:
    tokenizer = tokenizer_of(tmp_path, form)
    draw = random.Random(f"drift/{form}")
    assert sum(talk(draw, form, tokenizer) for _ in range(NUM_DIALOGUES)) == 0
