"""Single objects in S3 and compatible stores: whole, with proven digests, large ones in parts.

Covered: 500, 503, throttling, dropped connections, silence, bodies cut short or altered on either
way, an object that changes while it is read, more than a thousand objects, uploads left by a kill.
Not covered: two writers of one object (the later one wins, whole); versioned or archived objects;
customer-supplied encryption keys.

What arrived is proven without trust in the way: an upload carries a CRC, which S3 checks, and S3
answers with an ETag, which for most objects is the MD5 of what it received. Where it is that of what was
sent, all is well. Where it is not (for example with KMS encryption, or a compatible service that checks
nothing) it proves nothing, and the object is read back and hashed.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore, local
from typing import Any

from strop.errors import CorruptRecord, StoreError
from strop.io.atomic import explain_write_failure
from strop.store.contract import StoredObject
from strop.store.s3_client import (
    DamagedTransfer,
    RateLimiter,
    S3Settings,
    call,
    is_status,
    knows_crc,
    open_client,
)
from strop.store.uris import parse_s3

# Source: the limits in the Amazon S3 user guide.
_MAX_PARTS = 10_000
_SHA256_KEY = "strop-sha256"
_CHUNK_BYTES = 1 << 20
_HASHED_BYTES = 1 << 18
_GONE = ("404", "NoSuchKey")
NUM_WHOLE_ATTEMPTS = 3
"""How often an object is moved whose digest is wrong although every step went well."""
ORPHAN_AGE_S = 86_400.0
"""An upload in parts that began longer ago was left by a kill; its parts cost money until it is aborted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A stretch of an object."""

    number: int
    """From 1, as S3 counts."""
    start: int
    size_bytes: int


def cut_parts(size_bytes: int, part_bytes: int) -> list[_Part]:
    """Cut an object into parts of equal size, the last one smaller; an empty object is one empty part."""
    step = max(part_bytes, -(-size_bytes // _MAX_PARTS))
    starts = range(0, max(size_bytes, 1), step)
    return [
        _Part(number=number, start=start, size_bytes=min(step, size_bytes - start))
        for number, start in enumerate(starts, start=1)
    ]


class _Buffers(local):
    """Memory of one thread for the part that it sends, used again: fresh memory costs more than its hashes.

    A file given to the client instead would be read twice, and sent in pieces of 16 KiB.
    """

    buffer = bytearray()

    def read_part(self, path: Path, part: _Part) -> tuple[bytearray, str, str]:
        """Return a stretch of a file, its MD5 in hex, and its CRC-32 as S3 writes it.

        Holds until the thread's next call. Shorter if the file has become so.
        """
        if len(self.buffer) < part.size_bytes:
            self.buffer = bytearray(part.size_bytes)
        md5, crc32 = hashlib.md5(usedforsecurity=False), 0
        with memoryview(self.buffer) as view, path.open("rb", buffering=0) as file:
            file.seek(part.start)
            left = view[: part.size_bytes]
            # In pieces that are hashed while they are in the processor's cache.
            while num_bytes := file.readinto(left[:_HASHED_BYTES]):
                md5.update(left[:num_bytes])
                crc32 = zlib.crc32(left[:num_bytes], crc32)
                left = left[num_bytes:]
            size_bytes = part.size_bytes - len(left)
        whole = self.buffer if size_bytes == len(self.buffer) else self.buffer[:size_bytes]
        return whole, md5.hexdigest(), base64.b64encode(crc32.to_bytes(4, "big")).decode()


class S3Objects:
    """Objects under s3:// URIs."""

    def __init__(self, settings: S3Settings | None = None) -> None:
        self._settings = settings or S3Settings()
        self._pool = ThreadPoolExecutor(self._settings.num_connections, thread_name_prefix="strop-s3")
        # All parts hashed at once would take the cores from those that are being sent: on two cores, and
        # with the server on the same machine, that cost a fifth of the speed.
        self._may_hash = BoundedSemaphore(max(1, (os.cpu_count() or 1) // 2))
        self._rate_limiter = RateLimiter(self._settings.max_bytes_per_s)
        self._buffers = _Buffers()

    def find(self, uri: str) -> StoredObject | None:
        """Ask for the head of an object."""
        place = parse_s3(uri)
        found = self._answer_or_none(
            uri, lambda: self._client.head_object(Bucket=place.bucket, Key=place.key)
        )
        if found is None:
            return None
        return StoredObject(
            uri=uri,
            size_bytes=found["ContentLength"],
            version=found["ETag"],
            sha256=found.get("Metadata", {}).get(_SHA256_KEY),
        )

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Page through all keys below the URI."""
        place = parse_s3(uri)
        request = {"Bucket": place.bucket, "Prefix": f"{place.key}/" if place.key else ""}
        while True:
            page = self._call(uri, "listed", partial(self._client.list_objects_v2, **request))
            for entry in page.get("Contents", ()):
                # Consoles make objects that stand for folders; their names end in a slash.
                if not entry["Key"].endswith("/"):
                    yield StoredObject(
                        uri=f"s3://{place.bucket}/{entry['Key']}",
                        size_bytes=entry["Size"],
                        version=entry["ETag"],
                    )
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def read(self, uri: str) -> bytes:
        """Read an object that fits into memory."""
        place = parse_s3(uri)

        def ask() -> bytes:
            answer = self._client.get_object(Bucket=place.bucket, Key=place.key)
            data: bytes = answer["Body"].read()
            if len(data) != answer["ContentLength"]:
                raise DamagedTransfer(f"{len(data)} of {answer['ContentLength']} bytes came")
            return data

        data: bytes = self._call(uri, "read", ask)
        return data

    def read_versioned(self, uri: str) -> tuple[bytes, str] | None:
        """Read an object that fits into memory; its version is its ETag."""
        place = parse_s3(uri)

        def ask() -> tuple[bytes, str]:
            answer = self._client.get_object(Bucket=place.bucket, Key=place.key)
            return answer["Body"].read(), answer["ETag"]

        found: tuple[bytes, str] | None = self._answer_or_none(uri, ask)
        return found

    def write_if(self, uri: str, data: bytes, version: str | None) -> bool:
        """Write by a conditional request, which S3 has known since 2024."""
        from botocore.exceptions import ClientError

        place = parse_s3(uri)
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        sha256 = hashlib.sha256(data).hexdigest()

        def send() -> bool:
            try:
                self._client.put_object(
                    Bucket=place.bucket,
                    Key=place.key,
                    Body=data,
                    Metadata={_SHA256_KEY: sha256},
                    **condition,
                )
            except ClientError as error:
                # 404: it should have a version, and is gone. 409: another's request is under way.
                if not is_status(error, "PreconditionFailed", "412", "ConditionalRequestConflict", *_GONE):
                    raise
                # The attempt before may have succeeded, and its answer was lost.
                return self.digest(uri) == sha256
            return True

        is_written: bool = self._call(uri, "sent", send)
        return is_written

    def write(self, uri: str, data: bytes) -> None:
        """Write an object that fits into memory."""
        sha256 = hashlib.sha256(data).hexdigest()
        self._put_whole(uri, data, sha256)

    def upload(self, path: Path, uri: str, sha256: str) -> None:
        """Send a file in one request or in parts."""
        size_bytes = path.stat().st_size
        parts = cut_parts(size_bytes, self._settings.part_bytes)
        if len(parts) == 1:
            self._put_whole(uri, path.read_bytes(), sha256)
            return
        self._abort_orphans(uri)
        for _ in range(NUM_WHOLE_ATTEMPTS):
            is_proven = self._put_parts(path, uri, sha256, parts)
            if is_proven or self._read_back(uri) == sha256:
                return
        self.remove(uri)
        raise _altered(uri, "sent")

    def download(self, stored: StoredObject, path: Path, sha256: str | None) -> str:
        """Fetch an object, its parts side by side, all of one version."""
        promised = sha256 or stored.sha256
        for _ in range(NUM_WHOLE_ATTEMPTS):
            found = self._fetch(stored, path)
            if promised is None or found == promised:
                return found
        path.unlink(missing_ok=True)
        raise _altered(stored.uri, "fetched")

    def digest(self, uri: str) -> str | None:
        """Return the digest that strop left with the object."""
        found = self.find(uri)
        return found.sha256 if found else None

    def remove(self, uri: str) -> None:
        """Remove one object."""
        place = parse_s3(uri)
        self._call(uri, "removed", lambda: self._client.delete_object(Bucket=place.bucket, Key=place.key))

    def remove_below(self, uri: str) -> None:
        """Remove one object after the other."""
        for stored in list(self.list(uri)):
            self.remove(stored.uri)

    def list_folders(self, uri: str) -> Iterator[str]:
        """Page through the common prefixes."""
        place = parse_s3(uri)
        prefix = f"{place.key}/" if place.key else ""
        request = {"Bucket": place.bucket, "Prefix": prefix, "Delimiter": "/"}
        while True:
            page = self._call(uri, "listed", partial(self._client.list_objects_v2, **request))
            for entry in page.get("CommonPrefixes", ()):
                yield entry["Prefix"].removeprefix(prefix).rstrip("/")
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def give_up_uploads(self, uri: str) -> None:
        """Abort all uploads in parts below the URI; a writer that is still at one fails."""
        place = parse_s3(uri)
        self._abort_uploads(uri, f"{place.key}/", lambda entry: True)

    @property
    def _client(self) -> Any:
        return open_client(self._settings)

    def _call(self, uri: str, doing: str, action: Any) -> Any:
        return call(uri, doing, self._settings.retries, action)

    def _answer_or_none(self, uri: str, action: Any) -> Any:
        from botocore.exceptions import ClientError

        def ask() -> Any:
            try:
                return action()
            except ClientError as error:
                if is_status(error, "404", "NoSuchKey"):
                    return None
                raise

        return self._call(uri, "looked up", ask)

    def _put_whole(self, uri: str, data: bytes, sha256: str) -> None:
        place = parse_s3(uri)
        md5 = hashlib.md5(data, usedforsecurity=False)

        def send() -> Any:
            self._rate_limiter.wait_for(len(data))
            return self._client.put_object(
                Bucket=place.bucket,
                Key=place.key,
                Body=data,
                Metadata={_SHA256_KEY: sha256},
            )

        for _ in range(NUM_WHOLE_ATTEMPTS):
            answer = self._call(uri, "sent", send)
            if _is_etag(answer, md5.hexdigest()) or self._read_back(uri) == sha256:
                return
        self.remove(uri)
        raise _altered(uri, "sent")

    def _put_parts(self, path: Path, uri: str, sha256: str, parts: Sequence[_Part]) -> bool:
        """Send all parts and join them; return whether the answers prove what arrived."""
        place = parse_s3(uri)
        target = {"Bucket": place.bucket, "Key": place.key}
        request = {**target, "Metadata": {_SHA256_KEY: sha256}}
        if knows_crc(self._client):
            request["ChecksumAlgorithm"] = "CRC32"
        begun = self._call(uri, "sent", lambda: self._client.create_multipart_upload(**request))
        upload = {**target, "UploadId": begun["UploadId"]}
        is_joined = False
        try:
            futures = [self._pool.submit(self._put_part, path, uri, upload, part) for part in parts]
            sent = tuple(_in_order(futures))
            self._join(uri, upload, [answer for answer, _ in sent], sha256)
            is_joined = True
        finally:
            if not is_joined:
                # Also after an interrupt: parts that nobody joins are stored, and paid for, for ever.
                with suppress(StoreError):
                    self._call(uri, "given up", lambda: self._client.abort_multipart_upload(**upload))
        return all(is_proven for _, is_proven in sent)

    def _put_part(
        self, path: Path, uri: str, upload: dict[str, Any], part: _Part
    ) -> tuple[dict[str, Any], bool]:
        """Send one part; return how S3 wants it named when all are joined, and whether it is proven."""
        with self._may_hash:
            body, md5, crc32 = self._buffers.read_part(path, part)
        checksum = {"ChecksumCRC32": crc32} if knows_crc(self._client) else {}

        def send() -> Any:
            self._rate_limiter.wait_for(part.size_bytes)
            return self._client.upload_part(**upload, **checksum, PartNumber=part.number, Body=body)

        answer = self._call(uri, "sent", send)
        named = {"PartNumber": part.number, "ETag": answer["ETag"], **checksum}
        return named, _is_etag(answer, md5)

    def _join(self, uri: str, upload: dict[str, Any], parts: Sequence[dict[str, Any]], sha256: str) -> None:
        from botocore.exceptions import ClientError

        def join() -> None:
            try:
                self._client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
            except ClientError as error:
                # The attempt before succeeded, and its answer was lost.
                if not (is_status(error, "NoSuchUpload") and self.digest(uri) == sha256):
                    raise

        self._call(uri, "sent", join)

    def _abort_orphans(self, uri: str) -> None:
        """Give up uploads of this very object that a killed process began a day ago or earlier."""
        key, now = parse_s3(uri).key, dt.datetime.now(dt.UTC)

        def is_orphan(entry: dict[str, Any]) -> bool:
            return bool(entry["Key"] == key and (now - entry["Initiated"]).total_seconds() > ORPHAN_AGE_S)

        self._abort_uploads(uri, key, is_orphan)

    def _abort_uploads(self, uri: str, prefix: str, is_meant: Callable[[dict[str, Any]], bool]) -> None:
        bucket = parse_s3(uri).bucket
        begun = self._call(
            uri, "looked up", lambda: self._client.list_multipart_uploads(Bucket=bucket, Prefix=prefix)
        )
        for entry in filter(is_meant, begun.get("Uploads", ())):
            target = {"Bucket": bucket, "Key": entry["Key"], "UploadId": entry["UploadId"]}
            self._call(uri, "cleared", partial(self._abort_upload, target))

    def _abort_upload(self, target: dict[str, str]) -> None:
        from botocore.exceptions import ClientError

        try:
            self._client.abort_multipart_upload(**target)
        except ClientError as error:
            if not is_status(error, "NoSuchUpload"):  # Its writer was faster.
                raise

    def _read_back(self, uri: str) -> str:
        """Return the digest of what a store really has."""
        place = parse_s3(uri)

        def ask() -> str:
            hashed = hashlib.sha256()
            body = self._client.get_object(Bucket=place.bucket, Key=place.key)["Body"]
            for chunk in body.iter_chunks(_CHUNK_BYTES):
                hashed.update(chunk)
            return hashed.hexdigest()

        digest: str = self._call(uri, "read back", ask)
        return digest

    def _fetch(self, stored: StoredObject, path: Path) -> str:
        """Write the object to a file and hash it while later parts are still on their way."""
        parts = cut_parts(stored.size_bytes, self._settings.part_bytes)
        hashed = hashlib.sha256()
        try:
            with path.open("w+b") as file:
                descriptor = file.fileno()
                futures = [
                    self._pool.submit(self._fetch_part, stored, descriptor, part, is_whole=len(parts) == 1)
                    for part in parts
                ]
                for part, _ in zip(parts, _in_order(futures), strict=True):
                    hashed.update(os.pread(descriptor, part.size_bytes, part.start))
                os.fsync(descriptor)
        except OSError as error:
            raise explain_write_failure(error, path) from error
        return hashed.hexdigest()

    def _fetch_part(self, stored: StoredObject, descriptor: int, part: _Part, *, is_whole: bool) -> None:
        place = parse_s3(stored.uri)
        end = part.start + part.size_bytes
        # Else parts of two versions could be joined.
        request = {"Bucket": place.bucket, "Key": place.key, "IfMatch": stored.version}
        if not is_whole:
            request["Range"] = f"bytes={part.start}-{end - 1}"

        def ask() -> None:
            position = part.start
            body = self._client.get_object(**request)["Body"]
            for chunk in body.iter_chunks(_CHUNK_BYTES):
                if position + len(chunk) > end:
                    raise DamagedTransfer(f"more than {part.size_bytes} bytes came")
                os.pwrite(descriptor, chunk, position)
                position += len(chunk)
            if position != end:
                raise DamagedTransfer(f"{position - part.start} of {part.size_bytes} bytes came")
            # Here, while other parts are on their way: at the end, the disk would be waited for alone.
            os.fsync(descriptor)

        self._call(stored.uri, "fetched", ask)


def _in_order(futures: list[Future[Any]]) -> Iterator[Any]:
    """Yield results in order; after a failure, no part is still writing when it leaves here."""
    try:
        for future in futures:
            yield future.result()
    finally:
        for future in futures:
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.exception()


def _is_etag(answer: dict[str, Any], md5: str) -> bool:
    return str(answer.get("ETag", "")).strip('"') == md5


def _altered(uri: str, doing: str) -> CorruptRecord:
    return CorruptRecord(
        f"{uri} was {doing} {NUM_WHOLE_ATTEMPTS} times, and its SHA-256 was wrong every time",
        allowed="the content that was promised",
        next_step="send it anew with `strop stage RUN.toml --replace`; if that fails, the store or the"
        " way to it is at fault",
    )
