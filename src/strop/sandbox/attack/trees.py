"""Attacks on uploads and downloads: rows 20 and 21."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from strop.errors import SandboxError
from strop.sandbox.attack.bait import PRIVATE_FILE
from strop.sandbox.attack.contract import Attack, Code, Observation, always, attack, by_user
from strop.sandbox.attack.stage import Stage
from strop.sandbox.contract import MIB

ATTACKS: list[Attack] = []
_AT_PLACE = "what is made at the destination"
_NUM_RACES = 12
_NAMES = (b"two\nlines", b"not \xff text", b"-rf", b" ", b"a" * 255, b"\x1b[2J", b"..x", b"%2e%2e")

_LINKS = """
os.makedirs("tree/folder")
for name, target in zip("abcdefgh", sys.argv[2:]):
    attempt(os.symlink, target, f"tree/{name}")
    attempt(os.link, target, f"tree/folder/{name}")
    attempt(os.symlink, os.path.dirname(target), f"tree/folder/{name}-above")
open("tree/plain", "w").write("plain")
"""
_SPECIAL = """
os.mkdir("tree")
os.mkfifo("tree/pipe")
socket.socket(socket.AF_UNIX).bind("tree/socket")
attempt(os.mknod, "tree/device", 0o20666, os.makedev(1, 1))
os.symlink("pipe", "tree/link")
open("tree/plain", "w").write("plain")
"""
_MAKE_NAMES = """
os.mkdir("tree")
for word in sys.argv[2:]:
    name = bytes.fromhex(word)
    with open(b"tree/" + name, "wb") as file:
        file.write(name)
"""
_DEEP = """
os.mkdir("tree")
os.chdir("tree")
for _ in range(100):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
"""
_MANY = """
os.mkdir("tree")
for number in range(150):
    open(f"tree/{number}", "w").close()
"""
_LARGE = """
os.mkdir("tree")
for number in range(3):
    with open(f"tree/{number}", "wb") as file:
        file.truncate(1 << 20)
"""
_SWAP = """
target = sys.argv[2]
os.makedirs("tree/folder")
os.symlink(target, "link")
for name in ("private", "public"):
    open(f"tree/folder/{name}", "w").write("plain")
ready()
while True:
    # RENAME_EXCHANGE swaps both atomically.
    libc.renameat2(-100, b"tree/folder", -100, b"link", 2)
