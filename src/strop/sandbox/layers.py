"""Layers, the copies of programs' files: taking a snapshot, and starting a sandbox from one.

A layer is a directory of the daemon, with the size limit of the sandbox that was copied. Containers mount it
below their own changes, so any number of them share it and a start copies nothing; it holds deletions as the
overlay's whiteouts. The other backends copy it into the new private directory, with shared blocks where the
file system supports them.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from strop.sandbox.linux import become, close_all_but, detach_mount, mount_tmpfs
from strop.sandbox.place import Ground, Place
from strop.sandbox.runner import measure_tree
from strop.sandbox.spawning import remove_tree, run_program

PREFIX = "snap-"
MAX_LAYERS = 16
"""Limit on snapshots of snapshots of a container."""
_FILES, _DONE = "files", "done"
_NUM_OWN_FILES = 4
_KINDS = {errno.ENOSPC: "no_space", errno.EMLINK: "too_deep", errno.ENOTSUP: "snapshot"}
_MAX_ERROR_CHARS = 600
_ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}


def start_copy(
    path: str,
    place: Place,
    ground: Ground,
    selector: selectors.BaseSelector,
    on_end: Callable[[dict[str, Any]], None],
) -> None:
    """Copy a place's files into a new layer, in a fork; pass the reply to `on_end`.

    Raises: OSError if the host gives no process.
    """
    answer, theirs = socket.socketpair()
    with theirs:
        if os.fork() == 0:
            _copy_and_exit(path, place, ground, theirs)

    def on_answer() -> None:
        selector.unregister(answer)
        with answer:
            reply = answer.recv(1 << 16)
        on_end(json.loads(reply) if reply else {"failed": "io", "why": "the copy ended without a word"})

    selector.register(answer, selectors.EVENT_READ, on_answer)


def _copy_and_exit(path: str, place: Place, ground: Ground, answer: socket.socket) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        close_all_but((0, 1, 2, answer.fileno()))
        try:
            reply = _make_layer(path, place, ground)
        except OSError as error:
            remove_layer(path, can_mount=ground.can_mount)
            kind = _KINDS.get(error.errno or errno.EIO, "io")
            reply = {"failed": kind, "why": f"no snapshot was taken: {error}"}
        answer.sendall(json.dumps(reply).encode())
    finally:
        os._exit(0)


def _make_layer(path: str, place: Place, ground: Ground) -> dict[str, Any]:
    if place.has_overlay and not ground.can_mount:
        raise OSError(errno.ENOTSUP, "containers of an ordinary user have no snapshots")
    if len(place.layers) >= MAX_LAYERS:
        raise OSError(errno.EMLINK, f"a container of {MAX_LAYERS} layers")
    limits = place.limits
    os.mkdir(path, 0o711)
    if ground.can_mount:
        num_inodes = limits.max_scratch_files + _NUM_OWN_FILES
        mount_tmpfs(path, f"size={limits.scratch_bytes},nr_inodes={num_inodes},mode=711")
    files = f"{path}/{_FILES}"
    os.mkdir(files, 0o755)
    copy_tree(place.changes, files)
    num_bytes, _ = measure_tree(files)
    with open(f"{path}/{_DONE}", "wb"):
        pass
    return {
        "layers": [path, *(place.layers if place.has_overlay else ())],
        "uid": place.first_id,
        "num_bytes": num_bytes,
    }


def layer_files(path: str) -> str:
    """Return the path of a layer's files. Raises: OSError if the layer is incomplete or gone."""
    os.stat(f"{path}/{_DONE}")
    return f"{path}/{_FILES}"


def remove_layer(path: str, *, can_mount: bool) -> None:
    """Remove a layer, complete or not."""
    if can_mount:
        with suppress(OSError):
            detach_mount(path)
    remove_tree(path)


def remove_unfinished(runtime_dir: str, supervisor_pid: int, *, can_mount: bool) -> None:
    """Remove the unfinished layers of a supervisor that was killed."""
    for path in Path(runtime_dir).glob(f"{PREFIX}{supervisor_pid}-*"):
        if not (path / _DONE).exists():
            remove_layer(str(path), can_mount=can_mount)


def copy_tree(source: str, target: str, owner: int | None = None) -> None:
    """Copy the contents of a directory with modes, times, links and whiteouts; `owner`: change the owner.

    Raises: OSError with the first error.
    """
    owners = [] if owner is None else [["chown", "-hR", f"{owner}:{owner}", target]]
    for step in (["cp", "-a", "--reflink=auto", f"{source}/.", f"{target}/"], *owners):
        _run(step)


def unpack_inside(place: Place, source: str) -> None:
    """Copy the contents of a directory into the private directory of a place with a user namespace.

    Raises: OSError with the first error.
    """

    def enter() -> None:
        place.enter()
        os.chdir(place.scratch)
        if place.user is not None:
            become(*place.user)

    packed, packing = os.pipe()
    words = ["tar", "-cf", "-", "-C", source, "."]
    packer = os.posix_spawnp(words[0], words, _ENV, file_actions=[(os.POSIX_SPAWN_DUP2, packing, 1)])
    os.close(packing)
    try:
        # Unpacked inside, since its file system has no valid id for a user outside.
        _run(["tar", "-xpf", "-", "--no-same-owner", "--no-overwrite-dir"], stdin=packed, prepare=enter)
    finally:
        os.close(packed)
        with suppress(ProcessLookupError):
            os.kill(packer, signal.SIGKILL)
        os.waitpid(packer, 0)


def _run(words: list[str], *, stdin: int | None = None, prepare: Callable[[], None] | None = None) -> None:
    done = run_program(words, _ENV, stdin=stdin, prepare=prepare)
    if done.exit_code:
        error = done.stderr.decode(errors="replace").strip()[:_MAX_ERROR_CHARS]
        # "Wrote only": tar's message when a disk is full after a part of a file.
        is_full = os.strerror(errno.ENOSPC) in error or "Wrote only" in error
        raise OSError(errno.ENOSPC if is_full else errno.EIO, error or f"{words[0]} failed")
