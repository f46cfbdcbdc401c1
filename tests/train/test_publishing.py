"""Engines serve what the learner has made wherever that counts, and what they acknowledge is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from strop.engine import WeightReceipt, WeightUpdate
from strop.errors import WeightMismatch
from strop.train import EvalSummary
from tests.fixtures.apart import ApartPlacement
from tests.fixtures.tiny_run import Composition, new_run, tiny_spec


def test_an_evaluation_that_is_due_is_one_of_the_weights_of_its_step(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Publications are due at step 5 alone; evaluations at 2 and 4 as well, a checkpoint at 3."""
    train = {"steps": 5, "sync_every": 5, "max_staleness": 4, "checkpoint_every": 3, "keep_checkpoints": 9}
    spec = tiny_spec(train=train, eval={"every": 2}, placement={"kind": "process"})
    placement = ApartPlacement(spec, tiny_model_dir, tmp_path / "weights")
    served: dict[int, int] = {}
    sent: list[int] = []

    async def evaluate(step: int, on_progress: Callable[[], None]) -> EvalSummary:
        served[step] = sent[-1]
        return EvalSummary(
            step=step,
            num_examples=1,
            greedy_accuracy=0.0,
            greedy_low=0.0,
            greedy_high=1.0,
            sampled_accuracy=None,
        )

    made = Composition(spec, tiny_model_dir, new_run(tmp_path), placement=placement, evaluate=evaluate)
    made.run(lambda roles: replace(roles, engine=Watched(roles.engine, sent)))
    assert served == {0: 0, 2: 2, 4: 4, 5: 5}
    # And at the checkpoint: a run that goes on from it publishes these weights.
    assert sent == [0, 2, 3, 4, 5]


@dataclass
class Watched:
    """An engine of which is noted which versions it was sent."""

    engine: Any
    sent: list[int]

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        receipt: WeightReceipt = await self.engine.update(update)
        self.sent.append(receipt.version)
        return receipt

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@dataclass
class Misreporting:
    """An engine that acknowledges something else than it was sent."""

    engine: Any
    change: dict[str, Any]

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        receipt: WeightReceipt = await self.engine.update(update)
        return replace(receipt, **self.change)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@pytest.mark.parametrize("change", [{"version": 7}, {"digest": "e" * 64}])
@pytest.mark.parametrize("is_apart", [True, False])
def test_a_receipt_for_anything_but_what_was_published_ends_the_run(
    tmp_path: Path, tiny_model_dir: Path, is_apart: bool, change: dict[str, Any]
) -> None:
    spec = tiny_spec(placement={"kind": "process"} if is_apart else {})
    placement = ApartPlacement(spec, tiny_model_dir, tmp_path / "weights") if is_apart else None
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), placement=placement)
    named = r"version 7 \(" if "version" in change else r"version 0 \(eeeeeeeeeeee\)"
    with pytest.raises(
        WeightMismatch, match=rf"the engine serves {named}.*after version 0 \(.* was published"
    ):
        made.run(lambda roles: replace(roles, engine=Misreporting(roles.engine, change)))
    assert made.notes.steps == []
