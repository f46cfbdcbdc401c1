"""Jobs on a real cluster whose nodes, agents, shells and secrets go away; all by the command line.

The cluster's Python runs a shell script in place of the trainer: it notes each life of a run in `lives`, and
ends with the code in `go` once that file is there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import strop
from tests.conftest import require_system_part
from tests.faults.test_jobs import RUN
from tests.fixtures.commands import Run
from tests.fixtures.waiting import wait_until
from tools.slurm_cluster import Cluster, ClusterOptions, is_installed, slurm_cluster

pytestmark = pytest.mark.slow
LIMIT_S = 300.0
ENDS = {"succeeded", "failed", "cancelled", "timeout"}
TRAINER = """\
for word; do run=${word#output.dir=}; done
echo "$STROP_ATTEMPT $$ ${MYTOKEN:-}" >>"$run/lives"
while [ ! -e "$run/go" ]; do sleep 0.1; done
exit "$(cat "$run/go")"
"""
# A node is unfit for a job by its clock, which is an hour ahead.
NODE_PYTHON = """\
#!/bin/sh
export XDG_RUNTIME_DIR={root}/run.$SLURMD_NODENAME PYTHONPATH={source}
mkdir -p -m 700 "$XDG_RUNTIME_DIR"
[ ! -e "{root}/unfit.$SLURM_JOB_NAME.$SLURMD_NODENAME" ] || export PYTHONPATH={root}:{source}
case "$*" in "-m strop.cli train "*) shift 3; exec sh {root}/trainer.sh "$@" ;; esac
exec {python} "$@"
"""
SITE = """\
[sites.cluster]
backend = "slurm"
python = "{root}/node-python"
run_root = "{root}/runs"
setup = ["export SLURM_TMPDIR={root}/tmp"]
secrets = ["MYTOKEN"]
cpus_per_gpu = 1
time_limit = "15m"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that soon gives a node up."""
    require_system_part("slurm-wlm", is_installed())
    with slurm_cluster(tmp_path_factory.mktemp("frail"), ClusterOptions(slurmd_timeout_s=10)) as cluster:
        yield cluster


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    home: Path
    job_id: str
    command: Run

    def status(self) -> dict[str, Any]:
        """What `strop status` says of it."""
        ended = self.command("status", self.home, "--json")
        assert ended.code == 0, ended.err
        (found,) = json.loads(ended.out)
        return dict(found)

    def wait_for_end(self) -> dict[str, Any]:
        """Wait for its end, and return its status."""
        try:
            wait_until(lambda: self.status()["state"] in ENDS, limit_s=LIMIT_S)
        except AssertionError as error:
            logs = "".join(path.read_text() for path in self.home.glob("job/slurm-*.out"))
            raise AssertionError(f"{self.status()}\n{logs}") from error
        return self.status()

    def lives(self) -> list[list[str]]:
        """Attempt, process and secret of each start of its trainer."""
        path = self.home / "lives"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_life(self, number: int = 1) -> None:
        """Wait until its trainer has begun so many times."""
        wait_until(lambda: len(self.lives()) >= number, limit_s=LIMIT_S, what=f"life {number}: {self.home}")

    def let_go(self, code: int = 0) -> None:
        """Let its trainer end."""
        (self.home / "go.partial").write_text(str(code))
        (self.home / "go.partial").rename(self.home / "go")

    @property
    def secrets(self) -> list[Path]:
        """Its files that hold the secret, but those of its trainer."""
        files = [path for path in self.home.rglob("*") if path.is_file() and path.name != "lives"]
        return [path for path in files if b"t0ken-of-mine" in path.read_bytes()]


@dataclass(frozen=True)
class Login:
    """The cluster's login node."""

    cluster: Cluster
    root: Path
    command: Run

    def submit(self, name: str, *words: str) -> Job:
        """Submit a job."""
        ended = self.command("submit", "run.toml", f"name={name}", *words, "--on", "cluster", "--no-snapshot")
        assert ended.code == 0, ended.err
        (home,) = (path.parents[1] for path in (self.root / "runs").glob(f"{name}-*/job/ref.json"))
        return Job(home, json.loads((home / "job/ref.json").read_text())["job_id"], self.command)

    def ask(self, job: Job) -> dict[str, str]:
        """What Slurm says of a job."""
        shown = self.cluster.run("scontrol", "show", "job", "-o", job.job_id).split()
        return dict(word.split("=", 1) for word in shown if "=" in word)

    def wait_for_slurm(self, job: Job, state: str) -> None:
        """Wait until Slurm says so."""
        wait_until(lambda: self.ask(job)["JobState"] == state, limit_s=LIMIT_S)


