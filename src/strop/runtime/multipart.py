"""Reads forms with files in them, as browsers and httpx send them (RFC 7578)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from strop.runtime.http_server import HttpError

_NAME = re.compile(r'[; ]name="((?:[^"\\]|\\.)*)"|[; ]name=([^;\s"]+)')


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One field of a form."""

    name: str
    data: bytes


def read_form(content_type: str, body: bytes) -> list[Part]:
    """Return the parts of a form in their order. Raises: HttpError 422 if it is none."""
    kind, _, rest = content_type.partition(";")
    found = re.search(r'boundary="?([^";]+)"?', rest)
    if kind.strip().lower() != "multipart/form-data" or found is None:
        raise HttpError(422, f"a form is expected, and this is {content_type or 'nothing'}")
    fence = b"--" + found[1].strip().encode("latin-1")
    # The first fence may stand at the very begin; each other one follows the end of a line.
    pieces = (b"\r\n" + body).split(b"\r\n" + fence)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise HttpError(422, "the form has no end")
    parts = []
    for piece in pieces[1:-1]:
        head, gap, data = piece.partition(b"\r\n\r\n")
        named = _NAME.search(head.decode("utf-8", errors="replace"))
        if not gap or named is None:
            raise HttpError(422, "a part of the form has no name")
        parts.append(Part(name=named[1] if named[1] is not None else named[2], data=data))
    return parts


def one_part(parts: list[Part], name: str) -> bytes:
    """Return the data of the part of a name. Raises: HttpError 422 if there is none."""
    for part in parts:
        if part.name == name:
            return part.data
    raise HttpError(422, f"the form has no part {name!r}")
