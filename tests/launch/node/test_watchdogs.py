"""How an agent sees the other nodes of its attempt, by their files alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.launch.node.environment import NodeTask
from strop.launch.node.roles import PeerWatch


def task(folder: Path, node: int) -> NodeTask:
    return NodeTask(
        job_path=folder / "job", trial_path=folder, attempt="7-0", number=0, node=node, num_nodes=2
    )


def test_a_first_node_that_never_gives_a_sign_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: node 0 was lost before its first sign of life, and the others kept their GPUs for days."""
    assert PeerWatch(task(tmp_path, 1), is_sidecar=False).check() is None
    monkeypatch.setattr("strop.launch.node.roles.FIRST_HEARTBEAT_LIMIT_S", 0.0)
    order = PeerWatch(task(tmp_path, 1), is_sidecar=False).check()
    assert order is not None
    assert (order.exit_code, order.cause) == (1, "node 0 has sent no heartbeat for 0 s")
    # It gives the signs itself, and waits for none.
    assert PeerWatch(task(tmp_path, 0), is_sidecar=False).check() is None


def test_a_first_node_that_falls_silent_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.launch.node.roles.MAX_SILENCE_S", 0.0)
    monkeypatch.setattr("strop.launch.node.roles._LOOK_EVERY_S", 0.0)
    watch = PeerWatch(task(tmp_path, 1), is_sidecar=False)
    assert watch.check() is None
    sign = tmp_path / "attempts" / "7-0" / "alive"
    sign.parent.mkdir(parents=True)
    sign.write_text("1")
    # The first look at a sign is when it was given, whatever its clock says.
    assert watch.check() is None
    order = watch.check()
    assert order is not None
    assert order.cause.startswith("node 0 has sent no heartbeat")
