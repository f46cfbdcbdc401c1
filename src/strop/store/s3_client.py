"""The S3 client: its settings, its transient errors, and the meaning of the others.

boto3, because it takes every form of credentials that AWS knows (profiles, roles, single sign-on),
reports failures by code, and is what the SageMaker launcher needs anyway. The usual variables hold:
AWS_ENDPOINT_URL[_S3], AWS_PROFILE, AWS_REGION, and AWS_REQUEST_CHECKSUM_CALCULATION=when_required for a
compatible service that knows no CRC.

Tried with boto3 1.44.8 and moto 5.2.5. Not tried: Amazon's own service, MinIO, Ceph.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from strop.errors import (
    ConfigError,
    NoCredentials,
    RemoteDenied,
    RemoteMissing,
    RemoteUnreachable,
    StoreError,
)

if TYPE_CHECKING:
    pass

INSTALL = "pip install 'strop[s3]'"
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_CLIENT_VARIABLES = (
    *_ENDPOINT_VARIABLES,
    *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_REQUEST_CHECKSUM_CALCULATION"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
)
# Transient errors. Source: the list of error codes in the Amazon S3 reference.
_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_TRANSIENT_CODES = frozenset(
    {
        *("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "Throttling"),
        *("ThrottlingException", "RequestLimitExceeded", "TooManyRequestsException", "OperationAborted"),
        # The body was damaged on its way.
        *("BadDigest", "IncompleteBody", "InvalidDigest", "XAmzContentSHA256Mismatch"),
    }
)
_MISSING_CODES = frozenset({"404", "NoSuchKey", "NoSuchBucket", "NotFound"})
_CHANGED_STATUS = 412
_READ_BYTES = 1 << 18
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
    """Settings of a process's S3 client."""

    part_bytes: int = 16 << 20
    """Size of a part of a large object; larger if the object would have more parts than S3 allows."""
    num_connections: int = 8
    """Parts and small objects in flight, over all files."""
    connect_limit_s: float = 5.0
    silence_limit_s: float = 30.0
    """Longest wait for the next byte."""
    retries: RetryRules = field(default_factory=RetryRules)


def open_transfers(settings: S3Settings) -> Any:
    """Return the transfer manager of this process, whose `client` and threads all files share.

    Made once for each set of variables that it depends on.
    Raises: ConfigError if boto3 is not installed, or a variable or a profile makes no sense.
    """
    # A child that was forked must not share its parent's connections.
    return _make_transfers(settings, os.getpid(), tuple(map(os.environ.get, _CLIENT_VARIABLES)))


@lru_cache(maxsize=4)
def _make_transfers(settings: S3Settings, pid: int, variables: tuple[str | None, ...]) -> Any:
    session = _make_session()
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError
    from s3transfer.manager import TransferConfig, TransferManager

    is_foreign = any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
    config = Config(
        # `_retry_handler` decides instead; in this mode the client's own rules do not interfere.
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=settings.connect_limit_s,
        read_timeout=settings.silence_limit_s,
        max_pool_connections=settings.num_connections * 2,
        # A compatible endpoint rarely answers under bucket.host; Amazon's always does.
        s3={
            "addressing_style": "path" if is_foreign else "auto",
            # A body's checksum is among the signed headers; hashing it once more proves nothing.
            "payload_signing_enabled": False,
        },
    )
    try:
        client = session.client("s3", config=config)
    except (BotoCoreError, ValueError) as error:
        raise _no_client(error) from error

    client.meta.events.register("needs-retry.s3", _retry_handler(settings.retries))
    return TransferManager(
        client,
        TransferConfig(
            multipart_threshold=settings.part_bytes,
            multipart_chunksize=settings.part_bytes,
            max_request_concurrency=settings.num_connections,
            num_download_attempts=settings.retries.num_attempts,
            io_chunksize=1 << 20,
            max_io_queue_size=64,
        ),
        _make_reader(),
    )


def _make_session() -> Any:
    """Return boto3's session. Raises: ConfigError without boto3, or for a profile that makes no sense."""
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ConfigError(
            "s3:// needs the package boto3, which is not installed",
            allowed="a store in a directory, or S3 with boto3",
            next_step=INSTALL,
        ) from error
    try:
        # boto3 itself knows AWS_DEFAULT_REGION only.
        return boto3.session.Session(region_name=os.environ.get("AWS_REGION"))
    except (BotoCoreError, ValueError) as error:
        raise _no_client(error) from error


def _no_client(error: Exception) -> ConfigError:
    return ConfigError(
        f"the S3 client cannot be made ({error})",
        allowed="AWS_ENDPOINT_URL as http(s)://host, and a profile and region that exist",
        next_step="correct the variable or ~/.aws/config",
    )


