"""The runner as one text that defines `main`: no file lies in the sandbox that a candidate could change."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_PACKAGE = "strop.tasks.code.python_judge"
_MODULES = ("values", "channel", "candidate", "remote", "trials", "runner")
"""In the order of their imports."""
_LOADER = """\
import sys, types
def load(name, text):
    made = sys.modules[name] = types.ModuleType(name)
    made.__path__ = []
    exec(compile(text, name, "exec"), made.__dict__)
    return made
parts = {package!r}.split(".")
for length in range(1, len(parts) + 1):
    if ".".join(parts[:length]) not in sys.modules:
        load(".".join(parts[:length]), "")
for name, text in {texts!r}:
    main = load(name, text).__dict__.get("main")
"""


@cache
def read_runner() -> str:
    """Return the text of the runner: its modules, and the names that they import each other by."""
    folder = Path(__file__).parent
    texts = [(f"{_PACKAGE}.{name}", (folder / f"{name}.py").read_text("utf-8")) for name in _MODULES]
    return _LOADER.format(package=_PACKAGE, texts=texts)
