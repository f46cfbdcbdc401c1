"""An elastic pool: jobs of one node each, submitted while sandboxes wait and ended when their nodes are idle.

It runs next to the controller, in the service's own job, and submits as its user would. It prefers few long
jobs: it submits one for as many waiting sandboxes as the fullest node has, and none while an earlier job has
yet to start.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.errors import EXIT_DONE, StropError
from strop.launch.backends import open_backend
from strop.launch.build_request import SubmitOptions, read_request
from strop.launch.contract import JobRef, JobRequest
from strop.launch.launcher import Launcher
from strop.launch.serving import SERVE, ServiceOptions, joining_request
from strop.runtime.contract import NODE_KEY_HEADER
from strop.runtime.service_dir import ServiceDir

if TYPE_CHECKING:
    import httpx

_START_LIMIT_S = 600.0
_ANSWER_LIMIT_S = 10.0
_STOP_GRACE_S = 5.0
_ADJUST_EVERY_S = 5.0
_REPLACE_S = 900.0
"""A job that ends so soon, and is in the last tenth of its time, no longer counts: another may replace it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLimits:
    """The limits of a pool's growth, and when it shrinks."""

    max_jobs: int
    """Not counting the service's own job."""
    idle_s: float = 300.0
    """Seconds without sandboxes after which a node's job is ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolNode:
    """A node of the service, as the controller sees it."""

    node_id: str
    job_id: str
    is_open: bool
    num_sandboxes: int
    idle_for_s: float
    ends_in_s: float | None
    lasts_s: float = math.inf
    """Seconds from its first appearance to its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The pool's next actions."""

    num_to_submit: int = 0
    to_drain: tuple[str, ...] = ()
    """Nodes that will get no new sandboxes."""
    to_end: tuple[str, ...] = ()
    """Jobs whose nodes are drained and empty."""


def decide(nodes: Sequence[PoolNode], job_ids: Sequence[str], num_waiting: int, limits: PoolLimits) -> Steps:
    """Return a pool's next actions. `job_ids`: its jobs that have not ended, with or without a node yet."""
    of_pool = [node for node in nodes if node.job_id in job_ids]
    to_end = tuple(node.job_id for node in of_pool if not node.is_open and node.num_sandboxes == 0)
    here = {node.job_id for node in of_pool}
    num_coming = sum(job not in here for job in job_ids)
    leaving = {
        node.job_id
        for node in of_pool
        if node.ends_in_s is not None and node.ends_in_s < min(_REPLACE_S, node.lasts_s / 10)
    }
    num_to_submit = 0
    if num_waiting and not num_coming:
        per_node = max((node.num_sandboxes for node in nodes), default=0) or 1
        room = limits.max_jobs - len(set(job_ids) - leaving - set(to_end))
        num_to_submit = max(0, min(math.ceil(num_waiting / per_node), room))
    is_idle = not num_waiting
    to_drain = tuple(
        node.node_id
        for node in of_pool
        if is_idle and node.is_open and node.num_sandboxes == 0 and node.idle_for_s >= limits.idle_s
    )
    return Steps(num_to_submit=num_to_submit, to_drain=to_drain, to_end=to_end)


