"""Single objects in S3 and compatible stores: whole, with proven digests, large ones in parts.

Covered: 500, 503, throttling, dropped connections, silence, bodies cut short or altered on either
way, an object that changes while it is read, more than a thousand objects, uploads left by a kill.
Not covered: two writers of one object (the later one wins, whole); versioned or archived objects;
customer-supplied encryption keys.

boto3's transfer manager moves the bytes. The arrival is proven end to end: an upload carries a CRC, which S3
checks, and the ETag of most objects is made of the MD5s of the bytes that S3 received. If it matches the sent
bytes, they are proven. If not (for example with KMS encryption, or a compatible service that checks nothing),
the object is read back and hashed.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from strop.errors import CorruptRecord
from strop.io.atomic import explain_write_failure
from strop.store.contract import StoredObject
from strop.store.s3_client import (
    S3Settings,
    errors_explained,
    is_status,
    missing,
    open_transfers,
)
from strop.store.uris import parse_s3

_SHA256_KEY = "strop-sha256"
_GONE = ("404", "NoSuchKey")
NUM_WHOLE_ATTEMPTS = 3
"""Attempts for an object whose digest is wrong although every request succeeded."""
_READ_BYTES = 8 << 20
_USUAL_PART_BYTES = tuple(size << 20 for size in (5, 8, 10, 15, 16, 25, 32, 50, 64, 100, 128, 256, 512, 1024))
"""Sizes in which tools send parts: AWS's own 8 MiB, others' defaults and settings."""
ORPHAN_AGE_S = 86_400.0
"""An upload in parts that began longer ago was left by a kill; its parts cost money until it is aborted."""


class _Hashed:
    """A stream that hashes what is written to it, and keeps it in a file if there is one.

    It cannot seek, so the transfer manager writes in order, while later parts are on their way.
    """

    def __init__(self, file: BinaryIO | None = None) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.sha256.update(data)
        if self._file is not None:
            self._file.write(data)


@dataclass(frozen=True, slots=True)
class _Known:
    """Gives the transfer manager the size and the version of an object, so that it does not ask for them."""

    stored: StoredObject

    def on_queued(self, future: Any, **_: Any) -> None:
        future.meta.provide_transfer_size(self.stored.size_bytes)
        # Else parts of two versions could be joined.
        future.meta.provide_object_etag(self.stored.version)


class S3Objects:
    """Objects under s3:// URIs."""

    def __init__(self, settings: S3Settings | None = None) -> None:
        self._settings = settings or S3Settings()

    def find(self, uri: str) -> StoredObject | None:
        """Send a HEAD request."""
        from botocore.exceptions import ClientError

        with self._explained(uri, "looked up"):
            try:
                found = self._client.head_object(**_target(uri))
            except ClientError as error:
                if is_status(error, *_GONE):
                    return None
                raise
        return StoredObject(
            uri=uri,
            size_bytes=found["ContentLength"],
            version=found["ETag"],
            sha256=found.get("Metadata", {}).get(_SHA256_KEY),
        )

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Page through all keys below the URI."""
        place = parse_s3(uri)
        for page in self._pages(uri, Prefix=f"{place.key}/" if place.key else ""):
            for entry in page.get("Contents", ()):
                # Consoles make objects that stand for folders; their names end in a slash.
                if not entry["Key"].endswith("/"):
                    yield StoredObject(
                        uri=f"s3://{place.bucket}/{entry['Key']}",
                        size_bytes=entry["Size"],
                        version=entry["ETag"],
                    )

    def read(self, uri: str) -> bytes:
        """Read an object that fits into memory."""
        found = self.read_versioned(uri)
        if found is None:
            raise missing(uri)
        return found[0]

    def read_versioned(self, uri: str) -> tuple[bytes, str] | None:
        """Read an object that fits into memory; its version is its ETag."""
        from botocore.exceptions import (
            ClientError,
            FlexibleChecksumError,
            IncompleteReadError,
            ReadTimeoutError,
            ResponseStreamingError,
        )

        damaged = (FlexibleChecksumError, IncompleteReadError, ReadTimeoutError, ResponseStreamingError)
        with self._explained(uri, "read"):
            for num_left in reversed(range(self._settings.retries.num_attempts)):
                try:
                    answer = self._client.get_object(**_target(uri))
                    return answer["Body"].read(), answer["ETag"]
                except ClientError as error:
                    if is_status(error, *_GONE):
                        return None
                    raise
                except damaged:
                    if not num_left:
                        raise
        raise AssertionError("the last attempt returns or raises")

    def write_if(self, uri: str, data: bytes, version: str | None) -> bool:
        """Write by a conditional request, which S3 has known since 2024."""
        from botocore.exceptions import ClientError

        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        sha256 = hashlib.sha256(data).hexdigest()
        with self._explained(uri, "sent"):
            try:
                self._client.put_object(
                    **_target(uri), Body=data, Metadata={_SHA256_KEY: sha256}, **condition
                )
            except ClientError as error:
                # 404: the object was removed. 409: another request for it is running.
                if not is_status(error, "PreconditionFailed", "412", "ConditionalRequestConflict", *_GONE):
                    raise
                # An earlier attempt may have succeeded without its answer arriving.
                return self.digest(uri) == sha256
        return True

    def write(self, uri: str, data: bytes) -> None:
        """Write an object that fits into memory."""
        self._send(data, uri, hashlib.sha256(data).hexdigest())

    def upload(self, path: Path, uri: str, sha256: str) -> None:
        """Send a file in one request or in parts."""
        if path.stat().st_size >= self._settings.part_bytes:
            # Uploads of this very object that a killed process began a day ago or earlier.
            key, now = parse_s3(uri).key, dt.datetime.now(dt.UTC)
            self._abort_uploads(
                uri,
                key,
                lambda entry: (
                    entry["Key"] == key and (now - entry["Initiated"]).total_seconds() > ORPHAN_AGE_S
                ),
            )
        self._send(path, uri, sha256)

    def _send(self, content: Path | bytes, uri: str, sha256: str) -> None:
        from botocore.exceptions import ClientError

        place = parse_s3(uri)
        extra = {"Metadata": {_SHA256_KEY: sha256}}
        for _ in range(NUM_WHOLE_ATTEMPTS):
            with self._explained(uri, "sent"):
                source = str(content) if isinstance(content, Path) else io.BytesIO(content)
                sending = self._transfers.upload(source, place.bucket, place.key, extra_args=extra)
                etag = self._etag_of(content)  # While it is sent.
                try:
                    sending.result()
                except ClientError as error:
                    # An earlier attempt may have joined the parts without its answer arriving.
                    if not (is_status(error, "NoSuchUpload") and self.digest(uri) == sha256):
                        raise
            found = self.find(uri)
            if found is not None and (found.version.strip('"') == etag or self._fetch(found, None) == sha256):
                return
        self.remove(uri)
        raise _altered(uri, "sent")

    def download(self, stored: StoredObject, path: Path, sha256: str | None) -> str:
        """Fetch an object, its parts side by side, all of one version."""
        promised = sha256 or stored.sha256
        for _ in range(NUM_WHOLE_ATTEMPTS):
            try:
                with path.open("wb") as file:
                    found = self._fetch(stored, file)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise explain_write_failure(error, path) from error
            if found is not None and promised in {None, found}:
                return found
        path.unlink(missing_ok=True)
        raise _altered(stored.uri, "fetched")

    def read_part(self, stored: StoredObject, first: int, num_bytes: int) -> bytes:
        """Return a byte range of an object, in the stored version."""
        from botocore.exceptions import ClientError

        if not num_bytes:
            return b""
        wanted = {"Range": f"bytes={first}-{first + num_bytes - 1}", "IfMatch": stored.version}
        with self._explained(stored.uri, "read"):
            try:
                data: bytes = self._client.get_object(**_target(stored.uri), **wanted)["Body"].read()
            except ClientError as error:
                if is_status(error, "InvalidRange", "416"):
                    return b""
                raise
        return data

    def is_proven(self, stored: StoredObject, path: Path) -> bool:
        """Whether the ETag of an object is made of the MD5s of a local file, in parts of any usual size.

        False proves nothing: an encrypted object, or one in unusual parts, has another ETag.
        """
        digest, _, num_parts = stored.version.strip('"').partition("-")
        if not num_parts:
            return bool(_md5_of(path, None) == digest)
        size = stored.size_bytes
        fitting = [part for part in _USUAL_PART_BYTES if -(-size // part) == int(num_parts)]
        return any(_md5_of(path, part) == digest for part in fitting)

    def digest(self, uri: str) -> str | None:
        """Return the digest in the object's metadata, which strop writes."""
        found = self.find(uri)
        return found.sha256 if found else None

    def remove(self, uri: str) -> None:
        """Remove one object."""
        with self._explained(uri, "removed"):
            self._client.delete_object(**_target(uri))

    def remove_below(self, uri: str) -> None:
        """Remove one object after the other."""
        for stored in list(self.list(uri)):
            self.remove(stored.uri)

    def list_folders(self, uri: str) -> Iterator[str]:
        """Page through the common prefixes."""
        place = parse_s3(uri)
        prefix = f"{place.key}/" if place.key else ""
        for page in self._pages(uri, Prefix=prefix, Delimiter="/"):
            for entry in page.get("CommonPrefixes", ()):
                yield entry["Prefix"].removeprefix(prefix).rstrip("/")

    def begin_upload(self, uri: str) -> None:
        """Begin an upload in parts without any part."""
        with self._explained(uri, "sent"):
            self._client.create_multipart_upload(**_target(uri))

    def give_up_uploads(self, uri: str) -> None:
        """Abort all uploads in parts below the URI; a writer that is still uploading fails."""
        self._abort_uploads(uri, f"{parse_s3(uri).key}/", lambda entry: True)

    @property
    def _client(self) -> Any:
        return self._transfers.client

    @property
    def _transfers(self) -> Any:
        return open_transfers(self._settings)

    def _explained(self, uri: str, doing: str) -> AbstractContextManager[None]:
        return errors_explained(uri, doing, self._settings.retries)

    def _pages(self, uri: str, **request: str) -> Iterator[dict[str, Any]]:
        with self._explained(uri, "listed"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=parse_s3(uri).bucket, **request
            )
            yield from pages

    def _etag_of(self, content: Path | bytes) -> str:
        """Return the ETag of an object without KMS encryption: the MD5, or the MD5 of the parts' MD5s."""
        from s3transfer.utils import ChunksizeAdjuster

        part_bytes = self._settings.part_bytes
        size_bytes = content.stat().st_size if isinstance(content, Path) else len(content)
        if size_bytes < part_bytes:
            return _md5_of(content, None)
        step = ChunksizeAdjuster().adjust_chunksize(part_bytes, size_bytes)
        return f"{_md5_of(content, step)}-{-(-size_bytes // step)}"

    def _abort_uploads(self, uri: str, prefix: str, is_meant: Callable[[dict[str, Any]], bool]) -> None:
        from botocore.exceptions import ClientError

        bucket = parse_s3(uri).bucket
        with self._explained(uri, "cleared"):
            begun = self._client.list_multipart_uploads(Bucket=bucket, Prefix=prefix)
            for entry in filter(is_meant, begun.get("Uploads", ())):
                try:
                    self._client.abort_multipart_upload(
                        Bucket=bucket, Key=entry["Key"], UploadId=entry["UploadId"]
                    )
                except ClientError as error:
                    if not is_status(error, "NoSuchUpload"):  # Its writer finished it first.
                        raise

    def _fetch(self, stored: StoredObject, file: BinaryIO | None) -> str | None:
        """Fetch an object, into a file if there is one; return its digest, or None if it was altered."""
        from botocore.exceptions import FlexibleChecksumError

        place, target = parse_s3(stored.uri), _Hashed(file)
        with self._explained(stored.uri, "fetched"):
            try:
                self._transfers.download(
                    place.bucket, place.key, target, subscribers=[_Known(stored)]
                ).result()
            except FlexibleChecksumError:
                return None
        return target.sha256.hexdigest()


def _md5_of(content: Path | bytes, part_bytes: int | None) -> str:
    """Return the MD5, or with a part size that of the MD5s of its parts."""
    whole = hashlib.md5(usedforsecurity=False)
    with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as file:
        for part in iter(lambda: file.read(part_bytes or _READ_BYTES), b""):
            whole.update(part if part_bytes is None else hashlib.md5(part, usedforsecurity=False).digest())
    return whole.hexdigest()


def _target(uri: str) -> dict[str, str]:
    place = parse_s3(uri)
    return {"Bucket": place.bucket, "Key": place.key}


def _altered(uri: str, doing: str) -> CorruptRecord:
    return CorruptRecord(
        f"{uri} was {doing} {NUM_WHOLE_ATTEMPTS} times, and its SHA-256 was wrong every time",
        allowed="the content that was promised",
        next_step="send it anew with `strop stage RUN.toml --replace`; if that fails, the store or the"
        " way to it is at fault",
    )
