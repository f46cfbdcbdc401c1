"""Build contexts as RemoteRuntime uploads them: base64 text of a gzip tar, in one part of a form.

The archive is looked at before a node gets it: a member that would land outside of where it is unpacked, or
link there, is refused, and so is one that unpacks to far more than it is.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request

from strop.io.atomic import explain_write_failure
from strop.runtime.http_server import HttpError, one_part, read_form
from strop.runtime.web import read_body

MAX_CONTEXT_BYTES = 128 << 20
"""Of the form, base64 and all. It is held in memory while it is read."""
MAX_UNPACKED_BYTES = 16 << 30
MAX_MEMBERS = 500_000
UPLOAD_LIMIT_S = 120.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRequest:
    """`POST /build`, understood."""

    target: str
    tags: tuple[str, ...]
    archive: Path
    """The gzip tar; there while the request is open."""

    async def read(self) -> AsyncIterator[bytes]:
        """Yield the archive."""
        with self.archive.open("rb") as file:
            while part := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield part


@asynccontextmanager
async def open_build(request: Request, folder: Path) -> AsyncIterator[BuildRequest]:
    """Give what a client wants built; its archive is kept in `folder` until the end of the block.

    Raises: HttpError: 408, 413, 422 for what cannot be built from; StoreError if it cannot be kept.
    """
    body = await read_body(request, max_bytes=MAX_CONTEXT_BYTES, limit_s=UPLOAD_LIMIT_S)
    content_type = request.headers.get("content-type", "")
    try:
        archive = await asyncio.to_thread(_keep_archive, folder, content_type, body)
    except OSError as error:
        raise explain_write_failure(error, folder) from error
    del body
    try:
        await asyncio.to_thread(check_archive, archive.archive)
        yield archive
    finally:
        archive.archive.unlink(missing_ok=True)


def check_archive(path: Path) -> None:
    """Refuse an archive that cannot be unpacked without harm.

    Raises: HttpError 422 for a broken one, members or links that lead outside, and devices; 413 for too much.
    """
    num_members = num_bytes = 0
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                num_members += 1
                num_bytes += member.size
                if num_members > MAX_MEMBERS or num_bytes > MAX_UNPACKED_BYTES:
                    raise HttpError(413, f"the archive has more than {MAX_MEMBERS} files or too many bytes")
                _check_member(member, path.parent)
    except (tarfile.TarError, OSError, EOFError, binascii.Error, ValueError) as error:
        raise HttpError(422, f"the context is not a gzip tar that can be unpacked ({error})") from error


def _check_member(member: tarfile.TarInfo, folder: Path) -> None:
    if os.path.isabs(member.name) or ".." in Path(member.name).parts:
        raise HttpError(422, f"member {member.name!r} of the archive leads outside of it")
    try:
        tarfile.data_filter(member, str(folder / "unpacked"))
    except tarfile.FilterError as error:
        raise HttpError(422, f"member {member.name!r} of the archive is refused: {error}") from error


def _keep_archive(folder: Path, content_type: str, body: bytes) -> BuildRequest:
    """Write the archive of a form into a file. Raises: HttpError with 422; OSError."""
    try:
        parts = read_form(content_type, body)
        text = one_part(parts, "context")
        target = one_part(parts, "target_image").decode()
        tags = tuple(part.data.decode() for part in parts if part.name == "tags" and part.data)
        # As a text it may be cut into lines.
        data = base64.b64decode(text.translate(None, b"\r\n \t"), validate=True)
    except (binascii.Error, UnicodeDecodeError) as error:
        raise HttpError(422, f"the context is not the base64 text of an archive ({error})") from error
    if not target:
        raise HttpError(422, "target_image is empty")
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=folder, suffix=".tar.gz")
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return BuildRequest(target=target, tags=tags, archive=Path(name))
