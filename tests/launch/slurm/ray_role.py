"""A trainer of a job in tests: a tiny run on Ray over all nodes, then a wait until its engines are lost.

    ray_role.py RUN [MODEL]

It says what it saw as JSON, in a file and as a line: `RUN/trained.json` after the steps, `RUN/survived.json`
after a loss that it outlives, `RUN/lost.json` after the one that ends it. MODEL is the same model as the one
that it makes in RUN, for nodes that do not see that one; then the first loss is the end of the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import numpy as np

from strop.cluster import Roles
from strop.cluster.ray.placement import RayPlacement
from strop.engine.pool import EnginePool, ReplicaEvent
from strop.errors import StropError
from strop.record import RunDir
from strop.sandbox import Limits, SandboxSpec
from strop.sandbox.hosts import RayBackend, RayRequests
from strop.store import ModelHandle, get_model
from strop.train.loop import TrainInput, TrainLoop
from tests.fixtures.builders import request_for
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_model import tiny_model
from tests.fixtures.tiny_run import Notes, tiny_spec

REQUEST = request_for(np.arange(3, 9, dtype=np.int32), max_tokens=4, seed=7)


async def act(run_path: Path, model_uri: str) -> None:
    """Train, say so, and wait for the loss."""
    model_dir = tiny_model(run_path / "model")
    is_apart = bool(model_uri)
    spec = tiny_spec(
        train={"steps": 1, "prompts_per_step": 2},
        placement={"kind": "ray", "engines": 2},
        job={"nodes": 2},
        output={"dir": str(run_path)},
    )
    with RunDir.create(run_path, "tiny", "", "digest", {}) as run_dir:
        digest = get_model(model_uri).digest if is_apart else "unused"
        source = ModelHandle(path=model_dir, digest=digest, uri=model_uri)
        placement = RayPlacement(spec, source, run_path / "roles")
        try:
            roles = await placement.start()
            await TrainLoop(
                TrainInput(
                    spec=spec,
                    task=SpellTask(),
                    roles=roles,
                    run_dir=run_dir,
                    model_dir=model_dir,
                    observer=Notes(),
                    evaluate=None,
                )
            ).run()
            import ray

            assert isinstance(roles.engine, EnginePool)
            ids = REQUEST.prompt_ids
            scores = await roles.engine.score_each(ids, ids, 1.0)
            # Each takes a whole node; SageMaker's hosts make none.
            whole = SandboxSpec(limits=Limits(cpus=float(len(os.sched_getaffinity(0)))))
            boxes = await asyncio.gather(*(RayBackend().create(whole) for _ in range(0 if is_apart else 2)))
            said = [await box.exec(["/bin/echo", "here"], wall_limit_s=60.0) for box in boxes]
            found = {
                "places": [box.client.place.node for box in boxes if isinstance(box.client, RayRequests)],
                "said": [one.stdout.decode() for one in said],
                "nodes": [node["NodeName"] for node in ray.nodes()],
                "roles": placement.role_pids,
                "version": roles.learner.version,
                "served": [score.policy_version for score in scores.values()],
            }
            await asyncio.gather(*(box.stop() for box in boxes))
            write(run_path / "trained.json", found)
            await wait_for_loss(roles, run_path, is_last=is_apart)
        except StropError as error:
            write(run_path / "lost.json", {"cause": str(error)})
            raise
        finally:
            await placement.stop()


async def wait_for_loss(roles: Roles, run_path: Path, *, is_last: bool) -> None:
    """Ask roles that live until the last engine is gone, or the first one where `is_last`."""
    router = roles.engine
    assert isinstance(router, EnginePool)
    lost: list[ReplicaEvent] = []
    router.report_to(lost.append)
    num_told = 0
    while True:
        await roles.learner.score([], 1.0)
        reply = await router.generate(REQUEST)
        if len(lost) > num_told:
            num_told = len(lost)
            events = [{"replica": event.replica, "detail": event.detail} for event in lost]
            write(run_path / "survived.json", {"events": events, "num_tokens": len(reply.token_ids)})
            if is_last:
                return
        await asyncio.sleep(0.1)


def write(path: Path, content: object) -> None:
    """Write all of a file at once."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content))
    os.replace(partial, path)
    print(path.stem, json.dumps(content), flush=True)  # noqa: T201


if __name__ == "__main__":
    # The order to end that follows the loss of a node must not cut the account of it short.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    asyncio.run(act(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
