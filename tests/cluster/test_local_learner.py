"""The learner in the loop's process: where its work is done, and what the loop may do meanwhile."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strop.cluster.local import LocalLearner


class Recorder:
    """Stands for a learner: notes which thread calls it."""

    version = 0

    def __init__(self) -> None:
        self.threads: list[int] = []

    def step_terms(self, terms: Any, plan: Any) -> Any:
        self.threads.append(threading.get_ident())
        return SimpleNamespace()

    def save_state(self, target: Path) -> None:
        self.threads.append(threading.get_ident())


@pytest.mark.parametrize("is_async", [True, False])
def test_all_work_is_done_in_one_thread(is_async: bool, tmp_path: Path) -> None:
    """Each further thread would keep an OpenMP team and the memory that it freed."""
    local = Recorder()
    learner = LocalLearner(local, is_async=is_async)  # type: ignore[arg-type]
    assert learner.is_async == is_async

    async def act() -> None:
        for _ in range(5):
            # Others use threads meanwhile, as publications do.
            others = [asyncio.to_thread(threading.Event().wait, 0.01) for _ in range(3)]
            await asyncio.gather(learner.step_terms([]), *others)
        await learner.save_state(tmp_path)

    asyncio.run(act())
    assert len(local.threads) == 6
    assert len(set(local.threads)) == 1
    assert (local.threads[0] != threading.get_ident()) == is_async
