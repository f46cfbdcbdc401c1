"""What a role of Ray's sees of its node's GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strop.cluster.ray import roles
from strop.cluster.ray.roles import RayRole, RoleStart
from strop.environments import gpus
from strop.hardware.visible_devices import PART_DEVICES
from strop.spec.layout import DeviceShare


def test_a_worker_hands_out_its_share_of_the_gpus_for_sandboxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayRole, "computes", False)
    monkeypatch.setattr(roles, "require_environment", lambda *_: None)
    monkeypatch.setattr(gpus, "_pools", {})
    for name in PART_DEVICES.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("STROP_SANDBOX_DEVICES", "5,6,7")
    monkeypatch.setattr(os, "dup2", lambda *_: 0)
    share = DeviceShare(part="sandbox", first=1, count=2)
    log_path = str(tmp_path / "worker-0.log")
    RayRole(RoleStart(name="worker-0", node=0, log_path=log_path, devices=share, hands_out_gpus=True)).begin()
    # Its own code, and whom it starts, see none.
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert list(gpus.find_pool()._free) == ["6", "7"]
    # On a cluster that is not the run's, Ray has chosen them.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    RayRole(RoleStart(name="worker-0", node=0, log_path=log_path, hands_out_gpus=True)).begin()
    assert list(gpus.find_pool()._free) == ["3"]
