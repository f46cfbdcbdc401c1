"""Programs of strop's own inside sandboxes: what they find, and what is imported before they start."""

from __future__ import annotations

import site
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import strop

ENVIRONMENTS = "strop.environments.inside"
"""The program that plays an author's class; a service makes sandboxes for no other."""


@cache
def package_folders() -> tuple[str, ...]:
    """Return the folders of this Python's installed packages, and the one that strop is in."""
    found = [*site.getsitepackages(), site.getusersitepackages(), str(Path(strop.__file__).parent.parent)]
    return tuple(dict.fromkeys(str(folder) for folder in found if Path(folder).is_dir()))


def prepared_source(module: str, folders: Sequence[str]) -> str:
    """Return the Python that the prepared interpreter loads: a module's `main`, and what it imports."""
    return f"""\
import os, sys
sys.path += {[*folders]!r}
# A thread would not live in a fork.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import {module.rpartition(".")[0]}
from {module} import main
del os.environ["OPENBLAS_NUM_THREADS"]
"""
