"""The runner as one argument of `python -c`: no file lies in the sandbox that a candidate could change.

It carries its modules compiled, because compiling them takes half of a short judgement's time, and as text
for another version of Python than this process is.
"""

from __future__ import annotations

import base64
import importlib.util
import marshal
import zlib
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = "strop.tasks.code.python_judge"
_MODULES = ("values", "channel", "candidate", "remote", "trials", "runner")
"""In the order of their imports."""
_LOADER = """\
import sys, types, marshal, zlib, binascii, _frozen_importlib_external
def module(name, code):
    made = sys.modules[name] = types.ModuleType(name)
    made.__path__ = []
    exec(code, made.__dict__)
    return made
parts = {package!r}.split(".")
for length in range(1, len(parts) + 1):
    module(".".join(parts[:length]), "")
is_same = _frozen_importlib_external.MAGIC_NUMBER == {magic!r}
for name, code in marshal.loads(zlib.decompress(binascii.a2b_base64({compiled!r} if is_same else {texts!r}))):
    last = module(name, code)
last.main()
"""


@cache
def read_runner() -> str:
    """Return the text of the runner: its modules, and the names that they import each other by."""
    folder = Path(__file__).parent
    texts = [(f"{_PACKAGE}.{name}", (folder / f"{name}.py").read_text("utf-8")) for name in _MODULES]
    # Without docstrings; nothing here uses `assert`, which this leaves out too.
    compiled = [(name, compile(text, name, "exec", dont_inherit=True, optimize=2)) for name, text in texts]
    return _LOADER.format(
        package=_PACKAGE,
        magic=importlib.util.MAGIC_NUMBER,
        compiled=_pack(compiled),
        texts=_pack([(name, text.encode()) for name, text in texts]),
    )


def _pack(modules: list[tuple[str, Any]]) -> str:
    return base64.b64encode(zlib.compress(marshal.dumps(modules), 9)).decode()
