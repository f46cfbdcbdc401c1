"""Rollout workers as actors: each attempts and judges groups, and asks an engine over HTTP by itself.

The loop sends plans and gets whole groups; prompts, replies and judging stay out of its process.
"""

from __future__ import annotations

import asyncio
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cluster.contract import ModelSource
from strop.cluster.ray.deaths import DeathWatch
from strop.cluster.ray.engines import EngineAddress
from strop.cluster.ray.roles import RayRole
from strop.errors import EngineLost, explain_refusal
from strop.rollout import Group

if TYPE_CHECKING:
    from strop.environments import RolloutPlan
    from strop.tasks import Task

CALL_LIMIT_S = 3600.0
"""A group takes no longer."""


class RolloutWorker(RayRole):
    """Attempts groups, many at once. All methods that wait are coroutines: Ray runs them in one loop."""

    computes = False
    _keys_dir: Path | None = None

    async def load(
        self,
        source: ModelSource,
        address: EngineAddress,
        make_task: Callable[[], Task],
        judges: Mapping[str, str],
        work_dir: Path,
    ) -> None:
        """Build the task, open its judge and the engine's client.

        `judges` are those of the run's own, as `list_handovers` tells them: their keys go into `work_dir`.

        Raises: StropError as building the task does; OSError if `work_dir` cannot be written.
        """
        from strop.engine.remote import RemoteEngine
        from strop.environments import SingleTurn
        from strop.tasks.judging import open_judge
        from strop.tasks.llm_judge.role import adopt_handovers
        from strop.tokenizer import Tokenizer

        if judges:
            self._keys_dir = work_dir
            adopt_handovers(work_dir, judges)
        task = make_task()
        self._judge = open_judge(task, make_task)
        self._engine = RemoteEngine(address.url, address.key, is_streamed=address.is_streamed)
        self._tokenizer = Tokenizer.load(source.path)
        self._make_environment = partial(SingleTurn, task, self._judge)

    async def run_group(self, plans: Sequence[RolloutPlan]) -> bytes:
        """Attempt one group; pickled here, so that its arrays are nobody's views of shared memory."""
        from strop.environments import run_group

        return pickle.dumps(await run_group(self._make_environment, self._engine, self._tokenizer, plans))

    async def wait_for_end(self) -> str:  # type: ignore[override]
        """Return once this worker was told to end; a killed one never returns."""
        await asyncio.to_thread(self._ended.wait)
        return "it was told to end"

    async def end(self) -> None:  # type: ignore[override]
        """Close judge and client, and remove the judges' keys."""
        self._ended.set()
        if self._keys_dir is not None:
            shutil.rmtree(self._keys_dir, ignore_errors=True)
        if hasattr(self, "_judge"):
            await self._judge.close()
            await self._engine.close()


class RolloutWorkers:
    """Sends each group to the worker with the fewest, of those whose engine serves."""

    def __init__(
        self, actors: Sequence[Any], watch: DeathWatch, *, serves: Callable[[int], bool] = lambda worker: True
    ) -> None:
        """`actors` are of `RolloutWorker` and have loaded.

        `serves` says whether a worker's engine may be asked.
        """
        self._actors = actors
        self._watch = watch
        self._serves = serves
        self._num_running = [0] * len(actors)

    async def run_group(self, plans: Sequence[RolloutPlan]) -> Group:
        """Have one group attempted. See `Roles.run_group`.

        A group whose engine left meanwhile is attempted again with another one.
        Raises: EngineLost naming the role that ended; else like `environments.run_group`.
        """
        while True:
            serving = [worker for worker in range(len(self._actors)) if self._serves(worker)]
            if not serving:
                raise EngineLost(
                    explain_refusal(
                        f"none of {len(self._actors)} rollout workers has an engine that serves",
                        allowed="one engine at least that answers under the newest weights",
                        next_step="read the logs of the roles and start the run again; it resumes",
                    )
                )
            chosen = min(serving, key=self._num_running.__getitem__)
            group = await self._run_at(chosen, plans)
            if self._serves(chosen) or not any(map(self._serves, range(len(self._actors)))):
                return group

    async def _run_at(self, chosen: int, plans: Sequence[RolloutPlan]) -> Group:
        self._num_running[chosen] += 1
        try:
            call = self._actors[chosen].run_group.remote(list(plans))
            # From our own worker, over a connection that carries the run's token.
            group: Group = pickle.loads(await self._watch.guard(call, CALL_LIMIT_S))
        finally:
            self._num_running[chosen] -= 1
        return group


def assign_engines(num_workers: int, num_engines: int) -> list[int]:
    """Return the engine of each worker; the run file gives as many to each."""
    return [index % num_engines for index in range(num_workers)]
