"""What is asked of the judge of Python programs, and what it says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

MAX_OPEN_FILES = 64
MEMORY_BYTES = 512 << 20
FILE_BYTES = 16 << 20
PACKAGES_DIR = "/packages"
"""Where a sandbox shows the packages that a task allows; nothing else lies there."""


class JudgeMode(StrEnum):
    """How a program is tested; the words of the job."""

    STATEMENTS = "statements"
    """Tests are Python statements over names that the program defines."""
    CALLS = "calls"
    """Tests are arguments of one function and the value that it returns."""
    PROGRAMS = "programs"
    """Tests are what a program reads and what it prints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeJob:
    """A program and its tests."""

    source: str
    """The untrusted program."""
    mode: JudgeMode
    num_tests: int
    names: tuple[str, ...] = ()
    """Names that the program is tested by, the entry point first; none for whole programs."""
    imports: tuple[str, ...] = ()
    """Import statements of the tests. They run before the program, which may lean on them."""
    definitions: str = ""
    """Code of the data set that the tests use, run where the program cannot change it."""
    setup: str = ""
    """Code of the data set that uses the program's names, run before each test's first use of them."""
    tests: tuple[str, ...] = ()
    """The statements; empty in the other modes."""
    input_output: str = ""
    """JSON with the lists `inputs` and `outputs`; empty for statements."""
    wall_s: float = 5.0
    """For all tests together."""
    test_s: float = math.inf
    """For one test."""
    packages: tuple[str, ...] = ()
    """What the program may import beside the standard library, if this installation has it."""

    def package_dirs(self) -> dict[str, Path]:
        """Return the allowed packages' directories by name, with the libraries that wheels put beside."""
        found: dict[str, Path] = {}
        for package in self.packages:
            spec = find_spec(package)
            for folder in map(Path, spec.submodule_search_locations or ()) if spec else ():
                libraries = folder.with_name(f"{folder.name}.libs")
                found |= {place.name: place for place in (folder, libraries) if place.is_dir()}
        return found

    def limits(self) -> dict[str, float | int | str]:
        """Return the limits as the runner reads them; the candidate finds its packages among them."""
        return {
            "wall_s": self.wall_s,
            "test_s": min(self.test_s, self.wall_s),
            "memory_bytes": MEMORY_BYTES,
            "file_bytes": FILE_BYTES,
            "max_open_files": MAX_OPEN_FILES,
            "cpu_s": math.ceil(self.wall_s) + 1,
            "packages_dir": PACKAGES_DIR if self.packages else "",
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeVerdict:
    """What became of the tests."""

    num_tests: int
    num_passed: int = 0
    num_failed: int = 0
    """Of those that gave another answer than the expected one."""
    num_errored: int = 0
    """Of those that raised, crashed or could not begin."""
    num_timed_out: int = 0
    cause: str = ""
    """Why the first test that did not pass did not; without what was expected."""
    isolation: str
    """Level of the sandbox, in the words of run files."""

    @property
    def is_right(self) -> bool:
        """Whether every test passed."""
        return self.num_passed == self.num_tests > 0

    @property
    def timed_out(self) -> bool:
        """Whether the program used up the time of a test."""
        return self.num_timed_out > 0
