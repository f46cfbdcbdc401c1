"""URIs of stores: `s3://bucket/prefix`, or a directory."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from strop.errors import ConfigError

ALLOWED_URIS = "a directory, or s3://bucket/prefix"
# Letters, digits, dots and hyphens, 3 to 63. Source: the bucket naming rules of Amazon S3.
_S3 = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<key>.*))?$", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Uri:
    """A bucket and a key without slashes at its ends; an empty key is the whole bucket."""

    bucket: str
    key: str


def is_remote(text: str) -> bool:
    """Whether a text is a URI with a scheme rather than a path or a hub id."""
    return "://" in text


def join_uri(uri: str, *names: str) -> str:
    """Append names to a URI or a directory."""
    return "/".join([uri.rstrip("/"), *names])


def normalize_uri(uri: str) -> str:
    """Return the canonical spelling of a URI, which listings use too."""
    if uri.startswith("s3://"):
        place = parse_s3(uri)
        return f"s3://{place.bucket}/{place.key}".rstrip("/")
    return uri if is_remote(uri) else os.path.abspath(os.path.expanduser(uri))


def parse_s3(uri: str) -> S3Uri:
    """Take an S3 URI apart.

    Raises: ConfigError for any other form, and for keys with empty parts, '.' or '..'.
    """
    match = _S3.match(uri)
    key = (match["key"] or "").rstrip("/") if match else ""
    if match is None or (key and {"", ".", ".."} & set(key.split("/"))):
        raise _refuse(
            uri, "as in s3://bucket/prefix, the bucket in lowercase letters, digits, dots and hyphens"
        )
    return S3Uri(bucket=match["bucket"], key=key)


def require_known_scheme(uri: str) -> None:
    """Refuse a URI with an unknown scheme.

    Raises: ConfigError.
    """
    if is_remote(uri) and not uri.startswith("s3://"):
        raise _refuse(uri, ALLOWED_URIS)


def _refuse(uri: str, allowed: str) -> ConfigError:
    return ConfigError(f"{uri} is not a place of a store", allowed=allowed, next_step="correct the URI")
