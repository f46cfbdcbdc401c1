"""Estimates by hand, on a model whose sizes are small round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strop.hardware import Calibration, Gpu, Machine
from strop.hardware.accelerators import find_accelerator
from strop.hardware.calibrate import CPU_EFFICIENCY, GPU_EFFICIENCY, Efficiency
from strop.plan.estimate import estimate_time, list_disk_parts, step_period_s, sync_s
from strop.plan.roles import (
    KEPT_FRAC,
    RoleCounts,
    RoleMemory,
    count_roles,
    count_rows,
    list_roles,
    split_memory,
)
from strop.plan.rollouts import Work
from strop.plan.speeds import Speeds, choose_speeds
from strop.policy.footprint import (
    DEFAULT_MICRO_BATCH_POSITIONS,
    ModelSize,
    activation_bytes,
    cache_bytes,
    packed_bytes,
    rank_state_bytes,
    state_bytes,
)
from strop.spec import RunSpec

# Body: 1 layer x (2 x 10x10 + 2 x 10x10 + 3 x 10x20) = 1000 parameters; head and embedding: 100 x 10, tied.
SIZE = ModelSize(
    num_layers=1,
    hidden_width=10,
    mlp_width=20,
    num_heads=1,
    num_kv_heads=1,
    head_width=10,
    vocab_size=100,
    max_positions=64,
    is_tied=True,
)
MACHINE = Machine(
    host="h",
    platform="p",
    python="3",
    cpu_name="c",
    num_physical_cores=4,
    num_logical_cpus=8,
    memory_bytes=None,
    free_memory_bytes=None,
    cpu_flags=("avx512_bf16",),
    gpus=(),
)
MEASURED = Calibration(
    cpu_name="c",
    num_threads=4,
    gemm_fp32_gflops=50.0,
    gemm_bf16_gflops=200.0,
    copy_gb_per_s=8.0,
)


def make_spec(**sections: Any) -> RunSpec:
    base: dict[str, Any] = {
        "name": "x",
        "model": {"dtype": "bfloat16"},
        "task": {"name": "arithmetic", "max_reply_tokens": 8},
        "train": {"prompts_per_step": 4, "group_size": 4, "steps": 10},
    }
    return RunSpec.model_validate(base | sections)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_parts_of_memory_add_up_to_what_the_gate_counts(dtype: str) -> None:
    spec = make_spec(model={"dtype": dtype})
    parts = split_memory(spec, SIZE, 8)
    # 16 rows, each with 8 slots for its reply and its share of the 1,280 positions: 80.
    learner = state_bytes(SIZE, dtype) + activation_bytes(SIZE, dtype, DEFAULT_MICRO_BATCH_POSITIONS)
    engine = cache_bytes(SIZE, dtype, 16, 88) + packed_bytes(SIZE, dtype)
    assert sum(part.amount for part in parts) == pytest.approx((1 + KEPT_FRAC) * learner + engine)


def test_masters_gradients_and_moments_by_hand() -> None:
    amounts = {part.name: part.amount for part in split_memory(make_spec(), SIZE, 8)}
    # 2000 parameters: 4 bytes, 2 bytes, 4 bytes and twice 4 bytes each.
    assert amounts["weights (fp32 masters)"] == 8000
    assert amounts["compute copies"] == 4000
    assert amounts["gradients (fp32)"] == 8000
    assert amounts["moments (fp32)"] == 16000


def test_a_teacher_holds_its_weights_and_hidden_states_beside_the_policy() -> None:
    taught = make_spec(
        train={"terms": "distill", "prompts_per_step": 4, "group_size": 4},
        teacher={"source": "model", "model": "org/teacher"},
    )
    # Twice the policy's head: 1000 + 2 x 1000 parameters of 2 bytes; 168 positions of 10 values of 2 bytes,
    # and twice as much in its forward, which holds two tensors of the stream beside a layer's insides.
    teacher = replace(SIZE, is_tied=False)
    amounts = {
        part.name: part.amount for part in split_memory(taught, SIZE, 8, 10, frozen={"teacher": teacher})
    }
    assert amounts["teacher (frozen)"] == 6000 + 3 * 168 * 20
    # Of whom nothing is known counts like the policy.
    assert {part.name: part.amount for part in split_memory(taught, SIZE, 8, 10)}[
        "teacher (frozen)"
    ] == 4000 + 3 * 168 * 20
    # One of two ranks keeps half of the rows, and gathers the outer tensors and two layers: 2000 + 2 x 1000.
    spread = list_roles(
        taught.model_copy(
            update={"placement": make_spec(placement={"kind": "ray", "learners": 2}).placement}
        ),
        SIZE,
        RoleCounts(num_learners=2, num_engines=1, num_workers=0, is_shared=True),
        8,
        10,
        frozen={"teacher": teacher},
    )
    (part,) = [part for part in spread[0].parts if part.name.startswith("teacher")]
    # Two prompts are 84 positions on a rank.
    assert part.amount == 3000 + 2 * (2000 + 2 * 1000) + 3 * 84 * 20


def test_a_judge_of_the_run_is_an_engine_of_its_own() -> None:
    judge = {
        "name": "rows",
        "prompt": "prompt",
        "reward": "judge",
        "source": "x",
        "judge_url": "role",
        "judge_model": "org/judge",
        "judge_revision": "01234567",
        "judge_concurrency": 2,
    }
    larger = replace(SIZE, is_tied=False)
    roles = list_roles(
        make_spec(task=judge),
        SIZE,
        count_roles(make_spec(), is_processor=True),
        8,
        frozen={"org/judge": larger},
    )
    assert [role.role for role in roles] == ["learner", "engine", "judge org/judge"]
    amounts = {part.name: part.amount for part in roles[2].parts}
    # 3000 parameters of 2 bytes; two rows of 8 + 2 x 512 slots, each a key and a value of 10 x 2 bytes.
    assert amounts["judge: weights of the engine's process"] == 6000
    assert amounts["judge: key-value cache (2 rows)"] == 2 * 1032 * 40


def test_rows_and_disk() -> None:
    assert count_rows(make_spec()) == 16
    assert count_rows(make_spec(engine={"max_num_seqs": 5})) == 5
    assert count_rows(make_spec(train={"prompts_per_step": 200, "group_size": 4})) == 64
    # A GPU decodes 512 at once; what the run file says holds everywhere.
    many = {"prompts_per_step": 200, "group_size": 4}
    assert count_rows(make_spec(train=many), is_gpu=True) == 512
    assert count_rows(make_spec(train=many), 2, is_gpu=True) == 400
    assert count_rows(make_spec(train=many, engine={"max_num_seqs": 100}), is_gpu=True) == 100
    # Two kept and one being written, each 2000 x (2 + 4 + 8) bytes.
    here = list_disk_parts(make_spec(), SIZE, is_mirrored=False)
    assert [part.amount for part in here] == [3 * 2000 * 14]
    # And the one that the mirror holds: 2 + 1 + 1.
    mirrored = list_disk_parts(make_spec(), SIZE, is_mirrored=True)
    assert sum(part.amount for part in mirrored) == 4 * 2000 * 14


HALF = Efficiency(
    learn_frac=0.5, decode_frac=0.5, decode_layer_s=0.0, update_frac=1.0, cpu_name=None, source="by hand"
)


def make_speeds(**changes: Any) -> Speeds:
    """A million operations a second, half of which are reached; memory and link without limit."""
    base = Speeds(
        device="d",
        gflops=1e-3,
        copy_gb_per_s=1e9,
        link_gb_per_s=1e9,
        efficiency=HALF,
        memory_bytes=None,
        is_processor=True,
        source="",
        is_measured=True,
    )
    return replace(base, **changes)


def make_work(spec: RunSpec, **changes: Any) -> Work:
    base = Work(
        spec=spec, size=SIZE, prompt_tokens_mean=5.0, max_reply_tokens=8, num_eval_examples=2, num_evals=3
    )
    return replace(base, **changes)


def test_a_reference_is_one_more_forward() -> None:
    seconds = [
        {part.name: part.amount for part in estimate_time(make_work(spec), make_speeds()).step_parts}
        for spec in (make_spec(), make_spec(reference={"kl_beta": 0.1}))
    ]
    # 58 positions and 48 scored: 2 x 1000 x 58 + 2 x 1000 x 48 + 4 x 10 x 58 x 8 = 230,560.
    assert seconds[1]["learn"] - seconds[0]["learn"] == pytest.approx(230_560 / 5e5)
    assert seconds[1]["generate"] == seconds[0]["generate"]


def test_one_step_by_hand() -> None:
    found = estimate_time(make_work(make_spec(eval={"num_samples": None})), make_speeds())
    seconds = {part.name: part.amount for part in found.step_parts}
    # Half of 1e6 operations a second: 5e5. 16 replies of 6 tokens (three quarters of 8) are 96 tokens.
    # Prefill 2 x 1000 x 4 x 5 = 40,000; decode 2 x 2000 x 96 = 384,000; attention of one head of width 10
    # over 5 + 3 positions on average: 4 x 10 x 96 x 8 = 30,720.
    assert seconds["generate"] == pytest.approx(454_720 / 5e5)
    # Half of the groups, (20 + 96) / 2 = 58 positions, 48 scored: 6 x 1000 x 58 + 6 x 1000 x 48 = 636,000;
    # attention three times 4 x 10 x 58 x 8 = 55,680.
    assert seconds["learn"] == pytest.approx(691_680 / 5e5)
    assert seconds["verify"] == pytest.approx(16 * 0.0001)
    assert seconds["sync"] == 0.0
    # Two examples, one reply each: 2 x 1000 x 10 + 2 x 2000 x 12 + 4 x 10 x 12 x 8 = 71,840.
    # And two replies are judged.
    assert found.eval_s == pytest.approx(71_840 / 5e5 + 0.0002)
    step_s = 1_146_400 / 5e5 + 0.0016
    assert found.step_s == pytest.approx(step_s)
    assert found.total_s == pytest.approx(10 * step_s + 3 * (71_840 / 5e5 + 0.0002))
    assert found.scored_tokens_per_s == pytest.approx(96 / step_s)
    assert (found.num_reply_tokens, found.num_positions) == (96, 58)
    assert found.bottleneck == "learn (every step), bound by arithmetic"
    # Everything shares the cores: no other setting makes more of them.
    assert (found.bottleneck_role, found.relief) == ("learner", None)


def test_slow_memory_binds_generation() -> None:
    work = make_work(make_spec(), max_reply_tokens=80, num_eval_examples=0, num_evals=2)
    found = estimate_time(work, make_speeds(gflops=1e9, copy_gb_per_s=1e-6))
    # 80 steps, because some reply is as long as its limit: each reads 2000 parameters of 2 bytes, and the
    # cache of 16 rows of 5 + 30 positions, 2 x 10 values of 2 bytes each: 4000 + 16 x 35 x 40 = 26,400.
    assert found.step_parts[0].amount == pytest.approx(80 * 26_400 / 1000)
    assert found.bottleneck == "generate (every step), bound by memory bandwidth"
    assert found.bottleneck_role == "engine"


def test_every_layer_adds_to_every_decode_step() -> None:
    slow = make_speeds(efficiency=replace(HALF, decode_layer_s=0.5))
    work = make_work(make_spec())
    plain, found = (estimate_time(work, speeds).step_parts[0].amount for speeds in (make_speeds(), slow))
    # One layer, 8 steps.
    assert found - plain == pytest.approx(4.0)


def test_stages_hide_each_other_as_far_as_staleness_allows() -> None:
    seconds = {"generate": 3.0, "verify": 1.0, "learn": 2.0, "sync": 0.5}
    apart = RoleCounts(num_learners=1, num_engines=1, num_workers=0, is_shared=False)
    shared = replace(apart, is_shared=True)

    assert step_period_s(seconds, apart, max_staleness=0) == 6.5
    # 3 + 1 hide 2.
    assert step_period_s(seconds, apart, max_staleness=1) == 4.5
    assert step_period_s(seconds, apart, max_staleness=9) == 4.5
    # Work on one device takes its time, whatever the order.
    assert step_period_s(seconds, shared, max_staleness=1) == 6.5


def test_more_devices_share_the_work() -> None:
    spec = make_spec(placement={"kind": "ray"})
    devices = make_speeds(is_processor=False, memory_bytes=10**9)
    one = estimate_time(make_work(spec), devices)
    four = RoleCounts(num_learners=1, num_engines=4, num_workers=0, is_shared=False)
    many = estimate_time(make_work(spec, layout=four), devices)
    assert many.step_parts[0].amount == pytest.approx(one.step_parts[0].amount / 4)
    two = RoleCounts(num_learners=2, num_engines=1, num_workers=0, is_shared=False)
    learned = estimate_time(make_work(spec, layout=two), devices)
    # Half of the work each, and the rank with the most of it has 5 % more.
    assert learned.step_parts[2].amount == pytest.approx(1.05 * one.step_parts[2].amount / 2, rel=1e-3)
    # Processes on one processor share its cores.
    assert estimate_time(make_work(spec, layout=four), make_speeds()).step_parts[0].amount == pytest.approx(
        one.step_parts[0].amount
    )


def test_roles_that_share_a_gpu_count_together() -> None:
    def roles_of(spec: RunSpec) -> dict[str, tuple[int, float]]:
        counts = count_roles(spec, is_processor=False)
        found = list_roles(spec, SIZE, counts, 8, 10, device_bytes=10**9)
        return {role.role: (role.count, role.needed_bytes) for role in found}

    apart = roles_of(make_spec(job={"train_gpus": 2, "infer_gpus": 2}))
    shared = roles_of(make_spec(job={"gpus": 2}))
    assert shared == {"learner and engine": (2, apart["learner"][1] + apart["engine"][1])}
    # Imitation has one engine, which evaluates on the first rank's GPU.
    sft = make_spec(train={"terms": "sft"}, sft={"source": "x.jsonl"}, job={"gpus": 3})
    assert {name: count for name, (count, _) in roles_of(sft).items()} == {
        "learner and engine": 1,
        "learner": 2,
    }


def test_a_judge_of_the_run_is_counted_on_its_own_gpu_or_on_the_engines() -> None:
    judge = {
        "name": "rows",
        "prompt": "prompt",
        "reward": "judge",
        "source": "x",
        "max_reply_tokens": 8,
        "judge_url": "role",
        "judge_model": "judge",
        "judge_revision": "12345678",
    }

    def roles_of(**job: int) -> dict[str, tuple[int, float]]:
        spec = make_spec(task=judge, job={"train_gpus": 1, "infer_gpus": 2, **job})
        counts = count_roles(spec, is_processor=False)
        found = list_roles(spec, SIZE, counts, 8, 10, device_bytes=10**9)
        return {role.role: (role.count, role.needed_bytes) for role in found}

    alone, beside = roles_of(judge_gpus=1), roles_of()
    assert {name: count for name, (count, _) in alone.items()} == {
        "learner": 1,
        "engine": 2,
        "judge judge": 1,
    }
    assert {name: count for name, (count, _) in beside.items()} == {
        "learner": 1,
        "engine beside the judge": 1,
        "engine": 1,
    }
    both = alone["engine"][1] + alone["judge judge"][1]
    assert beside["engine beside the judge"][1] == pytest.approx(both)


def test_weights_that_cross_gpus_take_no_way_through_the_cpu() -> None:
    devices = make_speeds(is_processor=False, memory_bytes=10**9)
    sizes = {"train": {"prompts_per_step": 4, "group_size": 4, "steps": 10}}
    by_file = make_spec(placement={"kind": "ray"}, **sizes)
    across = make_spec(job={"train_gpus": 2, "infer_gpus": 3}, **sizes)
    num_bytes = SIZE.num_params * 2
    link, copy = devices.link_gb_per_s * 1e9, devices.copy_gb_per_s * 1e9
    counts = count_roles(across, is_processor=False)
    found = sync_s(make_work(across), devices, counts)
    # By hand: gathered twice by half of it, sent to three engines, summed up on both sides.
    assert found == pytest.approx((num_bytes + 3 * num_bytes) / link + 20 * num_bytes / copy)
    assert sync_s(make_work(by_file), devices, count_roles(by_file, is_processor=False)) == pytest.approx(
        3 * num_bytes / link + num_bytes / 0.75e9
    )


def test_the_plan_says_what_would_help_most() -> None:
    devices = make_speeds(is_processor=False, memory_bytes=10**9)
    slow = estimate_time(make_work(make_spec(placement={"kind": "ray"})), devices)
    # Generating takes 0.9 s and learning 1.4 s: to let them overlap saves most.
    assert slow.relief is not None
    assert slow.relief.setting == "train.max_staleness=1"
    assert slow.relief.step_s == pytest.approx(slow.step_parts[2].amount, rel=0.01)
    stale = make_spec(
        placement={"kind": "ray"},
        train={"prompts_per_step": 4, "group_size": 4, "steps": 10, "max_staleness": 1},
    )
    found = estimate_time(make_work(stale), devices).relief
    assert found is not None
    assert found.setting == "placement.learners=2"
    on_ray = make_spec(placement={"kind": "ray"}, train=stale.train.model_dump())
    again = estimate_time(make_work(on_ray), devices).relief
    assert again is not None
    assert again.setting == "placement.learners=2"


def test_ranks_share_the_state_and_engines_the_rows() -> None:
    spec = make_spec(placement={"kind": "ray"})
    layout = RoleCounts(num_learners=2, num_engines=4, num_workers=3, is_shared=False)
    learner, engine, worker = list_roles(spec, SIZE, layout, 8, 10, device_bytes=10**9)
    assert (learner.count, engine.count, worker.count) == (2, 4, 3)
    # Two of the four prompts each: 2 x (10 + 4 x 8) = 84 positions.
    activations = activation_bytes(SIZE, "bfloat16", 84)
    assert learner.needed_bytes == rank_state_bytes(SIZE, "bfloat16", 2) + activations
    # 4 of the 16 rows each; the weights once more, 2000 x 2 bytes.
    assert engine.parts[0].name == "key-value cache (4 rows)"
    assert engine.parts[-1].amount == 4000
    # Workers hold no model, and nothing of an accelerator.
    assert (worker.parts, worker.available_bytes) == ((), None)
    # Too small a device: activations are computed again.
    (name,) = (
        part.name
        for part in list_roles(spec, SIZE, layout, 8, 10, device_bytes=1)[0].parts
        if part.name.startswith("activations")
    )
    assert name.endswith("computed again)")


def test_vllm_takes_the_memory_that_it_is_given() -> None:
    def engine_of(device_bytes: int | None, **settings: Any) -> RoleMemory:
        spec = make_spec(placement={"kind": "ray"}, engine={"kind": "vllm", **settings})
        layout = count_roles(spec, is_processor=device_bytes is None)
        return list_roles(spec, SIZE, layout, 8, 10, device_bytes=device_bytes)[1]

    def amounts_of(role: RoleMemory) -> dict[str, float]:
        return {part.name: part.amount for part in role.parts}

    # 2000 parameters of 2 bytes, and 1 GiB for keys and values; nothing is packed, and its program is large.
    here = engine_of(None)
    assert amounts_of(here) == {"key-value cache of vLLM": 1 << 30, "weights of the engine's process": 4000}
    assert here.program_bytes == 1_950_000_000
    # On a GPU it fills its share: 0.92 by itself.
    there = engine_of(10**6)
    assert there.needed_bytes == 920_000
    assert amounts_of(there)["key-value cache of vLLM"] == 920_000 - 4000
    assert engine_of(10**6, gpu_memory_frac=0.5).needed_bytes == 500_000
    # Two devices for one copy of the model: each holds half of it.
    shared = engine_of(10**6, tensor_parallel=2)
    assert amounts_of(shared)["weights of the engine's process"] == 2000


def test_the_run_file_says_how_many_there_are() -> None:
    counts = {"kind": "ray", "learners": 4, "engines": 3, "rollout_workers": 6}
    assert count_roles(make_spec(placement=counts), is_processor=False) == RoleCounts(
        num_learners=4, num_engines=3, num_workers=6, is_shared=False
    )
    # Where it does not say, one rank for each GPU for learning.
    by_gpus = make_spec(placement={"kind": "ray"}, job={"train_gpus": 2, "infer_gpus": 1})
    assert count_roles(by_gpus, is_processor=False).num_learners == 2
    # And a job's GPUs are those of each of its nodes.
    by_nodes = make_spec(placement={"kind": "ray"}, job={"nodes": 3, "train_gpus": 2, "infer_gpus": 1})
    assert count_roles(by_nodes, is_processor=False).num_learners == 6


def test_one_process_shares_its_device() -> None:
    assert count_roles(make_spec(), is_processor=False) == RoleCounts(
        num_learners=1, num_engines=1, num_workers=0, is_shared=True
    )
    assert not count_roles(make_spec(placement={"kind": "ray"}), is_processor=False).is_shared
    assert count_roles(make_spec(placement={"kind": "ray"}), is_processor=True).is_shared
    (together,) = list_roles(make_spec(), SIZE, count_roles(make_spec(), is_processor=True), 8)
    assert together.role == "learner and engine"
    assert together.program_bytes == 400_000_000


def test_measured_speeds_are_those_of_the_number_format() -> None:
    fast = choose_speeds(make_spec(), MACHINE, MEASURED)
    slow = choose_speeds(make_spec(model={"dtype": "float32"}), MACHINE, MEASURED)
    assert (fast.gflops, slow.gflops, fast.is_measured) == (200.0, 50.0, True)
    assert fast.efficiency is CPU_EFFICIENCY
    assert choose_speeds(make_spec(), MACHINE, MEASURED, HALF).efficiency is HALF


def test_speeds_that_nobody_measured_are_marked_and_say_how_to_measure() -> None:
    assumed = choose_speeds(make_spec(), MACHINE, None)
    assert (assumed.gflops, assumed.is_measured) == (800.0, False)
    without = replace(MACHINE, cpu_flags=())
    # bfloat16 is emulated there, which a plan must not hide.
    assert choose_speeds(make_spec(placement={"threads": 2}), without, None).gflops == 2.0


@pytest.mark.parametrize(
    ("cpu_flags", "gflops"),
    [((), 100.0), (("avx2", "fma"), 170.0), (("avx2", "fma", "avx512f", "avx512_bf16"), 260.0)],
)
def test_assumed_speeds_in_float32_are_those_of_the_instructions(
    cpu_flags: tuple[str, ...], gflops: float
) -> None:
    """With one speed for all, a step on AVX2 cores was planned to take 2.3 times as long as it took."""
    spec = make_spec(placement={"threads": 2}, model={"dtype": "float32"})
    assert choose_speeds(spec, replace(MACHINE, cpu_flags=cpu_flags), None).gflops == gflops


def test_a_gpu_of_this_machine_or_a_named_one_is_taken_by_its_data_sheet() -> None:
    here = replace(MACHINE, gpus=(Gpu(index="0", uuid="GPU-1", name="NVIDIA L4", memory_bytes=None),))
    found = choose_speeds(make_spec(), here, MEASURED)
    assert (found.device, found.gflops, found.memory_bytes) == ("l4", 121_000.0, 24 * 10**9)
    assert (found.is_processor, found.is_measured) == (False, False)
    assert found.efficiency is GPU_EFFICIENCY
    # A GPU that is not in the table is no reason to guess: the processor is planned for.
    other = replace(MACHINE, gpus=(Gpu(index="0", uuid="GPU-1", name="Voodoo 2", memory_bytes=None),))
    assert choose_speeds(make_spec(), other, MEASURED).is_processor
    named = choose_speeds(make_spec(), here, MEASURED, accelerator=find_accelerator("h100"))
    assert (named.device, named.gflops) == ("h100", 989_000.0)
    plain = choose_speeds(
        make_spec(model={"dtype": "float32"}), here, None, accelerator=find_accelerator("h100")
    )
    assert plain.gflops == 67_000.0


def learning_s(**sections: Any) -> float:
    spec = make_spec(**sections)
    work = Work(
        spec=spec, size=SIZE, prompt_tokens_mean=10.0, max_reply_tokens=8, num_eval_examples=0, num_evals=0
    )
    speeds = choose_speeds(spec, MACHINE, MEASURED, CPU_EFFICIENCY)
    parts = {part.name: part.amount for part in estimate_time(work, speeds).step_parts}
    return parts["learn"]


def test_optimizer_steps_and_the_forward_of_old_log_probabilities_take_their_time() -> None:
    """Of the arithmetic a forward is a third; the optimizer moves 4000 + 3 x 8000 bytes each time."""
    one = learning_s()
    update = state_bytes(SIZE, "bfloat16") / (8.0e9 * CPU_EFFICIENCY.update_frac)
    arithmetic = one - update
    four = learning_s(train={"prompts_per_step": 4, "group_size": 4, "mini_batches": 4})
    twice = learning_s(train={"prompts_per_step": 4, "group_size": 4, "epochs": 2})
    assert four == pytest.approx(arithmetic * 4 / 3 + 4 * update, rel=1e-3)
    assert twice == pytest.approx(arithmetic * 7 / 3 + 2 * update, rel=1e-3)
    # Ratios that start at the engine's values ask for no forward.
    bypass = learning_s(
        train={"prompts_per_step": 4, "group_size": 4, "epochs": 2}, algorithm={"mode": "bypass"}
    )
    assert bypass == pytest.approx(2 * one, rel=1e-9)
    # Neither does one that is 1 by construction.
    assert learning_s(algorithm={"mode": "decoupled"}) == one
