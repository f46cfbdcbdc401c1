"""What roles on Ray check of themselves, and which nodes join, without Ray itself."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from strop.cluster.ray.deaths import read_log
from strop.cluster.ray.node import await_head
from strop.cluster.ray.roles import RayRole, RoleStart
from strop.cluster.ray.workers import assign_engines
from strop.errors import CheckRefused
from strop.hardware.visible_devices import ENV_DEVICES, PART_DEVICES
from strop.spec.layout import DeviceShare
from strop.store import get_model
from tests.fixtures.sockets import free_port

VALUE = "a,b 'c' \"d\"\nnew\\n$HOME"


def test_workers_are_shared_out_evenly_among_engines() -> None:
    assert assign_engines(4, 2) == [0, 1, 0, 1]
    assert assign_engines(0, 2) == []


def test_a_head_that_never_comes_is_said_and_an_order_ends_the_wait() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(CheckRefused, match=address):
        await_head(address, lambda: None, limit_s=0.1)
    assert not await_head(address, lambda: "told to by SIGTERM")
    # A name that does not resolve yet is waited for, too.
    assert not await_head("no-such-host.invalid:1", lambda: "told to by SIGTERM")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert await_head(f"127.0.0.1:{server.getsockname()[1]}", lambda: None)


def test_the_log_of_another_machine_is_named_where_it_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "engine-0.log").write_text("one\ntwo\n")
    assert read_log(tmp_path / "engine-0.log", "algo-2") == "one\ntwo"
    assert read_log(tmp_path / "engine-1.log", "algo-2") == "(they are on algo-2)"


ROLE = """
import json, sys
from pathlib import Path
from strop.store import ModelHandle
from strop.cluster.ray.roles import RayRole, RoleStart
from strop.errors import StropError
role = RayRole(RoleStart(name="engine-1", node=1, log_path=sys.argv[1]))
found = []
for path, digest in json.loads(sys.argv[3]):
    try:
        found.append(str(role.bring_model(ModelHandle(path=Path(path), digest=digest, uri=sys.argv[2])).path))
    except StropError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def test_a_role_fetches_the_model_where_it_is_not_and_refuses_another_one(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    elsewhere, digest = str(tmp_path / "elsewhere"), get_model(str(tiny_model_dir)).digest
    cases = json.dumps([[str(tmp_path), "unused"], [elsewhere, digest], [elsewhere, "0" * 64]])
    # In a process of its own: a role takes over its standard output.
    log = tmp_path / "log"
    subprocess.run([sys.executable, "-c", ROLE, str(log), str(tiny_model_dir), cases], check=True)
    assert "fetching" in log.read_text()
    here, fetched, refused = json.loads(log.read_text().splitlines()[-1])
    assert (here, fetched) == (str(tmp_path), str(tiny_model_dir))
    assert "where role engine-1 is" in refused


def test_importing_the_room_imports_neither_ray_nor_torch() -> None:
    modules = ("settings", "node", "runtime", "roles", "deaths")
    code = "import sys\n" + "\n".join(f"import strop.cluster.ray.{name}" for name in modules)
    code += "\nprint([name for name in ('ray', 'torch') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]", Path(__file__).name


EACH_IN_A_CHILD = """
import os, sys
def for_each(cases, act):
    for case in cases:
        if os.fork() == 0:
            act(case)
            sys.stdout.flush()
            os._exit(0)
        assert os.wait()[1] == 0
"""
BEGIN = """
import json
from strop.cluster.ray.roles import RoleStart
from strop.cluster.ray.workers import RolloutWorker
def begin(mark):
    store = {"STROP_STORE_URI": "s3://a/b"}
    facts = RolloutWorker(
        RoleStart(name="worker-0", node=1, log_path=f"{mark}.log", mark_path=mark, variables=store)
    ).begin()
    print(json.dumps([facts.sees_run, os.environ["STROP_STORE_URI"]]))
for_each(sys.argv[1:], begin)
"""


def test_a_role_knows_whether_it_sees_the_runs_disk_and_follows_its_store(tmp_path: Path) -> None:
    seen, unseen = tmp_path / "node-0.json", tmp_path / "elsewhere.json"
    seen.touch()
    # A role takes over its standard output: what it prints is in its log.
    environment = {**os.environ, "STROP_STORE_URI": "s3://of/the/node"}
    words = [sys.executable, "-c", EACH_IN_A_CHILD + BEGIN, str(seen), str(unseen)]
    subprocess.run(words, check=True, env=environment)
    for mark, sees_run in ((seen, True), (unseen, False)):
        said = Path(f"{mark}.log").read_text().splitlines()[-1]
        assert json.loads(said) == [sees_run, "s3://a/b"]


LOGGING_ROLE = """
import logging
from strop.cluster.ray.roles import RayRole, RoleStart
class Quiet(RayRole):
    computes = False
def begin(level):
    path = f"{sys.argv[1]}/{level}.log"
    Quiet(RoleStart(name="learner-0", node=0, log_path=path, log_level=level or None)).begin()
    logging.getLogger("any.library").info("it said so")
for_each(["info", "error", ""], begin)
"""


def test_a_role_logs_from_its_level_on(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", EACH_IN_A_CHILD + LOGGING_ROLE, str(tmp_path)], check=True)
    for level, is_said in (("info", True), ("error", False), ("", False)):
        said = (tmp_path / f"{level}.log").read_text()
        assert "role learner-0 on node 0" in said
        assert ("INFO any.library: it said so" in said) is is_said, level


# What a role of Ray's sees of its node's GPUs.


def test_a_worker_and_its_sandboxes_see_the_gpus_for_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayRole, "computes", False)
    for name in PART_DEVICES.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("STROP_INFER_DEVICES", "1")
    monkeypatch.setenv(ENV_DEVICES, "5,6,7")
    monkeypatch.setattr(os, "dup2", lambda *_: 0)
    share = DeviceShare(part="env", first=1, count=2)
    log_path = str(tmp_path / "worker-0.log")
    RayRole(RoleStart(name="worker-0", node=0, log_path=log_path, devices=share, has_env_gpus=True)).begin()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == os.environ[ENV_DEVICES] == "6,7"
    assert "STROP_INFER_DEVICES" not in os.environ
    # On a cluster that is not the run's, Ray has chosen them.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    RayRole(RoleStart(name="worker-0", node=0, log_path=log_path, has_env_gpus=True)).begin()
    assert os.environ[ENV_DEVICES] == "3"
    # A worker without such a share shows its sandboxes none.
    learning = DeviceShare(part="env", first=0, count=0)
    RayRole(RoleStart(name="worker-1", node=0, log_path=log_path, devices=learning)).begin()
    assert ENV_DEVICES not in os.environ
