"""What a sandbox service leaves behind whose every part is killed at random: nothing.

Three services share one folder, as the nodes of a job do: a controller with a node agent for one kind of
sandbox, and a node agent for each other kind. Clients start sandboxes, use, pause, stop and abandon them.
Meanwhile a seeded killer sends SIGKILL to controllers, node agents, what keeps these alive, the processes
that make and watch sandboxes, programs inside, and to everything of one node at the same moment. At the end
the services are told to end, and the host is searched. All of it runs apart (`benchmarks/apart.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.apart import FOLDER, Leftovers, can_run_apart, read_command, run_apart
from benchmarks.figures import Figure, Measured
from benchmarks.runtime_clients import ENDED, Clients, Ledger
from strop.runtime.journal import Journal
from strop.runtime.service_dir import ServiceDir
from strop.runtime.session import Session

NUM_SANDBOXES = 2000
VICTIMS = {
    "controller": 10,
    "node": 12,
    "serve": 4,
    "daemon": 8,
    "supervisor": 40,
    "payload": 60,
    "whole node": 6,
}
"""How often each is killed, relative to the others. A whole node is its agent and all processes below it."""
_PAUSE_S = (0.0, 2.0)
"""Between two kills."""
_BACKENDS = ("bubblewrap", "process", "podman")
_POLICY = {
    "slot": {"cpus": 1.0, "memory_bytes": 128 << 20, "disk_bytes": 32 << 20, "processes": 64},
    "cpu_factor": 6.0,
    "hold_s": 1.0,
    "settle_s": 600.0,
}
_END_LIMIT_S = 90.0
_BYSTANDER = """
import asyncio
from strop.sandbox import IsolationLevel, SandboxSpec, make_backend
async def main():
    spec = SandboxSpec(min_level=IsolationLevel.RLIMIT)
    async with await make_backend("process").create(spec) as sandbox:
        print("made", flush=True)
        kept = await sandbox.start(["/bin/cat"], has_stdin=True)
        await asyncio.to_thread(input)
        await kept.close_stdin()
        print((await kept.wait()).exit_code, flush=True)
asyncio.run(main())
"""
"""Somebody else's sandbox on the same host, which nobody may touch."""


def measure_runtime_kills(*, is_quick: bool, seed: int = 0) -> Measured:
    """Kill through the lives of 2,000 sandboxes, or of some for a try. Needs what `run_apart` needs."""
    backends = [name for name in _BACKENDS if name != "podman" or shutil.which("podman")]
    options: dict[str, Any] = {"num": NUM_SANDBOXES, "at_once": 60, "backends": backends, "seed": seed}
    options["idle_limit_s"] = 8.0
    if is_quick:
        options |= {"num": 20, "at_once": 10, "backends": ["bubblewrap"], "num_kills": 6, "idle_limit_s": 3.0}
    if not can_run_apart():
        raise RuntimeError("this needs root, util-linux and iproute2")
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run_apart("benchmarks.runtime_kills", options, Path(folder))
        finally:
            if keep := os.environ.get("STROP_KILLS_LOGS"):
                shutil.copytree(folder, keep, dirs_exist_ok=True)
    return _as_measured(found, options["num"])


def _as_measured(found: Mapping[str, Any], num: int) -> Measured:
    def figure(name: str, values: Mapping[str, int], **goal: float) -> Figure:
        measured = tuple(map(float, values.values())) or (0.0,)
        return Figure(name=name, unit="", value=sum(measured), measured=measured, **goal)

    left = {kind: len(which) for kind, which in found["left"].items()}
    figures = [
        figure("sandboxes that were asked for", {"num": found["num_told"]}, at_least=num * 0.95),
        figure("processes that were killed", found["killed"], at_least=num / 10),
        *(figure(f"left on the host: {kind}", {kind: number}, at_most=0.0) for kind, number in left.items()),
        figure("answers that were wrong", {"num": len(found["wrongs"])}, at_most=0.0),
        figure("sandboxes that the journal does not account for", found["unaccounted"], at_most=0.0),
        figure("tracebacks in logs", {"num": len(found["tracebacks"])}, at_most=0.0),
        figure("a bystander's sandbox, alive", {"num": int(found["is_bystander_well"])}, at_least=1.0),
    ]
    return Measured(figures=figures, details={"found": dict(found)})