@dataclass(kw_only=True, slots=True)
class Pool:
    """Submits and ends the jobs of one service."""

    folder: ServiceDir
    launcher: Launcher
    limits: PoolLimits
    make_request: Callable[[int], JobRequest]
    """Returns the request of the job with a number."""
    say: Callable[[str], None]
    _jobs: dict[str, JobRef] = field(default_factory=dict)
    _num_submitted: int = 0
    _busy_at: dict[str, float] = field(default_factory=dict)
    """When a node last had a sandbox, or appeared."""
    _lasts_s: dict[str, float] = field(default_factory=dict)

    async def run(self) -> None:
        """Watch the service until SIGTERM; then end all of the pool's jobs.

        Raises: CheckRefused if the service is not found.
        """
        import httpx

        is_stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, is_stopped.set)
        endpoint = await self.folder.wait_for(self.folder.find, limit_s=_START_LIMIT_S)
        for_nodes = await self.folder.wait_for(self.folder.find_for_nodes, limit_s=_START_LIMIT_S)
        # The first key is for queries, as of clients; the second for orders, as of the service's nodes.
        headers = {"X-API-Key": endpoint.key, NODE_KEY_HEADER: for_nodes.key}
        try:
            async with httpx.AsyncClient(
                base_url=endpoint.url, headers=headers, trust_env=False, timeout=_ANSWER_LIMIT_S
            ) as client:
                while not is_stopped.is_set():
                    try:
                        await self._adjust(client)
                    except (StropError, httpx.HTTPError) as error:
                        # The scheduler or controller may be restarting; the next query may succeed.
                        self.say(f"the pool stays as it is: {error}")
                    with suppress(TimeoutError):
                        await asyncio.wait_for(is_stopped.wait(), _ADJUST_EVERY_S)
        finally:
            for ref in self._jobs.values():
                self.launcher.backend.stop(ref, None, grace_s=_STOP_GRACE_S)

    async def _adjust(self, client: httpx.AsyncClient) -> None:
        answer = (await client.get("/nodes")).raise_for_status().json()
        nodes = self._read_nodes(answer["nodes"])
        await asyncio.to_thread(self._forget_ended)
        steps = decide(nodes, list(self._jobs), int(answer["num_waiting"]), self.limits)
        for node_id in steps.to_drain:
            (await client.post(f"/nodes/{node_id}/drain")).raise_for_status()
            self.say(f"node {node_id} is idle, and takes nothing new")
        for job_id in steps.to_end:
            await asyncio.to_thread(
                self.launcher.backend.stop, self._jobs.pop(job_id), None, grace_s=_STOP_GRACE_S
            )
            self.say(f"job {job_id} is ended: its node is idle")
        for _ in range(steps.num_to_submit):
            await asyncio.to_thread(self._submit)

    def _submit(self) -> None:
        self._num_submitted += 1
        request = self.make_request(self._num_submitted)
        ref = self.launcher.submit(request, is_new=True).ref
        self._jobs[ref.job_id] = ref
        self.say(f"job {ref.job_id} is submitted: sandboxes wait")

    def _forget_ended(self) -> None:
        if not self._jobs:
            return
        for status in self.launcher.status(list(self._jobs.values())):
            if status.state.is_terminal and self._jobs.pop(status.ref.job_id, None) is not None:
                self.say(f"job {status.ref.job_id} has ended: {status.state.value}")

    def _read_nodes(self, records: Sequence[Mapping[str, Any]]) -> list[PoolNode]:
        now, nodes = time.monotonic(), []
        for record in records:
            node_id = str(record["node_id"])
            if record["num_sandboxes"] or node_id not in self._busy_at:
                self._busy_at[node_id] = now
            ends_in_s = record["ends_in_s"]
            nodes.append(
                PoolNode(
                    node_id=node_id,
                    job_id=str(record["job_id"]),
                    is_open=bool(record["is_open"]),
                    num_sandboxes=int(record["num_sandboxes"]),
                    idle_for_s=now - self._busy_at[node_id],
                    ends_in_s=ends_in_s,
                    lasts_s=self._lasts_s.setdefault(node_id, math.inf if ends_in_s is None else ends_in_s),
                )
            )
        self._busy_at = {node.node_id: self._busy_at[node.node_id] for node in nodes}
        self._lasts_s = {node.node_id: node.lasts_s for node in nodes}
        return nodes


def main(arguments: Sequence[str] | None = None) -> int:
    """Submit and end jobs until SIGTERM; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m strop.launch.pool", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="the service's folder")
    parser.add_argument("--on", required=True, help="the site that gets the jobs")
    parser.add_argument("--max-jobs", type=int, required=True)
    parser.add_argument("--words", default="", help="options of the added node agents, as a shell would")
    parser.add_argument("--idle", type=float, default=300.0, help="seconds")
    parser.add_argument("settings", nargs="*", help="what each job asks for, key=value")
    args = parser.parse_args(arguments)

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    folder, service = (
        ServiceDir(args.dir),
        ServiceOptions(words=tuple(shlex.split(args.words))),
    )

    def make(number: int) -> JobRequest:
        home = folder.path.parent / "pool" / str(number)
        options = SubmitOptions(
            site=args.on,
            command=SERVE,
            overrides=(*args.settings, f"output.dir={home}"),
            has_snapshot=False,
            service=service,
        )
        request = read_request("", options, environ=os.environ, now=time.time())
        return joining_request(request, folder.path, service)

    try:
        pool = Pool(
            folder=folder,
            launcher=Launcher(open_backend(make(0).site)),
            limits=PoolLimits(max_jobs=args.max_jobs, idle_s=args.idle),
            make_request=make,
            say=say,
        )
        asyncio.run(pool.run())
    except StropError as error:
        say(f"strop: {error}")
        return error.exit_code
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
