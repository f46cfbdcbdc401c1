"""strop takes a language model and a verifiable task, and makes the model better at it.

Importing this package loads nothing heavy: no torch, no disk, no network, no device.
`strop.train` trains from Python what `strop train` trains from a run file.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from strop.run.from_python import Run, train

__version__ = "0.1.0"

__all__ = ["Run", "__version__", "train"]


def bring_when_asked(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` of a package that imports what it offers when somebody asks for it.

    `places`: names, with spaces between them, by the module that has them.
    """
    place_of = {name: place for place, names in places.items() for name in names.split()}

    def bring(name: str) -> Any:
        if name not in place_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(place_of[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    return bring


def __getattr__(name: str) -> Any:
    """Bring what trains when it is asked for."""
    places = {"train": "strop.train", "Run": "strop.run.from_python"}
    if name not in places:
        raise AttributeError(f"module 'strop' has no attribute {name!r}")
    found = import_module(places[name])
    # The room of that name can be called, and is what `import strop.train` would put here.
    return found if name == "train" else getattr(found, name)
