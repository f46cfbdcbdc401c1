"""Read, write and list files inside a sandbox: as its user, under its limits, in its root.

Files are opened inside, so no path is ever joined on the host, and a link that is swapped meanwhile leads
only into the sandbox. The exit code names the kind of error.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop.sandbox.linux import CLONE_NEWUSER, read_file, remove_ipc, unshare

EXIT_KINDS = {
    10: "missing",
    11: "directory",
    12: "not_regular",
    13: "denied",
    14: "too_large",
    15: "no_space",
    16: "io",
}
_CODES = {kind: code for code, kind in EXIT_KINDS.items()}
_KIND_BY_ERRNO = {
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
    errno.EISDIR: "directory",
    errno.ELOOP: "not_regular",
    errno.ENXIO: "not_regular",
    errno.EACCES: "denied",
    errno.EPERM: "denied",
    errno.EROFS: "denied",
    errno.EFBIG: "too_large",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
}
_NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts")
_CHUNK_BYTES = 1 << 16


def run_builtin(name: str, request: dict[str, Any]) -> int:
    """Run a file operation inside and return the exit code."""
    try:
        return _BUILTINS[name](request)
    except OSError as error:
        os.write(2, str(error).encode(errors="replace"))
        return _CODES[_KIND_BY_ERRNO.get(error.errno or 0, "io")]


def _read(request: dict[str, Any]) -> int:
    offset, max_bytes = request["offset"], request["max_bytes"]
    # NONBLOCK: a FIFO without a writer would block for ever. NOFOLLOW: a link is not a regular file.
    descriptor = os.open(request["path"], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        return _CODES["directory" if stat.S_ISDIR(mode) else "not_regular"]
    os.lseek(descriptor, offset, os.SEEK_SET)
    num_bytes = 0
    # Bytes read are counted; the file's reported size is not trusted.
    while data := os.read(descriptor, _CHUNK_BYTES):
        num_bytes += len(data)
        if num_bytes > max_bytes:
            return _CODES["too_large"]
        _write_all(1, data)
    return 0


def _write(request: dict[str, Any]) -> int:
    path = Path(request["path"])
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        return _CODES["directory"]
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(partial, flags, 0o600)
    try:
        while data := os.read(0, _CHUNK_BYTES):
            _write_all(descriptor, data)
        os.fchmod(descriptor, request["mode"])
        os.replace(partial, path)
    except OSError:
        os.unlink(partial)
        raise
    return 0


def _make_dir(request: dict[str, Any]) -> int:
    os.makedirs(request["path"], exist_ok=True)
    return 0


def _list(request: dict[str, Any]) -> int:
    """Write a listing of a tree: relative name, kind, permission bits. Links are not followed."""
    top, max_files = request["path"], request["max_files"]
    listing = []
    queue = [""]
    while queue:
        name = queue.pop()
        mode = os.lstat(os.path.join(top, name) if name else top).st_mode
        kind = "file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "other"
        listing.append((name, kind, stat.S_IMODE(mode)))
        if len(listing) > max_files:
            return _CODES["too_large"]
        if kind == "directory":
            queue += sorted(os.path.join(name, entry) for entry in os.listdir(os.path.join(top, name)))
    _write_all(1, json.dumps(listing).encode())
    return 0


def read_namespaces() -> dict[str, str]:
    """Return the identities of this process's namespaces, by kind; "" if the kernel has no such kind."""
    names = dict.fromkeys(_NAMESPACES, "")
    for name in _NAMESPACES:
        with suppress(OSError):
            names[name] = os.readlink(f"/proc/self/ns/{name}")
    return names


def measure_self() -> dict[str, Any]:
    """Return this process's privileges and namespaces, as the kernel reports them.

    Raises: OSError if /proc is not readable.
    """
    lines = read_file("/proc/self/status").splitlines()
    status = {word: rest.strip() for word, _, rest in (line.partition(":") for line in lines)}
    facts = {
        "caps": f"{int(status['CapEff'], 16):x}/{int(status['CapBnd'], 16):x}",
        "permitted": int(status["CapPrm"], 16),
        "no_new_privs": status.get("NoNewPrivs") == "1",
        "seccomp": status.get("Seccomp", "0") != "0",
        "namespaces": read_namespaces(),
    }
    try:
        # Last, because success changes this process.
        unshare(CLONE_NEWUSER)
        facts["nested_userns"] = True
    except OSError:
        facts["nested_userns"] = False
    return facts


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _free(request: dict[str, Any]) -> int:
    if request["uid"] is not None:
        remove_ipc(request["uid"], is_idle=True)
    return 0


_BUILTINS: dict[str, Callable[[dict[str, Any]], int]] = {
    "free": _free,
    "read": _read,
    "write": _write,
    "make_dir": _make_dir,
    "list": _list,
}
