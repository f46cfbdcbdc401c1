"""AWS clients and S3 objects of one site, and the meaning of their errors.

Every client takes region, credentials and address from the site profile, is created on first use, and belongs
to one `AwsClients`, so no client of the process acts for another account. The store's S3 client reads the
usual variables, as other programs do; `SiteObjects` sets them for the duration of a call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from strop.errors import (
    CheckRefused,
    ConfigError,
    RemoteDenied,
    RemoteMissing,
    RemoteUnreachable,
    StropError,
)
from strop.io.variables import set_variables
from strop.launch.sagemaker.options import SageMakerSite
from strop.store.contract import StoredObject

INSTALL = "pip install 'strop[s3]'"
NUM_ATTEMPTS = 6
"""Attempts of a request, with botocore's pauses."""
_EXPIRED_CODES = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
)
_DENIED_CODES = frozenset(
    {
        *("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "403", "Forbidden"),
        *("UnrecognizedClientException", "InvalidClientTokenId", "SignatureDoesNotMatch"),
        *("InvalidSignatureException", "AuthFailure", "NotAuthorized", "MissingAuthenticationToken"),
        *("InvalidAccessKeyId", "AllAccessDisabled", "OptInRequired"),
    }
)
_PASSING_CODES = frozenset(
    {
        *(
            "Throttling",
            "ThrottlingException",
            "TooManyRequestsException",
            "RequestLimitExceeded",
            "SlowDown",
        ),
        *("InternalFailure", "InternalServerError", "InternalError", "ServiceUnavailable"),
    }
)
MISSING_CODES = frozenset(
    {
        *("ResourceNotFound", "ResourceNotFoundException", "NoSuchEntity", "NoSuchBucket", "404", "NotFound"),
        *("RepositoryNotFoundException", "ImageNotFoundException"),
    }
)
_PASSING_STATUS = frozenset({500, 502, 503, 504})


@dataclass(kw_only=True)
class AwsClients:
    """The clients of one site."""

    profile: SageMakerSite
    num_attempts: int = NUM_ATTEMPTS
    by_service: dict[str, Any] = field(default_factory=dict)
    """Existing clients by service; tests add a `FakeSageMaker`."""
    _session: Any = None
    _identity: str | None = None

    def client(self, service: str) -> Any:
        """Return the client of a service. Raises: ConfigError if boto3 or the AWS profile is missing."""
        if service in self.by_service:
            return self.by_service[service]
        try:
            import boto3  # noqa: F401
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError as error:
            raise ConfigError(
                "SageMaker needs the package boto3, which is not installed",
                allowed="`strop submit --dry-run`, which works without it",
                next_step=INSTALL,
            ) from error
        retries = {"total_max_attempts": self.num_attempts, "mode": "standard"}
        config = Config(retries=retries, connect_timeout=5, read_timeout=60)
        try:
            client = self.session().client(service, config=config, endpoint_url=self.profile.endpoint_url)
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(
                f"the client for {service} cannot be made ({error})",
                allowed="an aws_profile and a region that exist, and endpoint_url as http(s)://host",
                next_step="correct the site profile or ~/.aws/config",
            ) from error
        self.by_service[service] = client
        return client

    def session(self) -> Any:
        """Return boto3's session. Raises: ImportError without boto3; BotoCoreError for an unknown profile."""
        if self._session is None:
            import boto3

            self._session = boto3.session.Session(
                profile_name=self.profile.aws_profile, region_name=self.profile.region
            )
        return self._session

    def credential_variables(self) -> dict[str, str]:
        """Return the submitter's credentials, place and endpoint for a process that has none of its files."""
        found = self.session().get_credentials()
        frozen = found.get_frozen_credentials() if found else None
        values = {
            "AWS_ACCESS_KEY_ID": frozen and frozen.access_key,
            "AWS_SECRET_ACCESS_KEY": frozen and frozen.secret_key,
            "AWS_SESSION_TOKEN": frozen and frozen.token,
            "AWS_REGION": self.session().region_name,
            "AWS_ENDPOINT_URL": self.profile.endpoint_url or os.environ.get("AWS_ENDPOINT_URL"),
        }
        return {name: value for name, value in values.items() if value}

    def call(self, service: str, operation: str, *, resource: str = "", **arguments: Any) -> Any:
        """Call an operation; the client repeats it while it is throttled or the service does not answer.

        Messages name `resource`. Raises: RemoteDenied with action, resource and identity; RemoteMissing;
            RemoteUnreachable; CheckRefused with the service's message.
        """
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        try:
            return getattr(self.client(service), operation)(**arguments)
        except (BotoCoreError, ClientError, ResponseParserError) as failure:
            raise self.explain(failure, service, operation, resource) from failure

    def explain(self, failure: Exception, service: str, operation: str, resource: str) -> StropError:
        """Return a failure as an error for the user."""
        action = action_of(service, operation)
        code, words = error_code(failure), " ".join(str(failure).split())
        where = f"{action} on {resource}" if resource else action
        if code in _EXPIRED_CODES or type(failure).__name__ in {"TokenRetrievalError", "SSOTokenLoadError"}:
            return RemoteDenied(
                f"{where}: the credentials have expired ({words})",
                allowed="credentials that are valid now",
                next_step=f"log in again{self._login()}, then start the same command again",
            )
        if may_pass(failure):
            return RemoteUnreachable(
                f"{where} failed in up to {self.num_attempts} attempts ({words})",
                allowed="a service that answers",
                next_step="wait, then start the same command again: nothing is submitted twice",
            )
        if code in MISSING_CODES or (code == "ValidationException" and "not found" in words.lower()):
            return RemoteMissing(
                f"{resource or action} is not there ({words})",
                allowed="something that exists in this account and region",
                next_step="check the name, the region and the account in the site profile",
            )
        if code in _DENIED_CODES or _status_of(failure) in {401, 403} or not code:
            if not code:
                # The client itself had no credentials, or no endpoint.
                return RemoteDenied(
                    f"{where}: no usable credentials ({words})",
                    allowed="credentials in a named profile, a role or the usual variables",
                    next_step=f"log in{self._login()}, or set aws_profile in the site profile",
                )
            return RemoteDenied(
                f"{where} is not allowed for {self.identity()} ({words})",
                allowed=f"an identity that may {action}",
                next_step="have the right granted: `strop policy` prints all that are needed",
            )
        return CheckRefused(
            f"{where} was refused: {words}",
            allowed="a request that the service accepts",
            next_step="change the site profile or the flag that the service names",
        )

    def identity(self) -> str:
        """Return the caller's ARN, for messages."""
        if self._identity is None:
            from botocore.exceptions import BotoCoreError, ClientError

            try:
                self._identity = str(self.client("sts").get_caller_identity()["Arn"])
            except (BotoCoreError, ClientError, ConfigError):
                self._identity = f"the credentials of {self.profile.aws_profile or 'this environment'}"
        return self._identity

    def _login(self) -> str:
        return f" (aws sso login --profile {self.profile.aws_profile})" if self.profile.aws_profile else ""


def error_code(failure: Exception) -> str:
    """Return the service's error code; empty if the client itself failed."""
    response: dict[str, Any] = getattr(failure, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def may_pass(failure: Exception) -> bool:
    """Whether another attempt may succeed."""
    from botocore.exceptions import ConnectionError as NoConnection
    from botocore.exceptions import HTTPClientError
    from botocore.parsers import ResponseParserError

    # A proxy's HTML page gives the last of these.
    if isinstance(failure, (NoConnection, HTTPClientError, ResponseParserError)):
        return True
    return error_code(failure) in _PASSING_CODES or _status_of(failure) in _PASSING_STATUS


def action_of(service: str, operation: str) -> str:
    """Return IAM's name of an operation, such as `sagemaker:CreateTrainingJob`."""
    prefix = {"service-quotas": "servicequotas"}.get(service, service)
    words = "".join(word.capitalize() for word in operation.split("_"))
    renamed = {
        "HeadBucket": "ListBucket",
        "ListObjectsV2": "ListBucket",
        "GetCallerIdentity": "GetCallerIdentity",
    }
    return f"{prefix}:{renamed.get(words, words)}"


def all_pages(clients: AwsClients, service: str, operation: str, key: str, **arguments: Any) -> list[Any]:
    """Return the items of all pages, which NextToken or nextToken connects."""
    name = "nextToken" if service in {"ecr", "logs"} else "NextToken"
    items: list[Any] = []
    while True:
        answer = clients.call(service, operation, **arguments)
        items += answer.get(key, [])
        if not answer.get(name):
            return items
        arguments[name] = answer[name]


def _status_of(failure: Exception) -> int:
    response: dict[str, Any] = getattr(failure, "response", None) or {}
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


class JobObjects(Protocol):
    """Objects in S3, or in folders that replace its buckets. All methods raise StoreError."""

    def find(self, uri: str) -> StoredObject | None:
        """Return the facts about one object, or None."""

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Yield all objects below a URI, by name."""

    def read(self, uri: str) -> bytes:
        """Return a small object. Raises: RemoteMissing."""

    def write(self, uri: str, data: bytes) -> None:
        """Write a small object atomically."""

    def upload(self, path: Path, uri: str, sha256: str) -> None:
        """Send a file, and verify its digest at the destination."""

    def download(self, stored: StoredObject, path: Path, sha256: str | None) -> str:
        """Write an object to a new local file and return its digest."""

    def digest(self, uri: str) -> str | None:
        """Return the SHA-256 of an object if it is known without a transfer, else None."""

    def remove(self, uri: str) -> None:
        """Remove one object; a missing one is no error."""


_LOCK = threading.RLock()


@contextmanager
def site_variables(profile: SageMakerSite) -> Iterator[None]:
    """Set the profile's AWS variables in this process; one profile at a time."""
    values = {
        "AWS_PROFILE": profile.aws_profile,
        "AWS_REGION": profile.region,
        "AWS_ENDPOINT_URL": profile.endpoint_url,
    }
    variables = {name: value for name, value in values.items() if value is not None}
    with _LOCK, set_variables(variables):
        yield


class SiteObjects:
    """`JobObjects` of a site's S3."""

    def __init__(self, profile: SageMakerSite) -> None:
        from strop.store.s3_objects import S3Objects

        self._profile = profile
        self._inner: JobObjects = S3Objects()

    def find(self, uri: str) -> StoredObject | None:
        """Return the facts about one object, or None."""
        with site_variables(self._profile):
            return self._inner.find(uri)

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Yield all objects below a URI, by name."""
        with site_variables(self._profile):
            yield from list(self._inner.list(uri))

    def read(self, uri: str) -> bytes:
        """Return a small object. Raises: RemoteMissing."""
        with site_variables(self._profile):
            return self._inner.read(uri)

    def write(self, uri: str, data: bytes) -> None:
        """Write a small object atomically."""
        with site_variables(self._profile):
            self._inner.write(uri, data)

    def upload(self, path: Path, uri: str, sha256: str) -> None:
        """Send a file, and verify its digest at the destination."""
        with site_variables(self._profile):
            self._inner.upload(path, uri, sha256)

    def download(self, stored: StoredObject, path: Path, sha256: str | None) -> str:
        """Write an object to a new local file and return its digest."""
        with site_variables(self._profile):
            return self._inner.download(stored, path, sha256)

    def digest(self, uri: str) -> str | None:
        """Return the SHA-256 that strop stored with an object, else None."""
        with site_variables(self._profile):
            return self._inner.digest(uri)

    def remove(self, uri: str) -> None:
        """Remove one object; a missing one is no error."""
        with site_variables(self._profile):
            self._inner.remove(uri)
