"""S3 as pyarrow reads it: parts of files, for whoever needs a few columns of many.

Endpoint, region, credentials and patience are those of the client in `s3_client`, so that both meet the
same store. Importing this module imports pyarrow.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

from strop.errors import RemoteDenied
from strop.store.s3_client import S3Settings, find_access

_AMAZON = ".amazonaws.com"


def open_arrow_files(settings: S3Settings | None = None) -> S3FileSystem:
    """Return the file system of S3, whose paths are `bucket/key`; nothing is asked yet.

    Raises: ConfigError as `open_transfers`; RemoteDenied if there are no credentials.
    """
    settings = settings or S3Settings()
    access = find_access(settings)
    if access.credentials is None:
        raise RemoteDenied(
            "there are no credentials for S3",
            allowed="credentials that may list and read",
            next_step="set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    endpoint = urlsplit(access.endpoint)
    is_foreign = not (endpoint.hostname or "").endswith(_AMAZON)
    return S3FileSystem(
        access_key=access.credentials.access_key,
        secret_key=access.credentials.secret_key,
        session_token=access.credentials.token,
        region=access.region,
        scheme=endpoint.scheme,
        endpoint_override=endpoint.netloc if is_foreign else None,
        connect_timeout=settings.connect_limit_s,
        request_timeout=settings.silence_limit_s,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=settings.retries.num_attempts),
        tls_ca_file_path=os.environ.get("AWS_CA_BUNDLE"),
    )
