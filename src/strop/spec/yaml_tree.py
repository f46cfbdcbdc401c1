"""YAML run files: the core schema of YAML 1.2, with the line of every key.

Stricter and plainer than the YAML reader it stands on, where 'no' is a truth value, 1e-5 a text
and the last of two equal keys wins. Left out on purpose: anchors and aliases (a short file can
unfold to gigabytes; `extends` shares settings between files), tags and several documents.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from strop.spec.display import KeyPath, show_text

_TAG = "tag:yaml.org,2002:"


class YamlRefused(ValueError):
    """Raised for a text that this reader does not take; `tree` turns it into a ConfigError."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class _CoreLoader(yaml.SafeLoader):
    """Composes nodes by the core schema; never constructs Python objects."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            line = event.start_mark.line + 1
            raise YamlRefused("it uses an anchor or an alias; extends shares settings between files", line)
        return super().compose_node(parent, index)


_CoreLoader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _CoreLoader.add_implicit_resolver(_TAG + _kind, re.compile(f"(?:{_pattern})\\Z"), _first)


def parse_yaml(text: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Return the tree of a YAML text and the line (from 1) of every key outside lists.

    An empty text is an empty tree.
    Raises: YamlRefused, with the line where one is known.
    """
    try:
        # compose reads one document and refuses a second.
        node = yaml.compose(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlRefused(str(error.problem or error.context), mark.line + 1 if mark else None) from error
    except yaml.YAMLError as error:
        raise YamlRefused("it holds a character that YAML does not allow") from error
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "null"):
        return {}, {}
    if not isinstance(node, yaml.MappingNode):
        raise YamlRefused("it is not a table of settings", node.start_mark.line + 1)
    lines: dict[KeyPath, int] = {}
    return _mapping(node, (), lines), lines


def _mapping(node: yaml.MappingNode, path: KeyPath | None, lines: dict[KeyPath, int]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
            raise YamlRefused("a key is not a text; put it in quotes", line)
        key = _checked_text(key_node)
        if key in tree:
            raise YamlRefused(f"the key {show_text(key)} is written twice in one table", line)
        inside = None if path is None else (*path, key)
        if inside is not None:
            lines[inside] = line
        tree[key] = _construct(value_node, inside, lines)
    return tree


def _construct(node: yaml.Node, path: KeyPath | None, lines: dict[KeyPath, int]) -> Any:
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        return _mapping(node, path, lines)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return [_construct(item, None, lines) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    raise YamlRefused(f"it uses the tag {node.tag!r}", node.start_mark.line + 1)


def _scalar(node: yaml.ScalarNode) -> Any:
    kind, text = node.tag.removeprefix(_TAG), node.value
    try:
        match kind:
            case "str":
                return _checked_text(node)
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)
            case "float":
                return float(re.sub(r"\.(?=[iInN])", "", text))
    except ValueError as error:
        if isinstance(error, YamlRefused):
            raise
        raise YamlRefused(f"a value is no {kind}", node.start_mark.line + 1) from error
    raise YamlRefused(f"it uses the tag {node.tag!r}", node.start_mark.line + 1)


def _checked_text(node: yaml.ScalarNode) -> str:
    text = str(node.value)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise YamlRefused("a text holds half of a surrogate pair", node.start_mark.line + 1)
    return text
