"""Drawing the problems of a reasoning-gym data set, the same ones in every process.

Some generators iterate over Python sets: of letters (isomorphic_strings, ransom_note), of words
(word_ladder), of board squares (knight_swap), of sympy's monomials (polynomial_multiplication). The order of
a set depends on Python's hash seed, which differs between processes, so a resumed run or a judge's worker
would see other problems. A process with hash seed 0 draws these data sets once, and the user's cache keeps
them by request. Others (pool_matrix, list_functions) draw from the process-wide generators, which are seeded
here for each problem and restored.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version as package_version
from typing import Any

import numpy as np

from strop.errors import DataError, StoreError
from strop.tasks.overlap import normal_text

Entry = Mapping[str, Any]
"""One problem as the package gives it: `question`, `answer` and `metadata`."""

HASH_SEEDED = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Data sets of reasoning-gym 0.1.25 whose problems follow from Python's hash seed, found by drawing all data
sets under two seeds. Their entries are JSON values but for tuples, which their scorers take as lists."""
_DRAWS_PER_EXAMPLE = 8
_DRAW_LIMIT_S = 3600.0
"""A problem of knight_swap takes a second."""
_PROGRAM = "from strop.tasks.generated.gym_draws import main; main()"
_FORM = 2
"""Of the cached file; another number makes old files unread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawRequest:
    """The problems to draw."""

    dataset: str
    settings: Mapping[str, Any]
    """The data set's own, without seed and size."""
    seed: int
    num_held_out: int
    """The first different questions."""
    num_train: int
    """Those after them that pose none of their problems (`problem_key`)."""

    @property
    def num_wanted(self) -> int:
        """Different questions in all."""
        return self.num_held_out + self.num_train

    @property
    def size(self) -> int:
        """Problems drawn at most to find that many different questions."""
        return _DRAWS_PER_EXAMPLE * self.num_wanted


def create_dataset(request: DrawRequest) -> Any:
    """Create the package's data set. Raises what the package raises on its settings."""
    import reasoning_gym

    with private_random_state(f"{request.dataset}/{request.seed}"):
        return reasoning_gym.create_dataset(
            request.dataset, **{**request.settings, "seed": request.seed, "size": request.size}
        )


def draw_entries(dataset: Any, request: DrawRequest) -> list[Entry]:
    """Return the first problems with different questions; fewer where the data set has no more.

    Raises: DataError if the process that draws them fails; StoreError never, as the cache is for speed only.
    """
    if request.dataset not in HASH_SEEDED or not sys.flags.hash_randomization:
        return _draw_here(dataset, request)
    from strop.io import user_cache_dir

    facts = [_FORM, package_version("reasoning-gym"), sys.version_info[:2], asdict(request)]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    path = user_cache_dir() / "reasoning-gym" / f"{request.dataset}-{key}.json"
    with suppress(OSError, ValueError, LookupError, TypeError):
        entries: list[Entry] = json.loads(path.read_bytes())["entries"]
        return entries
    entries = _draw_in_process(request)
    with suppress(OSError, StoreError):
        from strop.io import write_bytes_atomically

        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(path, json.dumps({"request": asdict(request), "entries": entries}).encode())
    return entries


def _draw_here(dataset: Any, request: DrawRequest) -> list[Entry]:
    entries: dict[str, Entry] = {}
    held_out: set[str] = set()
    for index in range(len(dataset)):
        with private_random_state(f"{request.dataset}/{request.seed}/{index}"):
            entry = dataset[index]
        question, answer = read_entry(entry)
        if len(entries) < request.num_held_out:
            held_out.add(problem_key(question, answer))
        elif problem_key(question, answer) in held_out:
            continue
        entries.setdefault(question, entry)
        if len(entries) == request.num_wanted:
            break
    return list(entries.values())


def read_entry(entry: Entry) -> tuple[str, str | None]:
    """Return question and answer as texts; None: the data set stores no answer."""
    return str(entry["question"]), None if entry["answer"] is None else str(entry["answer"])


def problem_key(question: str, answer: str | None) -> str:
    """Return what problems have in common that differ in order alone, such as 3 + 4 and 4 + 3.

    The words, numbers and signs of the question in order of the alphabet, with the answer; where none is
    stored, in their own order.
    """
    words = normal_text(question).split()
    return " ".join(words) if answer is None else " ".join([*sorted(words), "\n", answer])


def _draw_in_process(request: DrawRequest) -> list[Entry]:
    """Draw in a process of its own, whose sets are in the same order everywhere.

    Raises: DataError if that process fails or takes too long.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=json.dumps(asdict(request)).encode(),
            env={**os.environ, "PYTHONHASHSEED": "0"},
            capture_output=True,
            timeout=_DRAW_LIMIT_S,
            check=True,
        )
        entries: list[Entry] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        errors = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
        raise DataError(
            f"the problems of reasoning-gym data set {request.dataset} could not be drawn"
            f" ({type(error).__name__}; {errors[-1] if errors else 'no error text'})",
            allowed=f"settings with which {request.num_wanted} problems are drawn in {_DRAW_LIMIT_S:g} s",
            next_step="ask for fewer examples, or set PYTHONHASHSEED=0 to draw them in this process",
        ) from error
    return entries


@contextmanager
def private_random_state(stream_name: str) -> Iterator[None]:
    """Give a block its own seeded global random state, and put the old one back.

    Some data sets (pool_matrix, list_functions) draw from the process-wide generators, so their
    problems would depend on what ran before, and would disturb what runs after.
    """
    seed = int.from_bytes(hashlib.blake2b(stream_name.encode(), digest_size=4).digest(), "little")
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        # Standard output is for what was asked for; some of the generators print.
        with redirect_stdout(sys.stderr):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def main() -> None:
    """Answer one request: entries as JSON on standard output."""
    request = DrawRequest(**json.loads(sys.stdin.read()))
    entries = _draw_here(create_dataset(request), request)
    sys.stdout.write(json.dumps(entries))
