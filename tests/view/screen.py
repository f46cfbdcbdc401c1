"""What a terminal shows of what is written to it: rows that wrap."""

from __future__ import annotations

import io
import re

from rich.cells import cell_len

_CODE = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])")


class Screen(io.StringIO):
    """A terminal that is written to as a file, and knows the few codes that a calm display needs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.rows: list[list[str]] = [[]]
        """Cells, an empty one behind each wide character."""
        self.row, self.column = 0, 0
        self.is_cursor_hidden = False
        self.has_colour = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        position = 0
        while position < len(text):
            if found := _CODE.match(text, position):
                self._obey(found[1], found[2])
                position = found.end()
            else:
                self._put(text[position])
                position += 1
        return len(text)

    def show(self) -> list[str]:
        """Return the rows that hold something."""
        return [text for row in self.rows if (text := "".join(row).rstrip())]

    def _obey(self, given: str, code: str) -> None:
        if code == "A":
            self.row = max(self.row - int(given or 1), 0)
        elif code == "K":
            assert given == "2"
            self.rows[self.row] = []
        elif code in "hl":
            assert given == "?25"
            self.is_cursor_hidden = code == "l"
        elif code == "m":
            numbers = [int(one) for one in given.split(";") if one]
            self.has_colour = self.has_colour or any(30 <= one <= 49 or 90 <= one <= 107 for one in numbers)
        else:
            raise AssertionError(f"the display used the code {given}{code}")

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.row, self.column = self.row + 1, 0
            if self.row == len(self.rows):
                self.rows.append([])
        else:
            assert character >= " ", f"{character!r} reached the terminal"
            row = self.rows[self.row]
            if not cell_len(character) and self.column and len(row) >= self.column:
                row[self.column - 1] += character
                return
            cells = [character, *[""] * (cell_len(character) - 1)]
            if self.column + len(cells) > self.width:
                self._put("\n")
            row = self.rows[self.row]
            row += [" "] * (self.column - len(row))
            row[self.column : self.column + len(cells)] = cells
            self.column += len(cells)
