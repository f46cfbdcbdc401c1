"""Text to token ids and back, and messages to the exact prompt a model was trained on.

Reads a Hugging Face model directory without transformers, so planning and checking a run stay
fast. Left out on purpose: slow tokenizers without a tokenizer.json, and images in templates. Nothing is cut
or padded.

Which ids end a reply is read from the model, never guessed: the tokenizer's end-of-text token, all ids of
generation_config.json (of config.json where that file names none), and what the chat template itself writes
behind an assistant's message.

What users, tools and guests say has no control tokens: where such a text spells one, `GUARD` is written into
it before a template sees it, and `encode` gives it the ids of its letters.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as FastTokenizer

from strop.errors import ConfigError, StoreError
from strop.io.variables import set_variables
from strop.rollout import REASONING, IntArray, Message

DATE_VARIABLE = "STROP_DATE"
"""The date that templates print, such as 2026-11-29; the machine's own where it is not set."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GUARD = "\ufdd0"
"""Stands in the spelling of a control token that is none. No text holds it: Unicode keeps it free."""
_STAND_IN = "strop-said"
_REASONING_NAMES = (REASONING, "reasoning", "thinking")
"""Keys under which chat templates read what an assistant thought."""


class Tokenizer:
    """The tokenizer of one model. Build it with `load`; it holds no file open and may be shared."""

    def __init__(self, model_dir: Path, now: Callable[[], datetime]) -> None:
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"model directory {model_dir} has no tokenizer.json",
                allowed="a Hugging Face model directory with tokenizer.json",
                next_step="check the path in model.source, or fetch the model with `strop model get`",
            )
        try:
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:
            # For any bad file the package raises Exception itself (0.23), no subclass.
            raise _unreadable(path, str(error)) from error
        # A file may carry the cutting and padding of whoever saved it; a prompt must arrive whole.
        self._fast.no_truncation()
        self._fast.no_padding()
        settings = _read_json(model_dir / "tokenizer_config.json")
        self._special_texts = _special_texts(settings)
        self._source = str(model_dir)
        self._chat_template = _read_chat_template(model_dir, settings)
        self._now = now
        self._environment = _template_environment(now)
        self._template: Template | None = None
        self._eos_ids = tuple(_eos_ids(model_dir, self._fast, self._special_texts))
        self.eos_id: int = self._eos_ids[0]
        """The terminator of a text; that of a message in a chat is `turn_end_id`."""

    @classmethod
    def load(cls, model_dir: Path, *, now: Callable[[], datetime] | None = None) -> Tokenizer:
        """Read the tokenizer of a Hugging Face model directory.

        `now` answers templates that print today's date (default: `DATE_VARIABLE`, else the machine's clock).
        Raises: ConfigError if the directory, tokenizer.json or every terminator is missing;
            StoreError if a file cannot be read.
        """
        return cls(model_dir, now or _local_now)

    @property
    def vocab(self) -> dict[str, int]:
        """Every token's id, by how the tokenizer spells it."""
        return self._fast.get_vocab(with_added_tokens=True)

    def token_id(self, text: str) -> int | None:
        """Return the id of a token by its spelling, or None."""
        return self._fast.token_to_id(text)

    # These two walk the whole vocabulary: a plan, which asks for neither, has no time for them.
    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's logits may be wider."""
        return max(self.vocab.values()) + 1

    @cached_property
    def num_ids(self) -> int:
        """Ids that mean something; between them there may be holes."""
        return len(set(self.vocab.values()))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that were added to those that texts are made of, such as terminators."""
        named = map(self._fast.token_to_id, self._special_texts.values())
        return frozenset(self._fast.get_added_tokens_decoder()).union(
            token_id for token_id in named if token_id is not None
        )

    @cached_property
    def start_ids(self) -> IntArray:
        """Ids that the tokenizer itself puts before a text, as those that its model was trained on began."""
        plain, whole = (self._fast.encode("a", add_special_tokens=is_added).ids for is_added in (False, True))
        return np.asarray(whole[: whole.index(plain[0])], dtype=np.int32)

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """Every id that ends a reply when it is sampled."""
        ids = set(self._eos_ids)
        if self._chat_template is not None:
            # A template that is refused is named where a chat is asked for; plain text needs none.
            with suppress(ConfigError):
                ids.add(self.turn_end_id)
        return frozenset(ids)

    @cached_property
    def turn_end_id(self) -> int:
        """The id that the chat template writes behind an assistant's message: how a reply in a chat ends.

        Where it writes nothing, `eos_id`.
        Raises: ConfigError if the template does not write the message, or ends it with what is no token.
        """
        asked, said = Message(role="user", content="a"), Message(role="assistant", content=_STAND_IN)
        before, found, behind = self.render([asked, said], is_reply_next=False).rpartition(_STAND_IN)
        if not found:
            raise self._unfit("does not write what an assistant said", before)
        ids = self.encode(behind.lstrip())
        if not len(ids):
            return self.eos_id
        if int(ids[0]) in self.special_ids:
            return int(ids[0])
        named = self._special_texts.get("eos_token", "")
        if _CONTROL.match(behind.lstrip()) or (named and behind.lstrip().startswith(named)):
            raise self._unfit("ends a message with what is no token of its tokenizer", behind)
        return self.eos_id

    def _unfit(self, fault: str, shown: str) -> ConfigError:
        return ConfigError(
            f"the chat template of model {self._source} {fault}: {shown!r:.80}",
            allowed="a chat template made for this tokenizer, which ends each message with one of its tokens",
            next_step="use the model's own chat_template and tokenizer.json, or set model.prompt_format=base",
        )

    @cached_property
    def digest(self) -> str:
        """Hash over everything that changes ids, prompts or stops."""
        parts = [self._fast.to_str(), list(self._eos_ids), self._special_texts, self._chat_template]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def printed_date(self) -> str | None:
        """The date that the chat template prints, such as 2026-11-29; None where it prints none."""
        return self._now().date().isoformat() if "strftime_now" in (self._chat_template or "") else None

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a chat is written."""
        return self._chat_template is not None

    def require_chat_template(self) -> str:
        """Return the source of the chat template.

        Raises: ConfigError if the model has none.
        """
        if self._chat_template is None:
            raise ConfigError(
                f"model.prompt_format=chat, but model {self._source} has no chat template",
                allowed="chat only with a model that ships a chat template; base with any model",
                next_step="set model.prompt_format=base, or use the instruct variant of the model",
            )
        return self._chat_template

    def render(
        self,
        messages: Sequence[Message],
        *,
        is_thinking: bool | None = None,
        tools: Sequence[str] = (),
        is_reply_next: bool = True,
    ) -> str:
        """Write a chat the way the model was trained on it, up to where the reply begins.

        `is_thinking` is told to the template as `enable_thinking`; None leaves it to the template. `tools`
        are functions in the form of OpenAI's chat API, as JSON. Without `is_reply_next` it ends behind the
        last message. Control tokens that others spell are guarded (`GUARD`): the text is for `encode`.

        Raises: ConfigError if the model has no chat template, or its template refuses the messages, cannot be
            told whether to think, or leaves out a system message, a tool, its reply, a call or reasoning.
        """
        source = self.require_chat_template()
        if is_thinking is not None and "enable_thinking" not in source:
            raise ConfigError(
                f"task.thinking={'on' if is_thinking else 'off'}, but the chat template of model"
                f" {self._source} does not read enable_thinking",
                allowed="model_default with a model whose template has one way to write a chat",
                next_step="leave task.thinking out",
            )
        choice = {} if is_thinking is None else {"enable_thinking": is_thinking}
        chat = [self._to_template(message, source) for message in messages]
        try:
            if self._template is None:
                self._template = self._environment.from_string(source)
            text = self._template.render(
                messages=chat,
                tools=[self._guard_value(json.loads(tool)) for tool in tools] or None,
                documents=None,
                add_generation_prompt=is_reply_next,
                **choice,
                **self._special_texts,
            )
        except TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise ConfigError(
                f"the chat template of model {self._source} refused messages of roles {roles} ({error})",
                allowed="messages in the roles and order that this template accepts",
                next_step="leave out a system message (task.system_prompt, or the data's own), or set"
                " model.prompt_format=base",
            ) from error
        shown = text.replace(GUARD, "")
        _require_shown(shown, messages)
        for tool in tools:
            if (name := json.loads(tool)["function"]["name"]) not in shown:
                raise _left_out(f"the tool {name}")
        return text

    def _guard_value(self, value: Any) -> Any:
        """Guard the texts in a JSON value."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, list):
            return [self._guard_value(one) for one in value]
        if isinstance(value, dict):
            return {self.guard(key): self._guard_value(one) for key, one in value.items()}
        return value

    def _to_template(self, message: Message, source: str) -> dict[str, Any]:
        """Return a message as chat templates read it: in OpenAI's form, with arguments as an object."""
        found = message.to_json()
        if message.role != "assistant":
            # The model's own words may hold marks of thoughts and calls.
            found["content"] = self.guard(message.text)
        for call in found.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if message.name is not None:
            found["name"] = self.guard(message.name)
        found.pop(REASONING, None)
        if message.reasoning is not None:
            names = [name for name in _REASONING_NAMES if re.search(rf"\b{name}\b", source)]
            if not names:
                raise ConfigError(
                    f"a message has reasoning, and the chat template of model {self._source} reads none"
                    f" of {', '.join(_REASONING_NAMES)}",
                    allowed="reasoning where the chat template writes it",
                    next_step="leave it out, or write it into the message's content as the model does",
                )
            found |= dict.fromkeys(names, message.reasoning)
        return found

    def render_base(self, messages: Sequence[Message]) -> str:
        """Write plain text for a model without chat training; the reply begins on its own line.

        Contents are joined by a blank line. Roles are not written.
        """
        return "\n\n".join(message.text for message in messages) + "\n"

    def guard(self, text: str) -> str:
        """Return a text of others whose spelled control tokens `encode` takes for letters."""
        controls, first, lengths = self._controls
        pieces, place = [], 0
        for start in (match.start() for match in first.finditer(text)):
            if any(text[start : start + length] in controls for length in lengths):
                pieces.append(text[place : start + 1])
                place = start + 1
        return GUARD.join([*pieces, text[place:]])

    @cached_property
    def _controls(self) -> tuple[frozenset[str], re.Pattern[str], list[int]]:
        """Texts of added tokens that mark something, their first letters and lengths.

        Other added tokens stand for runs of spaces, say.
        """
        added = self._fast.get_added_tokens_decoder().values()
        texts = {one.content for one in added if one.special or _CONTROL.fullmatch(one.content)} - {""}
        firsts = "".join(sorted({text[0] for text in texts}))
        first = re.compile(f"[{re.escape(firsts)}]" if firsts else "(?!)")
        return frozenset(texts), first, sorted({len(text) for text in texts})

    def encode(self, text: str) -> IntArray:
        """Return the ids of a text; control tokens written in it become their ids, but for guarded ones.

        None is added.
        """
        found = self._fast.encode(text, add_special_tokens=False)
        ids = found.ids
        if GUARD in text:
            places = zip(ids, found.offsets, strict=True)
            ids = [token_id for token_id, (start, end) in places if text[start:end].strip(GUARD)]
        return np.asarray(ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | IntArray) -> str:
        """Return the text of ids, special tokens spelled out. Incomplete characters become U+FFFD."""
        return self._fast.decode([int(token_id) for token_id in token_ids], skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """Return what one id reads as; for people, not for joining."""
        return self.decode([token_id])


_CONTROL = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z][A-Z_]{1,30}\]|\u25c1[^\s\u25b7]{1,30}\u25b7")
"""How tokens that mark something are spelled."""


