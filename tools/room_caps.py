"""Hold the house to its caps: lines by room and by folder, files, and counts of concepts.

`room_caps.toml` has the caps. What is over its cap is an error, and so is a cap above the one of git's last
commit: they only go down.

Usage: python -m tools.room_caps
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from strop.cli.program import app
from strop.launch.backends import BACKENDS
from strop.spec.schema import all_keys, plain_settings

CAPS = "tools/room_caps.toml"
FOLDERS = ("tests", "benchmarks", "tools")


def count_lines(folder: Path, pattern: str = "**/*.py") -> int:
    """Count the lines of a folder's modules."""
    return sum(len(file.read_bytes().splitlines()) for file in folder.glob(pattern))


def count_used_once(trees: dict[str, ast.Module]) -> int:
    """Count private functions and methods that are named in one place beside their definition."""
    defined: set[str] = set()
    uses: Counter[str] = Counter()
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                defined |= {f"{module} {node.name}"} if node.name.strip("_") == node.name[1:] else set()
            elif isinstance(node, ast.Name | ast.Attribute):
                uses[f"{module} {node.id if isinstance(node, ast.Name) else node.attr}"] += 1
    return sum(uses[name] == 1 for name in defined)


def list_imports(tree: ast.Module) -> Iterator[str]:
    """Yield the names of modules, and of what may be one, that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def count_all(root: Path) -> dict[str, int]:
    """Count everything that has a cap."""
    package = root / "src/strop"
    trees = {
        ".".join(file.relative_to(root / "src").with_suffix("").parts): ast.parse(file.read_bytes())
        for file in package.rglob("*.py")
    }
    importers = Counter(name for tree in trees.values() for name in set(list_imports(tree)))
    return {
        **{room.name: count_lines(room) for room in sorted(package.iterdir()) if any(room.glob("*.py"))},
        "top-level modules": count_lines(package, "*.py"),
        "src": count_lines(package),
        **{folder: count_lines(root / folder) for folder in FOLDERS},
        "files": len(trees),
        "private functions used once": count_used_once(trees),
        "modules with one importer": sum(importers[name] == 1 for name in trees),
        "settings": len(plain_settings()),
        "task settings": len(all_keys()) - len(plain_settings()),
        "site options": sum(len(options.model_fields) for options in BACKENDS.values()),
        "commands": count_commands(typer.main.get_command(app)),
    }


def count_commands(command: Any) -> int:
    """Count the commands of a group, those of its groups instead of these."""
    return sum(map(count_commands, command.commands.values())) if hasattr(command, "commands") else 1


def main() -> int:
    """Print the counts that are no lines; return 1 if one is over its cap, or a cap went up."""
    root = Path(__file__).parents[1]
    caps: dict[str, int] = tomllib.loads((root / CAPS).read_text())
    git = subprocess.run(
        ["git", "show", f"HEAD:{CAPS}"], cwd=root, capture_output=True, text=True, check=False
    )
    before: dict[str, int] = tomllib.loads(git.stdout) if git.returncode == 0 else {}
    counts = count_all(root)
    wrong = [
        f"{name}: {count}; its cap is {caps.get(name, 0)}"
        for name, count in counts.items()
        if count > caps.get(name, 0)
    ]
    wrong += [
        f"{name}: a cap of {cap}, {before[name]} before"
        for name, cap in caps.items()
        if cap > before.get(name, cap)
    ]
    shown = ["src", *FOLDERS, *list(counts)[list(counts).index("files") :]]
    print("caps: " + ", ".join(f"{name} {counts[name]:,}" for name in shown))
    print(*(f"{CAPS}: {one}" for one in wrong), sep="\n", end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
