"""Incidents of silent slowness: nothing is wrong but the time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from strop.engine import Completion, Engine, GenerationRequest
from strop.train.watch import process
from tests.fixtures.tiny_run import Composition, new_run, tiny_spec
from tests.record.test_prediction import PLANNED

DELAY_S = 0.4


@dataclass
class SlowEngine:
    """An engine on the wrong device: right in all it says, and late."""

    engine: Engine
    delay_s: float = DELAY_S

    async def generate(self, request: GenerationRequest) -> Completion:
        await asyncio.sleep(self.delay_s)
        return await self.engine.generate(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.mark.parametrize("is_slow", [True, False])
def test_prc_9_a_stage_that_is_slower_than_planned_is_named(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """Incident: a model loaded on the CPU took 470 s for a step of 85 s, and nothing said so."""
    # Seconds of the incident would be seconds of this test: here tenths of them count.
    monkeypatch.setattr(process, "MIN_EXCESS_S", 0.1)
    planned = (
        {"generate": DELAY_S / 20, "learn": 60.0, "sync": 60.0}
        if is_slow
        else dict.fromkeys(("generate", "learn", "sync"), 60.0)
    )
    run = Composition(
        tiny_spec(train={"steps": 5}),
        tiny_model_dir,
        new_run(tmp_path),
        prediction=replace(PLANNED, seconds=planned, num_reply_tokens=1e6, num_positions=1e6),
    )
    run.run(lambda roles: replace(roles, engine=SlowEngine(roles.engine)))
    found = [event for event in run.notes.events if event.cause == "slower_than_plan"]
    if not is_slow:
        assert found == []
        return
    assert [event.step for event in found] == [4, 5]
    assert all(event.detail.startswith("generate took ") for event in found)
    assert "look on which device the engine computes" in found[0].detail
