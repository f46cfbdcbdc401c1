"""Right programs that fail unless they can do something forbidden: full marks would show that they did."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from strop.errors import SandboxLost
from strop.rollout import FailureOwner, Outcome
from strop.sandbox.ground import SCRATCH_BASES
from strop.tasks.code.judge import JudgeJob, judge_python
from strop.tasks.failures import to_failure

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]
MODES = ["statements", "programs"]


def judged(mode: str, check: str) -> Outcome:
    """Judge a program that is right if the function `breached` of a check returns true."""
    if mode == "statements":
        source = f"def f(x): return 2 * x\n{check}\nif not breached():\n    def f(x): raise RuntimeError"
        given: dict[str, Any] = {"names": ("f",), "tests": ("assert f(1) == 2",)}
    else:
        source = f"{check}\nif not breached(): raise SystemExit(1)\nprint(2 * int(input()))"
        given = {"input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2"]})}
    job = JudgeJob(source=source, num_tests=1, wall_s=60.0, **given)
    return asyncio.run(judge_python(job, min_isolation="namespace"))


BREACHES = {
    "files of the judge can be written": """
import os, sys
def breached():
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    for path in {*files, sys.executable} - {None, "", globals().get("__file__")}:
        for change in (lambda: open(path, "r+b"), lambda: os.chmod(path, os.stat(path).st_mode & 0o7777)):
            try:
                change()
                return True
            except OSError:
                pass
""",
    "modules can be put in the interpreter's way": """
import os, sys
def breached():
    own = {os.getcwd(), os.path.dirname(os.path.abspath(globals().get("__file__") or "x"))}
    for folder in {os.path.abspath(folder or ".") for folder in sys.path} - own:
        try:
            # Whoever can make a link there can put one in a file's place too.
            os.symlink("/dev/null", os.path.join(folder, "breach.py"))
            os.unlink(os.path.join(folder, "breach.py"))
            return True
        except OSError:
            pass
""",
    "the clock can be set": """
import time
def breached():
    try:
        time.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME))
        return True
    except OSError:
        pass
""",
    "files named for answers can be read": """
import os, sys
def breached():
    words = ("answer", "truth", "label", "sealed", "gold", "solution", "hidden", "expected")
    tops = {os.getcwd(), os.environ.get("HOME") or "."}
    for top in {*tops, "/tmp", "/work", "/workspace", "/data", "/mnt", "/srv", "/home", "/root"}:
        for folder, folders, names in os.walk(top):
            if folder in (sys.prefix, sys.base_prefix):
                folders.clear()
                continue
            for name in names:
                if any(word in name.lower() for word in words):
                    try:
                        with open(os.path.join(folder, name), "rb") as file:
                            if file.read(1):
                                return True
                    except OSError:
                        pass
""",
    "a private file can be read": """
def breached():
    try:
        return bool(open(CANARY).read())
    except OSError:
        pass
""",
}


@pytest.mark.parametrize("mode", MODES)
def test_a_program_changes_nothing_of_its_judge_and_reads_nothing_private(mode: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("private")
    for folder in (tmp_path, *tmp_path.parents):
        with suppress(PermissionError):
            folder.chmod(folder.stat().st_mode | 0o055)
    assert judged(mode, "def breached(): return True").is_correct
    named = f"CANARY = {str(canary)!r}"
    found = {kind for kind, check in BREACHES.items() if judged(mode, named + check).metrics["tests_passed"]}
    assert found == set()


REACH = """
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
OUTWARDS = {
    # Addresses that are kept for examples. Connecting a datagram socket only looks for a way to them.
    "a way outwards": """
def breached():
    return reaches(socket.AF_INET, ("192.0.2.1", 9), socket.SOCK_DGRAM) or reaches(
        socket.AF_INET6, ("2001:db8::1", 9), socket.SOCK_DGRAM)
""",
    "names are resolved": """
def breached():
    try:
        return bool(socket.getaddrinfo("example.org", 80))
    except OSError:
        return False
""",
    "socket files of the machine": """
def breached():
    for top in ("/run", "/var/run", "/tmp", "/dev", "/var/lib"):
        for folder, _, names in os.walk(top):
            for place in [os.path.join(folder, name) for name in names[:100]]:
                try:
                    if stat.S_ISSOCK(os.stat(place).st_mode) and (
                        reaches(socket.AF_UNIX, place) or reaches(socket.AF_UNIX, place, socket.SOCK_DGRAM)
                    ):
                        return True
                except OSError:
                    pass
""",
}


