"""The S3 client: how it is made, which of its errors are transient, and what the others mean.

boto3, because it takes every form of credentials that AWS knows (profiles, roles, single sign-on),
reports failures by code, and is what the SageMaker launcher needs anyway; by `benchmarks/store.py`
obstore and s3fs are not faster. Its own retries are off: they do not cover the body of a reply, so
strop retries whole steps. The usual variables hold: AWS_ENDPOINT_URL[_S3], AWS_PROFILE, AWS_REGION, and
AWS_REQUEST_CHECKSUM_CALCULATION=when_required for a compatible service that knows no CRC.

Tried with boto3 1.44.5 and moto 5.2.5. Not tried: Amazon's own service, MinIO, Ceph.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from strop.errors import (
    ConfigError,
    RemoteDenied,
    RemoteMissing,
    RemoteUnreachable,
    StoreError,
)

T = TypeVar("T")
INSTALL = "pip install 'strop[s3]'"
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_CLIENT_VARIABLES = (
    *_ENDPOINT_VARIABLES,
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_REQUEST_CHECKSUM_CALCULATION"),
)
# Transient errors. Source: the list of error codes in the Amazon S3 reference.
_PASSING_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_PASSING_CODES = frozenset(
    {
        *("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "Throttling"),
        *("ThrottlingException", "RequestLimitExceeded", "TooManyRequestsException", "OperationAborted"),
        # The body was damaged on its way.
        *("BadDigest", "IncompleteBody", "InvalidDigest", "XAmzContentSHA256Mismatch"),
    }
)
_MISSING_CODES = frozenset({"404", "NoSuchKey", "NoSuchBucket", "NotFound"})
_CHANGED_STATUS = 412
_REFUSED_STATUS = frozenset({401, 403})
_NOT_FOUND_STATUS = 404


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryRules:
    """Attempts and the pauses between them. The defaults give up after about half a minute of pauses."""

    num_attempts: int = 8
    first_pause_s: float = 0.25
    """Longest pause after the first failure; doubled after each further one."""
    max_pause_s: float = 8.0

    def pause_s(self, attempt_index: int) -> float:
        """Return a random pause, so that many clients do not come back together."""
        longest_s = min(self.first_pause_s * 2.0**attempt_index, self.max_pause_s)
        return random.uniform(0.5, 1.0) * longest_s


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Settings:
    """How one process talks to S3."""

    part_bytes: int = 16 << 20
    """Size of a part of a large object. Larger where the object would have more parts than S3 allows."""
    num_connections: int = 8
    """Parts and small objects under way at once, over all files."""
    connect_limit_s: float = 5.0
    silence_limit_s: float = 30.0
    """Longest wait for the next byte."""
    retries: RetryRules = field(default_factory=RetryRules)
    max_bytes_per_s: float | None = None
    """Most that is sent on average, over all connections; None: as fast as it goes."""


class DamagedTransfer(Exception):
    """Raised inside the room when the bytes that came are not the ones that were meant."""


def open_client(settings: S3Settings) -> Any:
    """Return a client of this process, made once for each set of variables it depends on.

    Raises: ConfigError if boto3 is not installed, or a variable or a profile makes no sense.
    """
    # A child that was forked must not share its parent's connections.
    return _make_client(settings, os.getpid(), tuple(os.environ.get(name) for name in _CLIENT_VARIABLES))


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
            next_step=INSTALL,
        ) from error
    is_foreign = any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
    config = Config(
        retries={"total_max_attempts": 1},
        connect_timeout=settings.connect_limit_s,
        read_timeout=settings.silence_limit_s,
        max_pool_connections=settings.num_connections * 2,
        # A compatible endpoint rarely answers under bucket.host; Amazon's always does.
        s3={
            "addressing_style": "path" if is_foreign else "auto",
            # A body's checksum is among the signed headers; hashing it once more proves nothing.
            "payload_signing_enabled": False,
        },
        # strop hashes all that comes, and knows what to do when it is wrong.
        response_checksum_validation="when_required",
    )
    region = os.environ.get("AWS_REGION")  # boto3 itself knows AWS_DEFAULT_REGION only.
    try:
        return boto3.session.Session(region_name=region).client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"the S3 client cannot be made ({error})",
            allowed="AWS_ENDPOINT_URL as http(s)://host, and a profile and region that exist",
            next_step="correct the variable or ~/.aws/config",
        ) from error


def call(uri: str, doing: str, rules: RetryRules, action: Callable[[], T]) -> T:
    """Do one step at S3; retry it while its error is transient.

    `doing` is what failed, for messages: 'read', 'sent'.
    Raises: RemoteMissing, RemoteDenied, RemoteUnreachable, StoreError. An action may raise those too.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    def explain(failure: Exception, num_left: int) -> Exception | None:
        if _may_pass(failure):
            return None if num_left else _unreachable(uri, doing, failure, rules.num_attempts)
        return _refusal(uri, doing, failure)

    return retry(action, rules, (BotoCoreError, ClientError, DamagedTransfer), explain)


