"""The shared interface of the suite's tasks: seeded instances with a starter, a hidden judge, known marks.

An attempt produces one file, its artefact: data, or Python source with one function. Source runs in a
separate sandbox and answers the judge's questions (`Play`). Labels, opponents and metrics stay here.
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
"""Largest fold off the best score that counts in the profile."""
_ALARM_ERRORS = 5.0
"""Scores by so many standard errors above the ceiling are no chance."""


class ArtefactRefused(Exception):
    """Raised for an artefact that cannot be scored; the message is for the model."""


class Phase(StrEnum):
    """The hidden draws on which an artefact is judged."""

    DEV = "dev"
    """The model may ask for these scores, within its budget."""
    SEALED = "sealed"
    """Only the reward uses these."""


Play: TypeAlias = Generator[list[list[Any]], list[Any], float]
"""The judging of source: yields lists of arguments, takes the function's results, and returns the score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The known points of an instance's scale, in the unit of its score."""

    floor: float
    """Score of the best answer that ignores the data."""
    baseline: float
    """Score of the starter."""
    ceiling: float
    """Score of the best possible answer."""
    ceiling_kind: str
    """Source of the ceiling: 'exact', 'bayes' (the generator's own rule), 'bound', or 'best_known'."""
    standard_error: float = 0.0
    """Standard error of a score at the ceiling, over the sealed draws."""
    limit: float | None = None
    """Largest honest score. None: the ceiling and five standard errors."""
    is_higher_better: bool = True

    def is_alarming(self, score: float) -> bool:
        """Whether no honest attempt can have this score."""
        sign = 1.0 if self.is_higher_better else -1.0
        limit = self.limit
        if limit is None:
            limit = self.ceiling + sign * (_ALARM_ERRORS * self.standard_error + 1e-9)
        return not math.isfinite(score) or sign * (score - limit) > 0

    def normalise(self, score: float | None) -> float:
        """Return a score as a reward: 0 is the starter, 1 the ceiling, -1 the least. None: the floor's."""
        value = self.floor if score is None else score
        return float(np.clip((value - self.baseline) / (self.ceiling - self.baseline), -1.0, 1.0))

    def share(self, score: float | None) -> float:
        """Return the share of the way from floor to ceiling, from 0 to 1."""
        value = self.floor if score is None else score
        return float(np.clip((value - self.floor) / (self.ceiling - self.floor), 0.0, 1.0))


def profile_area(share: float) -> float:
    """Return an attempt's contribution to the area under the performance profile, from 0 to 1.

    The profile is the share of tasks whose score lies within a fold of the best method's. The best method is
    always the ceiling, so an attempt is 1/share-fold off it, and the area does not depend on which other
    methods are compared. Its axis is the logarithm of the fold, from 1 to 10; beyond, nothing counts.
    """
    return max(0.0, 1.0 + math.log(share) / math.log(_MAX_FOLD)) if share > 0 else 0.0


def play_with(play: Play, function: Callable[..., Any]) -> float:
    """Return the score of a trusted function, such as a starter or an oracle. Raises: ArtefactRefused."""
    try:
        calls = next(play)
        while True:
            # Copies, as in a sandbox.
            calls = play.send([function(*arguments) for arguments in json.loads(json.dumps(calls))])
    except StopIteration as end:
        return float(end.value)


def load_function(source: bytes, name: str) -> Callable[..., Any]:
    """Return a function of source that strop itself wrote."""
    names: dict[str, Any] = {}
    exec(compile(source, "artefact", "exec"), names)
    function: Callable[..., Any] = names[name]
    return function


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One seeded instance of a task."""

    task: str
    statement: str
    """The exact task for the model; `README.md` of its workspace."""
    files: Mapping[str, bytes]
    """The initial workspace, including the starter."""
    artefact: str
    """Path in the workspace of the file that is judged."""
    marks: Marks
    oracle: bytes
    """An artefact near the ceiling, made with the generator's knowledge."""
    cheats: Mapping[str, bytes] = field(default_factory=dict)
    """Artefacts that must earn no more than the floor, by the kind of cheat."""
    leaked: bytes | None = None
    """An artefact made from the hidden draws; its score is alarming. None: there are no hidden draws."""
    score: Callable[[bytes, Phase], float] | None = None
    """Judges data. Raises: ArtefactRefused."""
    function: str | None = None
    """Name of the function that source must define."""
    play: Callable[[Phase], Play] | None = None
    """Judges source. Raises: ArtefactRefused."""

    @property
    def starter(self) -> bytes:
        """The initial artefact."""
        return self.files[self.artefact]


def seed_stream(task: str, seed: int, purpose: str) -> np.random.Generator:
    """Return the random generator of one purpose of an instance, independent of other purposes."""
    digest = hashlib.sha256(f"{SUITE_VERSION}/{task}/{seed}/{purpose}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def split_draws(task: str, seed: int, num_draws: int) -> dict[Phase, np.ndarray]:
    """Return the masks of the hidden draws of each phase; a fifth is for development."""
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

    Raises: ArtefactRefused for another format, a missing or repeated id, or a value that is not finite.
    """
    lines = _decode(artefact).split()
    if len(lines) != num_rows + 1:
        raise ArtefactRefused(f"{len(lines) - 1} rows below the header; there must be {num_rows}")
    values = np.full(num_rows, np.nan)
    for line in lines[1:]:
        name, _, value = line.partition(",")
        # Python refuses to parse thousands of digits.
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
    """Parse JSON without NaN and infinities. Raises: ArtefactRefused for malformed JSON."""

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
    """Return a reply that is an integer from 0 to `num_choices` - 1. Raises: ArtefactRefused for another."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_choices:
        raise ArtefactRefused(
            f"it returned {str(value)[:40]}; it must return an integer from 0 to {num_choices - 1}"
        )
    return value


def as_number(value: Any) -> float:
    """Return a reply that is a finite number. Raises: ArtefactRefused for another."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # An integer may be too large for a float.
    if not is_number or not abs(value) < sys.float_info.max:
        raise ArtefactRefused(f"it returned {str(value)[:40]}; it must return a finite number")
    return float(value)


def cheating_sources(function: str, starter: str) -> dict[str, bytes]:
    """Return programs that try to influence the judge by other means than their function's answers.

    `starter` is source that defines the function; some cheats append it so that they look normal.
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
