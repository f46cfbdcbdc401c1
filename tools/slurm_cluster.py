"""A real Slurm cluster on this machine, in a second: for tests, and for trying a launcher by hand.

One controller and one slurmd per node, as the user that calls, without munge and without root. GPUs are
character devices that every machine has; nothing computes on them. Needs Debian's package `slurm-wlm`.

Covered: submission, logs, arrays, heterogeneous jobs, signals, limits, preemption, requeue, node loss,
controller restart, typed GPUs and slices. Not covered: sacct, cgroups, real CUDA, host names and file systems
of their own. Tried with Slurm 22.05.8.

    python -m tools.slurm_cluster up DIR      then: export SLURM_CONF=DIR/slurm.conf
    python -m tools.slurm_cluster down DIR
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
_GPU_NODES, _CPU_NODES, _SLICED_NODES = ("n1", "n2"), ("c1",), ("m1",)
NODES = (*_GPU_NODES, *_CPU_NODES, *_SLICED_NODES)
_START_LIMIT_S = 120.0
"""Ample: it takes a second or two where nothing else runs."""
_STOP_LIMIT_S = 20.0
# Below the ports that a kernel hands out by itself.
_PORTS = range(20000, 32000)

_CONF = """\
ClusterName=strop
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
# A requeued job waits this long plus a little; the default makes it two minutes.
AuthInfo=cred_expire=5
StateSaveLocation={path}/state
SlurmdSpoolDir={path}/spool.%n
SlurmctldPidFile={path}/slurmctld.pid
SlurmdPidFile={path}/slurmd.%n.pid
SlurmctldLogFile={path}/slurmctld.log
SlurmdLogFile={path}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmctldParameters={controller_parameters}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
MinJobAge={min_job_age_s}
KillWait=40
ReturnToService=2
SlurmdTimeout={slurmd_timeout_s}
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={path}/finished.txt
MpiDefault=none
GresTypes=gpu
{nodes}
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=6
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF
PartitionName=cpu Nodes=c1 PreemptMode=OFF
PartitionName=mig Nodes=m1 PreemptMode=OFF
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """What tests change."""

    slurmd_timeout_s: int = 300
    """After how long a silent node counts as lost; 10 in tests of node loss."""
    min_job_age_s: int = 300
    """How long the controller remembers a finished job."""
    sends_user_signal: bool = True
    """Whether a preemption sends the job's own `--signal` before TERM."""


