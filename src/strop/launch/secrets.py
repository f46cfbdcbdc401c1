"""The file with the values of a job's secrets; `strop.io.redaction` removes them from texts.

`job/secrets.json` has mode 0600 from its first byte on, is written atomically, and stays as long as the job
may start again. Whoever sees its end removes it: the supervisor or batch script itself, `strop status`, `ls`
and `cancel`, `doctor --clean`. `environment` determines which secrets a job has.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from strop.errors import StoreError
from strop.io.atomic import write_bytes_atomically

SECRETS_NAME = "secrets.json"


def read_secrets(job_path: Path) -> dict[str, str]:
    """Return the secrets of a job by name; empty once they are removed. Raises: StoreError."""
    content = read_json(job_path / SECRETS_NAME)
    return {} if content is None else dict(content["values"])


def has_secrets(job_path: Path) -> bool:
    """Whether a job has values of secrets, or partial copies of them."""
    return next(job_path.glob(f"{SECRETS_NAME}*"), None) is not None


def remove_secrets(job_path: Path) -> None:
    """Remove `secrets.json` and partial copies of it. Raises: StoreError if that fails."""
    try:
        for path in job_path.glob(f"{SECRETS_NAME}.partial-*"):
            path.unlink(missing_ok=True)
        (job_path / SECRETS_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"{job_path / SECRETS_NAME} cannot be removed: {error.strerror}",
            allowed="a directory of the submitting user",
            next_step=f"remove it by hand: rm {shlex.quote(str(job_path / SECRETS_NAME))}",
        ) from error


def read_hub_login(environ: Mapping[str, str]) -> str | None:
    """Return the token that the hub's own client stores on this machine, or None.

    Source: huggingface_hub.constants: HF_TOKEN_PATH, else `token` in HF_HOME, which is by default
        `huggingface` in XDG_CACHE_HOME or ~/.cache.
    """
    home = Path(environ.get("HOME") or Path.home())
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(environ.get("HF_HOME") or cache / "huggingface")
    path = Path(environ.get("HF_TOKEN_PATH") or hub / "token")
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a file's JSON object, None without the file. Raises: StoreError without any of its content."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        # The message of the JSON error is left out: it may quote the content.
        raise StoreError(f"{path} cannot be read ({type(error).__name__}): submit the job again") from None
    return dict(content)


def write_private(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file atomically that other users can read at no time. Raises: StoreError."""

    def open_private(place: Path) -> BinaryIO:
        return os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

    write_bytes_atomically(path, json.dumps(content, indent=1).encode(), open_file=open_private)