def _make_reader() -> Any:
    """Return the transfer manager's access to files, which hands whole parts to the client.

    The client would read a file twice, and send it in pieces of 16 KiB.
    """
    from s3transfer.utils import OSUtils

    class PartReader(OSUtils):  # type: ignore[misc]
        @contextmanager
        def open_file_chunk_reader_from_fileobj(
            self, fileobj: Any, chunk_size: int, *_: Any, **__: Any
        ) -> Iterator[bytes]:
            with fileobj:
                sizes = (min(_READ_BYTES, chunk_size - start) for start in range(0, chunk_size, _READ_BYTES))
                yield b"".join(map(fileobj.read, sizes))

    return PartReader()


def _retry_handler(rules: RetryRules) -> Callable[..., float | None]:
    """Return the client's retry hook: the pause before a request is sent again, or None to give up."""

    def choose_pause_s(
        attempts: int, response: Any, caught_exception: Exception | None, operation: Any, **_: Any
    ) -> float | None:
        from botocore.exceptions import ReadTimeoutError

        if attempts >= rules.num_attempts:
            return None
        if caught_exception is None:
            is_transient = _is_transient_answer(response[1])
        else:
            # Callers that read a body fetch it again when it stops; retries here would multiply theirs.
            is_silent_body = operation.name == "GetObject" and isinstance(caught_exception, ReadTimeoutError)
            is_transient = _is_transient(caught_exception) and not is_silent_body
        return rules.pause_s(attempts - 1) if is_transient else None

    return choose_pause_s


@contextmanager
def errors_explained(uri: str, doing: str, rules: RetryRules) -> Iterator[None]:
    """Raise strop's errors instead of the client's.

    `doing` is what failed, for messages: 'read', 'sent'.
    Raises: RemoteMissing, RemoteDenied, RemoteUnreachable, StoreError.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError

    try:
        yield
    except RetriesExceededError as failure:
        raise _unreachable(uri, doing, failure.last_exception, rules.num_attempts) from failure
    except S3DownloadFailedError as failure:
        raise _changed(uri, doing, failure) from failure
    except (BotoCoreError, ClientError) as failure:
        if _is_transient(failure):
            raise _unreachable(uri, doing, failure, rules.num_attempts) from failure
        raise _refusal(uri, doing, failure) from failure


def is_status(error: Exception, *codes: str) -> bool:
    """Whether an error is the service's answer with one of these codes."""
    return _code_of(_answer_of(error)) in codes


def _answer_of(error: Exception) -> dict[str, Any]:
    return getattr(error, "response", None) or {}


def _code_of(answer: dict[str, Any]) -> str:
    return str(answer.get("Error", {}).get("Code", ""))


def _status_of(answer: dict[str, Any]) -> int:
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _is_transient_answer(answer: dict[str, Any]) -> bool:
    return _status_of(answer) in _TRANSIENT_STATUS or _code_of(answer) in _TRANSIENT_CODES


def _is_transient(failure: Exception) -> bool:
    from botocore.exceptions import (
        ConnectionError,
        FlexibleChecksumError,
        HTTPClientError,
        IncompleteReadError,
    )

    on_the_way = (ConnectionError, HTTPClientError, IncompleteReadError, FlexibleChecksumError)
    return isinstance(failure, on_the_way) or _is_transient_answer(_answer_of(failure))


def _refusal(uri: str, doing: str, failure: Exception) -> StoreError:
    answer = _answer_of(failure)
    status, cause = _status_of(answer), _words_of(failure)
    if _code_of(answer) in _MISSING_CODES or status == _NOT_FOUND_STATUS:
        return missing(uri, _code_of(answer))
    if status == _CHANGED_STATUS:
        return _changed(uri, doing, failure)
    if status == 0:
        return NoCredentials(
            f"{uri} could not be {doing}: there are no usable credentials for S3 ({cause})",
            allowed="credentials in a profile, a role or the usual variables",
            next_step="set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    if status in _REFUSED_STATUS:
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


def _changed(uri: str, doing: str, failure: Exception) -> StoreError:
    return StoreError(
        f"{uri} changed while it was {doing} ({_words_of(failure)})",
        allowed="one writer at a time, and none while it is read",
        next_step="start the same command again when the writer is done",
    )


def _unreachable(uri: str, doing: str, failure: Exception, num_attempts: int) -> RemoteUnreachable:
    cause = f"{type(failure).__name__}: {_words_of(failure)}"
    return RemoteUnreachable(
        f"{uri} could not be {doing} in {num_attempts} attempts ({cause})",
        allowed="a store that answers",
        next_step="start the same command again: what has arrived is not moved twice",
    )


def _words_of(failure: Exception) -> str:
    return " ".join(str(failure).split())
