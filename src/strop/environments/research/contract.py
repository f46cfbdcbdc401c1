"""What every task of the suite is: seeded instances with a starter, a hidden judge, and known marks.

An attempt leaves one file behind, its artefact. It is data, or Python source with one function; source runs
in a sandbox of its own and answers what the judge asks (`Play`). Labels, opponents and metrics stay here.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np

SUITE_VERSION = "research-1"
MAX_ARTEFACT_BYTES = 1 << 20
_DEV_FRAC = 0.2
_MAX_FOLD = 10.0
"""Share of the range, as one in so many, from which on an attempt counts in the profile."""
_ALARM_ERRORS = 5.0
"""Standard errors above the ceiling that chance does not explain."""


class ArtefactRefused(Exception):
    """Raised for an artefact that cannot be scored; the message is for the model."""


class Phase(StrEnum):
    """Which hidden draws an artefact is judged on."""

    DEV = "dev"
    """Told to the model, within its budget."""
    SEALED = "sealed"
    """The reward's alone."""


Play: TypeAlias = Generator[list[list[Any]], list[Any], float]
"""The judging of source: yields lists of arguments, takes what the function returned for each; the score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The known points of an instance's scale, in the unit of its score."""

    floor: float
    """What the best answer earns that looks at nothing."""
    baseline: float
    """What the starter earns."""
    ceiling: float
    """What the best answer earns that can be had."""
    ceiling_kind: str
    """How that is known: 'exact', 'bayes' (the generator's own rule), 'bound', or 'best_known'."""
    standard_error: float = 0.0
    """Of a score at the ceiling, over the sealed draws."""
    limit: float | None = None
    """What no honest score goes beyond. None: the ceiling and five standard errors."""
    is_higher_better: bool = True

    def is_alarming(self, score: float) -> bool:
        """Whether an honest attempt cannot have this score."""
        sign = 1.0 if self.is_higher_better else -1.0
        limit = self.limit
        if limit is None:
            limit = self.ceiling + sign * (_ALARM_ERRORS * self.standard_error + 1e-9)
        return not math.isfinite(score) or sign * (score - limit) > 0

    def normalise(self, score: float | None) -> float:
        """Return a score as a reward: 0 is the starter, 1 the ceiling, -1 the least. None: none was had."""
        found = self.floor if score is None else score
        return float(np.clip((found - self.baseline) / (self.ceiling - self.baseline), -1.0, 1.0))

    def share(self, score: float | None) -> float:
        """Return the share of the way from floor to ceiling, from 0 to 1."""
        found = self.floor if score is None else score
        return float(np.clip((found - self.floor) / (self.ceiling - self.floor), 0.0, 1.0))


def profile_area(share: float) -> float:
    """Return what an attempt adds to the area under the performance profile, from 0 to 1.

    The profile is the share of tasks whose score lies within a fold of the best method's. The best method is
    always the ceiling, so an attempt is 1/share-fold off it, and the area does not depend on which other
    methods are compared. Its axis is the logarithm of the fold, from 1 to 10; beyond, nothing counts.
    """
    return max(0.0, 1.0 + math.log(share) / math.log(_MAX_FOLD)) if share > 0 else 0.0


def play_with(play: Play, function: Callable[..., Any]) -> float:
    """Return the score of a function of strop's own. Raises: ArtefactRefused."""
    try:
        calls = next(play)
        while True:
            # As a sandbox has them: copies.
            calls = play.send([function(*arguments) for arguments in json.loads(json.dumps(calls))])
    except StopIteration as end:
        return float(end.value)


