"""Plans of whole runs, and what judging costs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.errors import ConfigError, DataError
from strop.hardware import describe_machine
from strop.hardware.accelerators import find_accelerator
from strop.plan.estimate import estimate_time
from strop.plan.plan import Plan
from strop.plan.planning import make_plan, predict_run
from strop.plan.roles import RoleCounts
from strop.plan.rollouts import (
    SIGNAL_FRAC,
    Work,
    describe_judging,
    judge_s,
    list_judge_assumptions,
    list_shares,
)
from strop.record.rollouts import write_rollouts
from strop.rollout import Outcome, Split, Turn
from strop.spec import load_spec
from strop.tasks import build_task, render_prompt
from strop.tokenizer import Tokenizer
from strop.train.data.offline import read_framing, read_pairs
from strop.train.data.preferences import pack_pairs
from tests.fixtures.builders import rollout_of, spoken_turn
from tests.fixtures.families import family_model
from tests.fixtures.tiny_run import new_run
from tests.plan.test_estimate import SIZE, make_spec, make_speeds, make_work

PlanIt = Callable[..., Plan]


@pytest.fixture
def plan_it(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> PlanIt:
    """Plan a run of the tiny model, with more settings."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(
        f'name = "x"\n[model]\nuri = "{tiny_model_dir}"\n[task]\nname = "arithmetic"\n'
    )

    def plan(*overrides: str, **options: object) -> Plan:
        return make_plan(load_spec("run.toml", overrides), cache_dir=tmp_path / "cache", **options)  # type: ignore[arg-type]

    return plan


def test_the_prompt_is_the_one_that_the_model_gets(plan_it: PlanIt, tiny_model_dir: Path) -> None:
    prompt = plan_it().prompt
    assert prompt is not None
    task = build_task(load_spec("run.toml").spec.task)
    example = task.examples(Split.TRAIN)[0]
    text, ids = render_prompt(Tokenizer.load(tiny_model_dir), task.render(example), "auto")
    assert (prompt.text, prompt.num_tokens) == (text, len(ids))
    assert prompt.example_id == example.example_id
    assert prompt.stops == ("<|end|>",)
    assert prompt.prompt_format == "chat"
    assert plan_it("model.prompt_format=base").prompt.text.endswith("?\nA:")  # type: ignore[union-attr]


def test_the_schedule_by_hand(plan_it: PlanIt) -> None:
    found = plan_it("train.steps=50", "train.checkpoint_every=20", "eval.every=20").schedule
    assert (found.steps, found.prompts_per_step, found.rollouts_per_step) == (50, 8, 64)
    # 400 pairs, 100 held out; 50 steps of 8 prompts over 300 examples.
    assert (found.num_train_examples, found.num_eval_examples) == (300, 100)
    assert found.num_epochs == pytest.approx(400 / 300)
    # Before, after 20 and 40, and after the last one.
    assert found.num_evals == 4
    assert found.num_checkpoints == 3
    # A multiple that is the last step is evaluated once.
    assert plan_it("train.steps=40", "eval.every=20").schedule.num_evals == 3
    assert plan_it("train.steps=40").schedule.num_evals == 2


def test_bfloat16_where_it_is_emulated_is_announced_with_its_cost(plan_it: PlanIt) -> None:
    without = replace(describe_machine(), cpu_flags=("avx2", "fma"), gpus=())
    asked = plan_it("model.dtype=bfloat16", machine=without)
    cost = "the processor has no instructions for bfloat16, and emulates it: products take many times"
    assert [notice for notice in asked.notices if cost in notice] == list(asked.notices)[-1:]
    settled = plan_it(machine=without)
    assert all("bfloat16" not in notice for notice in settled.notices)
    assert asked.time is not None
    assert settled.time is not None
    assert asked.time.step_s > 10 * settled.time.step_s
    (format_line,) = [value for value in settled.limits if value.name == "model.dtype"]
    assert (format_line.value, format_line.origin) == (
        "float32",
        "the processor has no instructions for bfloat16",
    )


