"""A setting of the user's own class, from the JSON Schema that pydantic makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import annotated_types as at
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_TYPES: Mapping[str, Any] = {"integer": int, "number": float, "string": str, "boolean": bool}
_LIMITS: Mapping[str, Any] = {
    "minimum": at.Ge,
    "exclusiveMinimum": at.Gt,
    "maximum": at.Le,
    "exclusiveMaximum": at.Lt,
    "minLength": at.MinLen,
    "maxLength": at.MaxLen,
}


def to_field(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> FieldInfo:
    """Return a setting as the sections of strop's own have it: type, limits, default, meaning."""
    choices = [_resolve(one, definitions) for one in schema.get("anyOf", [schema])]
    kinds = [one for one in choices if one.get("type") != "null"]
    kind = kinds[0] if kinds else {}
    annotation = _to_type(kind)
    if len(kinds) < len(choices):
        annotation = annotation | None
    info = FieldInfo(
        annotation=annotation,
        default=schema.get("default", PydanticUndefined),
        description=schema.get("description", ""),
    )
    info.metadata = [limit(kind[name]) for name, limit in _LIMITS.items() if name in kind]
    return info


def _resolve(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    found: Mapping[str, Any] = definitions.get(name, schema)
    return found


def _to_type(kind: Mapping[str, Any]) -> Any:
    if "enum" in kind or "const" in kind:
        return Literal[tuple(kind.get("enum", [kind.get("const")]))]
    if kind.get("type") == "array":
        is_numbers = kind.get("items", {}).get("type") in ("number", "integer")
        return tuple[float, ...] if is_numbers else tuple[str, ...]
    return _TYPES.get(kind.get("type", ""), dict[str, Any])
