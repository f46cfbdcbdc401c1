"""How Ray is started: ports, directories, memory and environment, without Ray itself."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.cluster.ray import settings
from strop.cluster.ray.settings import (
    MAX_TEMP_DIR_BYTES,
    OBJECT_STORE_BYTES,
    RAY_VERSION,
    RayNode,
    check_object_store,
    choose_temp_dir,
    ray_environment,
    require_ray,
)
from strop.errors import CheckRefused, ConfigError, StoreError
from strop.hardware.leftovers import SHARED_MEMORY, own_dir, remove_dead
from strop.hardware.ports import LOOPBACK, NODE_VARIABLE
from strop.record.fence import RAY_ADDRESS, RAY_TOKEN_PATH

PLACES = {"temp_dir": Path("/tmp/ray-1"), "logs_dir": Path("/logs")}


def test_a_head_binds_loopback_and_any_port_without_a_dashboard() -> None:
    """The address of a job is of no concern to a run on one node."""
    node = RayNode.here({RAY_ADDRESS: "elsewhere:7"}, 1, **PLACES)
    assert (node.host, node.index, node.shared_dir) == (LOOPBACK, 0, Path("/dev/shm/strop-ray-1"))
    args = node.ray_start()
    assert args[1:6] == ["-P", "-m", "ray.scripts.scripts", "start", "--block"]
    assert {"--head", "--port=0", "--include-dashboard=false", "--node-ip-address=127.0.0.1"} <= set(args)
    assert {"--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0"} <= set(args)
    assert '--resources={"strop_node_0": 1}' in args
    # Devices are shared out by the allocator alone.
    assert "--num-gpus=0" in args


def test_the_nodes_of_a_job_meet_at_the_address_that_all_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_host_address", lambda num_nodes, interface: "10.0.0.7")
    environ = {RAY_ADDRESS: "algo-1:6379"}
    assert "--port=6379" in RayNode.here(environ, 4, **PLACES).ray_start()
    args = RayNode.here(environ | {NODE_VARIABLE: "3"}, 4, **PLACES).ray_start()
    assert "--address=algo-1:6379" in args
    assert '--resources={"strop_node_3": 1}' in args
    assert not any(arg.startswith(("--head", "--port", "--include-dashboard")) for arg in args)


def test_the_network_between_nodes_may_be_named() -> None:
    with pytest.raises(CheckRefused, match="'nothing'"):
        RayNode.here({"GLOO_SOCKET_IFNAME": "nothing"}, 2, **PLACES)
    with pytest.raises(CheckRefused, match=r"127\.0\.0\.1, loopback"):
        RayNode.here({"GLOO_SOCKET_IFNAME": "lo"}, 2, **PLACES)
    assert RayNode.here({"GLOO_SOCKET_IFNAME": "nothing"}, 1, **PLACES).host == LOOPBACK


def test_the_environment_keeps_every_byte_and_nothing_of_another_ray() -> None:
    """LAU-4: a comma truncated what another launcher passed."""
    value = "a,b 'c' \"d\"\nnew\\n$HOME"
    given = {"KEY": value, "RAY_ADDRESS": "elsewhere:1", "RAY_AUTH_TOKEN": "theirs", "RAY_START_HOOK": "x"}
    token = {RAY_TOKEN_PATH: "/run/token"}
    found = ray_environment(given | token, LOOPBACK)
    assert found["KEY"] == value
    assert found["RAY_AUTH_MODE"] == "token"
    assert found["RAY_AUTH_TOKEN_PATH"] == "/run/token"
    assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_START_HOOK"} & found.keys()
    # The switch by which Ray's native processes bind to loopback alone.
    assert found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert ray_environment(token, "10.0.0.1")["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"


def test_an_object_store_must_fit_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = OBJECT_STORE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    check_object_store()
    free -= 1
    with pytest.raises(CheckRefused, match=f"{SHARED_MEMORY} has {free} free"):
        check_object_store()


def test_another_release_of_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "version", lambda name: RAY_VERSION)
    require_ray()
    monkeypatch.setattr(settings, "version", lambda name: "2.9.0")
    with pytest.raises(CheckRefused, match=r"2\.9\.0"):
        require_ray()


def test_a_temp_dir_that_is_too_long_for_a_socket_is_refused() -> None:
    """43 bytes are what Ray leaves of the 107 of a socket's path; `ray-` and eight digits are ours."""
    path = choose_temp_dir(Path("/tmp"))
    # 30 bytes of a folder, a slash and twelve of ours.
    assert len("x" * 30 + f"/{path.name}") == MAX_TEMP_DIR_BYTES
    with pytest.raises(ConfigError, match=r"ray\.temp_dir is /x+, 31 bytes long.*30 bytes at most"):
        choose_temp_dir(Path("/" + "x" * 30))


def test_the_usual_temp_dir_is_short_and_private() -> None:
    path = choose_temp_dir()
    assert len(os.fsencode(path)) <= MAX_TEMP_DIR_BYTES
    with own_dir(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert remove_dead(path.parent) == []
        assert path.is_dir()
    assert not path.exists()
    assert not path.with_name(f"{path.name}.lock").exists()


def test_a_temp_dir_that_cannot_be_written_is_named() -> None:
    with pytest.raises(StoreError, match="/proc/nowhere"):
        choose_temp_dir(Path("/proc/nowhere"))


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
