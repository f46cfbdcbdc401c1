"""The store of a URI."""

from __future__ import annotations

from strop.store.local_objects import LocalObjects
from strop.store.record_store import RecordStore
from strop.store.s3_client import S3Settings
from strop.store.s3_objects import S3Objects
from strop.store.uris import is_remote, require_known_scheme


def open_store(uri: str, settings: S3Settings | None = None) -> RecordStore:
    """Return the store of a URI, in S3 or a directory; no request is made yet.

    Raises: ConfigError for a scheme that strop does not know.
    """
    return RecordStore(open_objects(uri, settings))


def open_objects(uri: str, settings: S3Settings | None = None) -> LocalObjects | S3Objects:
    """Return the objects of S3, or the files of a disk. Raises: ConfigError for another scheme."""
    require_known_scheme(uri)
    return S3Objects(settings) if is_remote(uri) else LocalObjects()
