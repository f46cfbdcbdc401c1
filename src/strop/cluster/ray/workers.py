"""Rollout workers as actors.

A worker attempts and judges whole groups and calls an engine directly; the loop sends plans and gets groups.
"""

from __future__ import annotations

import pickle
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cluster.ray.deaths import DeathWatch
from strop.cluster.ray.engines import ActorEngine
from strop.cluster.ray.roles import AsyncRole
from strop.errors import EngineLost
from strop.hardware.busy_clock import BusyClock
from strop.io.endpoints import Endpoint, hand_over
from strop.record.timeline import VERIFIER
from strop.rollout import Group

if TYPE_CHECKING:
    from strop.environments import RolloutPlan
    from strop.tasks import Task

MAX_SPANS = 16
"""Spans of one group's calls of its engine, or its judge; more are joined."""


class RolloutWorker(AsyncRole):
    """Attempts groups, many at once."""

    computes = False

    async def load(
        self,
        engine: Any,
        is_streamed: bool,
        make_task: Callable[[], Task],
        endpoints: Mapping[str, Endpoint],
        work_dir: Path,
    ) -> None:
        """Build the task, open its judge and the client of an engine's actor, which has loaded.

        `endpoints` are servers of the run, such as judges: their keys are written into `work_dir`.

        Raises: StropError from building the task; OSError if `work_dir` cannot be written.
        """
        from strop.tasks.judging import Judge
        from strop.tokenizer import Tokenizer

        if endpoints:
            self.undo.callback(shutil.rmtree, work_dir, ignore_errors=True)
            hand_over(work_dir, endpoints)
        self._task = make_task()
        self._judge = Judge(self._task, make_task)
        self._engine = ActorEngine(engine, is_streamed=is_streamed)
        self.undo.push_async_callback(self._engine.close)
        self.undo.push_async_callback(self._judge.close)
        self._tokenizer = Tokenizer.load(self._source.path)

    async def run_group(self, plans: Sequence[RolloutPlan]) -> bytes:
        """Attempt one group; return it with the spans of engine and judge, in seconds from its begin.

        Pickled here, so that its arrays are not views of Ray's shared memory.
        """
        from strop.engine.contract import TimedEngine
        from strop.environments import choose_environment, run_group

        begun_at = time.perf_counter()
        engine, judge = TimedEngine(self._engine), self._judge.with_own_clock()
        make_environment = choose_environment(self._task, judge)
        group = await run_group(make_environment, engine, self._tokenizer, plans)
        spans = [
            [(begin - begun_at, end - begun_at) for begin, end in clock.take_intervals(MAX_SPANS)]
            for clock in (engine.busy, judge.busy)
        ]
        return pickle.dumps((group, *spans))


class RolloutWorkers:
    """Sends each group to the worker with the fewest, of those whose engine serves."""

    def __init__(
        self, actors: Sequence[Any], engines: Sequence[str], serves: Callable[[str], bool], watch: DeathWatch
    ) -> None:
        """`actors` are of `RolloutWorker` and have loaded.

        `engines` is the name of each worker's engine. `serves` returns whether an engine takes requests.
        """
        self._engines = engines
        self.busy = {name: BusyClock() for name in [*dict.fromkeys(engines), VERIFIER]}
        """The clocks of each engine, and of all workers' judges."""
        self._actors = actors
        self._watch = watch
        self._serves = serves
        self._num_running = [0] * len(actors)

    async def run_group(self, plans: Sequence[RolloutPlan]) -> Group:
        """Have one group attempted. See `Roles.run_group`.

        A group whose engine was taken out meanwhile is attempted again with another one.
        Raises: EngineLost naming the role that ended; else like `environments.run_group`.
        """
        while True:
            serving = [worker for worker, name in enumerate(self._engines) if self._serves(name)]
            if not serving:
                raise EngineLost(
                    f"none of {len(self._actors)} rollout workers has an engine that serves",
                    allowed="one engine at least that answers under the newest weights",
                    next_step="read the logs of the roles and start the run again; it resumes",
                )
            chosen = min(serving, key=self._num_running.__getitem__)
            self._num_running[chosen] += 1
            try:
                begun_at = time.perf_counter()
                call = self._actors[chosen].run_group.remote(list(plans))
                # From our own worker, over a connection that carries the run's token.
                answer = pickle.loads(await self._watch.guard(call))
            finally:
                self._num_running[chosen] -= 1
            group: Group = answer[0]
            for name, spans in zip((self._engines[chosen], VERIFIER), answer[1:], strict=True):
                for begin, end in spans:
                    self.busy[name].add((begun_at + begin, begun_at + end))
            if self._serves(self._engines[chosen]) or not any(map(self._serves, self._engines)):
                return group
