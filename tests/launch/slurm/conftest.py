"""A real Slurm cluster for all tests here, and a login node of it for each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import strop
from strop.launch.contract import JobRef, Resources
from strop.launch.launcher import Launcher
from strop.launch.slurm.backend import SlurmBackend
from strop.launch.slurm.options import SlurmSite
from tests.conftest import require_system_part
from tests.launch.slurm.plans import LoginNode, a_role
from tools.slurm_cluster import Cluster, ClusterOptions, is_installed, slurm_cluster

# All nodes are one machine here. What is a folder of each machine is one of each node.
_NODE_PYTHON = """#!/bin/sh
XDG_RUNTIME_DIR={root}/run.$SLURMD_NODENAME
mkdir -p -m 700 "$XDG_RUNTIME_DIR"
export XDG_RUNTIME_DIR PYTHONPATH={source}
exec {python} "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Early:
    """A cluster whose jobs mostly wait: for their limit of a minute, or to live again."""

    cluster: Cluster
    root: Path
    refs: dict[str, JobRef]


@pytest.fixture(scope="session")
def early(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Early]:
    """Jobs that are submitted before any other, and looked at after all others."""
    require_system_part("slurm-wlm", is_installed())
    minute = Resources(time_limit_s=60.0)
    root = tmp_path_factory.mktemp("early-login")
    # They are asked for when all others have had their turn, which may take longer than Slurm remembers.
    options = ClusterOptions(min_job_age_s=3600)
    with (
        slurm_cluster(tmp_path_factory.mktemp("early"), options) as cluster,
        pytest.MonkeyPatch.context() as patch,
    ):
        login = log_in(cluster, root, patch)
        # Slurm looks at limits every 30 s, so it is told 30 to 60 s before the end: after a minute at least,
        # when it has long begun to listen. Its next life has nothing left to do.
        told = login.submit(
            a_role("--steps", "3000,0"),
            name="told",
            resources=Resources(time_limit_s=120.0),
            grace_s=30.0,
            max_requeue=20,
        )
        deaf = login.submit(a_role("--steps", "3000", "--ignore-signals"), name="deaf", resources=minute)
        saving = login.submit(a_role("--codes", "75"), name="saving", max_requeue=2)
        patch.undo()
        refs = (told, deaf, saving)
        yield Early(cluster=cluster, root=root, refs={ref.name: ref for ref in refs})


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, early: Early) -> Iterator[Cluster]:
    """A running cluster. Tests that stop parts of it use one of their own."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def frail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose parts are stopped: it soon gives a node up, and soon forgets a job."""
    require_system_part("slurm-wlm", is_installed())
    options = ClusterOptions(slurmd_timeout_s=10, min_job_age_s=2)
    with slurm_cluster(tmp_path_factory.mktemp("frail"), options) as cluster:
        yield cluster


def log_in(cluster: Cluster, root: Path, monkeypatch: pytest.MonkeyPatch) -> LoginNode:
    """Log in to a cluster."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf_path))
    python = root / "node-python"
    root.mkdir(exist_ok=True)
    source = Path(strop.__file__).parents[1]
    python.write_text(_NODE_PYTHON.format(root=cluster.path, source=source, python=sys.executable))
    python.chmod(0o755)
    backend = SlurmBackend(SlurmSite(cpus_per_gpu=1, cpu_partition="cpu"), site="cluster")
    environ = {**os.environ, "XDG_STATE_HOME": str(root / "state")}
    return LoginNode(
        root=root, python=str(python), launcher=Launcher(backend, environ=environ), backend=backend
    )


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoginNode]:
    """A login node of the cluster that all tests share."""
    yield log_in(cluster, tmp_path / "login", monkeypatch)
    cluster.clear()
