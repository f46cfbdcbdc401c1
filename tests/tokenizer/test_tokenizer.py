"""Tests of `strop.tokenizer`: equal to transformers on a real and on a built tokenizer."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError, StoreError
from strop.rollout import Message
from strop.tokenizer import Tokenizer
from tests.fixtures.tiny_tokenizer import EOS_TEXT, tiny_tokenizer

CHATS = [
    (Message(role="user", content="What is 7 + 5?"),),
    (
        Message(role="system", content="Be brief."),
        Message(role="user", content="caf\u00e9 \U0001f642 <|im_en\n"),
    ),
    (
        Message(role="user", content="a"),
        Message(role="assistant", content=" b\n"),
        Message(role="user", content=""),
    ),
]


def assert_equals_transformers(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    reference: Any = AutoTokenizer.from_pretrained(str(model_dir))
    ours = Tokenizer.load(model_dir)
    for chat in CHATS:
        plain = [{"role": message.role, "content": message.text} for message in chat]
        prompt = ours.render(chat)
        assert prompt == reference.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        ids = ours.encode(prompt).tolist()
        theirs = reference.apply_chat_template(plain, tokenize=True, add_generation_prompt=True)
        assert ids == list(theirs["input_ids"])
        assert ours.decode(ids) == reference.decode(ids)
    assert ours.eos_id == reference.eos_token_id


@pytest.mark.slow
def test_smollm2_equals_transformers(smollm2_dir: Path) -> None:
    assert_equals_transformers(smollm2_dir)
    tokenizer = Tokenizer.load(smollm2_dir)
    assert tokenizer.token_text(tokenizer.eos_id) == "<|im_end|>"
    assert tokenizer.stop_token_ids == frozenset({2})
    assert tokenizer.vocab_size == 49152


def test_encode_by_hand(tmp_path: Path) -> None:
    # Merges of the fixture: 256 = "as", 257 = " +", 258 = "th", 259 = "the"; 260 ends, 261 starts.
    tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path))
    assert tokenizer.encode(f"the +{EOS_TEXT}").tolist() == [259, 257, 260]
    assert tokenizer.decode([259, 257, 260]) == f"the +{EOS_TEXT}"
    assert (tokenizer.encode("").tolist(), tokenizer.decode([])) == ([], "")
    assert tokenizer.token_text(260) == EOS_TEXT
    assert tokenizer.vocab_size == 262
    assert tokenizer.eos_id == 260


def test_half_a_character_decodes_to_a_replacement(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path))
    first_byte, second_byte = tokenizer.encode("\u00e9").tolist()
    assert tokenizer.decode([first_byte]) == "\ufffd"
    assert tokenizer.decode([first_byte, second_byte]) == "\u00e9"


def test_base_rendering_joins_contents(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path, with_chat_template=False))
    chat = (Message(role="system", content="Add."), Message(role="user", content="1 + 2"))
    assert tokenizer.render_base(chat) == "Add.\n\n1 + 2\n"
    assert not tokenizer.has_chat_template


def test_several_terminators_are_all_stops(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 260]}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.stop_token_ids == frozenset({5, 260})
    assert tokenizer.eos_id == 260  # the tokenizer's own end-of-text token comes first


@pytest.mark.parametrize("config", [{"eos_token_id": 7}, {"text_config": {"eos_token_id": 7}}])
def test_terminator_from_config_json_when_nothing_else_names_it(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    tiny_tokenizer(tmp_path, with_chat_template=False)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).stop_token_ids == frozenset({7})


def test_cutting_and_padding_saved_in_the_file_are_not_applied(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    from tokenizers import Tokenizer as FastTokenizer

    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.enable_truncation(max_length=2)
    fast.enable_padding(length=64)
    fast.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("xyz xyz")) == 7


def test_template_names(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    template = (
        "{{ bos_token }}{{ strftime_now('%Y') }}{{ {'k': '<\u00e9>'} | tojson }}"
        "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}"
        "{% break %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path, now=lambda: datetime(1999, 1, 2, tzinfo=UTC))
    assert tokenizer.render(CHATS[2]) == '<|start|>1999{"k": "<\u00e9>"}a'


def test_named_templates_use_the_default(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path, with_chat_template=False)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["chat_template"] = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"},
    ]
    path.write_text(json.dumps(settings))
    assert Tokenizer.load(tmp_path).render(CHATS[0]) == "plain"


def test_template_that_refuses_names_the_roles(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match=r"system, user \(no system role\).*task\.system_prompt"):
        Tokenizer.load(tmp_path).render(CHATS[1])


def test_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(ConfigError, match="refused messages"):
        Tokenizer.load(tmp_path).render(CHATS[0])


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("tokenizer.json", None, ConfigError),
        ("tokenizer.json", '{"version": "1.0", "trunc', StoreError),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE"}}', StoreError),
        ("tokenizer_config.json", "{", StoreError),
        ("tokenizer_config.json", "[]", StoreError),
    ],
)
def test_files_that_are_no_tokenizer_are_refused_by_name(
    tmp_path: Path, name: str, content: str | None, kind: type[Exception]
) -> None:
    path = tiny_tokenizer(tmp_path) / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(kind, match=re.escape(name)):
        Tokenizer.load(tmp_path)


def test_model_without_terminator_is_refused(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no token that ends a reply"):
        Tokenizer.load(tmp_path)


def test_digest_covers_template_and_terminators(tmp_path: Path) -> None:
    first = Tokenizer.load(tiny_tokenizer(tmp_path / "first")).digest
    assert Tokenizer.load(tiny_tokenizer(tmp_path / "again")).digest == first
    without = tiny_tokenizer(tmp_path / "without", with_chat_template=False)
    assert Tokenizer.load(without).digest != first
    other = tiny_tokenizer(tmp_path / "other")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 260]}))
    assert Tokenizer.load(other).digest != first
