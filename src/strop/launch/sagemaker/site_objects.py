"""The store's objects with the credentials, region and address of one site profile.

The store's client takes them from the usual variables, as every other program does; here those are set for
the length of a call, so that a profile decides and the rest of the process keeps its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from strop.io.variables import set_variables
from strop.launch.sagemaker.job_objects import JobObjects
from strop.spec.site import SageMakerSite
from strop.store.contract import StoredObject

if TYPE_CHECKING:
    from strop.store.s3_client import S3Settings

_LOCK = threading.RLock()


@contextmanager
def site_variables(profile: SageMakerSite) -> Iterator[None]:
    """Let this process be the profile's for a while; one profile at a time."""
    wanted = {
        "AWS_PROFILE": profile.aws_profile,
        "AWS_REGION": profile.region,
        "AWS_ENDPOINT_URL": profile.endpoint_url,
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    with _LOCK, set_variables(given):
        yield


class SiteObjects:
    """`JobObjects` of a site's S3."""

    def __init__(self, profile: SageMakerSite, settings: S3Settings | None = None) -> None:
        from strop.store.s3_objects import S3Objects

        self._profile = profile
        self._inner: JobObjects = S3Objects(settings)

    def find(self, uri: str) -> StoredObject | None:
        """Return what is known about one object, or None."""
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
        """Write a small object; it appears whole or not at all."""
        with site_variables(self._profile):
            self._inner.write(uri, data)

    def upload(self, path: Path, uri: str, sha256: str) -> None:
        """Send a file; what arrived is proven to have that digest before this returns."""
        with site_variables(self._profile):
            self._inner.upload(path, uri, sha256)

    def download(self, stored: StoredObject, path: Path, sha256: str | None) -> str:
        """Write an object to a new local file and return its digest."""
        with site_variables(self._profile):
            return self._inner.download(stored, path, sha256)

    def digest(self, uri: str) -> str | None:
        """Return the SHA-256 that strop left with an object, else None."""
        with site_variables(self._profile):
            return self._inner.digest(uri)

    def remove(self, uri: str) -> None:
        """Remove one object; none is no error."""
        with site_variables(self._profile):
            self._inner.remove(uri)