def test_weights_of_tokens_are_written_out(plan_it: PlanIt) -> None:
    def weight(name: str) -> str:
        values = {value.name: value.value for value in plan_it(f"algorithm.name={name}").algorithm}
        return str(values["weight of a token"])

    assert weight("grpo") == "1 / (64 rollouts x scored tokens of the rollout)"
    limit = build_task(load_spec("run.toml").spec.task).limits.max_reply_tokens
    assert weight("dr_grpo") == f"1 / (64 rollouts x {limit} tokens of reply limit)"
    assert weight("dapo") == weight("rloo") == "1 / scored tokens of the step"


def test_a_correction_is_shown_where_it_is_applied(plan_it: PlanIt) -> None:
    def shown(*words: str) -> dict[str, object]:
        values = {value.name: value.value for value in plan_it(*words).algorithm}
        names = ("correction", "correction_cap", "max_sequence_tokens")
        return {name: values[key] for name in names if (key := f"algorithm.{name}") in values}

    assert shown() == {"correction": "tis_token", "correction_cap": 2.0}
    assert shown("algorithm.correction=none", "algorithm.correction_cap=4") == {"correction": "none"}
    assert shown("algorithm.correction=mis_seq") == {
        "correction": "mis_seq",
        "correction_cap": 3.0,
        "max_sequence_tokens": 512,
    }
    # A ratio that starts at the engine's own value needs none, and gets none.
    assert shown("algorithm.mode=bypass") == shown("algorithm.name=dppo") == {"correction": "none"}
    taught = ("train.terms=distill", "teacher.source=initial")
    assert shown(*taught) == {}
    sampled = (*taught, "teacher.form=sampled", "algorithm.correction=icepop")
    assert shown(*sampled) == {"correction": "icepop", "correction_cap": 5.0}


