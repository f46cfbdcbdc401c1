"""The bait on the host: secrets, files, a process, and listeners.

The suite creates all of it and removes it afterwards. Each secret is a unique word, so a word that comes out
of a sandbox shows which secret was read.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import stat
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from strop.sandbox.attack.doors import INWARD, LISTED, Door, open_doors
from strop.sandbox.linux import read_file

ENVIRONMENT, COMMAND_LINE, DESCRIPTOR = "environment", "command line", "descriptor"
PRIVATE_FILE, PUBLIC_FILE = "private file", "public file"
_PLACES = (ENVIRONMENT, COMMAND_LINE, DESCRIPTOR, PRIVATE_FILE, PUBLIC_FILE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bait:
    """The targets of attacks outside of their sandboxes."""

    folder: Path
    """Every user of the host may enter it and read all but `private`; only this user may write."""
    words: dict[str, str]
    """The secret at each place."""
    process: asyncio.subprocess.Process
    """A process of this user with secrets in its environment, command line and descriptors."""
    doors: dict[str, Door]
    rights_programs: tuple[Path, ...]
    """Set-uid and file-capability copies of `sleep`; none if this user is not root."""
    before: dict[str, bytes]

    @property
    def private_file(self) -> Path:
        """Readable only by this user."""
        return self.folder / "private"

    @property
    def public_file(self) -> Path:
        """Readable by every user."""
        return self.folder / "public"

    @property
    def network(self) -> str:
        """The list for programs: one listener by name and address, one by a name that leads to loopback."""
        listed, inward = (self.doors[name].port for name in (LISTED, INWARD))
        return f"allow:localhost:{listed},127.0.0.1:{listed},localhost:{inward}"

    def leaked(self, output: bytes) -> list[str]:
        """Return the places whose secret is in a sandbox's output."""
        return [place for place, word in self.words.items() if word.encode() in output]

    def changed_files(self) -> list[str]:
        """Return the names of changed, missing and new files."""
        now = _read_all(self.folder)
        return sorted(
            name for name in now.keys() | self.before.keys() if now.get(name) != self.before.get(name)
        )


@asynccontextmanager
async def laid_bait(*, has_own_network: bool) -> AsyncIterator[Bait]:
    """Create the bait for the block. Must be entered in the network of the attacked sandboxes."""
    words = {place: f"secret{secrets.token_hex(8)}" for place in _PLACES}
    folder = Path(tempfile.mkdtemp(prefix="strop-bait-"))
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        _write_files(folder, words)
        yield Bait(
            folder=folder,
            words=words,
            process=await _start_process(words, stack),
            doors=await stack.enter_async_context(open_doors(folder, has_own_network=has_own_network)),
            rights_programs=_make_rights_programs(folder),
            before=_read_all(folder),
        )


def _write_files(folder: Path, words: dict[str, str]) -> None:
    folder.chmod(0o755)
    for name, word, mode in (
        ("private", words[PRIVATE_FILE], 0o600),
        ("public", words[PUBLIC_FILE], 0o644),
    ):
        (folder / name).write_text(f"{word}\n")
        (folder / name).chmod(mode)


async def _start_process(words: dict[str, str], stack: AsyncExitStack) -> asyncio.subprocess.Process:
    # The file's name is the secret; the file itself is deleted and only open in the process.
    with tempfile.NamedTemporaryFile(prefix=words[DESCRIPTOR]) as file:
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", f": {words[COMMAND_LINE]}; read nothing"),
            env={"SECRET": words[ENVIRONMENT], "PATH": "/usr/bin:/bin"},
            stdin=asyncio.subprocess.PIPE,
            stdout=file,
            start_new_session=True,
        )

    async def end() -> None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()

    stack.push_async_callback(end)
    return process


def _make_rights_programs(folder: Path) -> tuple[Path, ...]:
    """Make privileged copies of `sleep`, which can do no harm."""
    program = shutil.which("sleep")
    if program is None or os.geteuid() != 0:
        return ()
    set_uid, capable = folder / "sleep-set-uid", folder / "sleep-capable"
    for copy, mode in ((set_uid, 0o755 | stat.S_ISUID | stat.S_ISGID), (capable, 0o755)):
        shutil.copyfile(program, copy)
        copy.chmod(mode)
    with suppress(OSError):
        os.setxattr(capable, "security.capability", _own_capabilities())
    return set_uid, capable


def _own_capabilities() -> bytes:
    """Return the attribute with this process's capabilities; a program with more would not start."""
    lines = read_file("/proc/self/status").splitlines()
    own = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    # Version 2 with the effective flag; then permitted and inheritable, lower halves first.
    return struct.pack("<5I", 0x02000001, own & 0xFFFFFFFF, 0, own >> 32, 0)


def _read_all(folder: Path) -> dict[str, bytes]:
    # The mode counts as well.
    return {
        path.name: b"%o " % path.lstat().st_mode + (path.read_bytes() if path.is_file() else b"")
        for path in folder.iterdir()
    }