def load_function(source: bytes, name: str) -> Callable[..., Any]:
    """Return a function of source that strop itself wrote."""
    names: dict[str, Any] = {}
    exec(compile(source, "artefact", "exec"), names)
    found: Callable[..., Any] = names[name]
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One seeded instance of a task."""

    task: str
    statement: str
    """What the model is asked, exactly; `README.md` of its workspace."""
    files: Mapping[str, bytes]
    """The workspace that an attempt begins with, the starter among them."""
    artefact: str
    """The file that is judged, by its path in the workspace."""
    marks: Marks
    oracle: bytes
    """An artefact near the ceiling, made with what the generator knows."""
    cheats: Mapping[str, bytes] = field(default_factory=dict)
    """Artefacts that must earn no more than the floor, by what they try."""
    leaked: bytes | None = None
    """An artefact made by looking at the hidden draws; its score is alarming. None: there are none to see."""
    score: Callable[[bytes, Phase], float] | None = None
    """Judges data. Raises: ArtefactRefused."""
    function: str | None = None
    """What source must define."""
    play: Callable[[Phase], Play] | None = None
    """Judges source. Raises: ArtefactRefused."""

    @property
    def starter(self) -> bytes:
        """The artefact that the workspace begins with."""
        return self.files[self.artefact]


def seed_stream(task: str, seed: int, purpose: str) -> np.random.Generator:
    """Return the generator of one purpose of an instance: streams of other purposes tell nothing of it."""
    digest = hashlib.sha256(f"{SUITE_VERSION}/{task}/{seed}/{purpose}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def split_draws(task: str, seed: int, num_draws: int) -> dict[Phase, np.ndarray]:
    """Return which hidden draws of an instance count in each phase, as masks; a fifth is for development."""
    is_dev = seed_stream(task, seed, "split").random(num_draws) < _DEV_FRAC
    return {Phase.DEV: is_dev, Phase.SEALED: ~is_dev}


def to_csv(header: Sequence[str], rows: Sequence[Sequence[object]]) -> bytes:
    """Return a table as CSV; no cell may need quotes."""
    lines = [",".join(header), *(",".join(map(str, row)) for row in rows)]
    return ("\n".join(lines) + "\n").encode()


def to_predictions(values: np.ndarray) -> bytes:
    """Return the table `id,prediction` that `read_column` reads."""
    return to_csv(("id", "prediction"), list(enumerate(values.tolist())))


def read_column(artefact: bytes, num_rows: int) -> np.ndarray:
    """Return the second column of a table `id,value` with one row for each id from 0, by id.

    Raises: ArtefactRefused for another form, a missing or repeated id, or a value that is no finite number.
    """
    lines = _decode(artefact).split()
    if len(lines) != num_rows + 1:
        raise ArtefactRefused(f"{len(lines) - 1} rows below the header; there must be {num_rows}")
    values = np.full(num_rows, np.nan)
    for line in lines[1:]:
        name, _, value = line.partition(",")
        # Python refuses to read thousands of digits.
        if not name.isascii() or not name.isdigit() or len(name) > 9 or not int(name) < num_rows:
            raise ArtefactRefused(f"the row {line[:60]!r} has no id from 0 to {num_rows - 1}")
        try:
            values[int(name)] = float(value)
        except ValueError:
            raise ArtefactRefused(f"the row {line[:60]!r} has no number behind its id") from None
    if not np.isfinite(values).all():
        raise ArtefactRefused("an id is missing, or a value is not finite")
    return values


def read_json(artefact: bytes) -> Any:
    """Return what JSON says; NaN and infinities are none. Raises: ArtefactRefused for what is no JSON."""

    def refuse(word: str) -> float:
        raise ArtefactRefused(f"{word} is no number")

    try:
        return json.loads(_decode(artefact), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ArtefactRefused(f"it is no JSON: {error}"[:200]) from None


def _decode(artefact: bytes) -> str:
    try:
        return artefact.decode()
    except UnicodeDecodeError:
        raise ArtefactRefused("it is no UTF-8 text") from None


def as_index(value: Any, num_choices: int) -> int:
    """Return a reply that names one of some choices. Raises: ArtefactRefused for another one."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_choices:
        raise ArtefactRefused(
            f"it returned {str(value)[:40]}; it must return an integer from 0 to {num_choices - 1}"
        )
    return value


def as_number(value: Any) -> float:
    """Return a reply that is a finite number. Raises: ArtefactRefused for another one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # An integer may be too large for a float.
    if not is_number or not abs(value) < sys.float_info.max:
        raise ArtefactRefused(f"it returned {str(value)[:40]}; it must return a finite number")
    return float(value)


def cheating_sources(function: str, starter: str) -> dict[str, bytes]:
    """Return programs that try to be judged otherwise than by what their function answers.

    `starter` is source that defines the function; it stands behind the attempts that must leave no trace.
    """
    return {
        "forged stdout": b'print(\'{"score": 1.0, "reward": 1.0}\', flush=True)\nraise SystemExit(0)\n',
        "os._exit": b"import os\nos.write(1, b'RESULT 1.0 1.0 1.0')\nos._exit(0)\n",
        "exits in the function": (
            f"import os\ndef {function}(*arguments):\n"
            "    for descriptor in range(3, 64):\n"
            "        try:\n            os.write(descriptor, b'{\"score\": 1.0}\\n')\n"
            "        except OSError:\n            pass\n"
            "    os._exit(0)\n"
        ).encode(),
        "closes descriptors": f"import os\nos.closerange(0, 256)\n{starter}".encode(),
        "no such function": b"answer = 1\n",
        "not a number": f"def {function}(*arguments):\n    return float('nan')\n".encode(),
        "an object of its own": (
            f"class Best(int):\n    def __lt__(self, other): return False\n"
            f"    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
            f"def {function}(*arguments):\n    return Best(10**9)\n"
        ).encode(),
    }
