"""The files with a job's secrets; `strop.io.redaction` removes the values of variables from texts.

`job/secrets.json` has these values, `job/ray.token` the token of the Ray cluster of a job with several nodes.
Both have mode 0600 from their first byte on, are written atomically, and stay as long as the job may start
again. Whoever sees its end removes it: the supervisor or batch script itself, `strop status`, `ls`
and `cancel`, `doctor --clean`. `environment` determines which secrets a job has.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.errors import StoreError
from strop.io.atomic import write_bytes_atomically

SECRETS_NAME = "secrets.json"
RAY_TOKEN_NAME = "ray.token"
_NAMES = (SECRETS_NAME, RAY_TOKEN_NAME)


def read_secrets(job_path: Path) -> dict[str, str]:
    """Return the secrets of a job by name; empty once they are removed. Raises: StoreError."""
    content = read_json(job_path / SECRETS_NAME)
    return {} if content is None else dict(content["values"])


def has_secrets(job_path: Path) -> bool:
    """Whether a job has files with secrets, or partial copies of them."""
    return any(True for name in _NAMES for _ in job_path.glob(f"{name}*"))


def remove_secrets(job_path: Path) -> None:
    """Remove these files and partial copies of them. Raises: StoreError if that fails."""
    paths = [path for name in _NAMES for path in (*job_path.glob(f"{name}.partial-*"), job_path / name)]
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be removed: {error.strerror}",
                allowed="a directory of the submitting user",
                next_step=f"remove it by hand: rm {shlex.quote(str(path))}",
            ) from error


def write_ray_token(job_path: Path) -> None:
    """Write a token of 32 random bytes, unless a living job has one already. Raises: StoreError."""
    path = job_path / RAY_TOKEN_NAME
    if not path.exists():
        _write_private(path, secrets.token_hex(32).encode())


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
    _write_private(path, json.dumps(content, indent=1).encode())


def _write_private(path: Path, data: bytes) -> None:
    write_bytes_atomically(path, data, mode=0o600)
