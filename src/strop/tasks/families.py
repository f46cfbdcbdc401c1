"""Calls of tools that a family of models writes with tokens of its own, read by the package `renderers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from strop.errors import DataError
from strop.rollout import ToolCall
from strop.tasks.tool_calls import Spoken, is_one, list_types
from strop.thoughts import split_thought

if TYPE_CHECKING:
    from strop.rollout import IntArray
    from strop.tokenizer import Tokenizer

_NAMES = (
    *("kimi-k2", "deepseek-v3", "deepseek-v4", "glm-4.5", "glm-5", "minimax-m2", "gemma4"),
    *("hy3", "laguna-xs.2", "inkling"),
)
"""Renderers of `renderers` 0.1.12 whose families mark calls by tokens that no text spells."""


class _Adapter:
    """A tokenizer as `renderers` asks for one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = ""
        self.unk_token_id = None
        self.eos_token_id = tokenizer.eos_id
        self.chat_template = tokenizer.require_chat_template()

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return [int(one) for one in self._tokenizer.encode(text)]

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        return self._tokenizer.decode(token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._tokenizer.token_id(tokens)

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.vocab


@dataclass(frozen=True, slots=True)
class Family:
    """A renderer that reads the replies of a model."""

    renderer: Any

    def read(self, reply_ids: IntArray | Sequence[int], tools: Sequence[str]) -> Spoken:
        """Take a reply apart, its terminator included. `tools`: functions in OpenAI's form, as JSON."""
        functions = [json.loads(tool)["function"] for tool in tools]
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        told = [{**one, "parameters": _plainly(schemas[one["name"]])} for one in functions]
        found = self.renderer.parse_response([int(one) for one in reply_ids], tools=told)
        if found.reasoning_complete is False:
            return Spoken(content="", reasoning=found.reasoning_content)
        calls, mistakes = [], []
        for one in found.tool_calls:
            arguments = one.arguments if isinstance(one.arguments, dict) else {}
            allowed = {
                key: list_types(schema, schemas.get(one.name, {}))
                for key, schema in _properties(schemas.get(one.name, {})).items()
            }
            for key, value in arguments.items():
                if value in ("null", "None") and "null" in allowed.get(key, ()):
                    arguments[key] = None
            try:
                # A call of a tool that is not there is answered as one.
                if one.status not in ("ok", "unknown_tool"):
                    raise DataError(str(one.status))
                written = json.dumps(arguments, ensure_ascii=False)
                calls.append(ToolCall(name=one.name or "", arguments=written))
            except DataError:
                mistakes.append(f"a tool call that cannot be read: {one.status}: {one.raw.strip():.200}")
        text = self.renderer._tokenizer.decode(np.asarray(reply_ids))
        return Spoken(
            content=found.content.strip(),
            reasoning=found.reasoning_content,
            calls=tuple(calls),
            mistakes=tuple(mistakes),
            source=(split_thought(text)[1] or "").strip(),
        )


def _properties(schema: Any) -> dict[str, Any]:
    return dict(schema.get("properties") or {})


def _plainly(schema: Any) -> dict[str, Any]:
    """Return a schema that says of each argument that allows a text that it is one: it stays as written."""
    plain = {
        key: {"type": "string"} if "string" in list_types(value, schema) else value
        for key, value in _properties(schema).items()
    }
    return {**schema, "properties": plain}


def find_family(tokenizer: Tokenizer, written: str, call: ToolCall, tools: Sequence[str]) -> Family | None:
    """Return the family that reads a template's own text of a call as that call; None if none does."""
    if find_spec("renderers") is None:
        return None
    from renderers import config_from_name, create_renderer

    ids = tokenizer.encode(written)
    for name in _NAMES:
        try:
            family = Family(create_renderer(_Adapter(tokenizer), config_from_name(name)))
            found = family.read(ids, tools).calls
        except (AssertionError, AttributeError, KeyError, LookupError, TypeError, ValueError):
            # A tokenizer without the tokens of this family.
            continue
        if is_one(found, call):
            return family
    return None
