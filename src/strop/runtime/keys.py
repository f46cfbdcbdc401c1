"""The keys of clients, which may ask the service for sandboxes.

A key file has mode 0600 and lines `OWNER KEY`. An owner has one key, or two while the second replaces the
first. A changed file is read again, so a key can be changed without a restart. Keys are never in arguments,
logs or answers, except for a sandbox's own key, which is in its record.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from strop.errors import ConfigError, StropError
from strop.io.endpoints import write_secret

MIN_KEY_CHARS = 16
MAX_KEYS_PER_OWNER = 2
ANYONE = "anyone"
"""The owner of all sandboxes of a service without keys."""


def new_key() -> str:
    """Return 32 random bytes as text that fits into a header."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One line of a key file."""

    owner: str
    key: str = field(repr=False)


class KeyRing:
    """The keys of one file."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises: ConfigError like `read_keys`."""
        self._path = path
        self._stamp = _stamp(path)
        self._keys = read_keys(path)

    @property
    def newest(self) -> str:
        """The key of the last line."""
        return self._keys[-1].key

    def owner_of(self, key: str) -> str | None:
        """Return the owner of a key, None if it is wrong."""
        digest = _digest(key)
        owner = None
        for entry in self._keys:
            # No early end: the time must not depend on which key matches.
            if hmac.compare_digest(_digest(entry.key), digest):
                owner = entry.owner
        return owner

    def is_in(self, head: bytes) -> bool:
        """Whether a request's head has a key somewhere: its sender is no stranger."""
        return any(entry.key.encode() in head for entry in self._keys)

    def refresh(self) -> str:
        """Read the file again if it has changed. If it is invalid, keep the old keys and return the error."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return ""
        self._stamp = stamp
        try:
            self._keys = read_keys(self._path)
        except StropError as error:
            return str(error)
        return ""


def open_keys(path: Path, owner: str) -> KeyRing:
    """Return the keys of a file; a missing one is created with one new key.

    Raises: ConfigError like `read_keys`, or if it cannot be written.
    """
    try:
        write_secret(path, f"{owner} {new_key()}\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise _bad(path, f"cannot be written ({error.strerror})") from error
    return KeyRing(path)


def read_keys(path: Path) -> list[Key]:
    """Return the keys of a file.

    Raises: ConfigError if the file is missing, readable by others, empty or malformed; it shows no keys.
    """
    try:
        mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(path, f"cannot be read ({error})") from error
    if mode & 0o077:
        raise _bad(path, f"has mode {mode:04o}, so others can read it")
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or len(words[1]) < MIN_KEY_CHARS:
            raise _bad(path, f"has a line {number} that is not an owner and a key")
        keys.append(Key(owner=words[0], key=words[1]))
    if not keys:
        raise _bad(path, "has no key")
    if len({key.key for key in keys}) < len(keys):
        raise _bad(path, "names one key twice")
    for owner, number in Counter(key.owner for key in keys).items():
        if number > MAX_KEYS_PER_OWNER:
            raise _bad(path, f"has {number} keys of {owner}")
    return keys


def require_keys_or_loopback(host: str) -> None:
    """Refuse to serve without keys on an address that other machines can reach. Raises: ConfigError."""
    if host == "localhost":
        return
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"keys are not asked for, and {host} can be reached from other machines",
            allowed="no keys on a loopback address only",
            next_step="leave --disable-auth out, or serve on 127.0.0.1",
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_ino)


def _bad(path: Path, fault: str) -> ConfigError:
    return ConfigError(
        f"the key file {path} {fault}",
        allowed=f"lines of an owner and a key of at least {MIN_KEY_CHARS} characters, mode 0600, at most"
        f" {MAX_KEYS_PER_OWNER} keys an owner",
        next_step="correct it, or remove it to have one made",
    )
