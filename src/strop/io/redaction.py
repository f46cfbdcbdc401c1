"""Credentials, recognised by their names or forms, and removed from texts."""

from __future__ import annotations

import json
import re
import shlex
import urllib.parse
from collections.abc import Iterable

from strop.spec.display import credential_form, is_credential_name

REDACTED = "<redacted>"
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API_?KEY|ACCESS_KEY_ID|KEY|TOKEN|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|PAT)$",
    re.IGNORECASE,
)
# Shorter values occur by chance: replacing them would spoil the text and hide nothing.
_MIN_REDACTED_LENGTH = 4


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks like a credential, by its name or its value."""
    return bool(_SECRET_NAME.search(name)) or is_credential_name(name) or credential_form(value) is not None


def redact(text: str, values: Iterable[str]) -> str:
    """Replace all values in a text, also as escaped by JSON, a shell or a URL.

    The lines of a multi-line value are replaced too. Values under 4 characters stay.
    """
    forms: set[str] = set()
    for part in (part for value in values for part in (value, *value.splitlines())):
        forms |= {part, repr(part)[1:-1], shlex.quote(part), urllib.parse.quote(part, safe="")}
        forms |= {json.dumps(part, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)}
    # The longest first, so that no part of a longer form remains.
    for form in sorted(forms, key=len, reverse=True):
        if len(form) >= _MIN_REDACTED_LENGTH:
            text = text.replace(form, REDACTED)
    return text