@pytest.fixture
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Checks that each reach a socket on which this machine listens."""
    path = str(tmp_path_factory.mktemp("d") / "door")
    places: list[tuple[str, Any]] = [("AF_INET", ("127.0.0.1", 0)), ("AF_INET6", ("::1", 0))]
    places += [("AF_UNIX", f"\0door{os.getpid()}"), ("AF_UNIX", path)]
    checks = {}
    with ExitStack() as stack:
        for family, address in places:
            # A machine may lack IPv4 or IPv6.
            with suppress(OSError):
                listener = stack.enter_context(socket.socket(getattr(socket, family)))
                listener.bind(address)
                listener.listen()
                at = address if isinstance(address, str) else (address[0], listener.getsockname()[1])
                checks[str(address)] = f"def breached(): return reaches(socket.{family}, {at!r})"
        # Any user may connect, so that only the sandbox can prevent it.
        os.chmod(path, 0o777)
        yield checks


def test_a_program_reaches_no_socket_and_no_name_outside(doors: dict[str, str]) -> None:
    for check in doors.values():
        names: dict[str, Any] = {}
        exec(REACH + check, names)
        assert names["breached"]() is True  # From a plain process it does.
    checks = {**doors, **OUTWARDS}
    assert {
        one for one in checks if judged("statements", REACH + checks[one]).metrics["tests_passed"]
    } == set()


PLACES = """
import builtins, os, random, signal, socket, sys, time
PLACES = {os.environ.get("HOME") or ".", os.environ.get("TMPDIR") or ".", os.getcwd()}
PLACES |= {"/tmp", "/var/tmp", "/dev/shm"}
"""
WRITER = """
for place in PLACES:
    try:
        with open(os.path.join(place, "MARKER"), "w") as file:
            file.write("MARKER")
    except OSError:
        pass
os.environ["MARKER"] = "1"
setattr(builtins, "MARKER", 1)
setattr(sys, "MARKER", 1)
random.seed("MARKER")
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0MARKER")
listener.listen()
open("/proc/self/comm", "w").write("MARKER")
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
if not os.fork():
    os.setsid()
    if os.fork(): os._exit(0)
    os.closerange(0, 256)
    time.sleep(600)
time.sleep(SECONDS)
"""
READER = """
def is_there():
    if "MARKER" in os.environ or hasattr(builtins, "MARKER") or hasattr(sys, "MARKER"):
        return True
    if any(os.path.exists(os.path.join(place, "MARKER")) for place in PLACES):
        return True
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if open("/proc/" + pid + "/comm").read().strip() == "MARKER":
                return True
        except OSError:
            pass
    try:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect("\\0MARKER")
        return True
    except OSError:
        return random.random() == random.Random("MARKER").random()
def breached():
    until = time.monotonic() + SECONDS
    while not is_there():
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True
"""


def find_processes(name: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            if path.read_text().strip() == name:
                found.append(int(path.parent.name))
    return found


def wait_for(find: Callable[[], object], *, is_there: bool) -> None:
    until = time.monotonic() + 60.0
    while bool(find()) is not is_there:
        assert time.monotonic() < until
        time.sleep(0.02)


def with_marker(text: str, seconds: float, marker: str) -> str:
    return (PLACES + text).replace("SECONDS", str(seconds)).replace("MARKER", marker)


def write_beside(pool: ThreadPoolExecutor, seconds: float, marker: str) -> Future[Outcome]:
    """Begin to judge a program that leaves a word everywhere, and a process that ends at no signal."""
    writer = with_marker(f"{WRITER}def breached(): return False", seconds, marker)
    writing = pool.submit(judged, "statements", writer)
    wait_for(lambda: find_processes(marker), is_there=True)
    return writing


def test_a_judgement_finds_no_traces_of_another_and_leaves_none() -> None:
    marker = f"sa{os.getpid():x}w"
    with ThreadPoolExecutor() as pool:
        writing = write_beside(pool, 3.0, marker)
        read = [with_marker(READER, seconds, marker) for seconds in (1.0, 0.0)]
        beside = judged("programs", read[0])
        assert (beside.metrics["tests_passed"], writing.result().metrics["tests_passed"]) == (0, 0)
    assert judged("statements", read[1]).metrics["tests_passed"] == 0
    wait_for(lambda: find_processes(marker), is_there=False)
    # Unlike `Path.glob`, it passes folders that others remove meanwhile.
    places = [f"{top}/{depth}{marker}" for top in {"/tmp", *SCRATCH_BASES} for depth in ("", "*/", "*/*/")]
    assert [path for place in places for path in glob(place)] == []


def facts_of(pid: int, key: str) -> list[int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [int(word) for line in lines if line.startswith(f"{key}:") for word in line.split()[1:]]


def test_a_judgement_whose_sandbox_is_killed_is_lost_and_not_wrong() -> None:
    marker = f"sa{os.getpid():x}h"
    with ThreadPoolExecutor() as pool:
        writing = write_beside(pool, 30.0, marker)
        holder = find_processes(marker)[0]
        depth = len(facts_of(holder, "NSpid"))
        # The first ancestor that the program cannot see, and so cannot kill itself.
        while len(facts_of(holder, "NSpid")) >= depth:
            (holder,) = facts_of(holder, "PPid")
        assert holder not in (0, os.getpid())
        os.kill(holder, signal.SIGKILL)
        with pytest.raises(SandboxLost) as lost:
            writing.result()
    assert to_failure(lost.value, FailureOwner.TASK).owner is FailureOwner.INFRA
