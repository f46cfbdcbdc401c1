"""Incidents of the group on tokens, each test named after the incident's id."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from strop.engine.dummy import DummyEngine
from strop.environments import RolloutPlan, SingleTurn, run_group
from strop.errors import ConfigError
from strop.rollout import Sampling, Split
from strop.spec import ArithmeticSpec
from strop.tasks import build_task, render_prompt, resolve_prompt_format
from strop.tokenizer import Tokenizer
from tests.fixtures.tiny_tokenizer import tiny_tokenizer


def test_tok_3_chat_format_on_a_base_model_is_refused(tmp_path: Path) -> None:
    """Incident: a chat template applied to base models gave 42 % garbage output."""
    tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path / "some-base-model", with_chat_template=False))
    with pytest.raises(ConfigError) as caught:
        resolve_prompt_format(tokenizer, "chat")
    message = str(caught.value)
    assert "model.prompt_format=chat" in message
    assert "some-base-model" in message
    assert "Next: set model.prompt_format=base" in message


def test_tok_3_prompt_is_one_decision_and_shown_byte_for_byte(tmp_path: Path) -> None:
    """Incident: raw rendering was an opt-out with different defaults in different layers.

    The text that a check prints and the ids that the engine is asked with come from one call.
    """
    task = build_task(ArithmeticSpec())
    example = task.examples(Split.TRAIN)[0]
    question = f"What is {example.fields['a']} + {example.fields['b']}?"
    expected = {True: f"<|start|>user\n{question}<|end|>\n<|start|>assistant\n", False: f"{question}\n"}
    for is_chat, text in expected.items():
        model_dir = tiny_tokenizer(tmp_path / str(is_chat), with_chat_template=is_chat)
        tokenizer = Tokenizer.load(model_dir)
        shown, prompt_ids = render_prompt(tokenizer, task.render(example), "auto")
        assert shown == text
        engine = DummyEngine(tokenizer, ["1"])
        plan = RolloutPlan(
            example=example, step=0, sample_index=0, run_seed=0, sampling=Sampling(), max_reply_tokens=4
        )
        asyncio.run(run_group(partial(SingleTurn, task), engine, tokenizer, [plan]))
        assert engine.requests[0].prompt_ids.tolist() == prompt_ids.tolist()
