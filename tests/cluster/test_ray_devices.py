"""What a role of Ray's sees of its node's GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strop.cluster.ray import roles
from strop.cluster.ray.roles import RayRole, RoleStart
from strop.hardware.visible_devices import ENV_DEVICES, PART_DEVICES
from strop.spec.layout import DeviceShare


def test_a_worker_and_its_sandboxes_see_the_gpus_for_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayRole, "computes", False)
    monkeypatch.setattr(roles, "require_environment", lambda *_: None)
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
