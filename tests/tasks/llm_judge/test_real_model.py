"""A real model as judge, behind strop's own engine server and a face that speaks the OpenAI protocol."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from strop.rollout import FailureOwner, Message, Sampling, Split
from strop.tasks.prompt import render_prompt
from strop.tokenizer import Tokenizer
from tests.fixtures.builders import request_for
from tests.fixtures.engine_server import RunningServer, engine_server
from tests.fixtures.judge_server import judge_server
from tests.fixtures.judged import judge_task


async def ask(server: RunningServer, tokenizer: Tokenizer, question: str) -> str:
    """Pass a question on to the engine, greedy."""
    _, prompt_ids = render_prompt(tokenizer, [Message(role="user", content=question)], "auto")
    engine = server.connect()
    try:
        request = request_for(
            prompt_ids,
            max_tokens=32,
            seed=0,
            stops=tokenizer.stop_token_ids,
            sampling=Sampling(temperature=0.0),
        )
        return (await engine.generate(request)).text
    finally:
        await engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_small_model_gives_a_score_or_none_and_repeats_itself(tmp_path: Path, smollm2_dir: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_dir)
    with (
        engine_server(smollm2_dir, tmp_path / "engine", dtype="float32", max_num_seqs=4) as engine,
        judge_server(lambda question: asyncio.run(ask(engine, tokenizer, question))) as server,
    ):
        task = judge_task(tmp_path, server.url)
        example = task.examples(Split.TRAIN)[0]
        outcome = task.verify(example, "It is word-0.")
        first, second = task.score_twice(example, "It is word-0.")
        task.client.close()
    assert len(server.requests) == 3
    if outcome.failure is None:
        assert outcome.reward is not None
        assert 0.0 <= outcome.reward <= 1.0
    else:
        assert outcome.reward is None
        assert outcome.failure.owner is FailureOwner.ENGINE
        assert outcome.failure.kind in ("judge_unparsable", "judge_out_of_bounds")
        # What it said is the model's own text, not a fault of the way to it.
        assert re.search(r"the judge (ended with '.*\w|gave )", outcome.failure.detail, re.DOTALL)
    assert first == second == outcome.reward
