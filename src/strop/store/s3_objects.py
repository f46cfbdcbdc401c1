"""Single objects in S3 and compatible stores, moved by boto3: whole, checked, large ones in parts.

Retries, parts and the check on the way are the client's: an upload carries a SHA-256 that S3 compares, all
parts of a download are of one version. The SHA-256 of the whole object is kept in its metadata; a file that
was fetched is compared with it, and with the listed size.
Not covered: two writers of one object (the later one wins, whole); versioned or archived objects; keys of the
customer's own; parts of uploads that a kill left, which a life-cycle rule of the bucket removes.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from strop.errors import RemoteMissing, StoreError
from strop.store.contract import StoredObject, altered, missing
from strop.store.s3_client import S3Settings, code_of, errors_explained, open_client
from strop.store.uris import parse_s3

_SHA256_KEY = "strop-sha256"
_CONDITION_CODES = frozenset({"PreconditionFailed", "412", "ConditionalRequestConflict", "404", "NoSuchKey"})
_NUM_READS = 3
"""The client repeats requests; a small body that breaks off is asked for again here."""


class S3Objects:
    """Objects under s3:// URIs; each method does what that of `LocalObjects` does."""

    def __init__(self, settings: S3Settings | None = None) -> None:
        self._settings = settings or S3Settings()

    def find(self, uri: str) -> StoredObject | None:
        """Send a HEAD request."""
        try:
            with errors_explained(uri, "looked up"):
                found = self._client.head_object(**_target(uri))
        except RemoteMissing:
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
        for num_left in reversed(range(_NUM_READS)):
            try:
                with errors_explained(uri, "read"):
                    body = self._client.get_object(**_target(uri))
            except RemoteMissing:
                return None
            try:
                with errors_explained(uri, "read"):
                    return body["Body"].read(), body["ETag"]
            except StoreError:
                if not num_left:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def write_if(self, uri: str, data: bytes, version: str | None) -> bool:
        """Write by a conditional request, which S3 has known since 2024."""
        from botocore.exceptions import ClientError

        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        sha256 = hashlib.sha256(data).hexdigest()
        with errors_explained(uri, "sent"):
            try:
                self._client.put_object(
                    **_target(uri), Body=data, Metadata={_SHA256_KEY: sha256}, **condition
                )
            except ClientError as error:
                # The object was removed, or another request for it is running.
                if code_of(error) not in _CONDITION_CODES:
                    raise
                # An earlier attempt may have succeeded without its answer arriving.
                return self.digest(uri) == sha256
        return True

    def write(self, uri: str, data: bytes) -> None:
        """Write an object that fits into memory."""
        self._send(io.BytesIO(data), uri, hashlib.sha256(data).hexdigest())

    def upload(self, path: Path, uri: str, sha256: str) -> None:
        """Send a file in one request or in parts."""
        with path.open("rb") as file:
            self._send(file, uri, sha256)

    def _send(self, content: BinaryIO, uri: str, sha256: str) -> None:
        from botocore.exceptions import ClientError

        place, client = parse_s3(uri), self._client
        size_bytes = content.seek(0, os.SEEK_END)
        content.seek(0)
        extra: dict[str, Any] = {"Metadata": {_SHA256_KEY: sha256}}
        if client.meta.config.request_checksum_calculation != "when_required":
            extra["ChecksumAlgorithm"] = "SHA256"
        with errors_explained(uri, "sent"):
            try:
                client.upload_fileobj(
                    content, place.bucket, place.key, ExtraArgs=extra, Config=self._transfer_config()
                )
            except ClientError as error:
                # An earlier attempt may have joined the parts without its answer arriving.
                if code_of(error) != "NoSuchUpload":
                    raise
        found = self.find(uri)
        if found is None or (found.size_bytes, found.sha256) != (size_bytes, sha256):
            self.remove(uri)
            raise altered(uri, f"of {size_bytes} bytes sent, {found.size_bytes if found else 0} are there")

    def download(self, stored: StoredObject, path: Path, sha256: str | None) -> str:
        """Fetch an object, its parts side by side, all of one version."""
        place = parse_s3(stored.uri)
        with errors_explained(stored.uri, "fetched"), path.open("wb") as file:
            self._client.download_fileobj(place.bucket, place.key, file, Config=self._transfer_config())
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        size_bytes, promised = path.stat().st_size, sha256 or stored.sha256
        if size_bytes != stored.size_bytes or promised not in {None, found}:
            path.unlink()
            raise altered(
                stored.uri,
                f"{size_bytes} bytes of SHA-256 {found[:12]}, not {stored.size_bytes} bytes of"
                f" {promised[:12] if promised else 'any'}",
            )
        return found

    def digest(self, uri: str) -> str | None:
        """Return the digest in the object's metadata, which strop writes."""
        found = self.find(uri)
        return found.sha256 if found else None

    def remove(self, uri: str) -> None:
        """Remove one object."""
        with errors_explained(uri, "removed"):
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
        with errors_explained(uri, "sent"):
            self._client.create_multipart_upload(**_target(uri))

    def give_up_uploads(self, uri: str) -> None:
        """Abort all uploads in parts below the URI; a writer that is still uploading fails."""
        place = parse_s3(uri)
        with errors_explained(uri, "cleared"):
            begun = self._client.list_multipart_uploads(Bucket=place.bucket, Prefix=f"{place.key}/")
            for entry in begun.get("Uploads", ()):
                try:
                    with errors_explained(uri, "cleared"):
                        self._client.abort_multipart_upload(
                            Bucket=place.bucket, Key=entry["Key"], UploadId=entry["UploadId"]
                        )
                except RemoteMissing:  # Its writer finished it first.
                    continue

    @property
    def _client(self) -> Any:
        return open_client(self._settings)

    def _transfer_config(self) -> Any:
        from boto3.s3.transfer import TransferConfig

        return TransferConfig(
            multipart_threshold=self._settings.part_bytes,
            multipart_chunksize=self._settings.part_bytes,
            max_concurrency=self._settings.num_connections,
            num_download_attempts=self._settings.num_attempts,
            preferred_transfer_client="classic",
        )

    def _pages(self, uri: str, **request: str) -> Iterator[dict[str, Any]]:
        with errors_explained(uri, "listed"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=parse_s3(uri).bucket, **request
            )
            yield from pages


def _target(uri: str) -> dict[str, str]:
    place = parse_s3(uri)
    return {"Bucket": place.bucket, "Key": place.key}
