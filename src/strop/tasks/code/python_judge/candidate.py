"""The candidate's side: a fork server without knowledge of the job, and the candidate's processes.

The fork server is forked from the runner before the runner reads its job, and the candidate's processes are
forked from the fork server. So no test and no expected value was ever in the memory of a candidate's process.
This side is not protected against itself: a candidate can do anything to its own process, to the fork server
and to this connection; at most the runner then receives another value.
Runs in the sandbox, with the standard library only.
"""

from __future__ import annotations

import atexit
import io
import os
import resource
import signal
import socket
import struct
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TextIO

from strop.tasks.code.python_judge.channel import Caught, Channel, decode, describe, encode

CALLS, PROGRAMS, END = b"C", b"P", b"E"
"""Orders: fork a process that serves calls, or one that runs programs (a socket comes along); end it."""
STATUS = struct.Struct("!i")
MODULE_NAME = "candidate"
_MAX_ERROR_CHARS = 1000
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
Prctl = Callable[[int, int], None]


def start_fork_server(prctl: Prctl) -> socket.socket:
    """Fork the fork server; return the socket that orders go over."""
    ours, theirs = socket.socketpair()
    runner_pid = os.getpid()
    if os.fork():
        theirs.close()
        return ours
    with Caught():
        ours.close()
        # No descriptor of the runner may stay open: its standard output carries the verdict.
        _keep_only([theirs.fileno()])
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == runner_pid:
            _serve_orders(theirs, prctl)
    os._exit(0)


def _keep_only(descriptors: Sequence[int]) -> None:
    """Close all other descriptors, and open the standard ones on /dev/null."""
    kept = sorted(descriptors)
    start = 0
    for descriptor in kept:
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, max(start, resource.getrlimit(resource.RLIMIT_NOFILE)[0], 256))
    empty = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        if standard != empty:
            os.dup2(empty, standard)
    os.set_inheritable(empty, True)


def _serve_orders(control: socket.socket, prctl: Prctl) -> None:
    pid = 0
    fork_server_pid = os.getpid()
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if order == END:
            control.sendall(STATUS.pack(_end(pid)))
            continue
        if not order:
            _end(pid)
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_candidate(Channel(socket.socket(fileno=descriptors[0])), order, prctl, fork_server_pid)
        os.close(descriptors[0])


def _end(pid: int) -> int:
    """Kill a process and its group, and return its wait status."""
    if pid == 0:
        return 0
    for kill in (os.killpg, os.kill):
        # The group does not exist before the process has called setsid.
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return os.waitpid(pid, 0)[1]


def _become_candidate(channel: Channel, order: bytes, prctl: Prctl, fork_server_pid: int) -> NoReturn:
    with Caught():
        os.setsid()
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # This process holds no secret, and without it the file below belongs to root.
        prctl(_PR_SET_DUMPABLE, 1)
        with Caught(), open("/proc/self/oom_score_adj", "w") as file:
            # If memory runs out, the kernel kills this process and not the runner.
            file.write("1000")
        if os.getppid() == fork_server_pid:
            limits = channel.receive()["limits"]
            _set_limits(limits)
            if limits["packages_dir"]:
                sys.path.append(limits["packages_dir"])
            channel.send({"value": None})
            (_serve_calls if order == CALLS else _serve_programs)(channel)
    os._exit(1)


def _set_limits(limits: Mapping[str, int]) -> None:
    values = (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["max_open_files"]),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_CORE, 0),
    )
    for kind, value in values:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _serve_calls(channel: Channel) -> None:
    """Load the candidate's module, then apply the runner's operations to its objects."""
    objects: list[Any] = []

    def refer(value: Any) -> Any:
        objects.append(value)
        return {"t": "ref", "v": len(objects) - 1, "c": type(value).__name__}

    def resolve(reference: int) -> Any:
        return objects[reference]

    while True:
        request = channel.receive()
        reply: Any = None
        with Caught() as caught:
            if request["op"] == "load":
                reply = {name: encode(value, refer) for name, value in _load(request)}
            else:
                arguments = decode(request["args"], resolve)
                keywords = decode(request["keywords"], resolve)
                target = objects[request["target"]]
                reply = encode(_OPERATIONS[request["op"]](target, *arguments, **keywords), refer)
        channel.send({"value": reply} if caught.error is None else _describe_raised(caught.error))


def _call_in_place(target: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
    """Call a function for what it does to its arguments, and return them."""
    target(*arguments, **keywords)
    return arguments


def _load(request: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Run the candidate's module; return its objects of the tested names."""
    module = types.ModuleType(MODULE_NAME)
    sys.modules[MODULE_NAME] = module
    namespace = module.__dict__
    for statement in request["imports"]:
        exec(compile(statement, "<imports>", "exec"), namespace)
    exec(compile(request["source"], "<candidate>", "exec"), namespace)
    objects = [(name, namespace[name]) for name in request["names"] if name in namespace]
    missing = [name for name in request["names"] if name not in namespace]
    solution = namespace.get("Solution")
    if request["in_class"] and missing and isinstance(solution, type):
        instance = solution()
        objects += [(name, getattr(instance, name)) for name in missing if hasattr(instance, name)]
    return objects


def _describe_raised(error: BaseException) -> dict[str, Any]:
    names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    text, parts = "", None
    with Caught():
        text = str(error)[:_MAX_ERROR_CHARS]
    with Caught():
        parts = encode(error.args, _refuse)
    return {"raised": names, "text": text, "parts": parts}


def _refuse(value: Any) -> Any:
    raise TypeError(f"a {type(value).__name__} has no plain form")


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *arguments, **keywords: target(*arguments, **keywords),
    "call in place": _call_in_place,
    "get": getattr,
    "set": setattr,
    "iterate": iter,
    "next": next,
    "length": len,
    "item": lambda target, key: target[key],
    "put": lambda target, key, value: target.__setitem__(key, value),
    "truth": bool,
    "text": str,
    "form": repr,
}


def _serve_programs(channel: Channel) -> None:
    """Compile the candidate's program; run it in a separate process for each request."""
    code: Any = None
    request = channel.receive()
    with Caught() as caught:
        code = compile(request["source"], "<candidate>", "exec")
    channel.send({"value": None} if caught.error is None else _describe_raised(caught.error))
    while True:
        channel.receive()
        _, descriptors, _, _ = socket.recv_fds(channel.connection, 1, 3)
        pid = os.fork()
        if pid == 0:
            channel.connection.close()
            _run_program(code, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send({"value": os.waitpid(pid, 0)[1]})


def _run_program(code: Any, descriptors: Sequence[int]) -> NoReturn:
    """Run a program with these three standard descriptors, as the interpreter would, and exit."""
    exit_code = 1
    with Caught():
        for standard, descriptor in enumerate(descriptors):
            os.dup2(descriptor, standard, inheritable=True)
            os.close(descriptor)
        sys.stdin, sys.stdout, sys.stderr = _open_standard(0), _open_standard(1), _open_standard(2)
        sys.argv = ["solution.py"]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        with Caught() as caught:
            exec(code, module.__dict__)
        exit_code = _exit_code(caught.error)
        # Programs with a deep recursion often answer from a thread, or at exit.
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def _open_standard(descriptor: int) -> TextIO:
    file = io.FileIO(descriptor, "w" if descriptor else "r", closefd=False)
    buffer = io.BufferedWriter(file) if descriptor else io.BufferedReader(file)
    return io.TextIOWrapper(buffer, encoding="utf-8")


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return (error.code or 0) & 0xFF
    sys.stderr.write(describe(error))
    return 1
