"""The source files of user code: its own file, and the files beside and below it that it imports.

They are found by parsing all import statements, also those inside functions, without running them. Installed
packages have their own versions and do not count.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path


def list_sources(path: Path) -> tuple[Path, ...]:
    """Return a file and all files beside and below it that it imports, sorted."""
    root = root_of(path)
    sources: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in sources:
            continue
        sources.add(file)
        waiting += [source for name in _imported(file, root) for source in _files_of(root, name)]
    return tuple(sorted(sources))


def hash_sources(path: Path) -> str:
    """Return a hash over the contents of all source files. Raises: OSError if one cannot be read."""
    root = root_of(path)
    whole = hashlib.sha256()
    for file in list_sources(path):
        content = file.read_bytes()
        whole.update(f"{file.relative_to(root).as_posix()} {len(content)}\0".encode() + content)
    return whole.hexdigest()


def root_of(path: Path) -> Path:
    """Return the folder from which imports start: above all packages of the file."""
    folder = path.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _imported(file: Path, root: Path) -> Iterator[tuple[str, ...]]:
    """Yield the modules that a file's import statements may mean, as parts of their names."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    package = file.parent.relative_to(root).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = (*above, *(node.module.split(".") if node.module else ()))
            yield module
            yield from ((*module, alias.name) for alias in node.names)


def _files_of(root: Path, name: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files that importing a module runs: those of its parent packages, and its own."""
    for length in range(1, len(name) + 1):
        place = root.joinpath(*name[:length])
        candidates = (place / "__init__.py", place.with_name(f"{place.name}.py"))
        yield from (file for file in candidates if file.is_file())
