"""How Ray is started: ports, directories, memory and environment, without Ray itself."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from strop.cluster.ray.node import choose_temp_dir, ray_environment, ray_start
from strop.hardware.leftovers import own_dir, remove_dead
from strop.hardware.ports import LOOPBACK, NODE_VARIABLE, NUM_NODES_VARIABLE
from strop.record.fence import RAY_ADDRESS, RAY_TOKEN_PATH

PLACE = Path("/tmp/ray-1")


def test_a_head_binds_loopback_and_any_port_without_a_dashboard() -> None:
    """The address of a job is of no concern to a run on one node."""
    environ = {RAY_ADDRESS: "elsewhere:7"}
    args = ray_start(environ, LOOPBACK, PLACE)
    assert args[1:6] == ["-P", "-m", "ray.scripts.scripts", "start", "--block"]
    assert {"--head", "--port=0", "--include-dashboard=false", "--node-ip-address=127.0.0.1"} <= set(args)
    assert {"--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0"} <= set(args)
    # Devices are shared out by the allocator alone.
    assert "--num-gpus=0" in args


def test_the_nodes_of_a_job_meet_at_the_address_that_all_know() -> None:
    environ = {RAY_ADDRESS: "algo-1:6379", NUM_NODES_VARIABLE: "4"}
    assert "--port=6379" in ray_start(environ, "10.0.0.7", PLACE)
    args = ray_start(environ | {NODE_VARIABLE: "3"}, "10.0.0.7", PLACE)
    assert "--address=algo-1:6379" in args
    assert [arg for arg in args if arg.startswith("--node-name=3@")]
    assert not any(arg.startswith(("--head", "--port", "--include-dashboard")) for arg in args)


def test_native_processes_bind_to_loopback_alone_on_one_machine() -> None:
    found = ray_environment({RAY_TOKEN_PATH: "/run/token"}, LOOPBACK)
    assert (found["RAY_AUTH_MODE"], found["RAY_AUTH_TOKEN_PATH"]) == ("token", "/run/token")
    assert found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert ray_environment(found, "10.0.0.1")["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"


def test_the_usual_temp_dir_is_private_and_short_enough_for_rays_sockets() -> None:
    path = choose_temp_dir()
    # Of the 107 bytes of a socket's path Ray adds 64 at most.
    assert len(os.fsencode(path)) <= 43
    with own_dir(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert remove_dead(path.parent) == []
        assert path.is_dir()
    assert not path.exists()
    assert not path.with_name(f"{path.name}.lock").exists()


def test_what_a_killed_keeper_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    """PRC-6: only what nobody holds goes."""
    dead, living = tmp_path / "ray-dead", tmp_path / "ray-living"
    dead.mkdir()
    (dead / "socket").write_text("")
    (tmp_path / "ray-dead.lock").write_text("")
    with own_dir(living):
        assert not dead.exists()
        assert living.is_dir()
    assert list(tmp_path.iterdir()) == []
