"""An engine that notes when it is asked."""

from __future__ import annotations

from strop.engine.contract import (
    Completion,
    Engine,
    GenerationRequest,
    ReplyScore,
    WeightReceipt,
    WeightUpdate,
)
from strop.hardware.busy_clock import BusyClock
from strop.rollout import IntArray


class TimedEngine:
    """Passes requests on; its clock runs while it generates or scores."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.busy = BusyClock()

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply. See `Engine.generate`."""
        with self.busy.running():
            return await self._engine.generate(request)

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the log-probability of each reply token. See `Engine.score`."""
        with self.busy.running():
            return await self._engine.score(prompt_ids, reply_ids, temperature)

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights. See `Engine.update`."""
        return await self._engine.update(update)

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()
