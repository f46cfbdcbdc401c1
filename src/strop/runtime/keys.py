"""Keys of the service: who owns them.

A key file has mode 0600 and lines `OWNER KEY`; an owner may have several. The service reads it every second,
so a key can be changed without a restart. Keys are in no arguments, logs or answers, except for a sandbox's
own key, which is in its record.
"""

from __future__ import annotations

import hmac
import secrets
import stat
from pathlib import Path

from strop.errors import ConfigError
from strop.io.endpoints import write_secret

MIN_KEY_CHARS = 16


def new_key() -> str:
    """Return 32 random bytes as text that fits into a header."""
    return secrets.token_urlsafe(32)


def open_keys(path: Path, owner: str) -> dict[str, str]:
    """Return the keys of a file and their owners; a missing one is created with one new key.

    Raises: ConfigError like `read_keys`, or if it cannot be written.
    """
    try:
        write_secret(path, f"{owner} {new_key()}\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise _bad(path, f"cannot be written ({error.strerror})") from error
    return read_keys(path)


def find_owner(owners: dict[str, str], key: str) -> str | None:
    """Return the owner of a key, None if it is wrong. The time does not tell how much of it is right."""
    given = key.encode(errors="replace")
    return next((owner for one, owner in owners.items() if hmac.compare_digest(one.encode(), given)), None)


def read_keys(path: Path) -> dict[str, str]:
    """Return the keys of a file, in their order, and their owners.

    Raises: ConfigError if the file is missing, readable by others, empty or malformed; it shows no keys.
    """
    try:
        mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(path, f"cannot be read ({error})") from error
    if mode & 0o077:
        raise _bad(path, f"has mode {mode:04o}, so others can read it")
    owners: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or len(words[1]) < MIN_KEY_CHARS:
            raise _bad(path, f"has a line {number} that is not an owner and a key")
        owners[words[1]] = words[0]
    if not owners:
        raise _bad(path, "has no key")
    return owners


def _bad(path: Path, fault: str) -> ConfigError:
    return ConfigError(
        f"the key file {path} {fault}",
        allowed=f"lines of an owner and a key of at least {MIN_KEY_CHARS} characters, mode 0600",
        next_step="correct it, or remove it to have one made",
    )