@pytest.fixture
def login(cluster: Cluster, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Login]:
    """A login node, whose current folder has the run file and the site."""
    root = tmp_path / "shared"
    (root / "tmp").mkdir(parents=True)
    source = Path(strop.__file__).parents[1]
    python = root / "node-python"
    python.write_text(NODE_PYTHON.format(root=root, source=source, python=sys.executable))
    python.chmod(0o755)
    (root / "trainer.sh").write_text(TRAINER)
    (root / "sitecustomize.py").write_text("import time\nnow = time.time\ntime.time = lambda: now() + 3600\n")
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "strop-sites.toml").write_text(SITE.format(root=root))
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MYTOKEN", "t0ken-of-mine")
    monkeypatch.chdir(tmp_path)
    yield Login(cluster, root, run)
    cluster.clear()


def test_secrets_outlive_a_lost_node_and_end_with_the_run_which_stays_finished(
    login: Login, cluster: Cluster
) -> None:
    """The batch shell of a lost node removed the secrets, and the attempt on the next node lacked them.

    A run that had succeeded was failed after a requeue: its secrets were gone by then.
    """
    job = login.submit("lost")
    job.wait_for_life()
    node = job.status()["nodes"]
    cluster.kill_node(node)
    job.wait_for_life(2)
    try:
        (_, process, _), (_, _, token) = job.lives()
        # The old life, which goes on beside the new one, is cut off.
        wait_until(lambda: not Path(f"/proc/{process}").exists(), limit_s=LIMIT_S)
        assert token == "t0ken-of-mine"
        assert job.status()["nodes"] != node
        assert job.secrets
        job.let_go()
        assert job.wait_for_end()["state"] == "succeeded"
        wait_until(lambda: job.status() and not job.secrets, limit_s=LIMIT_S)
    finally:
        cluster.start_node(node)
        cluster.await_nodes()
    login.wait_for_slurm(job, "COMPLETED")
    cluster.run("scontrol", "requeue", job.job_id)

    def has_ended_again() -> bool:
        assert job.status()["state"] == "succeeded"
        facts = login.ask(job)
        return (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "2")

    wait_until(has_ended_again, limit_s=LIMIT_S)
    assert job.status()["state"] == "succeeded"
    assert len(job.lives()) == 2


def test_nothing_is_left_of_jobs_that_were_ended_from_outside(login: Login, cluster: Cluster) -> None:
    """Secrets and an empty folder stayed after scancel or a kill, and `doctor --clean` did not see them."""
    cancelled, killed = login.submit("cancelled"), login.submit("killed")
    for job in (cancelled, killed):
        job.wait_for_life()
    cluster.run("scancel", cancelled.job_id)
    os.kill(find_batch_shell(killed), signal.SIGKILL)
    wait_until(lambda: not cluster.run("squeue", "-h"), limit_s=LIMIT_S)
    ended = login.command("doctor", "--clean", "--json")
    assert {str(job.home) for job in (cancelled, killed)} <= {
        found.get("home") for found in json.loads(ended.out)
    }
    assert [job.secrets for job in (cancelled, killed)] == [[], []]
    assert [job.status()["state"] for job in (cancelled, killed)] == ["cancelled", "failed"]
    wait_until(lambda: not list((login.root / "tmp").iterdir()), limit_s=LIMIT_S)


