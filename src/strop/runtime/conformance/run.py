"""Runs the matrix and collects its results."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from strop.errors import ConfigError, StropError
from strop.runtime.conformance.replay import REPLAYS, Asking, NotRunHere
from strop.runtime.openhands import OPENHANDS
from strop.store.python_environment import ensure_environment

CASES: Mapping[int, str] = {
    1: "a fresh start, used and stopped",
    2: "results of commands",
    3: "attach to one that runs",
    4: "attach to one that is paused",
    5: "attach, and its resume fails",
    6: "two start one session at once",
    7: "a slow start",
    8: "a fast start is cheap",
    9: "an image that there is not",
    10: "an image without an agent server",
    11: "the server dies of memory",
    12: "wrong key, empty key",
    13: "wrong session key",
    14: "pause and resume",
    15: "time-outs and what survives them",
    16: "the service restarts",
    17: "many at once",
    18: "stop twice, stop of the unknown, garbage collection",
    19: "the shape of every address",
    20: "bodies of all dialects",
    21: "RemoteRuntime: from start to stop",
    22: "RemoteRuntime: build an image",
    23: "RemoteRuntime: a paused data plane",
    24: "RemoteSandboxService: from list to list",
    25: "the words of every state",
}
EXTRAS = ("slow_image", "no_agent_image", "oom_image", "restart", "base_image")
"""Images that take a while, have no agent server, need too much memory; a shell command that kills the
service and starts it again; an image that others are built upon."""
_LAST_REAL = 18
_DRIVER = Path(__file__).with_name("real_client.py")
# Nothing of OpenHands' modules is garbage, here and at the end: walks over them were 3 of 7 s.
_BEGIN = (
    "import atexit, gc, runpy; gc.disable(); import openhands.workspace; gc.freeze(); gc.enable();"
    f" atexit.register(gc.freeze); runpy.run_path({str(_DRIVER)!r}, run_name='__main__')"
)
_SHOWN_CHARACTERS = 2000
# Tokens and prices are not looked up in the network, and servers on this machine are asked directly.
_CLIENT_ENV = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONDONTWRITEBYTECODE": ""}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformanceOptions:
    """What a server is asked with."""

    image: str = "host"
    extra: Mapping[str, str] = field(default_factory=dict)
    """What single cases need, by `EXTRAS`."""
    many: int = 64
    start_limit_s: float = 120.0
    cases: tuple[int, ...] = tuple(CASES)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """How one case ended."""

    number: int
    status: Literal["passed", "failed", "not run"]
    detail: str = ""
    seconds: float = 0.0

    @property
    def title(self) -> str:
        """What the case is."""
        return CASES[self.number]


def read_options(words: Sequence[str]) -> ConformanceOptions:
    """Return what words ask for: cases=1,17, image=NAME, many=64, and what single cases need, by `EXTRAS`.

    Raises: ConfigError for a name that there is not, or a number that is none.
    """
    said = dict(word.partition("=")[::2] for word in words)
    names = ("cases", "image", "many", *EXTRAS)
    for name, value in said.items():
        if name not in names:
            raise ConfigError(
                f"{name}={value} is not known", allowed=", ".join(names), next_step="name one of them"
            )
    cases = said.get("cases", ",".join(map(str, CASES))).split(",")
    for name, numbers in (("cases", cases), ("many", [said.get("many", "64")])):
        if not all(number.isdecimal() and int(number) for number in numbers):
            raise ConfigError(
                f"{name}={','.join(numbers)} is not allowed",
                allowed="cases=1,17 names some of the matrix; many=64 is a number of clients, from 1 on",
                next_step=f"correct {name}",
            )
    return ConformanceOptions(
        image=said.get("image", "host"),
        many=int(said.get("many", 64)),
        cases=tuple(map(int, cases)),
        extra={name: said[name] for name in EXTRAS if name in said},
    )


def run_conformance(
    url: str, key: str, options: ConformanceOptions, *, say: Callable[[str], None]
) -> Iterator[CaseResult]:
    """Yield the results of the cases in their order, as they end.

    Raises: StoreError if OpenHands' environment cannot be made; ConfigError for a case that there is not, or
        if the real client does not start.
    """
    unknown = [number for number in options.cases if number not in CASES]
    if unknown:
        raise ConfigError(f"case {unknown[0]}", allowed=f"1 to {max(CASES)}", next_step="name one of them")
    real = [number for number in options.cases if number <= _LAST_REAL]
    if real:
        yield from run_real_client(url, key, options, real, say=say)
    asking = Asking(url=url, key=key, options=options)
    for number in options.cases:
        if number > _LAST_REAL:
            yield _replay(number, asking)


def run_real_client(
    url: str, key: str, options: ConformanceOptions, cases: list[int], *, say: Callable[[str], None]
) -> Iterator[CaseResult]:
    """Yield the results of cases of the real client. Raises: as `run_conformance`."""
    python = ensure_environment(OPENHANDS, say=say)
    order = {
        "url": url.rstrip("/"),
        "key": key,
        "image": options.image,
        "extra": dict(options.extra),
        "many": options.many,
        "start_limit_s": options.start_limit_s,
        "cases": cases,
    }
    left = list(cases)
    with tempfile.TemporaryFile() as errors:
        # The key goes by standard input: a command line is seen by all.
        with subprocess.Popen(
            [str(python), "-c", _BEGIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **_CLIENT_ENV},
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(f"{json.dumps(order)}\n".encode())
            child.stdin.close()
            for line in child.stdout:
                result = _read(line)
                if result is not None:
                    left.remove(result.number)
                    yield result
        if left:
            errors.seek(0)
            said = errors.read().decode(errors="replace")[-_SHOWN_CHARACTERS:]
            raise ConfigError(
                f"the real client ended with code {child.returncode} before case {left[0]}: {said}",
                allowed="a client that runs all cases",
                next_step="mend what its last line names",
            )


def _read(line: bytes) -> CaseResult | None:
    """Return a result; libraries of the client may print lines of their own."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return CaseResult(**found) if isinstance(found, dict) and "number" in found else None


def _replay(number: int, asking: Asking) -> CaseResult:
    import time

    import httpx

    began = time.monotonic()
    status: Literal["passed", "failed", "not run"] = "passed"
    detail = ""
    try:
        REPLAYS[number](asking)
    except NotRunHere as reason:
        status, detail = "not run", str(reason)
    except (AssertionError, StropError, httpx.HTTPError, LookupError, ValueError) as error:
        status, detail = "failed", f"{type(error).__name__}: {error}"
    return CaseResult(number=number, status=status, detail=detail, seconds=time.monotonic() - began)
