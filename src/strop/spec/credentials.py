"""Texts that look like credentials, so that none is kept in a run file or shown in a message.

Not a scanner for all secrets: it knows the forms that are pasted into run files of this field.
A credential belongs into the environment or a protected file, where a run finds it by name.
"""

from __future__ import annotations

import re

_FORMS = {
    "a model hub token": r"\bhf_[A-Za-z0-9]{16,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "an API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{16,}",
    "a Google API key": r"\bAIza[0-9A-Za-z_-]{30,}",
    "a Slack token": r"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "a signed web token": r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "a password in an address": r"://[^/\s:@]+:[^/\s@]+@",
}
# One pattern, compiled once: the reader asks about every text of a file.
_ANY = re.compile("|".join(f"(?P<f{index}>{form})" for index, form in enumerate(_FORMS.values())))
_NAMES = re.compile(
    r"(?:^|[_-])(?:api_?key|access_?key|secret|secret_?key|password|passwd|auth_?token)$", re.IGNORECASE
)


def credential_form(text: str) -> str | None:
    """Return what kind of credential a text looks like, or None if it looks like none."""
    match = _ANY.search(text)
    if match is None or match.lastgroup is None:
        return None
    return list(_FORMS)[int(match.lastgroup[1:])]


def is_credential_name(name: str) -> bool:
    """Whether a key by its name holds a credential, for example 'api_key'."""
    return _NAMES.search(name) is not None
