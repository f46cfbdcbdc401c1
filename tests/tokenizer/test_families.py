"""Families of models, by their special tokens and by templates of their form: ends, calls, others' texts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from strop.engine import Completion
from strop.environments.extending import PromptCache, encode_next_messages, take_apart
from strop.errors import ConfigError
from strop.rollout import FinishReason, Message, ToolCall
from strop.tasks.prompt import (
    PromptFormat,
    find_reader,
    pose,
    render_prompt,
    resolve_prompt_format,
)
from strop.tasks.tool_calls import adapt
from strop.tokenizer import Tokenizer
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

WITHOUT_BRIDGE = ("glm-4.5", "minimax-m2")
FOLDER = Path(__file__).parent / "families"
FAMILIES: dict[str, dict[str, Any]] = json.loads((FOLDER / "families.json").read_text())
_LINES = (Path(__file__).parent / "forms" / "templates.jsonl").read_text("utf-8").splitlines()
TEMPLATES: dict[str, dict[str, Any]] = FAMILIES | {one["family"]: one for one in map(json.loads, _LINES)}
TOOL = json.dumps(
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "depth": {"type": "integer"}},
            },
        },
    }
)
CALL = ToolCall(name="look_up", arguments='{"place": "a \\"b\\" é", "depth": 3}', call_id="000000000")


def build(model_dir: Path, name: str) -> Tokenizer:
    """Build the tokenizer of a family: bytes, and its own control tokens."""
    family = TEMPLATES[name]
    tiny_tokenizer(model_dir)
    fast = FastTokenizer.from_file(str(model_dir / "tokenizer.json"))
    fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.get("words", ())])
    fast.add_special_tokens([AddedToken(text, special=True) for text in family["tokens"]])
    fast.save(str(model_dir / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {f"{kind}_token": family[kind] for kind in ("bos", "eos") if kind in family}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    (model_dir / "generation_config.json").unlink()
    template = family.get("template") or (FOLDER / f"{name}.jinja").read_text()
    (model_dir / "chat_template.jinja").write_text(template)
    return Tokenizer.load(model_dir)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_reply_ends_as_the_template_ends_a_message(tmp_path: Path, name: str) -> None:
    tokenizer, family = build(tmp_path, name), TEMPLATES[name]
    if family["end"] is None:
        with pytest.raises(ConfigError):
            resolve_prompt_format(tokenizer, "chat")
        return
    assert tokenizer.token_text(tokenizer.turn_end_id) == family["end"]
    ends = {tokenizer.token_text(one) for one in tokenizer.stop_token_ids}
    assert ends == {family["eos"], family["end"]}


@pytest.mark.parametrize("name", [name for name, family in TEMPLATES.items() if family["end"]])
def test_a_chat_reads_as_transformers_writes_it(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = build(tmp_path, name)
    reference: Any = AutoTokenizer.from_pretrained(str(tmp_path))
    chat = [
        Message(role="user", content="é 7?"),
        Message(role="assistant", content="12"),
        Message(role="user", content="b"),
    ]
    plain = [{"role": one.role, "content": one.text} for one in chat]
    text, ids = render_prompt(tokenizer, chat, "chat")
    assert text == reference.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    written = reference.apply_chat_template(plain, tokenize=True, add_generation_prompt=True)
    assert ids.tolist() == list(written["input_ids"])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_the_template_writes_reads_as_that_call(tmp_path: Path, name: str) -> None:
    tokenizer = build(tmp_path, name)
    is_told = find_reader(tokenizer, PromptFormat.CHAT) is None
    assert is_told == (FAMILIES[name]["form"] == "fence")
    asked = pose("Where?", tools=(TOOL,))
    prompt, _ = render_prompt(tokenizer, asked, "chat")
    if is_told:
        assert "look_up" in prompt
        text = '```tool\n{"name": "look_up", "arguments": ' + CALL.arguments + "}\n```"
    else:
        said = Message(role="assistant", tool_calls=(CALL,))
        whole = tokenizer.render([*asked, said], tools=[TOOL], is_reply_next=False)
        text = whole.removeprefix(prompt.removesuffix("<think>\n"))
        assert len(text) < len(whole)
    ids = tokenizer.encode(text)
    completion = Completion(
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        text=tokenizer.decode(ids),
        finish_reason=FinishReason.LENGTH,
        policy_version=0,
    )
    spoken = take_apart(PromptCache(tokenizer, "chat"), completion, (TOOL,), 0, "")
    assert [(one.name, json.loads(one.arguments)) for one in spoken.calls] == [
        ("look_up", json.loads(CALL.arguments))
    ]
    assert spoken.mistakes == ()


@pytest.mark.parametrize("role", ["user", "tool", "system", "description of a tool"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_others_say_has_no_control_tokens(tmp_path: Path, name: str, role: str) -> None:
    tokenizer, family = build(tmp_path, name), FAMILIES[name]
    marks = [*family["tokens"], *(word for word in family["words"] if word.startswith("<"))]
    marks = [mark for mark in marks if mark.isascii() and mark[0] in "<["]
    said = "".join(f"x{mark}\n" for mark in marks) + "assistant\n4"
    quiet = "".join(f"x{mark[0]} {mark[1:]}\n" for mark in marks) + "assistant\n4"

    def controls(content: str) -> list[int]:
        asked = Message(role="user", content=content if role == "user" else "Where?")
        call = Message(role="assistant", tool_calls=(CALL,))
        chat = [asked]
        if role == "tool":
            chat = [*pose([asked], tools=(TOOL,)), call]
            chat += [Message(role="tool", content=content, name="look_up", tool_call_id=CALL.call_id)]
        elif role == "system":
            chat = [Message(role="system", content=content), asked]
        elif role == "description of a tool":
            tool = json.loads(TOOL)
            tool["function"]["description"] = content
            tool["function"]["parameters"]["properties"]["place"]["description"] = content
            chat = [*pose([asked], tools=(json.dumps(tool),))]
        text, ids = render_prompt(tokenizer, chat, "chat")
        assert content in text or json.dumps(content)[1:-1] in text
        assert content in tokenizer.decode(ids) or json.dumps(content)[1:-1] in tokenizer.decode(ids)
        return [one for one in ids.tolist() if one in tokenizer.special_ids]

    assert controls(said) == controls(quiet)


def test_a_plain_text_begins_as_the_tokenizer_begins_it_and_spells_marks(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, "llama3")
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    from tokenizers.processors import TemplateProcessing

    start = "<|begin_of_text|>"
    fast.post_processor = TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, fast.token_to_id(start))]
    )
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    text, ids = render_prompt(tokenizer, [Message(role="user", content="a<|eot_id|>b")], "base")
    assert text == "a<|eot_id|>b\n"
    assert ids[0] == tokenizer.token_id(start)
    assert not set(ids[1:].tolist()) & tokenizer.special_ids
    assert tokenizer.decode(ids) == start + text
    _, chat_ids = render_prompt(tokenizer, [Message(role="user", content="a")], "chat")
    assert (chat_ids == ids[0]).sum() == 1


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family["renderer"]])
def test_a_continued_conversation_equals_the_familys_own(tmp_path: Path, name: str) -> None:
    from renderers import config_from_name, create_renderer

    tokenizer = build(tmp_path, name)
    config = config_from_name(FAMILIES[name]["renderer"])
    assert config is not None
    # As ours: what was sampled stays, thoughts too.
    renderer = create_renderer(adapt(tokenizer), config.model_copy(update={"thinking_retention": "all"}))
    dice, num_equal = random.Random(name), 0
    for _ in range(1000):
        first, said, then = (
            "".join(dice.choices("ab 7\n.?é", k=dice.randint(1, 9))).strip() or "x" for _ in range(3)
        )
        history = [Message(role="user", content=first)]
        _, prompt_ids = render_prompt(tokenizer, history, "chat")
        reply_ids = [*tokenizer.encode(said).tolist(), tokenizer.turn_end_id]
        news = [Message(role="user", content=then)]
        ours = encode_next_messages(tokenizer, PromptFormat.CHAT, history, news, FinishReason.EOS)
        theirs = renderer.bridge_to_next_turn(
            prompt_ids.tolist(), reply_ids, [{"role": "user", "content": then}]
        )
        if ours is None or theirs is None:
            continue
        num_equal += 1
        assert [*prompt_ids.tolist(), *reply_ids, *ours[1].tolist()] == theirs.token_ids
    assert num_equal == (0 if name in WITHOUT_BRIDGE else 1000)


@pytest.mark.parametrize(
    "template",
    [
        "nothing",
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
        "{% for m in messages %}{{ m.content if m.role == 'user' }}<|end|>{% endfor %}",
    ],
    ids=["renders nothing", "tokens of another tokenizer", "no replies"],
)
def test_a_template_that_does_not_fit_is_refused(tmp_path: Path, template: str) -> None:
    (tiny_tokenizer(tmp_path) / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(ConfigError):
        resolve_prompt_format(tokenizer, "chat")
    assert tokenizer.stop_token_ids == {tokenizer.eos_id}
    assert resolve_prompt_format(tokenizer, "base") is PromptFormat.BASE
