"""What has a cap is counted by hand."""

from __future__ import annotations

import ast

from tools.room_caps import count_used_once, list_imports

SOURCE = """
from strop.io import atomic
import strop.errors

def _once(): ...
def _twice(): ...
def shown(): return _once() + _twice() + _twice()
class A:
    def __init__(self): self._method()
    def _method(self): ...
    def _unused(self): ...
"""


def test_private_functions_and_imports_by_hand() -> None:
    tree = ast.parse(SOURCE)
    assert count_used_once({"one": tree}) == 2  # _once and _method
    assert sorted(list_imports(tree)) == ["strop.errors", "strop.io", "strop.io.atomic"]
