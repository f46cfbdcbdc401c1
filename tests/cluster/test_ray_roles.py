"""What roles on Ray check of themselves, without Ray itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strop.cluster.ray.roles import RayRole, RoleStart
from strop.hardware.visible_devices import ENV_DEVICES, PART_DEVICES
from strop.spec.layout import DeviceShare, RoleKind, RoleSlot
from strop.store import ModelHandle, get_model

VALUE = "a,b 'c' \"d\"\nnew\\n$HOME"


ROLE = """
import json, sys
from pathlib import Path
from strop.store import ModelHandle
from strop.cluster.ray.roles import RayRole, RoleStart
from strop.errors import StropError
from strop.spec.layout import RoleKind, RoleSlot
slot = RoleSlot(kind=RoleKind.ENGINE, index=1, node=1)
role = RayRole(RoleStart(slot=slot, log_path=Path(sys.argv[1])))
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
    modules = ("node", "runtime", "roles", "deaths", "placement", "workers")
    lines = ["import sys, strop.run.training", *(f"import strop.cluster.ray.{name}" for name in modules)]
    code = "\n".join([*lines, "print([name for name in ('ray', 'torch') if name in sys.modules])"])
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]", Path(__file__).name


EACH_IN_A_CHILD = """
import os, sys
from pathlib import Path
from strop.cluster.ray.roles import RoleStart
from strop.spec.layout import RoleKind, RoleSlot
from strop.store import ModelHandle
def for_each(cases, act):
    for case in cases:
        if os.fork() == 0:
            act(case)
            sys.stdout.flush()
            os._exit(0)
        assert os.wait()[1] == 0
def start_of(kind, log, **told):
    return RoleStart(slot=RoleSlot(kind=kind, index=0, node=0), log_path=Path(log), **told)
MODEL = ModelHandle(path=Path("unused"), digest="")
"""
BEGIN = """
import json
from strop.cluster.ray.workers import RolloutWorker
def begin(mark):
    store = {"STROP_STORE_URI": "s3://a/b"}
    log = f"{mark}.log"
    role = RolloutWorker(start_of(RoleKind.WORKER, log, mark_path=Path(mark), variables=store))
    role.begin(MODEL)
    print(json.dumps([role.sees_run, os.environ["STROP_STORE_URI"]]))
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
from strop.cluster.ray.roles import RayRole
from strop.io.variables import level_variables
class Quiet(RayRole):
    computes = False
def begin(level):
    path = f"{sys.argv[1]}/{level}.log"
    Quiet(start_of(RoleKind.LEARNER, path, variables=level_variables(level or None))).begin(MODEL)
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

    def begin(share: DeviceShare, *, takes_devices: bool = True) -> None:
        slot = RoleSlot(kind=RoleKind.WORKER, index=0, node=0, devices=share)
        start = RoleStart(slot=slot, log_path=tmp_path / "log", takes_devices=takes_devices)
        RayRole(start).begin(ModelHandle(path=tmp_path, digest=""))

    begin(DeviceShare(part="env", first=1, count=2))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == os.environ[ENV_DEVICES] == "6,7"
    assert "STROP_INFER_DEVICES" not in os.environ
    # On a cluster that is not the run's, Ray has chosen them.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    begin(DeviceShare(part="env", first=0, count=1), takes_devices=False)
    assert os.environ[ENV_DEVICES] == "3"
    # A worker without such a share shows its sandboxes none.
    begin(DeviceShare(part="env", first=0, count=0))
    assert not os.environ[ENV_DEVICES]