@dataclass(kw_only=True, slots=True)
class Cluster:
    """A running cluster below one directory."""

    path: Path
    options: ClusterOptions
    port: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """`slurmctld` and the name of each node to its process."""

    @property
    def conf_path(self) -> Path:
        """What SLURM_CONF must be set to."""
        return self.path / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment without traces of another cluster or job, and with SLURM_CONF."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "SLURMD_", "SBATCH_"))
        }
        return kept | {"SLURM_CONF": str(self.conf_path)}

    def run(self, *argv: str, limit_s: float = 60.0) -> str:
        """Run a client program and return its standard output. Raises: RuntimeError with its words."""
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def start_controller(self, *, is_new: bool = False) -> None:
        """Start slurmctld and wait until it answers; `is_new` forgets all jobs."""
        flags = ["-c"] if is_new else []
        self._start("slurmctld", ["slurmctld", "-D", "-i", *flags])
        self._await("the controller", lambda: self._says("scontrol", "ping") is not None)

    def stop_controller(self) -> None:
        """End slurmctld as a shutdown does; jobs go on."""
        self._stop("slurmctld", signal.SIGTERM)

    def start_node(self, name: str) -> None:
        """Start a node's slurmd; ready when `sinfo` shows it as idle or busy again."""
        self._start(name, ["slurmd", "-D", "-N", name])

    def kill_node(self, name: str) -> None:
        """Kill a node's slurmd, as a crash does. What ran on it goes on running."""
        self._stop(name, signal.SIGKILL)

    def await_nodes(self, names: Sequence[str] = NODES) -> None:
        """Wait until all these nodes can take jobs."""
        self._await(
            f"nodes {', '.join(names)}",
            lambda: (
                set(names) <= set((self._says("sinfo", "-h", "-N", "-t", "idle", "-o", "%N") or "").split())
            ),
        )

    def clear(self) -> None:
        """Cancel every job and wait until all nodes are free again."""

        def is_empty() -> bool:
            # Each time: a job may have been put back into the queue, and a busy controller not answer.
            self._says("scancel", "--state=PENDING", "--user", getpass.getuser())
            self._says("scancel", "--user", getpass.getuser())
            return self._says("squeue", "-h") == ""

        self._await("an empty queue", is_empty)

    def step_daemons(self) -> list[int]:
        """Return the pids of this cluster's slurmstepd that are alive."""
        processes = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return sorted(int(entry.name) for entry in processes if self._is_own_step_daemon(entry))

    def down(self) -> None:
        """End all that was started, jobs first. Raises: RuntimeError if a slurmstepd is left."""
        if "slurmctld" in self.processes:
            self._says("scancel", "--user", getpass.getuser())
            self._says("scancel", "--signal=KILL", "--full", "--user", getpass.getuser())
        try:
            self._await("the end of all steps", lambda: not self.step_daemons())
        finally:
            left = self.step_daemons()
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            for name in list(self.processes):
                self._stop(name, signal.SIGTERM)
        if left:
            raise RuntimeError(f"slurmstepd were left and had to be killed: {left}")

    def _start(self, name: str, argv: list[str]) -> None:
        with (self.path / f"{name}.out").open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [*argv, "-f", str(self.conf_path)],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _stop(self, name: str, number: signal.Signals) -> None:
        process = self.processes.pop(name)
        process.send_signal(number)
        try:
            process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _says(self, *argv: str) -> str | None:
        """Return a client's output, None if it failed."""
        done = subprocess.run(
            argv, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout if done.returncode == 0 else None

    def _await(self, what: str, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + _START_LIMIT_S
        while not is_so():
            dead = [name for name, process in self.processes.items() if process.poll() is not None]
            if dead or time.monotonic() > end:
                cause = (
                    f"{dead[0]} ended; read {self.path}/{dead[0]}.out"
                    if dead
                    else f"{_START_LIMIT_S:g} s passed"
                )
                raise RuntimeError(f"waiting for {what} in {self.path}: {cause}")
            time.sleep(0.1)

    def _is_own_step_daemon(self, entry: Path) -> bool:
        try:
            if not (entry / "cmdline").read_bytes().startswith(b"slurmstepd"):
                return False
            files = [os.readlink(link) for link in (entry / "fd").iterdir()]
            files.append(os.readlink(entry / "cwd"))
        except OSError:
            return False
        return any(name.startswith(f"{self.path}/") for name in files)


@contextmanager
def slurm_cluster(path: Path, options: ClusterOptions | None = None) -> Iterator[Cluster]:
    """Bring a cluster up below a fresh directory, and down again, whatever happens in between."""
    cluster = bring_up(path, options or ClusterOptions())
    try:
        yield cluster
    finally:
        cluster.down()


def bring_up(path: Path, options: ClusterOptions) -> Cluster:
    """Start controller and nodes, and wait until every node is idle.

    Raises: RuntimeError if a daemon ends or the nodes are not ready in time.
    """
    path = path.resolve()
    path.mkdir(parents=True, exist_ok=True)
    (path / "state").mkdir()
    cluster = Cluster(path=path, options=options, port=_find_ports(1 + len(NODES)))
    cluster.conf_path.write_text(_write_conf(cluster))
    (path / "gres.conf").write_text(_write_gres())
    try:
        for name in NODES:
            (path / f"spool.{name}").mkdir()
            cluster.start_node(name)
        cluster.start_controller(is_new=True)
        cluster.await_nodes()
    except RuntimeError:
        cluster.down()
        raise
    return cluster


def is_installed() -> bool:
    """Whether this machine has Slurm's daemons and clients."""
    return all(shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") for name in PROGRAMS)


def _write_conf(cluster: Cluster) -> str:
    host = socket.gethostname().split(".")[0]
    nodes = []
    for number, name in enumerate(NODES):
        gres = "" if name in _CPU_NODES else " Gres=gpu:h100:4"
        if name in _SLICED_NODES:
            gres = " Gres=gpu:1g.10gb:3,gpu:h100:1"
        # Each node has a port of its own: with a shared one, steps end with "Job credential replayed".
        nodes.append(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={cluster.port + 1 + number}"
            f" CPUs=8 RealMemory=16000{gres}"
        )
    return _CONF.format(
        host=host,
        port=cluster.port,
        user=getpass.getuser(),
        path=cluster.path,
        controller_parameters="preempt_send_user_signal"
        if cluster.options.sends_user_signal
        else "idle_on_node_suspend",
        min_job_age_s=cluster.options.min_job_age_s,
        slurmd_timeout_s=cluster.options.slurmd_timeout_s,
        nodes="\n".join(nodes),
    )


def _write_gres() -> str:
    lines = [
        f"NodeName={node} Name=gpu Type=h100 File={device}" for node in _GPU_NODES for device in _DEVICES
    ]
    for node in _SLICED_NODES:
        lines += [f"NodeName={node} Name=gpu Type=1g.10gb File={device}" for device in _DEVICES[:3]]
        lines.append(f"NodeName={node} Name=gpu Type=h100 File={_DEVICES[3]}")
    return "\n".join(lines) + "\n"


def _find_ports(count: int) -> int:
    """Return the first of `count` neighboring ports that nobody listens on now."""
    for _ in range(200):
        first = random.randrange(_PORTS.start, _PORTS.stop - count)
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise RuntimeError(f"no {count} neighboring free ports in {_PORTS.start}..{_PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def _save(cluster: Cluster) -> None:
    """Note what `down` must end: pids with the start times that tell them from later ones."""
    found = {name: [process.pid, _start_ticks(process.pid)] for name, process in cluster.processes.items()}
    (cluster.path / "cluster.json").write_text(json.dumps(found))


def _start_ticks(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _take_down(path: Path) -> None:
    cluster = Cluster(path=path.resolve(), options=ClusterOptions(), port=0)
    notes = json.loads((cluster.path / "cluster.json").read_text())
    cluster._says("scancel", "--user", getpass.getuser())
    cluster._says("scancel", "--signal=KILL", "--full", "--user", getpass.getuser())
    cluster._await("the end of all steps", lambda: not cluster.step_daemons())
    alive = [pid for pid, ticks in notes.values() if ticks is not None and _start_ticks(pid) == ticks]
    for pid in alive:
        os.kill(pid, signal.SIGTERM)
    cluster._await("the end of the daemons", lambda: not any(_is_running(pid) for pid in alive))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Bring a cluster up or down."""
    parser = argparse.ArgumentParser(description="A real Slurm cluster on this machine.")
    parser.add_argument("verb", choices=("up", "down"))
    parser.add_argument("path", type=Path, metavar="DIR")
    parser.add_argument("--slurmd-timeout", type=int, default=300, metavar="SECONDS")
    parser.add_argument("--min-job-age", type=int, default=300, metavar="SECONDS")
    given = parser.parse_args(argv)
    if given.verb == "down":
        _take_down(given.path)
        return 0
    options = ClusterOptions(slurmd_timeout_s=given.slurmd_timeout, min_job_age_s=given.min_job_age)
    cluster = bring_up(given.path, options)
    _save(cluster)
    print(f"export SLURM_CONF={cluster.conf_path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
