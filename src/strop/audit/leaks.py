"""Checks that a program makes for what it must not see: hidden tests, files with answers, private files."""

from __future__ import annotations

from collections.abc import Mapping

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
"""Looks where programs work and data is kept, not among the interpreter's own files."""


def leak_breaches(hidden: str, canary_path: str) -> Mapping[str, str]:
    """Return checks that find a hidden text, unless it is empty, and a private file of this machine."""
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