@dataclass(kw_only=True)
class _Stage:
    """The services, and what is killed of them."""

    folder: ServiceDir
    backends: list[str]
    idle_limit_s: float
    """After which a sandbox ends that nobody asks for any more."""
    stream: random.Random
    ledger: Ledger
    leftovers: Leftovers
    serving: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    killed: Counter[str] = field(default_factory=Counter)
    num_replays: int = 0

    def revive(self) -> None:
        """Start each service that does not run, as a cluster requeues a job."""
        for number, backend in enumerate(self.backends):
            running = self.serving.get(backend)
            if running is None or running.poll() is not None:
                words = ["--dir", str(self.folder.path), "--backend", backend, "--node", f"{number}/0"]
                idle_limits = dict.fromkeys(("idle_limit_s", "orphan_limit_s"), self.idle_limit_s)
                words += ["--policy", json.dumps({**_POLICY, **idle_limits})]
                with (self.folder.path / f"serve-{backend}.log").open("ab") as log:
                    self.serving[backend] = subprocess.Popen(
                        [sys.executable, "-m", "strop.cli", "runtime", "serve", *words],
                        stdout=log,
                        stderr=log,
                        # The logs of its parts are named by it.
                        env={**os.environ, "SLURMD_NODENAME": backend},
                    )

    def end(self) -> None:
        """Tell all to end, the controller's last, and wait."""
        for backend in reversed(self.backends):
            self.serving[backend].terminate()
            try:
                self.serving[backend].wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.ledger.wrongs.append(f"the service of {backend} does not end")

    async def kill_some(self) -> None:
        """Kill what is drawn, if it is there."""
        victim = self.stream.choices(list(VICTIMS), weights=list(VICTIMS.values()))[0]
        found = self._find(victim)
        if not found:
            return
        pids = [self.stream.choice(found)]
        if victim == "whole node":
            pids += _below(pids[0], _read_parents())
            # First: else one clears up while the others are killed.
            _send(pids, signal.SIGSTOP)
        _send(pids, signal.SIGKILL)
        self.killed[victim] += 1
        if victim == "controller":
            await self.check_journal()

    async def check_journal(self) -> list[Session]:
        """Read the journal as a controller would that starts now, and hold it against what clients know."""
        told = dict(self.ledger.told)
        with tempfile.TemporaryDirectory(dir=self.folder.path.parent) as place:
            with suppress(FileNotFoundError):
                shutil.copy(self.folder.path / "journal.jsonl", place)
            journal = Journal.open(Path(place, "journal.jsonl"))
            sessions = {one.runtime_id: one for one in map(Session.from_json, journal.read())}
            await journal.close()
        self.num_replays += 1
        for runtime_id, record in told.items():
            session = sessions.get(runtime_id)
            if session is None or (session.url, session.key) != (record["url"], record["session_api_key"]):
                self.ledger.wrongs.append(f"the journal lacks {runtime_id}, or its address and key")
            elif record["status"] in ENDED and session.is_alive:
                self.ledger.wrongs.append(f"{runtime_id} lives in the journal, and was {record['status']}")
        return list(sessions.values())

    def _find(self, victim: str) -> list[int]:
        parents = _read_parents()
        if victim in ("controller", "node", "serve", "whole node"):
            word = victim.rpartition(" ")[2]
            return [pid for pid in parents if _plays(pid, word)]
        nodes = {pid for pid in parents if _plays(pid, "node")}
        daemons = {
            pid for pid, above in parents.items() if above in nodes and "sandbox.daemon" in read_command(pid)
        }
        supervisors = [pid for pid, above in parents.items() if above in daemons]
        if victim == "payload":
            return [pid for one in supervisors for pid in _below(one, parents)]
        return sorted(daemons) if victim == "daemon" else supervisors


