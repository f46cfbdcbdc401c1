"""Which role gets which node and GPUs on Ray."""

from __future__ import annotations

import pytest

from strop.cluster.ray.roles import (
    DeviceShare,
    NodeOffer,
    RoleCounts,
    RoleKind,
    RoleSlot,
    plan_slots,
    take_devices,
)
from strop.errors import CheckRefused, ConfigError

TWO_NODES = [NodeOffer(index=index, num_train=1, num_infer=2) for index in range(2)]


def share(part: str, first: int, count: int = 1) -> DeviceShare:
    return DeviceShare(part=part, first=first, count=count)


def places(slots: tuple[RoleSlot, ...]) -> dict[str, tuple[int, DeviceShare | None]]:
    return {slot.name: (slot.node, slot.devices) for slot in slots}


def test_without_gpus_roles_go_round_the_nodes() -> None:
    slots = plan_slots(RoleCounts(learners=2, engines=2, workers=3), [NodeOffer(index=0), NodeOffer(index=1)])
    assert places(slots) == {
        # Learner ranks stay together: what they send each other is more than all else.
        "learner-0": (0, None),
        "learner-1": (0, None),
        "engine-0": (0, None),
        "engine-1": (1, None),
        "worker-0": (0, None),
        "worker-1": (1, None),
        "worker-2": (0, None),
    }


def test_every_gpu_has_one_role() -> None:
    slots = plan_slots(RoleCounts(learners=2, engines=2, workers=1), TWO_NODES)
    assert places(slots) == {
        "learner-0": (0, share("train", 0)),
        "learner-1": (1, share("train", 0)),
        # 4 GPUs for 2 engines: each has both of its node.
        "engine-0": (0, share("infer", 0, 2)),
        "engine-1": (1, share("infer", 0, 2)),
        "worker-0": (0, share("train", 0, 0)),
    }


def test_one_gpu_for_each_engine() -> None:
    found = places(plan_slots(RoleCounts(learners=2, engines=4, workers=0), TWO_NODES))
    assert [found[f"engine-{index}"] for index in range(4)] == [
        (0, share("infer", 0)),
        (0, share("infer", 1)),
        (1, share("infer", 0)),
        (1, share("infer", 1)),
    ]


def test_workers_prefer_the_nodes_without_gpus() -> None:
    nodes = [NodeOffer(index=0), NodeOffer(index=1, is_cpu=True), NodeOffer(index=2, is_cpu=True)]
    slots = plan_slots(RoleCounts(learners=1, engines=1, workers=3), nodes)
    assert [slot.node for slot in slots if slot.kind is RoleKind.WORKER] == [1, 2, 1]


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (RoleCounts(learners=3, engines=2, workers=0), r"placement\.learners is 3 and the nodes have 2 GPUs"),
        (
            RoleCounts(learners=2, engines=3, workers=0),
            r"placement\.engines is 3 and the nodes have 2, 2 GPUs",
        ),
        (
            RoleCounts(learners=2, engines=1, workers=0),
            r"placement\.engines is 1 and the nodes have 2, 2 GPUs",
        ),
    ],
)
def test_counts_that_do_not_go_into_the_gpus_are_refused(counts: RoleCounts, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_slots(counts, TWO_NODES)


def test_a_role_sees_exactly_its_devices_and_ids_stay_words() -> None:
    """PRC-7: indices that do not begin at 0, UUIDs, and slices."""
    indices = {"CUDA_VISIBLE_DEVICES": "3,5", "STROP_INFER_DEVICES": "1,7"}
    assert take_devices("learner-1", share("train", 1), indices)["CUDA_VISIBLE_DEVICES"] == "5"
    assert take_devices("engine-0", share("infer", 0, 2), indices)["CUDA_VISIBLE_DEVICES"] == "1,7"
    slices = {"CUDA_VISIBLE_DEVICES": "MIG-aaaa,MIG-bbbb"}
    assert take_devices("learner-1", share("train", 1), slices)["CUDA_VISIBLE_DEVICES"] == "MIG-bbbb"
    # One GPU for both parts: only the first variable is set.
    one = {"CUDA_VISIBLE_DEVICES": "GPU-12ab"}
    assert take_devices("engine-0", share("infer", 0), one)["CUDA_VISIBLE_DEVICES"] == "GPU-12ab"
    assert take_devices("worker-0", share("train", 0, 0), indices)["CUDA_VISIBLE_DEVICES"] == ""


def test_a_node_with_fewer_devices_is_refused_by_role() -> None:
    with pytest.raises(CheckRefused, match=r"role learner-1 is to have GPU 1 to 1.*names 1: 4"):
        take_devices("learner-1", share("train", 1), {"CUDA_VISIBLE_DEVICES": "4"})
