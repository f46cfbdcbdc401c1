"""Say which measured figures of the documents are older than what they measure.

A figure names its result by a link whose text is the commit, with a + behind it where the tree had changes
that were in none: `[1a2b3c4](../benchmarks/results/demo-2026-11-23.json)`. A link to a result that is not
there, or that is of another commit, is an error. Notices, which pass: commits since then that changed what
a result depends on, results of a tree with changes, and figures that name no result (rows of tables under a
heading that begins with `Results`, and paragraphs with `Measured on`).

Usage: python -m tools.figures [ROOT]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.links import list_documents, prose_lines

RESULTS = "benchmarks/results"
_LINK = re.compile(r"\[([^\]]*)\]\([^)\s]*" + RESULTS + r"/([^)\s/]+\.json)\)")
_HEADING = re.compile(r"^##? (.*)")
_LEARNING = ("algorithm", "engine", "environments", "hardware", "kernels", "policy", "spec", "tasks", "train")
ROOMS = {
    "code-judge": ("sandbox", "tasks"),
    "generate": ("engine", "hardware", "kernels", "policy"),
    "gradient-cosine": ("algorithm", "kernels", "policy"),
    "head-memory": ("algorithm", "kernels", "policy"),
    "kills": ("",),
    "launch": ("cli", "launch", "plan", "spec"),
    "mirror": ("io", "record", "store", *_LEARNING),
    "orchestrator": ("engine", "environments", "train"),
    "packing": ("engine", "policy"),
    "planning": ("plan", *_LEARNING),
    "ray-demo": ("cluster", *_LEARNING),
    "runtime": ("runtime",),
    "sharded": ("cluster", "policy"),
    "start-up": ("cli", "plan", "spec"),
    "store": ("io", "store"),
    "verify": ("tasks",),
}
"""Rooms of `src/strop` whose changes may change a benchmark's results; of all others, those that learn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One result file."""

    name: str
    commit: str
    """In full, or what else stands there."""
    has_changes: bool
    """Whether the tree had changes that no commit held."""

    @property
    def label(self) -> str:
        """What a link to it is to say."""
        return self.commit[:7] + "+" * self.has_changes


@dataclass(frozen=True, kw_only=True, slots=True)
class Named:
    """A place in a document that names a result."""

    place: str
    label: str
    file: str


def read_results(folder: Path) -> dict[str, Result]:
    """Read the commit of every result file, by the file's name."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        revision = str(json.loads(path.read_text(encoding="utf-8")).get("git_rev", "unknown"))
        commit, plus, _ = revision.partition("+")
        found[path.name] = Result(name=path.stem, commit=commit, has_changes=bool(plus))
    return found


def find_named(text: str, document: str) -> Iterator[Named]:
    """Yield every link to a result."""
    for number, line in prose_lines(text):
        for label, file in _LINK.findall(line):
            yield Named(place=f"{document}:{number}", label=label, file=file)


def find_unnamed(text: str) -> Iterator[int]:
    """Yield the lines of figures that name no result: rows under `Results`, paragraphs with `Measured on`."""
    is_results, is_body, paragraph, begins = False, False, "", 0
    for number, line in [*prose_lines(text), (0, "")]:
        heading = _HEADING.match(line)
        if heading:
            is_results = heading[1].startswith("Results")
        is_figure = is_body and line.startswith("|") and any(character.isdigit() for character in line)
        # The rows above the line of dashes are the head.
        is_body = line.startswith("|") and (is_body or line.startswith("|--"))
        if is_results and is_figure and not _LINK.search(line):
            yield number
        if line.strip() and not line.startswith("|"):
            begins = begins if paragraph else number
            paragraph += line + "\n"
            continue
        if "Measured on" in paragraph and not _LINK.search(paragraph):
            yield begins
        paragraph = ""


def list_paths(name: str) -> list[str]:
    """Return what a result depends on, by its name."""
    chosen = max((kind for kind in ROOMS if name.startswith(kind)), key=len, default="")
    rooms = ROOMS[chosen] if chosen else _LEARNING
    return [*(f"src/strop/{room}" for room in rooms), "benchmarks/arms", "recipes/arithmetic.toml"]


def count_later(root: Path, result: Result) -> tuple[int, str] | None:
    """Return how many later commits changed what a result depends on, and the last one's subject.

    None where the history that is here does not hold its commit.
    """
    command = ["git", "log", "--format=%s", f"{result.commit}..HEAD", "--", *list_paths(result.name)]
    done = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        return None
    subjects = done.stdout.splitlines()
    return len(subjects), subjects[0] if subjects else ""


def find_wrong(named: Sequence[Named], results: dict[str, Result]) -> Iterator[str]:
    """Yield one message for each result that is not there as it is named."""
    for one in named:
        result = results.get(one.file)
        if result is None:
            yield f"{one.place}: there is no {RESULTS}/{one.file}. Next: measure again, or correct the name."
        elif one.label != result.label:
            yield (
                f"{one.place}: {one.file} is of commit {result.label}, not {one.label}."
                f" Next: write [{result.label}]({RESULTS}/{one.file}) with the figures that stand in it."
            )


def find_old(root: Path, named: Sequence[Named], results: dict[str, Result]) -> Iterator[str]:
    """Yield one message for each result that is named and no longer what would be measured."""
    for file in dict.fromkeys(one.file for one in named if one.file in results):
        result, places = results[file], [one.place for one in named if one.file == file]
        later = count_later(root, result)
        said = ["a tree with changes that no commit holds"] if result.has_changes else []
        if later is None:
            said.append("its commit is not in the history here")
        elif later[0]:
            said.append(f"{later[0]} commits since changed what it measures, the last: {later[1]}")
        if said:
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            yield f"{places[0]}{more}: {file}, {result.label}: {'; '.join(said)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check all documents; return 1 if a result is not there as it is named."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    root = Path(given[0] if given else ".")
    results = read_results(root / RESULTS)
    named, notices = [], []
    for path in list_documents(root):
        document, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        named += list(find_named(text, document))
        notices += [f"{document}:{number}: a figure names no result" for number in find_unnamed(text)]
    notices += find_old(root, named, results)
    wrong = list(find_wrong(named, results))
    for message in [*wrong, *(f"notice: {notice}" for notice in notices)]:
        print(message)
    print(f"figures: {len(named)} results named, {len(wrong)} not there; {len(notices)} notices")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
