"""The tasks of the suite, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType

from strop.environments.research.blotto import make_blotto
from strop.environments.research.charlm import make_charlm
from strop.environments.research.contract import Instance
from strop.environments.research.control import make_car, make_pole
from strop.environments.research.fixtrain import make_fixtrain
from strop.environments.research.games import make_prisoners, make_sexes
from strop.environments.research.glyphs import make_glyphs
from strop.environments.research.sat import make_sat
from strop.environments.research.tabular import make_class, make_price

TASKS: Mapping[str, Callable[[int], Instance]] = MappingProxyType(
    {
        "tab_class": make_class,
        "tab_reg": make_price,
        "bos": make_sexes,
        "ipd": make_prisoners,
        "blotto": make_blotto,
        "sat3": make_sat,
        "glyphs": make_glyphs,
        "mcar": make_car,
        "cpole": make_pole,
        "charlm": make_charlm,
        "fixtrain": make_fixtrain,
    }
)
"""What makes an instance from its seed; equal seeds, equal instances."""


@lru_cache(maxsize=64)
def make_instance(task: str, seed: int) -> Instance:
    """Make an instance, or return it again: the attempts of a group share one. Raises: KeyError."""
    return TASKS[task](seed)
