"""When a pool of sandbox nodes grows, shrinks and stays."""

from __future__ import annotations

import pytest

from strop.launch.pool import PoolLimits, PoolNode, Steps, decide

LIMITS = PoolLimits(max_jobs=2)


def node(
    name: str, job: str, num: int = 0, *, is_open: bool = True, idle_s: float = 0.0, ends_in_s: float = 1e5
) -> PoolNode:
    return PoolNode(
        node_id=name,
        job_id=job,
        is_open=is_open,
        num_sandboxes=num,
        idle_for_s=idle_s,
        ends_in_s=ends_in_s,
        lasts_s=1e5,
    )


OWN = node("own", "service", 4)


@pytest.mark.parametrize(
    ("nodes", "jobs", "num_waiting", "steps"),
    [
        pytest.param([OWN], [], 0, Steps(), id="nobody waits"),
        pytest.param([OWN], [], 1, Steps(num_to_submit=1), id="one waits"),
        pytest.param([OWN], [], 7, Steps(num_to_submit=2), id="as many as they will be on"),
        pytest.param([OWN], [], 99, Steps(num_to_submit=2), id="never more than allowed"),
        pytest.param([OWN], ["1"], 99, Steps(), id="one is coming"),
        pytest.param(
            [OWN, node("a", "1", 4)], ["1"], 99, Steps(num_to_submit=1), id="the rest of what is allowed"
        ),
        pytest.param([], [], 3, Steps(num_to_submit=2), id="no node has shown what it holds"),
        pytest.param(
            [OWN, node("a", "1", 4), node("b", "2", 4, ends_in_s=500.0)],
            ["1", "2"],
            1,
            Steps(num_to_submit=1),
            id="one that ends soon is replaced",
        ),
        pytest.param([OWN, node("a", "1", idle_s=400.0)], ["1"], 0, Steps(to_drain=("a",)), id="idle"),
        pytest.param([OWN, node("a", "1", idle_s=200.0)], ["1"], 0, Steps(), id="idle for a moment"),
        pytest.param([node("own", "service", idle_s=9e9)], [], 0, Steps(), id="the service's own node stays"),
        pytest.param([OWN, node("a", "1", 1, is_open=False)], ["1"], 0, Steps(), id="drained and in use"),
        pytest.param(
            [OWN, node("a", "1", is_open=False)], ["1"], 0, Steps(to_end=("1",)), id="drained and empty"
        ),
    ],
)
def test_what_a_pool_does_next(
    nodes: list[PoolNode], jobs: list[str], num_waiting: int, steps: Steps
) -> None:
    assert decide(nodes, jobs, num_waiting, LIMITS) == steps
