"""How the files of rollouts of an evaluation are named: by the examples, in a row, that each is about."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_NAME = re.compile(r"examples-(\d{6,})-(\d{6,})\.parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Some examples in a row, at least one."""

    examples: range
    """Positions among the examples of the evaluation, which fix their order only."""

    @property
    def file_name(self) -> str:
        """First and last position, for example 'examples-000000-000031.parquet'."""
        return f"examples-{self.examples[0]:06d}-{self.examples[-1]:06d}.parquet"

    @classmethod
    def of_file(cls, path: Path) -> Self | None:
        """Return the shard that a file of this name holds; None for any other name."""
        match = _NAME.fullmatch(path.name)
        examples = range(int(match[1]), int(match[2]) + 1) if match else range(0)
        return cls(examples=examples) if examples else None


def list_shards(folder: Path) -> list[Path]:
    """Return the shards in a folder, in the order of their examples; none where it is no folder."""
    found = {path: Shard.of_file(path) for path in (folder.iterdir() if folder.is_dir() else ())}
    firsts = {path: shard.examples[0] for path, shard in found.items() if shard is not None}
    return sorted(firsts, key=lambda path: (firsts[path], path.name))
