"""How Ray is started: ports, directories, memory and environment, without Ray itself."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from strop.cluster.ray.settings import (
    MAX_TEMP_DIR_BYTES,
    OBJECT_STORE_BYTES,
    RAY_VERSION,
    NodeSettings,
    check_object_store,
    choose_temp_dir,
    ray_environment,
    require_same_version,
    start_args,
)
from strop.errors import CheckRefused, ConfigError, StoreError
from strop.hardware.leftovers import SHARED_MEMORY, own_dir, remove_dead
from strop.hardware.ports import LOOPBACK

NODE = NodeSettings(
    temp_dir="/tmp/r", shared_dir="/dev/shm/r", token_path="/t", log_path="/l", keep_logs_dir="/k"
)


def replaced(**values: object) -> NodeSettings:
    return NodeSettings(**{name: getattr(NODE, name) for name in NODE.__slots__} | values)


def test_a_head_binds_loopback_and_any_port_without_a_dashboard() -> None:
    args = start_args(NODE, None)
    assert args[1:6] == ["-P", "-m", "ray.scripts.scripts", "start", "--block"]
    assert {"--head", "--port=0", "--include-dashboard=false", "--node-ip-address=127.0.0.1"} <= set(args)
    assert {"--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0"} <= set(args)
    assert '--resources={"strop_node_0": 1}' in args
    # Devices are shared out by the allocator alone.
    assert "--num-gpus=0" in args


def test_a_node_joins_by_address_and_has_no_head_options() -> None:
    args = start_args(replaced(index=3), "10.0.0.1:6379")
    assert "--address=10.0.0.1:6379" in args
    assert '--resources={"strop_node_3": 1}' in args
    assert not any(arg.startswith(("--head", "--port", "--include-dashboard")) for arg in args)


def test_the_environment_keeps_every_byte_and_nothing_of_another_ray() -> None:
    """LAU-4: a comma truncated what another launcher passed."""
    value = "a,b 'c' \"d\"\nnew\\n$HOME"
    given = {"KEY": value, "RAY_ADDRESS": "elsewhere:1", "RAY_AUTH_TOKEN": "theirs", "RAY_START_HOOK": "x"}
    found = ray_environment(given, host=LOOPBACK, token_path=Path("/run/token"))
    assert found["KEY"] == value
    assert found["RAY_AUTH_MODE"] == "token"
    assert found["RAY_AUTH_TOKEN_PATH"] == "/run/token"
    assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_START_HOOK"} & found.keys()
    # The switch by which Ray's native processes bind to loopback alone.
    assert found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert (
        ray_environment({}, host="10.0.0.1", token_path=Path("/t"))["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]
        == "1"
    )


def test_an_object_store_must_fit_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = OBJECT_STORE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    check_object_store()
    free -= 1
    with pytest.raises(CheckRefused, match=f"{SHARED_MEMORY} has {free} free"):
        check_object_store()


def test_another_release_of_ray_is_refused_by_place() -> None:
    require_same_version("node 1", RAY_VERSION)
    with pytest.raises(CheckRefused, match=r"node 1 has Ray 2\.9\.0.*pip install ray==2\.60\.0 there"):
        require_same_version("node 1", "2.9.0")


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