async def _work(options: Mapping[str, Any]) -> dict[str, Any]:
    """Live all lives, kill meanwhile, end, and look what is left."""
    leftovers = Leftovers()
    folder = ServiceDir(FOLDER / "service")
    folder.path.mkdir()
    ledger = Ledger()
    stage = _Stage(
        folder=folder,
        backends=options["backends"],
        idle_limit_s=options["idle_limit_s"],
        stream=random.Random(options["seed"]),
        ledger=ledger,
        leftovers=leftovers,
    )
    bystander = await asyncio.to_thread(_start_bystander)
    clients = Clients(folder.find, options["seed"], ledger)
    stage.revive()
    living = asyncio.create_task(clients.live_all(options["num"], options["at_once"]))
    await _disturb(stage, living, options.get("num_kills"))
    await living
    await clients.settle()
    await clients.close()
    await asyncio.to_thread(stage.end)
    sessions = await stage.check_journal()
    said, _ = bystander.communicate(b"\n", timeout=_END_LIMIT_S)
    ends = Counter(f"{one.state.value} {one.failure_kind or ''}".strip() for one in sessions)
    return {
        "num_told": len(ledger.told),
        "killed": dict(stage.killed),
        "left": leftovers.find(),
        "wrongs": ledger.wrongs,
        "unaccounted": _count_unaccounted(sessions, folder),
        "tracebacks": _find_tracebacks(folder.path),
        "is_bystander_well": said == b"0\n",
        "ends": dict(ends),
        "causes": dict(Counter(_shorten(one.cause) for one in sessions).most_common(40)),
        "lives": dict(ledger.lives),
        "answers": dict(ledger.answers),
        "num_replays": stage.num_replays,
    }


def _start_bystander() -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", _BYSTANDER]
    bystander = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert bystander.stdout is not None
    bystander.stdout.readline()
    return bystander


async def _disturb(stage: _Stage, living: asyncio.Task[None], num_kills: int | None) -> None:
    """Kill until the lives have been lived, or often enough; keep the services running."""
    while not living.done():
        await asyncio.wait([living], timeout=stage.stream.uniform(*_PAUSE_S))
        stage.leftovers.note_containers()
        if num_kills is None or sum(stage.killed.values()) < num_kills:
            await stage.kill_some()
        stage.revive()


def _count_unaccounted(sessions: list[Session], folder: ServiceDir) -> dict[str, int]:
    """Return how many sandboxes have not ended, and how many were begun or ended more than once."""
    begun: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    for path in folder.path.glob("events.jsonl*"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["event"] == "asked":
                begun[event["runtime_id"]] += 1
            elif event["event"] == "state" and event["state"] in ("stopped", "failed"):
                # One that failed is stopped when its client says so.
                ended[event["runtime_id"]] += event["before"] != "failed"
    return {
        "alive": sum(one.is_alive for one in sessions),
        "begun again": sum(number > 1 for number in begun.values()),
        "ended again": sum(number > 1 for number in ended.values()),
        "names": len(sessions) - len({one.session_id for one in sessions}),
    }


def _find_tracebacks(path: Path) -> list[str]:
    """Return the last line of each traceback in the logs."""
    found = []
    for log in path.glob("*.log"):
        lines = iter(log.read_text(errors="replace").splitlines())
        for line in lines:
            if line.startswith("Traceback"):
                last = next((one for one in lines if one and not one.startswith((" ", "Traceback"))), "")
                found.append(f"{log.name}: {last[:200]}")
    return found


def _shorten(cause: str) -> str:
    """Leave names and numbers out of a cause."""
    return re.sub(r"[0-9a-f]{8,}|[0-9.]+|node \S+", "_", cause)[:100]


def _read_parents() -> dict[int, int]:
    """Return the parent of each process."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
    return parents


def _below(pid: int, parents: Mapping[int, int]) -> list[int]:
    found = [one for one, above in parents.items() if above == pid]
    return [*found, *(deeper for one in found for deeper in _below(one, parents))]


def _plays(pid: int, word: str) -> bool:
    words = read_command(pid)
    # Not the stub that a child is for a moment before it becomes its program.
    return (
        re.search(rf"strop\.(cli runtime |runtime\.){word} ", words) is not None and "-I -S -c" not in words
    )


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def main(options: str) -> None:
    """Do the work, apart; the last line of output is what was found."""
    found = json.dumps(asyncio.run(_work(json.loads(options))))
    (FOLDER / "found.json").write_text(found)
    print(found)


if __name__ == "__main__":
    main(sys.argv[1])
