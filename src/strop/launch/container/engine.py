"""The program that runs containers on this machine: which one works, and with which flags.

An installed program may not work: the proof is a started container. The flags that a host needs are found by
trying; each is added because the start without it failed:

* limits on open files and processes at or below those of this process (runc: `error setting rlimit type 7`),
* `--cgroup-manager cgroupfs`, if systemd does not run,
* `--runtime runc`, if crun refuses hybrid cgroups.

No configuration of the user is read, except by the engine itself, and none is changed.
Tried with podman 4.3.1 (runc 1.1.5, cgroup hybrid, root). Not tried: a running docker daemon, rootless
podman.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from strop.errors import CheckRefused, StoreError

KINDS = ("podman", "docker")
ASK_LIMIT_S = 30.0
START_LIMIT_S = 120.0
_MOST = {"nofile": 1 << 20, "nproc": 1 << 15}
# podman 4.3.1 lowers its own limit of processes before it starts anything: with a hard limit of 96365 it
# failed to pass on 65536.
_IS_MISSING = re.compile(r"no such (?:container|image|object)|image not known", re.IGNORECASE)
_MAX_QUOTED = 2000
"""Characters of an engine's output in a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """A program that runs containers, and the flags that it needs on this machine."""

    kind: str
    """`podman` or `docker`."""
    program: str
    """Absolute path."""
    version: str
    global_flags: tuple[str, ...] = ()
    """Flags between the program and its verb."""
    run_flags: tuple[str, ...] = ()
    """Flags after `run`."""
    is_rootless: bool = False
    """Whether root inside is an ordinary user outside."""

    def argv(self, *words: str) -> list[str]:
        """Return a command line of this engine; `run` gets the flags of a start."""
        if words[:1] == ("run",):
            words = ("run", *self.run_flags, *words[1:])
        return [self.program, *self.global_flags, *words]

    def ask(self, *words: str, limit_s: float = ASK_LIMIT_S) -> subprocess.CompletedProcess[str]:
        """Run a command of the engine to its end.

        Raises: StoreError if it does not answer in time or cannot be run.
        """
        return _run(self.argv(*words), limit_s)

    def read_json(self, *words: str) -> Any:
        """Return the JSON output of a command, even if some of its objects do not exist.

        Raises: StoreError with the engine's message if it did not answer.
        """
        done = self.ask(*words)
        # An unreachable daemon also prints an empty list, which does not mean that an object is gone.
        is_answer = done.returncode == 0 or _IS_MISSING.search(done.stderr) is not None
        with suppress(ValueError):
            if is_answer:
                return json.loads(done.stdout)
        raise StoreError(
            f"{self.kind} {words[0]} did not answer: {quote_words(done)}",
            allowed="an engine that answers",
            next_step=f"try it by hand: {self.kind} ps --all",
        )


def engine_from_json(values: Mapping[str, Any]) -> Engine:
    """Return the engine that a job was started with, from its fields in the job's record."""
    flags = {name: tuple(values[name]) for name in ("global_flags", "run_flags")}
    return Engine(**{**values, **flags})


def locate_engine(preference: str = "auto") -> Engine:
    """Return the preferred engine, or the first one, that answers; starts no container.

    Raises: CheckRefused with the messages of all engines tried.
    """
    reasons: list[str] = []
    for kind in KINDS if preference == "auto" else (preference,):
        program = shutil.which(kind)
        if program is None:
            reasons.append(f"{kind}: not on PATH")
            continue
        part = "Server" if kind == "docker" else "Client"
        try:
            done = _run([program, "version", "--format", f"{{{{.{part}.Version}}}}"], ASK_LIMIT_S)
        except StoreError as error:
            reasons.append(f"{kind}: {error}")
            continue
        if done.returncode == 0:
            is_rootless = kind == "podman" and os.getuid() != 0
            version = done.stdout.strip()
            return Engine(
                kind=kind, program=os.path.abspath(program), version=version, is_rootless=is_rootless
            )
        reasons.append(f"{kind}: {quote_words(done)}")
    raise CheckRefused(
        "no container engine answers: " + "; ".join(reasons),
        allowed="podman, or docker with a running daemon",
        next_step="install podman, or send the run to another site",
    )


def prove_engine(engine: Engine, image: str | None = None) -> Engine:
    """Start a real container, and return the engine with the flags that this needed.

    `image` is started with `true`. Without one podman starts a container from this machine's root file system
    and discards its writes; docker cannot do that, and is not tried.

    Raises: CheckRefused with the engine's messages; StoreError if it hangs.
    """
    if image is None and engine.kind != "podman":
        return engine
    words = ("--rm", "--network", "none")
    target = (
        ("--rootfs", "/:O", "true") if image is None else ("--pull", "never", "--entrypoint", "true", image)
    )
    attempts: list[str] = []
    # Use limits that this process can pass on: engines request more than some hosts allow.
    flags: list[str] = []
    for name, number in (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC)):
        hard = resource.getrlimit(number)[1]
        most = _MOST[name] if hard == resource.RLIM_INFINITY else min(hard, _MOST[name])
        flags += ["--ulimit", f"{name}={most}:{most}"]
    # First the plain engine, then one more remedy each time.
    candidates = [engine, replace(engine, run_flags=(*engine.run_flags, *flags))]
    if engine.kind == "podman":
        cgroupfs = (*engine.global_flags, "--cgroup-manager", "cgroupfs")
        candidates.append(replace(candidates[-1], global_flags=cgroupfs))
        if runc := shutil.which("runc") or shutil.which("runc", path="/usr/sbin:/sbin"):
            candidates.append(replace(candidates[-1], global_flags=(*cgroupfs, "--runtime", runc)))
    for candidate in candidates:
        done = candidate.ask("run", *words, *target, limit_s=START_LIMIT_S)
        if done.returncode == 0:
            return candidate
        attempts.append(quote_words(done))
    # The message of the plain start comes first: later ones may be about the remedies.
    raise CheckRefused(
        f"{engine.kind} {engine.version} starts no container: " + "; then: ".join(dict.fromkeys(attempts)),
        allowed="a host that it can start one on",
        next_step=f"try it by hand: {engine.kind} run --rm --network none IMAGE true",
    )


def quote_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return a failed command's output, for a message."""
    words = (done.stderr.strip() or done.stdout.strip())[-_MAX_QUOTED:]
    return " ".join(words.split()) or f"exit code {done.returncode} without a word"


def _run(argv: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv,
            # Here podman's monitor leaves a file `oom` when a container runs out of memory.
            cwd=tempfile.gettempdir(),
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        raise StoreError(
            f"{' '.join(argv[:2])} gave no answer in {limit_s:g} s",
            allowed="an engine that answers",
            next_step="look what holds it: its locks, or its daemon",
        ) from error
    except OSError as error:
        raise StoreError(
            f"{argv[0]} cannot be run: {error.strerror}",
            allowed="an executable program",
            next_step="install podman again",
        ) from error