def knows_crc(client: Any) -> bool:
    """Whether S3 may be asked to check CRCs: always, unless the usual variable says otherwise."""
    return bool(client.meta.config.request_checksum_calculation == "when_supported")


def is_status(error: Exception, *codes: str) -> bool:
    """Whether an error is the service's answer with one of these codes."""
    return _code_of(error) in codes


def _code_of(error: Exception) -> str:
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _status_of(error: Exception) -> int:
    response: dict[str, Any] = getattr(error, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _may_pass(failure: Exception) -> bool:
    from botocore.exceptions import (
        ConnectionError,
        HTTPClientError,
        IncompleteReadError,
    )

    if isinstance(failure, (ConnectionError, HTTPClientError, IncompleteReadError, DamagedTransfer)):
        return True
    return _status_of(failure) in _PASSING_STATUS or _code_of(failure) in _PASSING_CODES


def _refusal(uri: str, doing: str, failure: Exception) -> StoreError:
    status, cause = _status_of(failure), " ".join(str(failure).split())
    if _code_of(failure) in _MISSING_CODES or status == _NOT_FOUND_STATUS:
        return missing(uri, _code_of(failure))
    if status == _CHANGED_STATUS:
        return StoreError(
            f"{uri} changed while it was {doing} ({cause})",
            allowed="one writer at a time, and none while it is read",
            next_step="start the same command again when the writer is done",
        )
    if status == 0 or status in _REFUSED_STATUS:
        return RemoteDenied(
            f"{uri} could not be {doing}: the store refuses us ({cause})",
            allowed="credentials that may list, read and write below this URI",
            next_step="set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or have the right"
            " named above granted",
        )
    return StoreError(
        f"{uri} could not be {doing} ({cause})",
        allowed="a request that the store understands",
        next_step="check the bucket's region (AWS_REGION) and the endpoint (AWS_ENDPOINT_URL)",
    )


def missing(uri: str, code: str = "") -> RemoteMissing:
    """Build the error for an object that is not there."""
    what = "its bucket does not exist" if code == "NoSuchBucket" else "there is no such object"
    return RemoteMissing(
        f"{uri} cannot be had: {what}",
        allowed="an object or a record that was put there",
        next_step="check the URI, or send it there with `strop stage RUN.toml`",
    )


def _unreachable(uri: str, doing: str, failure: Exception, num_attempts: int) -> RemoteUnreachable:
    cause = " ".join(str(failure).split())
    return RemoteUnreachable(
        f"{uri} could not be {doing} in {num_attempts} attempts ({type(failure).__name__}: {cause})",
        allowed="a store that answers",
        next_step="start the same command again: what has arrived is not moved twice",
    )


def retry(
    action: Callable[[], T],
    rules: RetryRules,
    failures: tuple[type[Exception], ...],
    explain: Callable[[Exception, int], Exception | None],
) -> T:
    """Return what the action returns; try again while it fails with one of `failures`.

    `explain` is given a failure and the number of attempts left. It returns the error to raise, or
    None where another attempt is worth while. All other exceptions pass.
    """
    for attempt_index in range(rules.num_attempts):
        try:
            return action()
        except failures as failure:
            error = explain(failure, rules.num_attempts - attempt_index - 1)
            if error is not None:
                raise error from failure
        time.sleep(rules.pause_s(attempt_index))
    raise AssertionError("after the last attempt, `explain` returns an error")


class RateLimiter:
    """Limits the rate of sending, so that others can use the connection too. Safe for several threads."""

    def __init__(
        self,
        max_bytes_per_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._max_bytes_per_s = max_bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait_for(self, num_bytes: int) -> None:
        """Wait until so many bytes may be sent: when all that was let through before had its time."""
        if self._max_bytes_per_s is None:
            return
        with self._lock:
            now = self._clock()
            wait_s = max(self._free_at - now, 0.0)
            self._free_at = now + wait_s + num_bytes / self._max_bytes_per_s
        if wait_s:
            self._sleep(wait_s)
