"""Code of a script or a notebook, written to a file that every process of a run can import.

A definition is written with what it uses: imports, plain values, and further definitions. So no process of a
run executes the rest of a script, and a notebook's functions need no file.
"""

from __future__ import annotations

import ast
import hashlib
import linecache
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from strop.errors import ConfigError
from strop.io.atomic import write_bytes_atomically


class _Unwritable(Exception):
    """Raised for a value that no text makes; holds its name."""


def place_of(code: Callable[..., Any], folder: Path) -> str:
    """Return FILE.py:NAME of a class or a function; one of the running program is written below `folder`.

    Raises: ConfigError if it has no name at the top of a file or a notebook, or uses what cannot be written.
    """
    name = getattr(code, "__qualname__", type(code).__name__)
    module = sys.modules.get(getattr(code, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    texts: dict[str, str] = {}
    why = "is in no file, so that no other process can import it"
    if module is not None and module.__name__ == "__main__" and vars(module).get(name) is code:
        try:
            _write(name, vars(module), set(), texts)
        except _Unwritable as error:
            why = f"uses {error}, which is neither an import, a plain value nor defined beside it"
        else:
            text = "\n".join(["from __future__ import annotations", "", *texts.values(), ""])
            return f"{write_by_content(folder / 'code', name, '.py', text.encode())}:{name}"
    if not file or not file.endswith(".py") or not Path(file).is_file() or not name.isidentifier():
        raise ConfigError(
            f"{name} {why}",
            allowed="classes and functions at the top of a file, a script or a notebook",
            next_step="write it into a file of its own, and import it from there",
        )
    return f"{Path(file).absolute()}:{name}"


def write_by_content(folder: Path, stem: str, suffix: str, text: bytes) -> Path:
    """Write a file that is named by its content, and return it. Raises: StoreError if the disk fails."""
    path = folder / f"{stem}-{hashlib.sha256(text).hexdigest()[:12]}{suffix}"
    write_bytes(path, text)
    return path


def write_bytes(path: Path, text: bytes) -> None:
    """Write a file atomically, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(path, text)


def _write(name: str, space: Mapping[str, Any], seen: set[str], texts: dict[str, str]) -> None:
    """Add the text that makes `name` to `texts`, behind those of what it uses. Raises: _Unwritable."""
    if name in seen:
        return
    seen.add(name)
    value = space[name]
    home = sys.modules.get(getattr(value, "__module__", None) or "")
    own = getattr(value, "__name__", None)
    is_named = isinstance(own, str) and getattr(home, own, None) is value
    if isinstance(value, ModuleType):
        _require_installed(value, name)
        texts[name] = f"import {value.__name__} as {name}"
    elif home is not None and home.__name__ != "__main__" and is_named:
        _require_installed(home, name)
        texts[name] = f"from {home.__name__} import {value.__name__} as {name}"
    elif isinstance(value, FunctionType | type):
        node, text = _find_source(value)
        for used in sorted({one.id for one in ast.walk(node) if isinstance(one, ast.Name)}):
            if used in space:
                _write(used, space, seen, texts)
        texts[name] = f"\n\n{text}"
    elif isinstance(value, re.Pattern):
        texts[name] = f"{name} = __import__('re').compile({value.pattern!r}, {value.flags})"
    else:
        try:
            is_plain = ast.literal_eval(repr(value)) == value
        except (ValueError, SyntaxError):
            is_plain = False
        if not is_plain:
            raise _Unwritable(name)
        texts[name] = f"{name} = {value!r}"


def _require_installed(module: ModuleType, name: str) -> None:
    """Refuse a module beside the script or notebook: a file elsewhere cannot import it."""
    top = sys.modules[module.__name__.partition(".")[0]]
    file = getattr(top, "__file__", None)
    if file is None:
        return
    root = Path(file).parent.parent if hasattr(top, "__path__") else Path(file).parent
    if root.absolute() in {Path(os.path.abspath(sys.path[0])), Path.cwd()}:
        raise _Unwritable(name)


def _find_source(value: Any) -> tuple[ast.AST, str]:
    """Return the statement that defines a function or class at the top of its file or cell, and its text."""
    inside = [value, *vars(value).values()] if isinstance(value, type) else [value]
    codes = [one.__code__ for one in inside if isinstance(one, FunctionType)]
    lines = linecache.getlines(codes[0].co_filename) if codes else []
    for node in ast.parse("".join(lines)).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (
            node.name == value.__name__
        ):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first <= codes[0].co_firstlineno <= (node.end_lineno or first):
                return node, "".join(lines[first - 1 : node.end_lineno])
    raise _Unwritable(value.__name__)
