"""A command's output: results to standard output, everything else to standard error.

While a run is open, its log gets all output too, from the start of the command.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from strop.errors import EXIT_FAILED
from strop.io.notices import listen

if TYPE_CHECKING:
    from strop.errors import StropError
    from strop.record import RunDir


_NAME_CHARACTERS = 100
PLAIN_WIDTH = 200
"""Width of a table that is not printed on a terminal."""


class RunLog(io.StringIO):
    """A text stream that buffers its text until `open_at` names its file.

    Lines that a full disk does not take are lost: the run ends by its record, which says so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.path: Path | None = None
        self._file: FileIO | None = None

    def open_at(self, path: Path) -> None:
        """Write to a file from now on, beginning with the buffered text."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = FileIO(path, "a")
        self.path = path
        self.write(self.getvalue())

    def write(self, text: str) -> int:
        """Write without buffering, so that a killed run's log ends with its last line."""
        if self._file is None:
            return super().write(text)
        with suppress(OSError):
            self._file.write(text.encode(errors="backslashreplace"))
        return len(text)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        super().close()


class Output:
    """The output of one command."""

    def __init__(self) -> None:
        self.log = RunLog()

    def open_run(self, run_dir: RunDir) -> None:
        """Write to the log of the next attempt from now on."""
        self.log.open_at(run_dir.next_attempt().log_path)
        self.say(f"run {run_dir.path}")

    def say(self, text: str) -> None:
        """Print a line that is not a result, on standard error and to the log."""
        for stream in (sys.stderr, self.log):
            with suppress(OSError):
                print(text, file=stream, flush=True)

    def hear_notices(self) -> AbstractContextManager[None]:
        """Print every notice of the `with` block."""
        return listen(lambda notice: self.say(f"notice: {notice}"))

    def say_refusal(self, error: StropError) -> None:
        """Print one of strop's own errors; its cause goes before it, to the log if one is open."""
        if self.log.path is None:
            for note in getattr(error, "__notes__", ()):
                print(note, file=sys.stderr)
        elif error.__cause__ is not None:
            traceback.print_exception(error, file=self.log)
        self.say(f"strop: {error}")

    def say_bug(self, error: Exception) -> None:
        """Print an unexpected error, and where its traceback is."""
        stream: TextIO = sys.stderr if self.log.path is None else self.log
        traceback.print_exception(error, file=stream)
        where = "above" if self.log.path is None else f"in {self.log.path}"
        self.say(f"strop: unexpected {type(error).__name__}: {error}. The traceback is {where}.")

    def give(self, text: str) -> None:
        """Print a line of the result."""
        print(text)
        print(text, file=self.log)

    def give_json(self, value: Any) -> None:
        """Print the result as JSON."""
        print(json.dumps(value, indent=1, ensure_ascii=False))

    def give_json_list(self, values: Iterable[Any]) -> None:
        """Print a JSON list, one entry per line, as the entries arrive."""
        print("[", end="")
        for index, value in enumerate(values):
            print(",\n " if index else "\n ", json.dumps(value, ensure_ascii=False), sep="", end="")
        print("\n]")

    def give_table(
        self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = ""
    ) -> None:
        """Print a table; columns of numbers are aligned to the right."""
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        from strop.view import make_harmless

        table = Table(box=SIMPLE_HEAD)
        for index, column in enumerate(columns):
            is_number = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
            # Readers search the first column, so its names are never broken over lines.
            is_name = index == 0 and all(len(_show(row[0])) <= _NAME_CHARACTERS for row in rows)
            table.add_column(
                column, justify="right" if is_number else "left", overflow="fold", no_wrap=is_name
            )
        for row in rows:
            table.add_row(*(Text(make_harmless(_show(cell))) for cell in row))

        class Page(Console):
            def on_broken_pipe(self) -> None:
                # By itself it would raise SystemExit.
                raise typer.Exit(EXIT_FAILED)

        console = Page(file=sys.stdout, highlight=False)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            # For a file or a program there is no screen to fit into.
            console.width = PLAIN_WIDTH
        if title:
            # Not rich's own title, which is broken at the table's width.
            console.print(Text(title, style="bold"))
        console.print(table)

    def close(self) -> None:
        """Close the log."""
        self.log.close()


def _show(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:g}" if isinstance(cell, float) else str(cell)
