"""A loop whose engine is another process, which dies. Its curve is compared where placements are tested."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.cluster import Roles
from strop.cluster.contract import build_placement
from strop.cluster.local import InlinePlacement, ProcessPlacement
from strop.engine import Completion, GenerationRequest
from strop.errors import RunStopped
from strop.io import verify_directory
from strop.record import RunDir
from strop.spec import RunSpec
from strop.store import ModelHandle
from tests.fixtures.tiny_run import NUM_GATE_REQUESTS, Composition, new_run, read_curve, tiny_spec

SIZES = {"steps": 4, "checkpoint_every": 2}


def over_processes(spec: RunSpec, model_dir: Path, run_dir: RunDir) -> Composition:
    source = ModelHandle(path=model_dir, digest="unused")
    placement = ProcessPlacement(spec, source, run_dir.path / "roles")
    return Composition(spec, model_dir, run_dir, placement=placement)


def test_the_spec_names_the_placement(tmp_path: Path) -> None:
    source = ModelHandle(path=tmp_path, digest="unused")
    for kind, built in (("inline", InlinePlacement), ("process", ProcessPlacement)):
        spec = tiny_spec(placement={"kind": kind})
        assert type(build_placement(spec, source, tmp_path / "roles")) is built
    # Nothing is made before it is started.
    assert list(tmp_path.iterdir()) == []


class DyingEngine:
    """Hands everything on; its process is killed at the n-th request."""

    def __init__(self, engine: Any, pid: int, num_requests: int) -> None:
        self._engine = engine
        self._pid = pid
        self._num_left = num_requests

    async def generate(self, request: GenerationRequest) -> Completion:
        if self._num_left == 0:
            os.kill(self._pid, signal.SIGKILL)
        self._num_left -= 1
        completion: Completion = await self._engine.generate(request)
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def kill_at(placement: ProcessPlacement, num_requests: int) -> Callable[[Roles], Roles]:
    def change(roles: Roles) -> Roles:
        assert placement.engine_pid is not None
        return replace(roles, engine=DyingEngine(roles.engine, placement.engine_pid, num_requests))

    return change


@pytest.mark.slow
def test_a_killed_engine_ends_the_run_with_its_cause_and_the_run_goes_on_later(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    spec = tiny_spec(train=SIZES)
    whole = Composition(spec, tiny_model_dir, new_run(tmp_path / "whole"))
    whole.run()
    made = over_processes(spec, tiny_model_dir, new_run(tmp_path / "killed"))
    assert isinstance(made.placement, ProcessPlacement)
    # A step asks for 3 groups of 4: this is the first request of step 4.
    with pytest.raises(RunStopped) as caught:
        made.run(kill_at(made.placement, NUM_GATE_REQUESTS + 3 * 12))
    message = str(caught.value)
    assert "all 12 rollouts of step 4 failed: engine, EngineLost" in message
    assert "ended with signal 9" in message
    assert "the same command goes on from checkpoint step-000002" in message
    assert made.placement.engine_pid is None
    assert made.notes.events[-1].kind == "stop"
    assert [line["step"] for line in made.run_dir.metrics.read()] == [1, 2, 3]
    verify_directory(made.run_dir.checkpoint_path(2))
    run_dir = RunDir.open(made.run_dir.path)
    run_dir.acquire()
    again = over_processes(spec, tiny_model_dir, run_dir)
    again.run()
    assert read_curve(run_dir.path) == read_curve(whole.run_dir.path)
