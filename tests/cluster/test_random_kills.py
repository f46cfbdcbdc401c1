"""Random kills in a sandbox service and in a run: what is lost says so, and in the end nothing is left.

A round of the service starts two Ray nodes here with sandboxes on both, kills some parts that it outlives,
and then one of those that end a node or all of it. A round of a run goes on with the run of the round before,
and kills one part of it. STROP_KILL_ROUNDS and STROP_KILL_SEED set how many rounds there are, and which.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from strop.errors import EXIT_FAILED, EXIT_INTERRUPTED
from strop.io.endpoints import RUNTIME, read_endpoint
from strop.record.rollouts import read_rollouts
from tests.environments.test_workspace import OWN
from tests.fixtures import stand_in
from tests.fixtures.attempts import Bench, fork, wait_for_end
from tests.fixtures.ray_traces import needs_ray, read_variables
from tests.fixtures.runtime_client import RuntimeClient, wait_for
from tests.fixtures.sandboxes import IS_ROOT, needs_bubblewrap
from tests.fixtures.small_root import imported, make_small_root
from tests.fixtures.sockets import find_interface
from tests.fixtures.tiny_model import tiny_model

pytestmark = [pytest.mark.slow, needs_ray, needs_bubblewrap]

NUM_ROUNDS = int(os.environ.get("STROP_KILL_ROUNDS", "2"))
SEED = int(os.environ.get("STROP_KILL_SEED", "0"))
MARK = "STROP_KILL_MARK"
LIMIT_S = 120.0
GONE_LIMIT_S = 30.0
OWN_NAMES = re.compile(r"strop-sandbox-[0-9a-f]{16}|ray-[0-9a-f]{8}|strop-box-[0-9]+")
"""Of the directories of sandboxes and their containers, of Ray nodes, and of control groups."""


@dataclass
class Traces:
    """Everything that was started with a mark in its environment, and the names of what that has made."""

    mark: str
    roots: set[int] = field(default_factory=set)
    """Processes that were forked, and show another environment."""
    seen: set[tuple[int, float]] = field(default_factory=set)
    """Process ids and starts, also of those that have cleared their environment."""
    names: set[str] = field(default_factory=set)

    def look(self) -> dict[int, str]:
        """Return the command lines of all that live, by process id."""
        table = {
            one.pid: one.info
            for one in psutil.process_iter(["ppid", "create_time", "cmdline", "status"])
            if one.info["status"] != psutil.STATUS_ZOMBIE
        }
        commands = {pid: " ".join(info["cmdline"] or []) for pid, info in table.items()}
        starts = {pid: (pid, info["create_time"]) for pid, info in table.items()}
        family = {pid for pid in table if starts[pid] in self.seen or pid in self.roots}
        family |= {pid for pid in table if read_variables(pid).get(MARK) == self.mark}
        # Podman's monitor of a container descends from nobody.
        family |= {pid for pid in table if self.names & {*OWN_NAMES.findall(commands[pid])}}
        while more := {pid for pid in table if table[pid]["ppid"] in family} - family:
            family |= more
        self.seen |= {starts[pid] for pid in family}
        for pid in family:
            self.names |= {f"strop-box-{pid}", *OWN_NAMES.findall(commands[pid])}
            with suppress(OSError):
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(OSError):
                        self.names |= {*OWN_NAMES.findall(os.readlink(link))}
        return {pid: commands[pid] for pid in sorted(family)}

    def find(self, kind: str) -> list[int]:
        """Return the processes with such words in their command lines."""
        return [pid for pid, command in self.look().items() if kind in f"{command} "]

    def left(self) -> list[str]:
        """Return what is left: processes, directories, control groups, mounts, containers."""
        places = ("/tmp", f"/tmp/strop-{os.getuid()}", "/var/tmp", "/dev/shm", tempfile.gettempdir())
        paths = [path for place in places for path in Path(place).glob("*")]
        paths += [Path(top) / name for top, names, _ in os.walk("/sys/fs/cgroup") for name in names]
        lines = [str(path) for path in paths] + Path("/proc/self/mountinfo").read_text().splitlines()
        if IS_ROOT:
            words = ["podman", "ps", "--all", "--external", "--format", "container {{.Names}}"]
            lines += subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines()
        left = [f"process {pid} {command[:150]}" for pid, command in self.look().items()]
        return left + [line for line in lines if self.names & {*OWN_NAMES.findall(line)}]

    def require_gone(self) -> None:
        """Wait until nothing is left. Raises: AssertionError if something stays."""
        deadline = time.monotonic() + GONE_LIMIT_S
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == [], chr(10).join(left)


@contextmanager
def traced(number: int) -> Iterator[Traces]:
    """See to it that nothing is left at the end of the block, and end what is."""
    traces = Traces(f"{os.getpid()}-{number}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, traces.mark)
        try:
            yield traces
            traces.require_gone()
        finally:
            for pid in traces.look():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


# A service.

HOST_ACTOR, RAYLET, HEAD, LAUNCHER = "ray::NodeHost", "/raylet/raylet ", "/gcs_server ", "cluster.ray.node "
AGENT = "/agent.pyc "
"""What runs the programs of a sandbox, inside."""
SLEEPER = f"sleep 100000.{os.getpid()}"
SMALL = (SLEEPER, stand_in.PROGRAM, AGENT, "bwrap ", HOST_ACTOR)
"""What the service outlives; the first ends no sandbox."""
LARGE = (RAYLET, "service", LAUNCHER, HEAD)
NUM_CPUS = len(os.sched_getaffinity(0))
SLOT = {"cpus": 2.0 * NUM_CPUS, "memory_bytes": 64 << 20, "disk_bytes": 64 << 20, "processes": 64}
"""Two on each node, which promises each of its processors four times."""


class Scene:
    """A service of two nodes, and a client."""

    def __init__(self, folder: Path, traces: Traces, image: str) -> None:
        self.traces, self.folder = traces, folder
        self.images = ("host", image or "host")
        self.records: list[dict[str, Any]] = []
        backends = ["--backend=bubblewrap", *(["--backend=podman"] if image else [])]
        policy = json.dumps({"slot": SLOT})
        self.service = self._start("serve", f"--dir={folder}", "--nodes=2", f"--policy={policy}", *backends)
        self.joined = self._start("join", f"--dir={folder}")
        endpoint = wait_for(lambda: read_endpoint(folder, RUNTIME), lambda found: found is not None)
        self.client = RuntimeClient(endpoint)

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "strop.cli", "runtime", *words]
            return subprocess.Popen(command, stdout=log, stderr=log)

    def fill(self, prefix: str) -> dict[str, dict[str, Any]]:
        """Start sandboxes on both nodes, once these have hosts; return those that are ready, by name."""
        wait_for(self.client.nodes, lambda nodes: len(nodes) == 2)
        for record in self.records:
            self.client.stop(record)
        names = [f"{prefix}-{number}" for number in range(4)]
        for number, name in enumerate(names):
            self.client.start(name, self.images[number % 2])
        ready = {name: self.client.wait_ready(name) for name in names}
        self.records = [*ready.values()]
        for record in self.records:
            # It outlives its shell, in a session of its own.
            said = self.client.run(record, f"setsid {SLEEPER} < /dev/null > /dev/null 2>&1 & echo up")
            assert said == (0, "up\n")
        assert len({record["node"] for record in self.records}) == 2
        return ready

    def settle(self, ready: dict[str, dict[str, Any]], num_lost: int) -> dict[str, str]:
        """Wait until every sandbox either answers or is lost; return how those that are lost failed.

        At least `num_lost` are, or the service itself has ended.
        """
        lost: dict[str, str] = {}
        left, deadline = [*ready], time.monotonic() + LIMIT_S
        while (left or len(lost) < num_lost) and self.service.poll() is None:
            for name in [name for name in ready if name not in lost]:
                with suppress(httpx.HTTPError, AssertionError):
                    now = self.client.session(name)
                    if now["status"] == "error":
                        lost[name] = now["failure_kind"]
                    answers = name in lost or self.client.run(ready[name], "echo up") == (0, "up\n")
                    left = [one for one in left if one != name or not answers]
            assert time.monotonic() < deadline, (left, lost)
            time.sleep(0.05)
        return lost

    def end(self) -> None:
        """End what has not ended."""
        self.client.http.close()
        self.service.terminate()
        self.service.wait(LIMIT_S)
        self.joined.wait(LIMIT_S)


@pytest.mark.skipif(find_interface() is None, reason="a network beside loopback is needed")
def test_prc_4_parts_of_a_service_are_killed_at_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(SEED)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", find_interface() or "")
    has_podman = IS_ROOT and shutil.which("podman") is not None
    with ExitStack() as stack:
        image = stack.enter_context(imported(make_small_root(tmp_path / "root"))) if has_podman else ""
        # Two rounds have all that the service outlives.
        small = [kind for _ in range(NUM_ROUNDS) for kind in chance.sample(SMALL, len(SMALL))]
        for number in range(NUM_ROUNDS):
            (folder := tmp_path / str(number)).mkdir()
            with traced(number) as traces:
                scene = Scene(folder, traces, image)
                for kind in (*small[3 * number : 3 * number + 3], LARGE[number % len(LARGE)]):
                    ready = scene.fill(kind.rpartition("/")[2])
                    pid = scene.service.pid if kind == "service" else chance.choice(traces.find(kind))
                    os.kill(pid, signal.SIGKILL)
                    lost = scene.settle(ready, num_lost=kind != SLEEPER)
                    assert {*lost.values()} <= {"infra_lost", "agent_error"}
                    assert kind in LARGE or (scene.service.poll() is None and bool(lost) is (kind != SLEEPER))
                scene.end()


OUTLIVED = ("ray::SandboxHost", AGENT)
ROLES = ("ray::LearnerRank", "ray::EngineActor", "ray::RolloutWorker")
LONG_RUN = """
name = "boxes"
[model]
uri = "{model}"
dtype = "float32"
[environment]
name = "{code}:Own"
sandbox = "ray"
max_reply_tokens = 8
[train]
steps = 100000
prompts_per_step = 1
group_size = 4
checkpoint_every = 1
accept = "weights: a random model for a test; audit: it earns something"
[eval]
every = 2
num_examples = 1
num_samples = 1
[placement]
rollout_workers = 1
threads = 1
"""


def test_prc_4_parts_of_a_run_are_killed_at_random(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    (own := tmp_path / "own.py").write_text(OWN)
    model = tiny_model(tmp_path / "model", max_position_embeddings=2048)
    bench = Bench(tmp_path / "bench", LONG_RUN.format(model=model, code=own))
    kinds = (*OUTLIVED, *ROLES, RAYLET, HEAD, LAUNCHER, "run")
    wait_for_end(fork(int))
    for number in range(NUM_ROUNDS):
        kind = chance.choice(kinds)
        begun_at = bench.log_path.stat().st_size
        with traced(number) as traces:
            process = bench.start()
            assert process.pid is not None
            traces.roots.add(process.pid)
            bench.wait_until_begun(process)
            take_steps(bench, 1)
            found: list[int] = [process.pid] if kind == "run" else []
            while not found:
                found = traces.find(kind)
            os.kill(chance.choice(found), signal.SIGKILL)
            if kind in OUTLIVED:
                take_steps(bench, 2)
                os.kill(process.pid, signal.SIGTERM)
            code = wait_for_end(process)
            said = bench.log_path.read_bytes()[begun_at:].decode()
            wanted = EXIT_INTERRUPTED if kind in OUTLIVED else EXIT_FAILED
            assert code == (-signal.SIGKILL if kind == "run" else wanted), said
            # Ray ends a process ten seconds after the head, whatever this one was about to say.
            assert code != EXIT_FAILED or "EngineLost: " in said or "Failed to connect to GCS" in said, said
    outcomes = [one.outcome for one in read_rollouts(bench.only_run().rollouts_path(1))]
    # Random weights do no task; more attempts than this machine has processors.
    assert [(one.reward, one.isolation) for one in outcomes] == [(0.0, "namespace")] * 4


def take_steps(bench: Bench, num: int) -> None:
    """Wait until a run has taken so many more steps."""

    def count() -> int:
        return len([*bench.only_run().metrics.read()])

    end = count() + num
    wait_for(count, lambda found: found >= end, LIMIT_S)
