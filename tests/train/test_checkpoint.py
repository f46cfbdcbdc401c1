"""A checkpoint is written by the living attempt alone, after the logs that belong to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from strop.errors import CheckRefused
from strop.record.fence import NUMBER_VARIABLE, raise_fence
from tests.fixtures.tiny_run import Composition, Notes, new_run, tiny_spec


class Overtaken(Notes):
    """Has a later attempt begin elsewhere after the second step."""

    run_path: Path

    def on_step(self, metrics: Mapping[str, float]) -> None:
        super().on_step(metrics)
        if metrics["step"] == 2:
            raise_fence(self.run_path, 1, "17-1")


def test_an_attempt_that_was_overtaken_writes_no_checkpoint(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NUMBER_VARIABLE, "0")
    spec = tiny_spec(train={"steps": 4, "checkpoint_every": 2})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), notes=Overtaken())
    raise_fence(made.run_dir.path, 0, "17-0")
    made.notes.run_path = made.run_dir.path  # type: ignore[attr-defined]
    with pytest.raises(CheckRefused, match=r"attempt 0 of .* was overtaken by attempt 1 \(17-1\)"):
        made.run()
    assert list(made.run_dir.checkpoints_path.iterdir()) == []
    assert made.notes.causes("checkpoint") == []


def test_logs_are_on_the_disk_before_the_checkpoint_that_continues_them(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a checkpoint of step k with metrics of fewer steps would be a curve with a gap."""
    made = Composition(tiny_spec(train={"checkpoint_every": 1}), tiny_model_dir, new_run(tmp_path))
    logs = [made.run_dir.path / name for name in ("metrics.jsonl", "events.jsonl", "timeline.jsonl")]
    durable: dict[Path, int] = {}
    at_seal: list[list[tuple[int, int]]] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        durable[path] = os.fstat(descriptor).st_size
        if path.name.startswith("COMPLETE") or ".COMPLETE" in path.name:
            at_seal.append([(durable.get(log, 0), log.stat().st_size) for log in logs])

    monkeypatch.setattr(os, "fsync", note)
    made.run()
    assert len(at_seal) == 3
    for sizes in at_seal:
        assert all(synced == written > 0 for synced, written in sizes), sizes