def find_batch_shell(job: Job) -> int:
    """The process of the batch script of a job."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_shell = b"/slurm_script" in (entry / "cmdline").read_bytes()
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if is_shell and f"SLURM_JOB_ID={job.job_id}".encode() in variables:
                return int(entry.name)
    raise AssertionError(f"no batch shell of {job.job_id}")


def test_a_cause_of_the_job_ends_it_and_excludes_no_node(login: Login, cluster: Cluster) -> None:
    """A missing secret, or a torch without CUDA, excluded innocent nodes until the job waited for ever."""
    cluster.run("scontrol", "update", "PartitionName=low", "State=DOWN")
    jobs = {"MYTOKEN": login.submit("robbed")}
    (jobs["MYTOKEN"].home / "job/secrets.json").unlink()
    from torch import version

    if version.cuda is None:
        jobs["torch_build"] = login.submit("no-cuda", "job.gpus=1")
    cluster.run("scontrol", "update", "PartitionName=low", "State=UP")
    for word, job in jobs.items():
        end = job.wait_for_end()
        login.wait_for_slurm(job, "FAILED")
        assert (end["state"], word in end["reason"], end["attempt"]["number"]) == ("failed", True, 0), end
        facts = login.ask(job)
        assert (facts["ExcNodeList"], facts["Restarts"]) == ("(null)", "0")
        assert job.lives() == []


def test_a_cause_of_nodes_excludes_them_until_none_is_left(login: Login) -> None:
    """With its only nodes excluded, a job waited for ever, and the cause was in the logs alone."""
    for name in ("half.n1", "none.n1", "none.n2", "pair.n2"):
        (login.root / f"unfit.{name}").touch()
    half, none = login.submit("half"), login.submit("none")
    # One of two is left, which is not enough; the other one, whose role had begun, is innocent.
    pair = login.submit("pair", "job.nodes=2")
    half.wait_for_life()
    half.let_go()
    assert half.wait_for_end()["state"] == "succeeded"
    assert (login.ask(half)["ExcNodeList"], half.status()["attempt"]["number"]) == ("n1", 1)
    end = none.wait_for_end()
    assert (end["state"], end["attempt"]["number"]) == ("failed", 1)
    assert "clock_skew" in end["reason"]
    login.wait_for_slurm(none, "FAILED")
    assert none.lives() == []
    end = pair.wait_for_end()
    assert (end["state"], end["attempt"]["number"]) == ("failed", 0)
    assert "node 1 ended with exit code 76" in end["reason"]
    assert login.ask(pair)["ExcNodeList"] == "(null)"


def test_a_job_whose_agent_is_killed_lives_again_or_says_so(login: Login) -> None:
    """After kill -9 of a node's agent the job was failed, without a cause and without another attempt."""
    again, last = login.submit("again"), login.submit("last", "job.max_requeue=0")
    for job in (again, last):
        job.wait_for_life()
        (start,) = job.home.glob("attempts/*/agent-0.json")
        os.kill(json.loads(start.read_text())["pid"], signal.SIGKILL)
    end = last.wait_for_end()
    assert (end["state"], "killed" in end["reason"]) == ("failed", True), end
    again.wait_for_life(2)
    again.let_go()
    end = again.wait_for_end()
    assert (end["state"], end["attempt"]["number"]) == ("succeeded", 1)


def test_a_job_that_slurm_has_forgotten_can_be_closed(login: Login, cluster: Cluster) -> None:
    """A job that its scheduler had forgotten stayed unknown, and could not be cancelled."""
    cluster.run("scontrol", "update", "PartitionName=cpu", "State=DOWN")
    job = login.submit("forgotten", "site.partition=cpu")
    assert job.status()["state"] == "queued"
    cluster.stop_controller()
    assert login.command("cancel", job.home).code != 0
    cluster.start_controller(is_new=True)
    assert job.status()["state"] == "unknown"
    assert login.command("cancel", job.home).code == 0
    assert job.status()["state"] == "cancelled"
    assert job.secrets == []
    listed = json.loads(login.command("ls", "--json").out)
    assert [(found["home"], found["state"]) for found in listed] == [(str(job.home), "cancelled")]
    cluster.await_nodes()
