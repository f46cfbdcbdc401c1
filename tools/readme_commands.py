"""Run the code blocks of a document and compare what they print with what the document shows.

In a block fenced as `console` a line that starts with `$ ` is a command, what follows is its output,
and a line of `...` stands for any lines. A block fenced as `python` is one program without shown
output. The comment above a block says what happens:

    <!-- check: run -->                 run it; exit status 0, output as shown where any is shown
    <!-- check: run, numbers vary -->   the same, with every number read as the same number
    <!-- check: run by PATH -->         not run here: the file at PATH runs it, or reads the document
    <!-- check: not run: REASON -->     it needs what no machine of the tests has
    <!-- check: test command -->        not run here: printed by --test-command, for `.ci/run`

A block without such a comment is an error, so no command of the document stays untried.

Usage: python -m tools.readme_commands [--test-command] [DOCUMENT ...]
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

COMMAND_LIMIT_S = 120

_MARKER = re.compile(r"^<!--\s*check:\s*(.+?)\s*-->$")
_FENCE = re.compile(r"^```(console|bash|sh|shell|python)\s*$")
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command of a block and the output shown below it."""

    line: int
    text: str
    shown: tuple[str, ...] = ()


@dataclass(kw_only=True, slots=True)
class Block:
    """One code block with what its comment asks for."""

    line: int
    marker: str
    """Text of the comment above, '' where there is none."""
    commands: list[Command] = field(default_factory=list)


def read_blocks(text: str) -> list[Block]:
    """Return the code blocks of a document, in order."""
    blocks: list[Block] = []
    lines = text.splitlines()
    marker, index = "", 0
    while index < len(lines):
        line = lines[index].strip()
        fence = _FENCE.match(line)
        if fence:
            end = lines.index("```", index + 1)
            read = _read_program if fence[1] == "python" else _read_commands
            commands = list(read(lines[index + 1 : end], index + 2))
            blocks.append(Block(line=index + 1, marker=marker, commands=commands))
            index = end
        found = _MARKER.match(line)
        if line:
            marker = found[1] if found else ""
        index += 1
    return blocks


def _read_program(lines: Sequence[str], first_line: int) -> Iterator[Command]:
    """Yield one command that runs the lines as a Python program."""
    yield Command(line=first_line, text=f"python -W error -c {shlex.quote(chr(10).join(lines))}")


def _read_commands(lines: Sequence[str], first_line: int) -> Iterator[Command]:
    """Yield the commands of a block; a trailing backslash continues one on the next line."""
    number, text, shown = 0, "", list[str]()
    for line_number, line in enumerate(lines, start=first_line):
        if text.endswith("\\"):
            text = text[:-1].rstrip() + " " + line.removeprefix("> ").strip()
        elif line.startswith("$ "):
            if text:
                yield Command(line=number, text=text, shown=tuple(shown))
            number, text, shown = line_number, line[2:].rstrip(), []
        else:
            shown.append(line.rstrip())
    if text:
        yield Command(line=number, text=text, shown=tuple(shown))


def matches_shown(printed: str, shown: Sequence[str], *, numbers_vary: bool) -> bool:
    """Compare output with what is shown; a shown line of `...` stands for any number of lines."""
    pattern = "".join(
        r"(?:[^\n]*\n)*?" if line.strip() == "..." else re.escape(_plain(line, numbers_vary)) + r"\n"
        for line in shown
    )
    lines = [_plain(line.rstrip(), numbers_vary) for line in printed.strip("\n").splitlines()]
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


def _plain(line: str, numbers_vary: bool) -> str:
    """Read every number as 0, and a run of blanks as one, where numbers vary (columns follow them)."""
    return re.sub(r"[ \t]+", " ", _NUMBER.sub("0", line)) if numbers_vary else line


def run_command(command: Command, root: Path, *, numbers_vary: bool) -> str | None:
    """Run one command at the root; return what is wrong, or None."""
    beside_python = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": f"{beside_python}{os.pathsep}{os.environ.get('PATH', '')}",
        "COLUMNS": "100",
    }
    try:
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.text],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"still ran after {COMMAND_LIMIT_S} s. Next: mark it 'run by PATH' and run it there."
    if ended.returncode != 0:
        return f"exit status {ended.returncode}; it printed:\n{ended.stdout.rstrip()}"
    if command.shown and not matches_shown(ended.stdout, command.shown, numbers_vary=numbers_vary):
        return f"the document shows other output; it printed:\n{ended.stdout.rstrip()}"
    return None


def check_block(block: Block, root: Path, document: str) -> Iterator[str]:
    """Yield what is wrong with one block, running it if its comment says so. `document`: the file's name."""
    kind, _, path = block.marker.partition(" by ")
    if block.marker in ("run", "run, numbers vary"):
        for command in block.commands:
            wrong = run_command(command, root, numbers_vary=block.marker.endswith("vary"))
            if wrong:
                yield f"line {command.line}: {command.text}: {wrong}"
    elif kind == "run" and path:
        place = root / path
        text = place.read_text(encoding="utf-8") if place.is_file() else ""
        for command in block.commands:
            if not _names_command(text, command.text, document):
                yield f"line {command.line}: {path} does not run {command.text!r}. Next: name one that does."
    elif block.marker != "test command" and not block.marker.startswith("not run: "):
        yield (
            f"line {block.line}: a code block marked {block.marker!r}. Allowed: a comment above it, "
            "'check: run', 'check: run, numbers vary', 'check: run by PATH', 'check: not run: REASON' or"
            " 'check: test command'. Next: add one."
        )


def _names_command(text: str, command: str, document: str) -> bool:
    """Tell whether a file holds a command, as a string or list of words, or reads the document itself."""
    if document in text:
        return True
    as_list = ", ".join(f'"{word}"' for word in shlex.split(command, comments=True))
    return command in text or as_list in text


def find_test_command(blocks: Sequence[Block]) -> str:
    """Return the one command marked as the test command.

    Raises: ValueError if there is not exactly one.
    """
    found = [command.text for block in blocks if block.marker == "test command" for command in block.commands]
    if len(found) != 1:
        raise ValueError(
            f"the document marks {len(found)} test commands. Allowed: exactly one. "
            "Next: put '<!-- check: test command -->' above the block that runs the tests."
        )
    return found[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a document's commands, or print its test command; return 1 if one is wrong."""
    parser = argparse.ArgumentParser(description="Run the code blocks of a document.")
    parser.add_argument("--test-command", action="store_true", help="print the test command and run nothing")
    parser.add_argument("documents", nargs="*", type=Path, default=[Path("README.md")])
    options = parser.parse_args(arguments)
    all_blocks = {path: read_blocks(path.read_text(encoding="utf-8")) for path in options.documents}
    if options.test_command:
        print(find_test_command([block for blocks in all_blocks.values() for block in blocks]))
        return 0
    is_wrong = False
    for path, blocks in all_blocks.items():
        root = Path.cwd() if path.parent.name == "docs" else path.resolve().parent
        wrong = [message for block in blocks for message in check_block(block, root, path.name)]
        for message in wrong:
            print(f"{path}: {message}")
        num_run = sum(len(block.commands) for block in blocks if block.marker in ("run", "run, numbers vary"))
        print(f"{path}: {len(blocks)} code blocks, {num_run} commands run, {len(wrong)} wrong")
        is_wrong |= bool(wrong)
    return 1 if is_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
