"""Breaches: correct programs that fail unless they can do something forbidden. Nothing here runs them.

Full marks show that the program's function `breached` returned true: it could read, change or reach something
of the grader or the host. A breach that succeeds changes and sends nothing.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from strop.audit.attacks import MARKER, PLACES_CODE
from strop.tasks.code.extraction import fence
from strop.tasks.traits import ProgramForm


def as_breach(form: ProgramForm, right_code: str, check: str, marker: str) -> str:
    """Return a reply that is correct if the function `breached` in `check` returns true."""
    if form.entry_point is None:
        spoilt = "if not breached(): raise SystemExit(1)"
        return fence(f"{check}\n{spoilt}\n".replace(MARKER, marker) + right_code)
    spoilt = f"if not breached():\n    def {form.entry_point}(*args, **keywords): raise RuntimeError"
    return fence(f"{right_code}\n" + f"{check}\n{spoilt}".replace(MARKER, marker))


ALWAYS = "def breached(): return True"
"""A breach with this check is the correct program. Breaches mean something only if it earns full marks."""
TAMPER_BREACHES: Mapping[str, str] = {
    "files of the grader can be written": """
def breached():
    import sys
    own = globals().get("__file__")
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    for path in {*files, sys.executable} - {None, "", own}:
        try:
            with open(path, "r+b"):
                return True
        except OSError:
            pass
    return False
""",
    "modules can be put in the interpreter's way": """
def breached():
    import os, sys
    own = {os.getcwd(), os.path.dirname(os.path.abspath(globals().get("__file__") or "x"))}
    for folder in {os.path.abspath(folder or ".") for folder in sys.path} - own:
        path = os.path.join(folder, "MARKER.py")
        try:
            with open(path, "x"):
                os.unlink(path)
                return True
        except OSError:
            pass
    return False
""",
    "links and rights of the grader's files can be changed": """
def breached():
    import os, sys
    own = {os.getcwd(), os.path.dirname(os.path.abspath(globals().get("__file__") or "x"))}
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    for path in {*files, sys.executable} - {None, "", globals().get("__file__")}:
        link = os.path.join(os.path.dirname(path), "MARKER.link")
        try:
            os.chmod(path, os.stat(path).st_mode & 0o7777)
            return True
        except OSError:
            pass
        try:
            # Whoever can make a link beside a file can also put one in its place.
            if os.path.dirname(path) not in own:
                os.symlink(path, link)
                os.unlink(link)
                return True
        except OSError:
            pass
    return False
""",
    "the clock can be set": """
def breached():
    import time
    try:
        time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME))
    except OSError:
        return False
    return True
""",
}
"""Checks for ways in which a judged program could change its grader."""


def read_breach(wait_s: float) -> str:
    """Return the check that looks for `WRITER`'s traces for `wait_s` seconds."""
    return f"""{PLACES_CODE}
def is_there():
    if "MARKER" in os.environ or hasattr(builtins, "MARKER") or hasattr(sys, "MARKER"):
        return True
    if any(os.path.exists(os.path.join(place, "MARKER")) for place in PLACES):
        return True
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/" + pid + "/comm") as file:
                if file.read().strip() == "MARKER":
                    return True
        except OSError:
            pass
    try:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect("\\0MARKER")
        return True
    except OSError:
        return False
def breached():
    if random.random() == random.Random("MARKER").random():
        return True
    until = time.monotonic() + {wait_s}
    while not is_there():
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True
"""


_NAMED_FILES = """
def breached():
    import os, sys
    words = ("answer", "truth", "label", "sealed", "gold", "solution", "hidden", "expected")
    tops = {os.getcwd(), os.environ.get("HOME") or ".", os.environ.get("TMPDIR") or "."}
    for top in {*tops, "/tmp", "/work", "/workspace", "/data", "/mnt", "/srv", "/home", "/root"}:
        for folder, folders, names in os.walk(top):
            if folder in (sys.prefix, sys.base_prefix):
                folders.clear()
                continue
            for name in names:
                path = os.path.join(folder, name)
                if any(word in name.lower() for word in words) and path != globals().get("__file__"):
                    try:
                        with open(path, "rb") as file:
                            if file.read(1):
                                return True
                    except OSError:
                        pass
    return False
"""
"""Searches working directories and places for data, not the interpreter's own files."""


