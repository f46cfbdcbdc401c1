"""The optimizer's state of ranks that do not see the run's disk, on its way to it and back.

It crosses in pieces, through Ray, over connections that carry the run's token. Each rank saves its own files,
and reads what it needs from all.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from strop.io.atomic import explain_write_failure

Guard = Callable[[Awaitable[Any]], Awaitable[Any]]
PIECE_BYTES = 64 << 20
"""Some of them fit into Ray's smallest object store at a time."""


class StagedState:
    """A folder on a rank's machine through which its state passes."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def open(self) -> Path:
        """Make the folder, empty. Raises: StoreError."""
        self.clear()
        try:
            # In the attempt's own folder, which goes with its lease.
            self._path = Path(tempfile.mkdtemp(prefix="strop-state-"))
        except OSError as error:
            raise explain_write_failure(error, Path(tempfile.gettempdir())) from error
        return self._path

    def list_files(self) -> dict[str, int]:
        """Return names and sizes in bytes of what is in it."""
        return {path.name: path.stat().st_size for path in sorted(self._opened().iterdir())}

    def read(self, name: str, offset: int) -> bytes:
        """Return a piece of a file."""
        with (self._opened() / name).open("rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)

    def append(self, name: str, piece: bytes) -> None:
        """Add a piece to the end of a file. Raises: StoreError."""
        _append(self._opened() / name, piece)

    def clear(self) -> None:
        """Remove the folder."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None

    def _opened(self) -> Path:
        assert self._path is not None, "open comes first"
        return self._path


async def fetch_files(rank: Any, sizes: Mapping[str, int], target: Path, guard: Guard) -> None:
    """Write the files that a rank has staged into a folder here.

    Raises: StoreError; what `guard` does where the rank has ended.
    """
    for name, num_bytes in sizes.items():
        for offset in range(0, num_bytes, PIECE_BYTES):
            piece = await guard(rank.read_staged.remote(name, offset))
            await asyncio.to_thread(_append, target / name, piece)


async def send_files(source: Path, rank: Any, guard: Guard) -> None:
    """Stage every file of a folder here with a rank.

    Raises: StoreError; OSError if a file cannot be read; what `guard` does where the rank has ended.
    """
    for path in await asyncio.to_thread(lambda: sorted(source.iterdir())):
        with path.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                await guard(rank.append_staged.remote(path.name, piece))


def _append(path: Path, piece: bytes) -> None:
    try:
        with path.open("ab") as file:
            file.write(piece)
    except OSError as error:
        raise explain_write_failure(error, path) from error
