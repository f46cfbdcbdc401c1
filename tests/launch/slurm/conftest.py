"""A real Slurm cluster for all tests here, and a login node of it for each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import strop
from strop.launch.jobs.launcher import Launcher
from strop.launch.slurm import SlurmBackend
from strop.spec.site import SlurmSite
from tests.conftest import require_system_part
from tests.launch.slurm.plans import Desk
from tools.slurm_cluster import Cluster, ClusterOptions, is_installed, slurm_cluster

# All nodes are one machine here. What is a folder of each machine is one of each node.
_NODE_PYTHON = """#!/bin/sh
XDG_RUNTIME_DIR={root}/run.$SLURMD_NODENAME
mkdir -p -m 700 "$XDG_RUNTIME_DIR"
export XDG_RUNTIME_DIR PYTHONPATH={source}
exec {python} "$@"
"""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running cluster. Tests that stop parts of it use one of their own."""
    require_system_part("slurm-wlm", is_installed())
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def open_desk(cluster: Cluster, root: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Log in to a cluster."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf_path))
    python = root / "node-python"
    root.mkdir(exist_ok=True)
    source = Path(strop.__file__).parents[1]
    python.write_text(_NODE_PYTHON.format(root=cluster.path, source=source, python=sys.executable))
    python.chmod(0o755)
    backend = SlurmBackend(SlurmSite(cpus_per_gpu=1, cpu_partition="cpu"), site="cluster")
    environ = {**os.environ, "XDG_STATE_HOME": str(root / "state")}
    return Desk(root=root, python=str(python), launcher=Launcher(backend, environ=environ), backend=backend)


@pytest.fixture
def desk(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """A login node of the cluster that all tests share."""
    yield open_desk(cluster, tmp_path / "desk", monkeypatch)
    cluster.clear()


__all__ = ["ClusterOptions", "open_desk"]
