"""The S3 client of boto3: its settings, and the meaning of its errors.

boto3 takes every form of credentials that AWS knows (profiles, roles, single sign-on). The usual variables
hold: AWS_ENDPOINT_URL[_S3], AWS_PROFILE, AWS_REGION, and AWS_REQUEST_CHECKSUM_CALCULATION=when_required for a
compatible service that knows no checksums.

Tried with boto3 1.44.8 and moto 5.2.5. Not tried: Amazon's own service, MinIO, Ceph.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from strop.errors import (
    ConfigError,
    NoCredentials,
    RemoteDenied,
    RemoteUnreachable,
    StoreError,
)
from strop.store.contract import altered, missing

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_CLIENT_VARIABLES = (
    *_ENDPOINT_VARIABLES,
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_REQUEST_CHECKSUM_CALCULATION"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
)
_CONNECT_LIMIT_S = 5.0
_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
# The body was damaged or cut on its way. Source: the list of error codes in the Amazon S3 reference.
_TRANSIENT_CODES = frozenset({"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentSHA256Mismatch"})


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Settings:
    """Settings of a process's S3 client."""

    part_bytes: int = 16 << 20
    """Size of a part of a large object; larger if the object would have more parts than S3 allows."""
    num_connections: int = 8
    """Parts of one file in flight."""
    num_attempts: int = 8
    """Attempts of a request, with botocore's pauses, which grow to 20 s."""
    silence_limit_s: float = 30.0
    """Longest wait for the next byte."""


def open_client(settings: S3Settings) -> Any:
    """Return the S3 client of this process, made once for each set of variables that it depends on.

    Raises: ConfigError if boto3 is not installed, or a variable or a profile makes no sense.
    """
    # A child that was forked must not share its parent's connections.
    return _make_client(settings, os.getpid(), tuple(map(os.environ.get, _CLIENT_VARIABLES)))


@lru_cache(maxsize=4)
def _make_client(settings: S3Settings, pid: int, variables: tuple[str | None, ...]) -> Any:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ConfigError(
            "s3:// needs the package boto3, which is not installed",
            allowed="a store in a directory, or S3 with boto3",
            next_step="pip install 'strop[s3]'",
        ) from error
    # A compatible endpoint rarely answers under bucket.host; Amazon's always does.
    style = "path" if any(os.environ.get(name) for name in _ENDPOINT_VARIABLES) else "auto"
    config = Config(
        retries={"total_max_attempts": settings.num_attempts, "mode": "standard"},
        connect_timeout=_CONNECT_LIMIT_S,
        read_timeout=settings.silence_limit_s,
        max_pool_connections=settings.num_connections * 4,
        s3={"addressing_style": style},
    )
    try:
        # boto3 itself knows AWS_DEFAULT_REGION only.
        session = boto3.session.Session(region_name=os.environ.get("AWS_REGION"))
        return session.client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"the S3 client cannot be made ({error})",
            allowed="AWS_ENDPOINT_URL as http(s)://host, and a profile and region that exist",
            next_step="correct the variable or ~/.aws/config",
        ) from error


@contextmanager
def errors_explained(uri: str, doing: str) -> Iterator[None]:
    """Raise strop's errors instead of the client's.

    `doing` is what failed, for messages: 'read', 'sent'.
    Raises: RemoteMissing, RemoteDenied, RemoteUnreachable, CorruptRecord, StoreError.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError

    try:
        yield
    except S3DownloadFailedError as failure:
        raise _changed(uri, doing, failure) from failure
    except (BotoCoreError, ClientError, RetriesExceededError) as failure:
        raise _translate(uri, doing, getattr(failure, "last_exception", failure)) from failure


def code_of(failure: Exception) -> str:
    """Return the code in the service's answer, such as 'NoSuchKey'; empty if it did not answer."""
    answer: dict[str, Any] = getattr(failure, "response", None) or {}
    return str(answer.get("Error", {}).get("Code", ""))


def _translate(uri: str, doing: str, failure: Exception) -> StoreError:
    from botocore import exceptions

    answer: dict[str, Any] = getattr(failure, "response", None) or {}
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code, words = code_of(failure), " ".join(str(failure).split())
    what = f"{uri} could not be {doing} ({type(failure).__name__}: {words})"
    on_the_way = (exceptions.ConnectionError, exceptions.HTTPClientError, exceptions.IncompleteReadError)
    if isinstance(failure, exceptions.FlexibleChecksumError):
        return altered(uri, "its checksum differs from the one that came with it")
    if isinstance(failure, on_the_way) or status in _TRANSIENT_STATUS or code in _TRANSIENT_CODES:
        return RemoteUnreachable(
            what,
            allowed="a store that answers",
            next_step="start the same command again: what has arrived is not moved twice",
        )
    if code == "NoSuchBucket" or status == 404:
        return missing(uri, code or words)
    if status == 412:
        return _changed(uri, doing, failure)
    if status in {0, 401, 403}:
        return (RemoteDenied if status else NoCredentials)(
            what,
            allowed="credentials that may list, read and write below this URI",
            next_step="set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or have the right"
            " granted",
        )
    return StoreError(
        what,
        allowed="a request that the store understands",
        next_step="check the bucket's region (AWS_REGION) and the endpoint (AWS_ENDPOINT_URL)",
    )


def _changed(uri: str, doing: str, failure: Exception) -> StoreError:
    return StoreError(
        f"{uri} changed while it was {doing} ({failure})",
        allowed="one writer at a time, and none while it is read",
        next_step="start the same command again when the writer is done",
    )
