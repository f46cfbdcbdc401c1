"""The tasks of the suite, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
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


@dataclass(frozen=True, slots=True)
class Kind:
    """A task of the suite."""

    make: Callable[[int], Instance]
    """Makes an instance from its seed; equal seeds, equal instances."""
    summary: str
    """The task in a sentence, and the artefact; the same for every instance."""


TASKS: Mapping[str, Kind] = MappingProxyType(
    {
        "tab_class": Kind(
            make_class, "Predict from a table of people who of others survived: predictions.csv."
        ),
        "tab_reg": Kind(make_price, "Predict the prices of houses from a table of others: predictions.csv."),
        "bos": Kind(
            make_sexes,
            "Play a matrix game well, again and again, with a partner that remembers little: player.py.",
        ),
        "ipd": Kind(
            make_prisoners,
            "Play a prisoner's dilemma well, again and again, with a partner of some habits: player.py.",
        ),
        "blotto": Kind(
            make_blotto,
            "Spread an army over fields against a commander whose past allocations are known:"
            " allocation.json.",
        ),
        "sat3": Kind(
            make_sat,
            "Choose where a solver of Boolean formulas branches, so that it tries little: branching.py.",
        ),
        "glyphs": Kind(
            make_glyphs, "Tell which small shape is somewhere on a noisy canvas: predictions.csv."
        ),
        "mcar": Kind(make_car, "Drive a weak car up a hill with little effort: controller.py."),
        "cpole": Kind(make_pole, "Balance a pole on a cart: controller.py."),
        "charlm": Kind(
            make_charlm, "Predict the next symbol of a text of an unknown language: logprobs.json."
        ),
        "fixtrain": Kind(
            make_fixtrain, "Find what is broken in a program that trains a network, and repair it: train.py."
        ),
    }
)
_making = Lock()


def make_instance(task: str, seed: int) -> Instance:
    """Make an instance, or return it from the cache: a group's attempts share one. Raises: KeyError."""
    # All attempts of a group call this at once, each in a thread.
    with _making:
        return _make_once(task, seed)


@lru_cache(maxsize=64)
def _make_once(task: str, seed: int) -> Instance:
    return TASKS[task].make(seed)
