"""The shapes of SageMaker's API as botocore ships them: which fields there are, and their limits.

The client checks types, required and unknown fields and minima, and neither maxima nor patterns nor
enumerations (botocore 1.43.11 and 1.44.5), so the same file is read here. Nothing touches a network.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from strop.errors import ConfigError, explain_refusal

INSTALL = "pip install 'strop[s3]'"
# What Java calls by these names and Python's `re` does not know. Alnum is ASCII there.
_NAMED_CLASS = re.compile(r"\\p\{(\w+)\}")
_ASCII_CLASSES = {"Alnum": "a-zA-Z0-9", "Alpha": "a-zA-Z", "Digit": "0-9"}


@lru_cache(maxsize=1)
def load_model() -> Mapping[str, Any]:
    """Return the service's whole model.

    Raises: ConfigError if botocore is not installed.
    """
    try:
        from botocore.loaders import Loader
    except ImportError as error:
        raise ConfigError(
            explain_refusal(
                "the limits of SageMaker come with the package boto3, which is not installed",
                allowed="a plan without a check of its request, or boto3",
                next_step=INSTALL,
            )
        ) from error
    model: Mapping[str, Any] = Loader().load_service_model("sagemaker", "service-2")
    return model


def load_shapes() -> Mapping[str, Any]:
    """Return all shapes of the service by name. Raises: ConfigError as `load_model`."""
    shapes: Mapping[str, Any] = load_model()["shapes"]
    return shapes


def input_shape(operation: str) -> Mapping[str, Any]:
    """Return the shape that an operation takes."""
    name = load_model()["operations"][operation]["input"]["shape"]
    shape: Mapping[str, Any] = load_shapes()[name]
    return shape


def does_match(pattern: str, text: str) -> bool:
    r"""Whether a text is, as a whole, what a pattern of the service asks for.

    Patterns are Java's: `\d`, `\w` and `\s` mean ASCII, and `\p{L}` means a category of Unicode.
    """
    return _compile(pattern, text.isascii()).fullmatch(text) is not None


@lru_cache(maxsize=512)
def _compile(pattern: str, is_ascii: bool) -> re.Pattern[str]:
    # Most texts are ASCII; the classes of all of Unicode take a fifth of a second to collect.
    limit = 128 if is_ascii else sys.maxunicode + 1

    def replace(found: re.Match[str]) -> str:
        name = found[1]
        return _ASCII_CLASSES.get(name) or _category_class(name, limit)

    return re.compile(_NAMED_CLASS.sub(replace, pattern), re.ASCII)


@lru_cache(maxsize=32)
def _category_class(name: str, limit: int) -> str:
    """Return the characters of a category of Unicode below a code point, as the inside of a class."""
    ranges: list[tuple[int, int]] = []
    for code in range(limit):
        if not unicodedata.category(chr(code)).startswith(name):
            continue
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1] = (ranges[-1][0], code)
        else:
            ranges.append((code, code))
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)
