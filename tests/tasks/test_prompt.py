"""Tests of `strop.tasks.prompt`: one decision between chat and base."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.errors import ConfigError, DataError
from strop.rollout import Message
from strop.tasks import PromptFormat, render_prompt, resolve_prompt_format
from strop.tokenizer import Tokenizer
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

QUESTION = (Message(role="user", content="Hi"),)


@pytest.fixture
def chat_tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer(tmp_path / "chat"))


@pytest.fixture
def base_tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(tiny_tokenizer(tmp_path / "base", with_chat_template=False))


def test_auto_follows_the_model(chat_tokenizer: Tokenizer, base_tokenizer: Tokenizer) -> None:
    assert resolve_prompt_format(chat_tokenizer, "auto") is PromptFormat.CHAT
    assert resolve_prompt_format(base_tokenizer, "auto") is PromptFormat.BASE


def test_chat_prompt(chat_tokenizer: Tokenizer) -> None:
    text, ids = render_prompt(chat_tokenizer, QUESTION, "auto")
    assert text == "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    assert ids.tolist() == chat_tokenizer.encode(text).tolist()


def test_base_can_be_asked_of_a_chat_model(chat_tokenizer: Tokenizer) -> None:
    assert render_prompt(chat_tokenizer, QUESTION, PromptFormat.BASE)[0] == "Hi\n"


def test_unknown_format_is_refused(chat_tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"model\.prompt_format=chatml\. Allowed: auto, chat, base"):
        resolve_prompt_format(chat_tokenizer, "chatml")


def test_prompt_without_a_token_is_refused(tmp_path: Path) -> None:
    model_dir = tiny_tokenizer(tmp_path)
    (model_dir / "chat_template.jinja").write_text("{# says nothing #}")
    with pytest.raises(DataError, match="a prompt of 1 messages has no token"):
        render_prompt(Tokenizer.load(model_dir), QUESTION, "chat")
