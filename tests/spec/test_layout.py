"""Which role gets which node and GPUs: one function, and what it refuses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.errors import CheckRefused, ConfigError
from strop.hardware.allocation import take_devices
from strop.launch.build_request import list_roles
from strop.launch.contract import is_place
from strop.launch.options import Site
from strop.launch.slurm.options import SlurmSite
from strop.plan.roles import count_roles
from strop.spec import RunSpec
from strop.spec.layout import (
    INFER,
    PARTS,
    DeviceShare,
    Layout,
    RoleKind,
    lay_out,
    settle_layout,
)

JUDGED = {
    "name": "rows",
    "prompt": "prompt",
    "reward": "judge",
    "source": "rows.jsonl",
    "rubric": "correctness",
    "judge_url": "role",
    "judge_model": "org/judge",
    "judge_revision": "1",
}


def share(part: str, first: int, count: int = 1) -> DeviceShare:
    return DeviceShare(part=part, first=first, count=count)


def places(layout: Layout) -> dict[str, tuple[int, DeviceShare | None]]:
    return {slot.name: (slot.node, slot.devices) for slot in layout.slots}


def asked(**sections: Any) -> RunSpec:
    """Return a run with these sections."""
    return RunSpec.model_validate({"name": "x", "task": {"name": "arithmetic"}, **sections})


@pytest.mark.parametrize(
    ("job", "kind", "roles"),
    [
        ({}, "inline", "learner-0 engine-0"),
        # In these words one GPU trained and three were idle.
        ({"gpus": 4}, "ray", "learner-0 learner-1 learner-2 learner-3 engine-0 engine-1 engine-2 engine-3"),
        ({"train_gpus": 2, "infer_gpus": 2}, "ray", "learner-0 learner-1 engine-0 engine-1"),
        ({"single_gpu": True}, "inline", "learner-0 engine-0"),
        ({"train_gpus": 1, "infer_gpus": 1}, "ray", "learner-0 engine-0"),
        ({"nodes": 2}, "ray", "learner-0 engine-0 engine-1"),
    ],
)
def test_placement_learners_and_engines_follow_from_the_gpus(
    job: dict[str, Any], kind: str, roles: str
) -> None:
    layout = asked(job=job).layout
    assert (layout.kind, " ".join(slot.name for slot in layout.slots)) == (kind, roles)


def test_five_learn_one_generates_and_one_is_for_environments() -> None:
    spec = asked(job={"train_gpus": 5, "infer_gpus": 1, "env_gpus": 1})
    found = places(spec.layout)
    assert [found[f"learner-{index}"] for index in range(5)] == [(0, share("train", n)) for n in range(5)]
    assert found["engine-0"] == (0, share("infer", 0))
    assert found["worker-0"] == (0, share("env", 0))
    assert spec.job.gpus_per_node == 7


def test_one_node_learns_and_the_other_generates() -> None:
    layout = asked(job={"nodes": 2, "gpus": 2, "infer_nodes": 1}).layout
    assert places(layout) == {
        "learner-0": (0, share("train", 0)),
        "learner-1": (0, share("train", 1)),
        "engine-0": (1, share("infer", 0)),
        "engine-1": (1, share("infer", 1)),
    }


def test_engines_that_are_counted_share_the_gpus_in_vllm() -> None:
    job = {"train_gpus": 1, "infer_gpus": 4}
    layout = asked(engine={"kind": "vllm"}, placement={"engines": 2}, job=job).layout
    assert (layout.num_engines, layout.tensor_parallel) == (2, 2)
    assert places(layout)["engine-1"] == (0, share("infer", 2, 2))
    layout = asked(engine={"kind": "vllm", "tensor_parallel": 4}, job=job).layout
    assert (layout.num_engines, layout.kind) == (1, "ray")


def test_imitation_learns_on_all_gpus_and_evaluates_in_turns() -> None:
    spec = asked(train={"terms": "sft"}, sft={"source": "rows.jsonl"}, job={"gpus": 4})
    assert (spec.layout.num_learners, spec.layout.num_engines, spec.layout.kind) == (4, 1, "ray")


def test_without_gpus_roles_go_round_the_nodes() -> None:
    layout = asked(placement={"learners": 2, "engines": 2, "rollout_workers": 4}, job={"nodes": 2}).layout
    assert places(layout) == {
        # Learner ranks stay together: what they send each other is more than all else.
        "learner-0": (0, None),
        "learner-1": (0, None),
        "engine-0": (0, None),
        "engine-1": (1, None),
        **{f"worker-{index}": (index % 2, None) for index in range(4)},
    }


def test_workers_prefer_the_nodes_without_gpus() -> None:
    job = {"gpus": 1, "cpu_nodes": 2}
    layout = asked(placement={"rollout_workers": 3}, job=job).layout
    assert [slot.node for slot in layout.of(RoleKind.WORKER)] == [1, 2, 1]
    assert [slot.devices for slot in layout.of(RoleKind.WORKER)] == [share("env", 0, 0)] * 3
    other = asked(job={"cpu_nodes": 1, "cpu_command": "sandboxes --serve"})
    assert len(other.layout.nodes) == 1


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"placement": {"learners": 3}, "job": {"gpus": 2}}, "placement.learners is 3 and the nodes have 2"),
        ({"placement": {"engines": 2}, "job": {"infer_gpus": 3}}, "1 of the 3 for job.infer_gpus on node 0"),
        ({"placement": {"engines": 4}, "job": {"infer_gpus": 3}}, "4 engines of 1 GPUs do not go into"),
        (
            {"engine": {"kind": "vllm", "tensor_parallel": 4}, "job": {"nodes": 2, "infer_gpus": 2}},
            "do not go into nodes with 2, 2 GPUs",
        ),
        *(
            ({"placement": {"kind": "inline"}, **several}, "only Ray starts other processes")
            for several in (
                {"job": {"gpus": 4}},
                {"job": {"train_gpus": 1, "infer_gpus": 1}},
                {"task": JUDGED},
                {"ray": {"address": "auto"}},
            )
        ),
        ({"placement": {"rollout_workers": 3, "engines": 2}}, "some engines would have fewer workers"),
        ({"placement": {"rollout_workers": 0}, "job": {"gpus": 1, "env_gpus": 1}}, "for job.env_gpus"),
        ({"job": {"gpus": 1, "judge_gpus": 1}}, "the run starts 0 judges"),
        ({"job": {"nodes": 2, "gpus": 2, "infer_nodes": 2}}, "no node is left to learn"),
        ({"job": {"nodes": 2, "train_gpus": 1, "infer_nodes": 1}}, "whole nodes generate"),
        ({"job": {"nodes": 2}, "placement": {"engines": 1}}, "node 1 would have no role"),
        (
            {"job": {"nodes": 2, "gpus": 7, "judge_gpus": 1}, "task": JUDGED},
            "GPUs would be idle: 1 of node 1",
        ),
        (
            {"train": {"terms": "sft"}, "sft": {"source": "x.jsonl"}, "job": {"infer_gpus": 1}},
            "nothing is generated while it learns",
        ),
    ],
)
def test_what_does_not_go_into_the_nodes_or_leaves_a_gpu_idle_is_refused(
    sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        asked(**sections)


def test_a_run_here_is_laid_out_on_the_nodes_that_are_here() -> None:
    spec = asked(job={"nodes": 2, "train_gpus": 1, "infer_gpus": 1})
    assert settle_layout(spec).placement.learners == 2
    here = settle_layout(spec, 1)
    assert (here.placement.kind, here.placement.learners, here.placement.engines) == ("ray", 1, 1)
    with pytest.raises(ConfigError, match="no node is left to learn"):
        settle_layout(asked(job={"nodes": 2, "gpus": 2, "infer_nodes": 1}), 1)


def test_vllm_leaves_room_for_a_learner_on_its_gpu() -> None:
    beside = settle_layout(asked(engine={"kind": "vllm"}, job={"single_gpu": True}))
    assert beside.engine.gpu_memory_frac == 0.45
    apart = settle_layout(asked(engine={"kind": "vllm"}, job={"train_gpus": 1, "infer_gpus": 1}))
    assert apart.engine.gpu_memory_frac is None


COUNTS = st.none() | st.integers(1, 9)
SPLITS = st.one_of(
    st.fixed_dictionaries({"gpus": st.integers(0, 9)}, optional={"infer_nodes": st.integers(0, 4)}),
    st.fixed_dictionaries({}, optional={"train_gpus": st.integers(1, 9), "infer_gpus": st.integers(1, 9)}),
    st.just({"single_gpu": True}),
)
BESIDE = st.fixed_dictionaries(
    {"nodes": st.integers(1, 5)},
    optional={"env_gpus": st.integers(0, 2), "cpu_nodes": st.integers(0, 2)},
)
PLACEMENTS = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["inline", "ray", None]),
        "learners": COUNTS,
        "engines": COUNTS,
        "rollout_workers": st.none() | st.integers(0, 6),
    },
)


@pytest.mark.slow
@settings(max_examples=2_500, deadline=None)
@given(
    split=SPLITS,
    beside=BESIDE,
    placement=PLACEMENTS,
    width=COUNTS,
    is_vllm=st.booleans(),
    has_rl=st.booleans(),
)
def test_plan_dry_run_and_run_give_the_same_roles_and_no_gpu_is_idle(
    split: dict[str, Any],
    beside: dict[str, Any],
    placement: dict[str, Any],
    width: int | None,
    is_vllm: bool,
    has_rl: bool,
) -> None:
    job = split | beside
    engine = {"kind": "vllm", "tensor_parallel": width} if is_vllm else {"kind": "native"}
    terms = {} if has_rl else {"train": {"terms": "sft"}, "sft": {"source": "rows.jsonl"}}
    try:
        spec = asked(job=job, placement=placement, engine=engine, **terms)
    except ValueError:
        return
    layout = spec.layout
    settled = settle_layout(spec)
    # Plan, and the run on all of its nodes.
    for other in (settled, settle_layout(settled), settle_layout(spec, spec.job.nodes + spec.job.cpu_nodes)):
        assert lay_out(other) == layout
    counts = count_roles(settled, is_processor=False)
    assert (counts.num_learners, counts.num_engines) == (layout.num_learners, layout.num_engines)
    # The dry run: what each node's agent is told to hand out.
    site = Site(name="cluster", profile=SlurmSite())
    roles = list_roles("train", spec, "python", site)
    for node in range(spec.job.nodes):
        given_gpus: Counter[str] = Counter()
        for role in roles:
            if is_place(role.nodes, node, "main"):
                given_gpus.update(role.gpus)
        assert dict(given_gpus) == dict(layout.nodes[node].gpus)
        assert sum(given_gpus.values()) == spec.job.gpus_per_node
    # The run: every GPU that a node has is in the share of a role, and nobody's share is outside.
    taken = Counter(
        (slot.node, slot.devices.part, place)
        for slot in layout.slots
        if slot.devices is not None
        for place in range(slot.devices.first, slot.devices.first + slot.devices.count)
    )
    there = {
        (node.index, part, place)
        for node in layout.nodes
        for part, number in node.gpus.items()
        for place in range(number)
    }
    assert set(taken) == there
    assert all(number == 1 for one, number in taken.items() if one[1] == INFER)
    assert {part for node in layout.nodes for part in node.gpus} <= set(PARTS)


def test_a_role_sees_exactly_its_devices_and_ids_stay_words() -> None:
    """PRC-7: indices that do not begin at 0, UUIDs, and slices."""
    indices = {"CUDA_VISIBLE_DEVICES": "3,5", "STROP_INFER_DEVICES": "1,7", "STROP_ENV_DEVICES": "6"}
    assert take_devices("learner-1", share("train", 1), indices)["CUDA_VISIBLE_DEVICES"] == "5"
    assert take_devices("engine-0", share("infer", 0, 2), indices)["CUDA_VISIBLE_DEVICES"] == "1,7"
    assert take_devices("worker-0", share("env", 0), indices)["CUDA_VISIBLE_DEVICES"] == "6"
    slices = {"CUDA_VISIBLE_DEVICES": "MIG-aaaa,MIG-bbbb"}
    assert take_devices("learner-1", share("train", 1), slices)["CUDA_VISIBLE_DEVICES"] == "MIG-bbbb"
    # A node that only generates has no other variable.
    one = {"CUDA_VISIBLE_DEVICES": "GPU-12ab"}
    assert take_devices("engine-0", share("infer", 0), one)["CUDA_VISIBLE_DEVICES"] == "GPU-12ab"
    assert take_devices("worker-0", share("env", 0, 0), indices)["CUDA_VISIBLE_DEVICES"] == ""


def test_a_node_with_fewer_devices_is_refused_by_role() -> None:
    with pytest.raises(CheckRefused, match=r"role learner-1 is to have GPU 1 to 1.*names 1: 4"):
        take_devices("learner-1", share("train", 1), {"CUDA_VISIBLE_DEVICES": "4"})