"""


@attack(
    ATTACKS,
    20,
    tries="have links followed at a download: absolute, climbing, hard",
    judged=_AT_PLACE,
    expects=by_user("mountns"),
)
async def _download_links(stage: Stage) -> Observation:
    private, public = str(stage.bait.private_file), str(stage.bait.public_file)
    climbing = "../" * 12
    await stage.python(
        _LINKS, private, f"{climbing}{private}", f"{climbing}etc/passwd", "/etc/shadow", public
    )
    with _destination() as place:
        left_out = await stage.sandbox.download("tree", place)
        names = {path.name for path in place.rglob("*")}
        wrong = _find_unexpected(stage, place)
        # A hard link to a world-readable file equals a copy of it, so it is allowed.
        wrong += (
            [] if {"plain", "folder"} <= names and len(left_out) >= 10 else [f"{len(left_out)} were left out"]
        )
    return _judge(wrong, f"{len(left_out)} links were left out, and are listed")


@attack(
    ATTACKS,
    20,
    tries="have pipes, sockets and devices opened at a download",
    judged=_AT_PLACE,
    expects=always(Code.BLOCKED),
)
async def _download_special(stage: Stage) -> Observation:
    await stage.python(_SPECIAL)
    with _destination() as place:
        left_out = await stage.sandbox.download("tree", place)
        wrong = _find_unexpected(stage, place)
        wrong += [] if {"pipe", "socket", "link"} <= set(left_out) else [f"left out: {left_out}"]
    return _judge(wrong, f"{len(left_out)} special files were left out, and are listed")


@attack(
    ATTACKS,
    20,
    tries="names with line ends, terminal escapes and bytes that are no text",
    judged=_AT_PLACE,
    expects=always(Code.BLOCKED),
)
async def _download_names(stage: Stage) -> Observation:
    await stage.python(_MAKE_NAMES, *(name.hex() for name in _NAMES))
    with _destination() as place:
        await stage.sandbox.download("tree", place)
        contents = {os.fsencode(path.name): path.read_bytes() for path in place.iterdir()}
        wrong = _find_unexpected(stage, place)
    wrong += [] if contents == {name: name for name in _NAMES} else ["names or contents differ"]
    return _judge(wrong, f"{len(contents)} names arrived byte for byte")


@attack(
    ATTACKS,
    20,
    tries="a tree deeper than a path may be long",
    judged="the error, its time, and the destination",
    expects=always(Code.BLOCKED),
)
async def _download_deep(stage: Stage) -> Observation:
    return await _refused(stage, _DEEP, kinds=("io", "too_large"))


@attack(
    ATTACKS,
    20,
    tries="more files than a download may have",
    judged="the error, and the destination",
    expects=always(Code.BLOCKED),
)
async def _download_many(stage: Stage) -> Observation:
    return await _refused(stage, _MANY, kinds=("too_large",))


@attack(
    ATTACKS,
    20,
    tries="more bytes than a download may have, in files without blocks",
    judged="the error, and the destination",
    expects=always(Code.BLOCKED),
)
async def _download_large(stage: Stage) -> Observation:
    return await _refused(stage, _LARGE, kinds=("too_large",))


@attack(
    ATTACKS,
    20,
    tries="put a link in a directory's place, again and again, while it is downloaded",
    judged="private secrets at the destination, and what is there",
    expects=by_user("mountns"),
)
async def _download_race(stage: Stage) -> Observation:
    wrong: list[str] = []
    async with stage.held(_SWAP, str(stage.bait.folder)):
        for _ in range(_NUM_RACES):
            with _destination() as place:
                with suppress(SandboxError):
                    await stage.sandbox.download("tree", place)
                wrong += _find_unexpected(stage, place)
    return _judge(wrong, f"{_NUM_RACES} downloads brought no secret and no link")


@attack(
    ATTACKS,
    21,
    tries="put a link to this user's files in a directory's place, again and again, while files are written",
    judged="the files on the host",
    expects=by_user("mountns"),
    spares_user=False,
)
async def _upload_race(stage: Stage) -> Observation:
    num_written = 0
    async with stage.held(_SWAP, str(stage.bait.folder)):
        for number in range(_NUM_RACES):
            for name in ("private", "public", f"new-{number}"):
                with suppress(SandboxError):
                    await stage.sandbox.write(f"tree/folder/{name}", b"written\n")
                    num_written += 1
    changed = stage.bait.changed_files()
    return _judge(changed, f"{num_written} files were written inside, none outside")


async def _refused(stage: Stage, code: str, *, kinds: tuple[str, ...]) -> Observation:
    await stage.python(code)
    with _destination() as place:
        try:
            await asyncio.wait_for(
                stage.sandbox.download("tree", place, max_files=120, max_bytes=2 * MIB), timeout=20.0
            )
            wrong = ["it was downloaded"]
        except SandboxError as error:
            wrong = [] if error.kind in kinds else [f"refused as {error.kind}"]
        wrong += _find_unexpected(stage, place)
    return _judge(wrong, "refused")


@contextmanager
def _destination() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="strop-bait-")
    try:
        yield Path(folder, "tree")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _find_unexpected(stage: Stage, place: Path) -> list[str]:
    """List the unexpected files at a destination: links, special files, private secrets, neighbours."""
    wrong = [f"beside it: {path.name}" for path in place.parent.iterdir() if path != place]
    for top, folders, files in os.walk(place):
        for name in (*folders, *files):
            mode = os.lstat(os.path.join(top, name)).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                wrong.append(f"no regular file: {name!r}")
            elif stat.S_ISREG(mode) and PRIVATE_FILE in stage.bait.leaked(Path(top, name).read_bytes()):
                wrong.append(f"a secret: {name!r}")
    return wrong


def _judge(wrong: list[str], blocked: str) -> Observation:
    return Observation(Code.EXPOSED if wrong else Code.BLOCKED, "; ".join(wrong) or blocked)
