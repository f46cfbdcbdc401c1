"""Keys: who may ask the controller for sandboxes, and which node agents may report.

Keys stand in files that their owner alone may read, one a line as `OWNER KEY`. An owner has one key, or two
while one takes the place of the other. A file that changes is read again, so a key is changed without a
restart. Keys are never in arguments, logs or answers; one sandbox's key is in that sandbox's record.
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
"""The owner of all sandboxes where keys are not asked for."""


def new_key() -> str:
    """Return 32 random bytes as text that fits into a header."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One line of a file."""

    owner: str
    key: str = field(repr=False)
    digest: bytes = field(repr=False)
    """Keys are compared by it, so that their lengths do not matter."""


class KeyRing:
    """The keys of one file. A given key is compared with all of them, each in constant time."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises: ConfigError like `read_keys`."""
        self._path = path
        self._stamp = _stamp(path)
        self._keys = read_keys(path)

    @property
    def newest(self) -> str:
        """The key of the last line, to send."""
        return self._keys[-1].key

    def owner_of(self, given: str) -> str | None:
        """Return whose key this is; None if it is nobody's."""
        digest = _digest(given)
        found = None
        for one in self._keys:
            # No early end: the time must not tell which key it was, nor how many there are before it.
            if hmac.compare_digest(one.digest, digest):
                found = one.owner
        return found

    def refresh(self) -> str:
        """Read the file again if it changed; return what is wrong with it, or nothing. Old keys stay then."""
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
    """Return the keys of a file, which is made with one fresh key if it is not there yet.

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

    Raises: ConfigError if the file is missing, open to others, empty or malformed; its keys are not shown.
    """
    try:
        mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(path, f"cannot be read ({error})") from error
    if mode & 0o077:
        raise _bad(path, f"has mode {mode:04o}, so others can read it")
    found: list[Key] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or len(words[1]) < MIN_KEY_CHARS:
            raise _bad(path, f"has a line {number} that is not an owner and a key")
        found.append(Key(owner=words[0], key=words[1], digest=_digest(words[1])))
    if not found:
        raise _bad(path, "has no key")
    if len({one.key for one in found}) < len(found):
        raise _bad(path, "names one key twice")
    for owner, number in Counter(one.owner for one in found).items():
        if number > MAX_KEYS_PER_OWNER:
            raise _bad(path, f"has {number} keys of {owner}")
    return found


def require_keys_or_loopback(host: str, *, is_forced: bool) -> None:
    """Refuse to serve without keys where others than this machine's users can connect.

    Raises: ConfigError.
    """
    if is_forced or host == "localhost":
        return
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"keys are not asked for, and {host} can be reached from other machines",
            allowed="no keys on a loopback address only",
            next_step="leave --disable-auth out, or add --force if nobody else is on this network",
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_ino)


def _bad(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"the key file {path} {what}",
        allowed=f"lines of an owner and a key of at least {MIN_KEY_CHARS} characters, mode 0600, at most"
        f" {MAX_KEYS_PER_OWNER} keys an owner",
        next_step="correct it, or remove it to have one made",
    )