class _GenerationTag(Extension):
    """Accepts the tag that marks assistant text in some templates; strop masks by length instead."""

    tags = {"generation"}  # noqa: RUF012  (the attribute is declared mutable by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _require_shown(text: str, messages: Sequence[Message]) -> None:
    """Refuse a chat template that leaves out a system message, a tool's reply or a tool call.

    Some do not know them, and do not say so. Reasoning is the template's to show or to leave out.
    """
    for message in messages:
        content = message.text.strip()
        # Some templates write a tool's reply as JSON.
        is_shown = content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text
        if message.role not in ("user", "assistant") and not is_shown:
            raise _left_out(f"a message of the role {message.role}")
        for call in message.tool_calls:
            num_calls = sum(other.name == call.name for other in message.tool_calls)
            if text.count(call.name) < num_calls or any(
                key not in text for key in json.loads(call.arguments)
            ):
                raise _left_out(f"a call of the tool {call.name}")


def _left_out(what: str) -> ConfigError:
    return ConfigError(
        f"the chat template of the model leaves out {what}",
        allowed="system messages, tool calls and tool replies where the chat template writes them",
        next_step="say it in task.prompt_template instead of task.system_prompt, or use a model that was"
        " trained to call tools",
    )


def dated(date: str | None) -> AbstractContextManager[None]:
    """Have templates print this date in this process and its children; None changes nothing."""
    return set_variables({} if date is None else {DATE_VARIABLE: date})


