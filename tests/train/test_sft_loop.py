"""Runs that imitate, alone and beside their rollouts: the loop, its record, its gate and its resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused, DataError
from strop.policy.packing import PackedGroup
from strop.rollout import Example, Outcome
from strop.train import EvalSummary
from strop.train import gate as gate_module
from strop.train import step as step_module
from strop.train.data.offline import Demonstration, Demonstrations
from tests.fixtures.demonstrations import make_framing, read, write_rows
from tests.fixtures.spell import GOLD, NUM_TRAIN, SpellTask
from tests.fixtures.tiny_run import GATE_CHECKS, Composition, new_run, read_curve, take_up, tiny_spec

TERMS = ("sft", "rl+sft")
OF_TERMS = {"loss_rl", "loss_sft", "grad_norm_rl", "grad_norm_sft", "grad_cosine"}


def gold_rows(numbers: Sequence[int] = range(NUM_TRAIN)) -> list[dict[str, Any]]:
    """Ask as `SpellTask` asks, and answer right."""
    return [{"prompt": f"#{n}", "completion": GOLD, "problem": f"number {n}"} for n in numbers]


def imitate(folder: Path, model_dir: Path, rows: Sequence[Any] | None = None) -> Demonstrations:
    path = write_rows(folder / "rows.jsonl", gold_rows() if rows is None else rows)
    return read(path, make_framing(model_dir, SpellTask()))


def compose(
    root: Path, model_dir: Path, terms: str, *, rows: Sequence[Any] | None = None, **train: Any
) -> Composition:
    root.mkdir(parents=True, exist_ok=True)
    found = imitate(root, model_dir, rows)
    sft = {"source": found.source, "rows_per_step": 4}
    spec = tiny_spec(train={"terms": terms, **train}, sft=sft)
    return Composition(spec, model_dir, new_run(root / "runs"), demonstrations=found)


def test_a_run_of_demonstrations_learns_them(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = compose(tmp_path, tiny_model_dir, "sft", steps=12)
    made.run()
    lines = made.run_dir.metrics.read()
    losses = [line["loss"] for line in lines]
    assert losses[-1] < 0.2 * losses[0]
    for line in lines:
        # Q, 7, Z and the terminator of 4 rows; nothing was sampled, so nothing is said about that.
        assert (line["num_sft_rows"], line["num_sft_tokens"]) == (4, 16)
        assert not {"reward_mean", "num_scored_tokens", "drift_mean_nats", "failed_frac"} & line.keys()
        assert not OF_TERMS & line.keys()
        assert line["scored_tokens_per_s"] == pytest.approx(16 / line["seconds_step"])
    assert list((made.run_dir.path / "rollouts").iterdir()) == []
    assert made.notes.causes("tripwire") == []
    assert made.notes.causes("gate") == [*GATE_CHECKS[:-2], "demonstrations", *GATE_CHECKS[-2:]]
    (check,) = [event for event in made.notes.events if event.cause == "demonstrations"]
    # 12 steps of 4 rows are 4 passes over 12.
    assert check.detail.startswith(f"12 demonstrations from {tmp_path / 'rows.jsonl'}, seen 4 times")
    assert check.detail.endswith("the first teaches 'Q7Z<|end|>'")
    assert made.run_dir.is_finished
    assert made.run_dir.checkpoint_steps()[-1] == 12


def test_a_mixed_run_records_both_terms(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = compose(tmp_path, tiny_model_dir, "rl+sft", steps=3)
    made.run()
    for line in made.run_dir.metrics.read():
        assert line.keys() >= OF_TERMS | {"reward_mean", "drift_mean_nats"}
        assert line["loss"] == pytest.approx(line["loss_rl"] + line["loss_sft"], abs=1e-9)
        assert min(line["grad_norm_rl"], line["grad_norm_sft"]) > 0.0
        assert -1.0 <= line["grad_cosine"] <= 1.0
        # |a + b|^2 = |a|^2 + |b|^2 + 2 |a| |b| cos
        rl, sft = line["grad_norm_rl"], line["grad_norm_sft"]
        square = rl**2 + sft**2 + 2 * rl * sft * line["grad_cosine"]
        assert line["grad_norm"] ** 2 == pytest.approx(square, rel=1e-4)
        # Drift is that of the sampled tokens: what nobody sampled has none.
        assert line["drift_mean_nats"] < 1e-5
    assert len(list((made.run_dir.path / "rollouts").iterdir())) == 3


def test_the_weight_scales_one_term(tmp_path: Path, tiny_model_dir: Path) -> None:
    lines = []
    for weight in (1.0, 0.25):
        made = compose(tmp_path / str(weight), tiny_model_dir, "rl+sft", steps=1)
        made.spec = made.spec.model_copy(update={"sft": made.spec.sft.model_copy(update={"weight": weight})})
        made.run()
        lines += made.run_dir.metrics.read()
    whole, quarter = lines
    assert quarter["grad_norm_rl"] == whole["grad_norm_rl"]
    assert quarter["grad_norm_sft"] == pytest.approx(whole["grad_norm_sft"] / 4, rel=1e-6)
    assert quarter["loss_sft"] == pytest.approx(whole["loss_sft"] / 4)
    assert quarter["grad_cosine"] == pytest.approx(whole["grad_cosine"], abs=1e-6)


def test_a_step_whose_rollouts_say_nothing_still_imitates(tmp_path: Path, tiny_model_dir: Path) -> None:
    class HalfBroken(SpellTask):
        num_judged = 0

        async def verify(self, example: Example, text: str) -> Outcome:
            # Behind the gate every other attempt is lost, so that of a pair nothing can be compared.
            self.num_judged += bool(made.notes.starts)
            if self.num_judged % 2:
                raise ValueError("no judgement")
            return await super().verify(example, text)

    made = compose(tmp_path, tiny_model_dir, "rl+sft", steps=2, group_size=2, prompts_per_step=1)
    made.task = HalfBroken()
    made.run()
    for line in made.run_dir.metrics.read():
        assert line["num_scored_tokens"] == 0
        assert line["loss_sft"] == line["loss"] > 0.0
        assert not {"loss_rl", "grad_norm_rl", "grad_cosine"} & line.keys()
    assert made.notes.causes("tripwire").count("empty_step") == 2
    assert made.run_dir.is_finished


def test_the_seed_orders_the_rows(tmp_path: Path, tiny_model_dir: Path) -> None:
    weights = []
    for seed in (5, 6):
        made = compose(tmp_path / str(seed), tiny_model_dir, "sft")
        made.spec = made.spec.model_copy(update={"seed": seed})
        made.run()
        weights.append(read_curve(made.run_dir.path).weights)
    assert weights[0] != weights[1]


async def die(step: int, on_progress: Callable[[], None]) -> EvalSummary:
    if step > 0:
        raise ConnectionError("the machine went away")
    return EvalSummary(
        step=0, num_examples=1, greedy_accuracy=0.0, greedy_low=0.0, greedy_high=1.0, sampled_accuracy=None
    )


@pytest.mark.parametrize("terms", TERMS)
def test_a_run_taken_up_again_gives_the_curve_of_an_uninterrupted_one(
    tmp_path: Path, tiny_model_dir: Path, terms: str
) -> None:
    sizes: dict[str, Any] = {"steps": 5, "checkpoint_every": 2}
    whole = compose(tmp_path / "whole", tiny_model_dir, terms, **sizes)
    whole.run()
    half = compose(tmp_path / "half", tiny_model_dir, terms, **sizes)
    calm = half.spec
    half.spec = calm.model_copy(update={"eval": calm.eval.model_copy(update={"every": 3})})
    half.evaluate = die
    with pytest.raises(ConnectionError):
        half.run()
    assert half.run_dir.checkpoint_steps() == [2]
    take_up(half, spec=calm).run()
    assert read_curve(half.run_dir.path) == read_curve(whole.run_dir.path)


def test_other_demonstrations_are_refused_on_resume(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = compose(tmp_path, tiny_model_dir, "sft", steps=5, checkpoint_every=2)
    made.spec = made.spec.model_copy(update={"eval": made.spec.eval.model_copy(update={"every": 3})})
    made.evaluate = die
    with pytest.raises(ConnectionError):
        made.run()
    changed = imitate(tmp_path, tiny_model_dir, [*gold_rows(range(1, NUM_TRAIN)), *gold_rows([0])])
    with pytest.raises(CheckRefused, match=r"step-000002 began with another demonstrations \(\w{12} then, "):
        take_up(made, demonstrations=changed).run()


def test_fewer_demonstrations_than_a_step_takes_are_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = compose(tmp_path, tiny_model_dir, "sft", rows=gold_rows(range(3)))
    with pytest.raises(DataError, match=r"sft.rows_per_step=4 and there are 3 demonstrations"):
        made.run()


def test_what_is_evaluated_on_is_not_imitated(tmp_path: Path, tiny_model_dir: Path) -> None:
    # The held-out example 12 in another form.
    leak = {"prompt": f" #{NUM_TRAIN}.", "completion": GOLD}
    made = compose(tmp_path, tiny_model_dir, "sft", rows=[*gold_rows(), leak])
    with pytest.raises(CheckRefused, match=r"overlap: 1 of 12 .*: 1 in the same"):
        made.run()
    # Accepted by name and reason, it is trained.
    spec = made.spec.model_copy(
        update={
            "train": made.spec.train.model_copy(
                update={"accept": "weights: a test; audit: a test; overlap: a test of memory", "steps": 1}
            )
        }
    )
    take_up(made, spec=spec).run()


def test_a_builder_that_drops_the_terminator_is_refused(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TOK-4 for rows without one: the gate looks at what the loss is computed on."""
    builder = step_module.pack_demonstrations

    def drop(members: Sequence[Demonstration]) -> list[PackedGroup]:
        shorter = [
            replace(one, reply_ids=one.reply_ids[:-1], is_trained=one.is_trained[:-1]) for one in members
        ]
        return builder(shorter)

    monkeypatch.setattr(gate_module, "pack_demonstrations", drop)
    made = compose(tmp_path, tiny_model_dir, "sft")
    with pytest.raises(CheckRefused, match="12 of 12 demonstrations do not teach one terminator"):
        made.run()