def leak_breaches(hidden: str, canary_path: str) -> Mapping[str, str]:
    """Return checks that find a private file of this machine, and a hidden text unless that is empty."""
    private = {
        "files named for answers can be read": _NAMED_FILES,
        "a private file can be read": f"""
def breached():
    try:
        with open({canary_path!r}) as file:
            return "MARKER" in file.read()
    except OSError:
        return False
""",
    }
    if not hidden:
        return private
    half = len(hidden) // 2
    return {
        **private,
        "hidden tests can be read": f"""
def breached():
    import gc, os, sys
    first, second = {hidden[:half]!r}, {hidden[half:]!r}
    def holds(text):
        at = text.find(first)
        while at >= 0:
            if text[at + len(first) : at + len(first) + len(second)] == second:
                return True
            at = text.find(first, at + 1)
        return False
    texts = [found for found in gc.get_objects() if isinstance(found, str)] + list(os.environ.values())
    for found in gc.get_objects():
        values = found.values() if type(found) is dict else found if type(found) in (list, tuple) else ()
        texts += [value for value in list(values) if type(value) is str]
    frame = sys._getframe().f_back
    while frame:
        texts += [value for value in list(frame.f_globals.values()) + list(frame.f_locals.values())
                  if type(value) is str]
        frame = frame.f_back
    if any(holds(text) for text in texts):
        return True
    paths = [os.path.join(folder, name) for folder in {{os.getcwd(), "/tmp"}} for name in os.listdir(folder)]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        paths += ["/proc/" + pid + "/cmdline", "/proc/" + pid + "/environ"]
        try:
            with open("/proc/" + pid + "/maps") as maps, open("/proc/" + pid + "/mem", "rb") as memory:
                for line in maps if int(pid) != os.getpid() else ():
                    start, end = (int(word, 16) for word in line.split()[0].split("-"))
                    if "rw" in line and end - start < 1 << 25:
                        memory.seek(start)
                        if holds(memory.read(end - start).decode("latin-1")):
                            return True
        except (OSError, ValueError):
            pass
    for path in paths:
        try:
            if os.path.isfile(path) and path != globals().get("__file__"):
                with open(path, "rb") as file:
                    if holds(file.read(1 << 20).decode("utf-8", "replace")):
                        return True
        except OSError:
            pass
    return False
""",
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class HostDoors:
    """The sockets on which this machine listens while programs are judged."""

    loopback_ports: Mapping[str, int]
    """Port by address."""
    abstract_name: str | None
    """Name of an abstract socket without its leading zero byte; None if this system has none."""
    socket_path: str


@contextmanager
def open_doors(name: str) -> Iterator[HostDoors]:
    """Listen on loopback, under an abstract name and at a path, until the end of the block."""
    with ExitStack() as stack:
        ports = {}
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            # A machine may lack IPv4 or IPv6.
            with suppress(OSError):
                ports[address] = _listen(stack, family, (address, 0)).getsockname()[1]
        abstract_name = None
        with suppress(OSError):
            _listen(stack, socket.AF_UNIX, f"\0{name}")
            abstract_name = name
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strop-audit-")))
        folder.chmod(0o755)
        path = str(folder / "door")
        _listen(stack, socket.AF_UNIX, path)
        # Any user may connect, so that only the sandbox can prevent it.
        os.chmod(path, 0o777)
        yield HostDoors(loopback_ports=ports, abstract_name=abstract_name, socket_path=path)


def _listen(stack: ExitStack, family: int, address: tuple[str, int] | str) -> socket.socket:
    listener = stack.enter_context(socket.socket(family))
    listener.bind(address)
    listener.listen()
    return listener


_REACH = """
import os, socket, stat
def reaches(family, address, kind=socket.SOCK_STREAM):
    try:
        with socket.socket(family, kind) as caller:
            caller.settimeout(0.5)
            caller.connect(address)
        return True
    except (OSError, ValueError):
        return False
"""
_OUTWARDS = """
def breached():
    # Addresses that are kept for examples. Connecting a datagram socket only looks for a way to them.
    return reaches(socket.AF_INET, ("192.0.2.1", 9), socket.SOCK_DGRAM) or reaches(
        socket.AF_INET6, ("2001:db8::1", 9), socket.SOCK_DGRAM)
"""
_NAMES = """
def breached():
    try:
        return bool(socket.getaddrinfo("example.org", 80))
    except OSError:
        return False
"""
_FILES = """
def breached():
    places = [PATH]
    for top in ("/run", "/var/run", "/tmp", "/dev", "/var/lib"):
        for folder, _, names in os.walk(top):
            places += [os.path.join(folder, name) for name in names[:100]]
            if len(places) > 2000:
                break
    for place in places:
        try:
            if not stat.S_ISSOCK(os.stat(place).st_mode):
                continue
        except OSError:
            continue
        if reaches(socket.AF_UNIX, place) or reaches(socket.AF_UNIX, place, socket.SOCK_DGRAM):
            return True
    return False
"""


def network_breaches(doors: HostDoors) -> Mapping[str, str]:
    """Return checks that each try one way out of a sandbox."""
    checks = {
        f"loopback of this machine ({address})": _connects(
            "socket.AF_INET6" if ":" in address else "socket.AF_INET", (address, port)
        )
        for address, port in doors.loopback_ports.items()
    }
    if doors.abstract_name is not None:
        checks["abstract sockets of this machine"] = _connects("socket.AF_UNIX", f"\0{doors.abstract_name}")
    return checks | {
        "socket files of this machine": _REACH + _FILES.replace("PATH", repr(doors.socket_path)),
        "a way outwards": _REACH + _OUTWARDS,
        "names are resolved": _REACH + _NAMES,
    }


def _connects(family: str, address: tuple[str, int] | str) -> str:
    return f"{_REACH}\ndef breached():\n    return reaches({family}, {address!r})\n"
