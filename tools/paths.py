"""Find paths that exist on one machine only: home folders and working copies of whoever wrote a file.

They run for their author and for nobody else. Paths below the temporary folder are not looked for:
a test may need one as a value that it never touches. So may the home of one of PLACEHOLDERS, people
that examples and tests invent.

Usage: python -m tools.paths [ROOT]
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

PLACEHOLDERS = ("ada", "user", "you")
_MACHINE_PATH = re.compile(
    r"(?<![\w.$}~-])/(?:root|work|(?:home|Users)/(?!(?:" + "|".join(PLACEHOLDERS) + r")/)[\w.-]+)/[\w.-]+"
)


def find_machine_paths(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and path for everything that looks like somebody's own folder."""
    for number, line in enumerate(text.splitlines(), start=1):
        for match in _MACHINE_PATH.finditer(line):
            yield number, match[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check every text file that git would keep; return 1 if one names such a path."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    root = Path(given[0] if given else ".")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    files = [name for name in sorted(listed.split("\0")) if name and (root / name).is_file()]
    found = 0
    for name in files:
        text = (root / name).read_bytes().decode("utf-8", errors="replace")
        for number, path in find_machine_paths(text):
            found += 1
            print(f"{name}:{number}: {path} exists on one machine only. Next: make it relative or a setting.")
    print(f"paths: {len(files)} files, {found} machine paths")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
