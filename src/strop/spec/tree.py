"""One run file as a tree of values, with the line of every key. Knows no settings.

TOML and YAML are told apart by the suffix. Duplicate keys are refused in both.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.errors import ConfigError, explain_refusal
from strop.spec.display import KeyPath, show_path
from strop.spec.toml_lines import locate_keys

MAX_FILE_BYTES = 256 * 1024
"""A run file is written by a person; anything larger is another kind of file."""
SUFFIXES = (".toml", ".yaml", ".yml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """What a file says."""

    shown: str
    """The file as messages name it."""
    folder: str
    """Absolute folder that its relative paths start from."""
    values: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> str:
        """Return 'file:line' of a key, or of the nearest table above it that has a line."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return f"{self.shown}:{self.lines[path[:length]]}"
        return self.shown


def read_tree(path: str) -> Tree:
    """Read one file.

    Raises: ConfigError if the file is missing, unreadable, too large, not UTF-8, or no valid TOML
        or YAML. Its `extends` is not followed here.
    """
    shown = show_path(path)
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in SUFFIXES:
        raise ConfigError(
            explain_refusal(
                f"run file {shown} has the suffix {suffix or '(none)'}",
                allowed="a file that ends in " + ", ".join(SUFFIXES),
                next_step="name the run file first, then key=value overrides",
            )
        )
    text = _read_text(path, shown)
    folder = os.path.dirname(os.path.abspath(path))
    values, lines = _parse_toml(text, shown) if suffix == ".toml" else _parse_yaml(text, shown)
    return Tree(shown=shown, folder=folder, values=values, lines=lines)


def _read_text(path: str, shown: str) -> str:
    """Return the text of a file with plain line ends and no byte-order mark."""
    try:
        if os.path.isfile(path) and os.path.getsize(path) > MAX_FILE_BYTES:
            raise ConfigError(
                explain_refusal(
                    f"run file {shown} has {os.path.getsize(path)} bytes",
                    allowed=f"at most {MAX_FILE_BYTES} bytes",
                    next_step="name the run file, not its data",
                )
            )
        data = Path(path).read_bytes() if not os.path.isdir(path) else None
    except FileNotFoundError as error:
        raise _missing_file(path, shown) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            explain_refusal(
                f"run file {shown} cannot be read ({_reason(error)})",
                allowed="a readable file",
                next_step="check the path and its permissions",
            )
        ) from error
    if data is None:
        raise ConfigError(
            explain_refusal(
                f"run file {shown} is a folder", allowed="a file", next_step="name a run file inside it"
            )
        )
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            explain_refusal(
                f"run file {shown} is not UTF-8 (line {line}, byte {error.start})",
                allowed="UTF-8 text",
                next_step="save the file as UTF-8",
            )
        ) from error


def _reason(error: Exception) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)


def _missing_file(path: str, shown: str) -> ConfigError:
    folder = os.path.dirname(path) or "."
    try:
        names = [name for name in os.listdir(folder) if name.lower().endswith(SUFFIXES)]
    except OSError:
        names = []
    # Compared without the suffix, which is alike in all of them.
    stems = {os.path.splitext(name)[0]: name for name in sorted(names)}
    wanted = os.path.splitext(os.path.basename(path))[0]
    near = [stems[stem] for stem in difflib.get_close_matches(wanted, list(stems), n=3, cutoff=0.6)]
    hint = f"did you mean {', '.join(map(show_path, near))}?" if near else "check the path"
    return ConfigError(
        explain_refusal(f"run file {shown} does not exist", allowed="an existing file", next_step=hint)
    )


def _parse_toml(text: str, shown: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    try:
        values = tomllib.loads(text)
        return values, locate_keys(text)
    except tomllib.TOMLDecodeError as error:
        match = re.search(r"^(.*) \(at line (\d+), column (\d+)\)$", str(error), re.DOTALL)
        line = int(match.group(2)) if match else text.count("\n") + 1
        reason = match.group(1) if match else str(error)
        if re.match("Cannot (overwrite|declare|mutate)|Duplicate", reason):
            reason = "a key or table is written twice"
        raise _unparsable(shown, "TOML", reason, line) from error
    except (ValueError, RecursionError) as error:
        # The standard library lets two through: integers of thousands of digits, and deep nesting.
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else "a number is too long"
        raise _unparsable(shown, "TOML", reason, None) from error


def _parse_yaml(text: str, shown: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    # Late, because most run files are TOML.
    from strop.spec.yaml_tree import YamlRefused, parse_yaml

    try:
        return parse_yaml(text)
    except YamlRefused as error:
        raise _unparsable(shown, "YAML", str(error), error.line) from error
    except (ValueError, OverflowError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else "an escape is invalid"
        raise _unparsable(shown, "YAML", reason, None) from error


def _unparsable(shown: str, language: str, reason: str, line: int | None) -> ConfigError:
    where = shown if line is None else f"{shown}:{line}"
    return ConfigError(
        explain_refusal(
            f"run file {where} cannot be read as {language}: {show_path(reason)}",
            allowed=f"valid {language} in which every key is written once",
            next_step="correct that line" if line is not None else "correct the file",
        )
    )