def _local_now() -> datetime:
    date = os.environ.get(DATE_VARIABLE)
    return datetime.now().astimezone() if date is None else datetime.fromisoformat(date)


def _template_environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """Build the sandbox in which chat templates run, with the names that templates rely on."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # The filter of jinja2 escapes HTML characters, which no model was trained on.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON table, empty if the file does not exist."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(value, dict):
        raise _unreadable(path, f"a {type(value).__name__} instead of a table")
    return value


def _unreadable(path: Path, cause: str) -> StoreError:
    return StoreError(
        f"{path} cannot be read ({cause})",
        allowed="the complete file that came with the model",
        next_step="delete the model directory and fetch the model again with `strop model get`",
    )


def _special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the named special tokens; a token is stored as its text or as a table with `content`."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _read_chat_template(model_dir: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the model's chat template: its own file first, then the tokenizer's settings."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        # Several named templates; plain chats use the one named default.
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _eos_ids(model_dir: Path, fast: FastTokenizer, special_texts: Mapping[str, str]) -> list[int]:
    """Collect the ids that end a reply, the trained terminator first.

    Raises: ConfigError if the model names none.
    """
    ids: list[int] = []
    eos_text = special_texts.get("eos_token")
    eos_id = None if eos_text is None else fast.token_to_id(eos_text)
    if eos_id is not None:
        ids.append(eos_id)
    generation = _read_json(model_dir / "generation_config.json").get("eos_token_id")
    if generation is None:
        model = _read_json(model_dir / "config.json")
        text_model = model.get("text_config")
        nested = text_model.get("eos_token_id") if isinstance(text_model, Mapping) else None
        generation = model.get("eos_token_id", nested)
    listed = generation if isinstance(generation, list) else [generation]
    ids.extend(value for value in listed if isinstance(value, int) and value not in ids)
    if not ids:
        raise ConfigError(
            f"model directory {model_dir} names no token that ends a reply",
            allowed="eos_token in tokenizer_config.json, or eos_token_id in generation_config.json",
            next_step="add the end-of-text token of this model to one of the two files",
        )
    return ids