def test_data_in_the_hub_clients_cache_is_read_without_the_hub(
    plan_it: PlanIt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    # As the client lays it out: a commit named by refs/main, its files below snapshots.
    hub = tmp_path / "hub"
    repo = hub / "datasets--org--words"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    rows = repo / "snapshots" / "abc" / "main"
    rows.mkdir(parents=True)
    for split, number in (("train", 10), ("test", 2)):
        table = pa.table(
            {
                "question": [f"{split} {n}?" for n in range(number)],
                "answer": [f"#### {n}" for n in range(number)],
            }
        )
        pq.write_table(table, rows / f"{split}-00000-of-00001.parquet")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    found = plan_it("task.name=gsm8k", "task.source=org/words")
    assert found.schedule.num_train_examples == 10
    assert found.prompt is not None
    assert "train 0?" in found.prompt.text
    (rows / "test-00000-of-00001.parquet").unlink()
    assert plan_it("task.name=gsm8k", "task.source=org/words").prompt is None


def test_data_that_is_here_and_wrong_is_refused(plan_it: PlanIt) -> None:
    Path("rows.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"rows\.jsonl"):
        plan_it("task.name=gsm8k", "task.source=./rows.jsonl")


def test_what_the_gate_would_refuse_is_said(plan_it: PlanIt, tmp_path: Path) -> None:
    assert plan_it().warnings == ()
    # Prompts of about 40 byte tokens and replies of 500 exceed the tiny model's 512 positions.
    Path("long.jsonl").write_text(
        "\n".join(json.dumps({"question": f"{n}" * 20, "answer": f"#### {n}"}) for n in range(20))
    )
    long = plan_it("task.name=gsm8k", "task.source=./long.jsonl", "task.max_reply_tokens=500")
    assert long.warnings[0].startswith("a prompt of ")
    assert "a reply of 500 exceed the model's 512 positions" in long.warnings[0]
    assert "and so do 18 of 18 measured prompts" in long.warnings[0]
    assert long.prompt is not None
    assert long.prompt.num_too_long == 18
    # A share that the run file allows is no warning. One row is held out, which may be a long one.
    questions = ["1" * 400, "2" * 400, *(f"{n}?" for n in range(18))]
    Path("mixed.jsonl").write_text(
        "\n".join(json.dumps({"question": question, "answer": "#### 1"}) for question in questions)
    )
    words = ("task.name=gsm8k", "task.source=./mixed.jsonl", "task.num_held_out=1")
    (warning,) = plan_it(*words, "task.max_reply_tokens=200").warnings
    assert re.search("and so do [12] of 19 measured prompts", warning)
    assert plan_it(*words, "task.max_reply_tokens=200", "task.max_too_long_frac=0.11").warnings == ()
    small = plan_it(machine=replace(describe_machine(), memory_bytes=1000))
    assert small.warnings[0].startswith("memory: ")


def test_a_name_that_is_no_model_is_refused(plan_it: PlanIt) -> None:
    for name in ("nothing", "./nothing"):
        with pytest.raises(ConfigError, match="nothing"):
            plan_it(f"model.uri={name}")


def test_a_plan_for_other_hardware_has_its_memory_and_roles(plan_it: PlanIt) -> None:
    here = plan_it("placement.kind=ray")
    assert [role.role for role in here.roles] == ["learner", "engine"]
    assert here.memory is not None
    # What both hold without their programs is what the machine's memory is compared with.
    parts = sum(part.amount for role in here.roles for part in role.parts)
    assert parts == here.memory.needed_bytes
    there = plan_it("placement.kind=ray", accelerator=find_accelerator("l4"))
    assert (there.hardware, there.memory) == ("l4", None)
    assert [role.available_bytes for role in there.roles] == [24 * 10**9] * 2
    assert there.warnings == ()
    assert here.time is not None
    assert there.time is not None
    assert there.time.step_s < here.time.step_s
    # A card with 1 MB of memory.
    tiny = find_accelerator("l4").model_copy(update={"memory_gb": 0.001, "name": "tiny"})
    warnings = plan_it("placement.kind=ray", accelerator=tiny).warnings
    assert warnings[0].startswith("memory of the learner: ")
    assert "and one tiny has 0.0 GB; the largest part is " in warnings[0]


def test_a_run_that_starts_is_predicted_as_it_was_planned(plan_it: PlanIt, tmp_path: Path) -> None:
    words = ("model.dtype=float32",)
    planned = plan_it(*words)
    spec = load_spec("run.toml", words).spec
    assert planned.model_path is not None
    found = predict_run(
        spec, build_task(spec.task), Path(planned.model_path), None, cache_dir=tmp_path / "cache"
    )
    assert found is not None
    assert planned.time is not None
    assert found.step_s == planned.time.step_s
    assert found.seconds == {part.name: part.amount for part in planned.time.step_parts}
    assert found.memory_bytes == planned.roles[0].needed_bytes
    assert not found.is_overlapped
    assert not found.is_measured


def test_a_family_that_shares_no_prompts_is_planned_so(plan_it: PlanIt, tmp_path: Path) -> None:
    alone = plan_it(f"model.uri={family_model(tmp_path / 'mamba', 'mamba2')}", "model.dtype=float32")
    packed = plan_it("model.dtype=float32")
    said = [next(v.value for v in plan.limits if v.name == "sequences") for plan in (alone, packed)]
    assert said == ["each by itself: its layers carry a state from token to token", "packed, prompts shared"]
    assert alone.time is not None
    assert packed.time is not None
    assert alone.prompt == packed.prompt
    assert alone.prompt is not None
    # One more reading of the prompt for each of the other replies, of the groups that are forwarded.
    train = load_spec("run.toml").spec.train
    more = train.prompts_per_step * (train.group_size - 1) * alone.prompt.tokens_mean
    assert alone.time.num_positions - packed.time.num_positions == pytest.approx(SIGNAL_FRAC * more)


def write_pairs(root: Path, model_dir: Path, num_pairs: int) -> Path:
    """Write a run with a right reply of 3 tokens and a wrong one of 9 to each example, ends included."""
    task, tokenizer = build_task(load_spec("run.toml").spec.task), Tokenizer.load(model_dir)
    rollouts = []
    for example in task.examples(Split.TRAIN)[:num_pairs]:
        asked, prompt_ids = render_prompt(tokenizer, task.render(example), "auto")
        for reward, length in ((1.0, 2), (0.0, 8)):
            ids = np.append(np.full(length, 5, np.int32), np.int32(tokenizer.eos_id))
            said = spoken_turn(tokenizer.decode(ids[:-1]), ids)
            turns = (Turn(role="prompt", text=asked, token_ids=prompt_ids), said)
            outcome = Outcome(parts={"right": reward})
            rollouts.append(rollout_of(example, turns, outcome))
    run = new_run(root)
    write_rollouts(run.rollouts_path(1), rollouts)
    run.release()
    return run.path


def test_a_run_on_pairs_is_planned_by_their_lengths(
    plan_it: PlanIt, tmp_path: Path, tiny_model_dir: Path
) -> None:
    plan_it()
    source = write_pairs(tmp_path / "runs", tiny_model_dir, 6)
    words = (
        *("train.terms=dpo", f"dpo.source={source}", "dpo.pairs_per_step=4", "train.steps=3"),
        "model.dtype=float32",
    )
    planned = plan_it(*words)
    schedule, time = planned.schedule, planned.time
    assert (schedule.given_kind, schedule.given_per_step, schedule.num_given_epochs) == ("pairs", 4, 2.0)
    assert schedule.given == f"6 pairs from {source}"
    assert time is not None
    assert {part.name: part.amount for part in time.step_parts}["generate"] == 0.0
    activations = next(part.name for part in planned.memory.parts if "activations" in part.name)  # type: ignore[union-attr]
    assert int(re.findall(r"\d+", activations)[0]) >= 4 * 12
    assert {"dpo.beta", "dpo.loss", "dpo.pairs_per_step"} <= {value.name for value in planned.algorithm}
    spec = load_spec("run.toml", words).spec
    framing = read_framing(tiny_model_dir, build_task(spec.task), spec.model.prompt_format)
    pairs = read_pairs(spec.dpo, framing)
    # A prompt once, and replies of 3 and 9.
    assert list(pairs.lengths) == [len(one.turns[0].token_ids) + 12 for one, _ in pairs.members]
    assert time.num_positions == pytest.approx(4 * fmean(pairs.lengths))
    packed = pack_pairs(pairs)
    assert packed.lengths == pairs.lengths
    replies = [reply for pair in packed.members for reply in pair.replies]
    assert sum(int(reply.is_scored.sum()) for reply in replies) == packed.num_scored == 6 * 12
    assert time.scored_tokens_per_s == pytest.approx(4 * 12 / time.step_s)
    found = predict_run(spec, build_task(spec.task), tiny_model_dir, pairs, cache_dir=tmp_path / "cache")
    assert found is not None
    assert found.step_s == time.step_s


def test_pairs_that_are_elsewhere_are_unknown(plan_it: PlanIt) -> None:
    planned = plan_it("train.terms=dpo", "dpo.source=/nowhere", "dpo.pairs_per_step=4")
    assert planned.unknown == ("pairs: dpo.source=/nowhere is not on this machine",)
    # Both replies of a pair are as long as the run's own, three quarters of the limit, behind its prompts.
    assert planned.time is not None
    (given,) = (one for one in planned.assumptions if one.name == "given_tokens_mean")
    assert planned.prompt is not None
    (reply,) = (one for one in planned.assumptions if one.name == "reply_tokens_mean")
    assert given.value == pytest.approx(2 * (planned.prompt.tokens_mean + reply.value), abs=1)
    # A full micro-batch, where nobody knows how long they are.
    assert any("activations (1280 positions)" in part.name for part in planned.memory.parts)  # type: ignore[union-attr]


def test_distillation_samples_in_some_steps_and_is_shown_demonstrations_in_others(
    plan_it: PlanIt, tmp_path: Path
) -> None:
    rows = [{"prompt": f"Say {number}", "completion": str(number)} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["train.terms=distill", "teacher.source=initial", "train.steps=4"]
    shown = [f"sft.source={tmp_path / 'rows.jsonl'}", "sft.rows_per_step=4"]
    alone, mixed, only = (
        plan_it(*words, *more)
        for more in ([], [*shown, "teacher.student_frac=0.25"], [*shown, "teacher.student_frac=0"])
    )
    assert alone.time is not None
    assert mixed.time is not None
    assert only.time is not None
    assert (alone.schedule.given_kind, mixed.schedule.given_kind) == ("", "demonstrations")
    assert (mixed.schedule.num_given_epochs, only.schedule.num_given_epochs) == (1.5, 2.0)
    assert mixed.schedule.num_epochs == pytest.approx(0.25 * (alone.schedule.num_epochs or 0))
    generate = [plan.time.step_parts[0].amount for plan in (alone, mixed, only)]  # type: ignore[union-attr]
    assert generate == pytest.approx([generate[0], 0.25 * generate[0], 0.0])
    # Every reply is taught, not half of them.
    reply_tokens = alone.time.num_reply_tokens
    assert alone.time.num_positions == pytest.approx(reply_tokens + 8 * alone.prompt.tokens_mean)  # type: ignore[union-attr]
    assert mixed.time.num_positions == pytest.approx(
        0.25 * alone.time.num_positions + 0.75 * only.time.num_positions
    )


def values_of(plan: Plan) -> dict[str, str]:
    return {value.name: str(value.value) for value in (*plan.algorithm, *plan.optimizer)}


def test_several_optimizer_steps_are_planned(plan_it: PlanIt) -> None:
    one = plan_it()
    several = plan_it("train.mini_batches=4", "train.epochs=2", "algorithm.name=dr_grpo")
    assert (one.schedule.steps_per_batch, several.schedule.steps_per_batch) == (1, 8)
    assert (values_of(one)["algorithm.mode"], values_of(several)["algorithm.mode"]) == ("single", "decoupled")
    # 2 of 8 prompts with 8 rollouts each are in a mini-batch.
    assert values_of(several)["weight of a token"].startswith("1 / (16 rollouts x ")
    token_mean = plan_it("train.mini_batches=4", "algorithm.name=dapo")
    assert values_of(token_mean)["weight of a token"] == "1 / scored tokens of the mini-batch"
    assert one.time is not None
    assert several.time is not None
    assert several.time.num_positions == 2 * one.time.num_positions
    parts = [{part.name: part.amount for part in plan.time.step_parts} for plan in (one, several)]  # type: ignore[union-attr]
    assert parts[1]["generate"] == parts[0]["generate"]
    assert parts[1]["learn"] > 2 * parts[0]["learn"]


def test_a_rate_that_falls_is_planned_to_its_end(plan_it: PlanIt) -> None:
    assert "lr of the last optimizer step" not in values_of(plan_it("optimizer.schedule=constant"))
    words = ["optimizer.lr=1e-4", "optimizer.final_frac=0.5", "train.steps=10"]
    # 1 - 0.5 x 9 / 10, and with four steps in each 1 - 0.5 x 39 / 40
    assert values_of(plan_it(*words))["lr of the last optimizer step"] == "5.5e-05"
    assert values_of(plan_it(*words, "train.epochs=4"))["lr of the last optimizer step"] == "5.12e-05"


def test_where_a_penalty_stands_is_planned(plan_it: PlanIt) -> None:
    beta = "reference.kl_beta=0.1"
    in_reward = values_of(plan_it("algorithm.name=reinforce_pp", beta))
    assert in_reward["KL to the reference"] == "0.1 x log-ratio (k1), in the reward"
    assert in_reward["algorithm.advantage"] == "keep_reward, then whitened over all tokens of the batch"
    assert "KL to the reference" not in values_of(plan_it("algorithm.name=reinforce_pp_baseline", beta))


def test_an_attempt_of_several_turns_counts_with_all_of_them(plan_it: PlanIt) -> None:
    def reckoned(*words: str) -> tuple[float, float, float]:
        planned = plan_it("task.name=guess-number", "task.max_reply_tokens=4", *words)
        assert planned.time is not None
        assert planned.memory is not None
        (reply,) = (one for one in planned.assumptions if one.name == "reply_tokens_mean")
        return reply.value, planned.time.num_reply_tokens, planned.memory.needed_bytes

    (one, tokens, memory), (five, all_tokens, more) = (
        reckoned(f"task.max_turns={number}") for number in (1, 5)
    )
    assert (one, five) == (3.0, 15.0)
    assert all_tokens > 4 * tokens
    assert more > memory
    # No more than the model has room for.
    longest = plan_it("task.name=guess-number", "task.max_reply_tokens=4", "task.max_turns=10000")
    (bounded,) = (one for one in longest.assumptions if one.name == "reply_tokens_mean")
    assert bounded.value < 1000


ROWS = {"name": "rows", "source": "x", "prompt": "{a}", "answer": "b"}
SERVED = {
    "name": "rows",
    "prompt": "prompt",
    "reward": "judge",
    "source": "x",
    "judge_url": "https://judge.example/v1",
    "judge_model": "big",
    "judge_revision": "r1",
}
ONE = RoleCounts(num_learners=1, num_engines=1, num_workers=0, is_shared=True)


def work_of(task: dict[str, Any], **changes: Any) -> Work:
    return make_work(make_spec(task={"max_reply_tokens": 8, **task}), **changes)


@pytest.mark.parametrize(
    ("task", "name", "seconds"),
    [
        ({"name": "mbpp"}, "program_s", 0.036),
        ({**ROWS, "reward": ("exact", "python-tests")}, "program_s", 0.036),
        ({**ROWS, "reward": ("exact",)}, "verify_s", 0.0001),
        ({"name": "arithmetic"}, "verify_s", 0.0001),
        (SERVED, "judge_call_s", 5.0),
    ],
)
def test_programs_and_judges_take_longer_than_rules(task: dict[str, Any], name: str, seconds: float) -> None:
    spec = make_spec(task=task)
    assert {one.name: one.value for one in list_judge_assumptions(spec.task)}[name] == seconds


def test_programs_share_the_cores() -> None:
    two, eight = (work_of({"name": "mbpp"}, num_cores=count) for count in (2, 8))
    assert judge_s(two, make_speeds(), ONE, 100) == pytest.approx(100 * 0.036 / 2)
    assert judge_s(eight, make_speeds(), ONE, 100) == pytest.approx(100 * 0.036 / 8)
    (verify,) = (one for one in estimate_time(two, make_speeds()).step_parts if one.name == "verify")
    # 16 replies a step.
    assert verify.amount == pytest.approx(16 * 0.036 / 2)


def test_programs_that_run_into_their_limit_take_as_long() -> None:
    # 16 replies in 10 steps, 2 examples in 3 evaluations; a program may take 5 s.
    found = describe_judging(work_of({"name": "mbpp"}, num_cores=4))
    assert found is not None
    num_samples = make_spec().eval.num_samples or 0
    assert (found.programs_per_step, found.programs_in_run) == (16, 160 + 6 * (1 + num_samples))
    assert found.limit_step_s == pytest.approx(16 * 5.0 / 4)
    assert (found.calls_in_run, found.served) == (0, ())
    assert describe_judging(work_of({"name": "arithmetic"})) is None


def test_a_served_judge_answers_so_many_at_once() -> None:
    work = work_of({**SERVED, "judge_concurrency": 4})
    assert judge_s(work, make_speeds(), ONE, 16) == pytest.approx(16 * 5.0 / 4)


def test_a_judges_tokens_and_calls_are_counted() -> None:
    work = replace(work_of(SERVED), num_evals=0)
    found = describe_judging(work)
    assert found is not None
    assert (found.calls_per_step, found.calls_in_run) == (16, 160)
    # Rubric 200, prompt 5, reply three quarters of 8; an answer of 150.
    assert found.read_tokens_in_run == pytest.approx(160 * 211)
    assert found.written_tokens_in_run == 160 * 150
    assert found.served == ("big",)
    assert found.limit_step_s is None
    # One on this machine costs what this machine costs.
    here = describe_judging(work_of({**SERVED, "judge_url": "http://127.0.0.1:8000/v1"}))
    assert here is not None
    assert here.served == ()


def test_a_judge_of_the_run_takes_what_its_size_takes() -> None:
    role = {**SERVED, "judge_url": "role", "judge_model": "org/judge", "judge_concurrency": 2}
    large = replace(SIZE, hidden_width=20, mlp_width=40, head_width=20)
    small, big = (work_of(role, frozen={"org/judge": size}) for size in (SIZE, large))
    seconds = judge_s(small, make_speeds(), ONE, 4)
    # 5e5 operations a second: 4 questions of 211 tokens, answers of 150 over contexts of 211 + 75.
    assert seconds == pytest.approx((2000 * 4 * 211 + 4000 * 600 + 40 * 600 * 286) / 5e5)
    assert judge_s(big, make_speeds(), ONE, 4) > 2 * seconds
    found = describe_judging(small)
    assert found is not None
    assert found.served == ()


def test_parts_of_a_mixture_judge_their_share() -> None:
    parts = {"a": {"name": "mbpp", "weight": 3.0}, "b": {"name": "arithmetic", "weight": 1.0}}
    mixed = make_spec(task={"name": "mixture", "parts": parts})
    assert [(one.name, share) for one, share in list_shares(mixed.task)] == [
        ("mbpp", 0.75),
        ("arithmetic", 0.25),
    ]
    seconds = judge_s(make_work(mixed), make_speeds(), ONE, 100)
    assert seconds == pytest.approx(75 * 0.036 / 2 + 25 * 0.0001)
