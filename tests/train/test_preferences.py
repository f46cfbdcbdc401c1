"""Preference pairs: which replies are paired, what the reference thinks of them, and a run on them."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from strop.errors import CheckRefused, CorruptRecord, DataError
from strop.policy.packing import PackedGroup
from strop.rollout import FinishReason, FloatArray, Rollout
from strop.train.data.offline import Framing, Pairs, find_offline_source, pair_rollouts, read_pairs
from strop.train.data.preferences import REFERENCE_NAME, Preferences, pack_pair, pack_pairs, with_reference
from tests.fixtures.demonstrations import make_framing
from tests.fixtures.spell import GOLD, SpellTask
from tests.fixtures.tiny_run import Composition, learner_of, new_run, read_curve, take_up, tiny_spec
from tests.train.test_sft_sources import roll, write_run


@pytest.fixture
def framing(tiny_model_dir: Path) -> Framing:
    return make_framing(tiny_model_dir, SpellTask())


def pairs_of(rollouts: Sequence[Rollout]) -> list[tuple[str, str]]:
    found = pair_rollouts(rollouts, 512, Counter())
    return [tuple(one.reply.text if one.reply else "" for one in pair) for pair in found]  # type: ignore[misc]


def test_the_best_of_a_group_is_paired_with_its_worst(framing: Framing) -> None:
    group = [roll(framing, 0, text, reward) for text, reward in (("A", 0.2), ("B", 1.0), ("C", 0.0))]
    # Of equals the earlier one, at both ends.
    group += [roll(framing, 0, "D", 1.0), roll(framing, 0, "E", 0.0)]
    other_example = [roll(framing, 1, "F", 1.0), roll(framing, 1, "G", 1.0)]
    other_step = [roll(framing, 0, "H", 0.5, step=3), roll(framing, 0, "I", 0.1, step=3)]
    assert pairs_of([*group, *other_example, *other_step]) == [("B", "C"), ("H", "I")]


def test_what_cannot_be_compared_is_counted(framing: Framing) -> None:
    rollouts = [roll(framing, 0, "A", None), roll(framing, 0, "B", 1.0), roll(framing, 0, "C" * 60, 0.0)]
    counts: Counter[str] = Counter()
    assert list(pair_rollouts(rollouts, 40, counts)) == []
    assert counts == {
        "rollouts without a score": 1,
        "rollouts longer than the model's positions": 1,
        "groups without a pair": 1,
    }


def test_a_pair_is_packed_with_its_prompt_held_once(framing: Framing) -> None:
    cut = roll(framing, 0, "no", 0.0, end=FinishReason.LENGTH)
    pair = pack_pair((roll(framing, 0, GOLD, 1.0), cut))
    assert [reply.advantage for reply in pair.replies] == [1.0, -1.0]
    # Q, 7, Z and the terminator; a reply that was cut has none.
    assert [len(reply.token_ids) for reply in pair.replies] == [4, 2]
    assert all(bool(np.isnan(reply.engine_logprobs).all()) for reply in pair.replies)


class Scripted:
    """A reference that finds every token equally likely, and counts how often it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def score(self, groups: Sequence[PackedGroup], temperature: float) -> list[FloatArray]:
        self.num_asked += 1
        replies = [reply for group in groups for reply in group.replies]
        return [np.full(int(reply.is_scored.sum()), -2.0, dtype=np.float32) for reply in replies]


def some_pairs(framing: Framing, num_pairs: int = 2) -> Preferences:
    pairs = [(roll(framing, n, GOLD, 1.0), roll(framing, n, "no", 0.0)) for n in range(num_pairs)]
    return pack_pairs(Pairs(source="s", members=tuple(pairs), counts={}))


def attach(found: Preferences, scorer: Scripted | None, path: Path) -> Preferences:
    return asyncio.run(with_reference(found, scorer.score if scorer else None, path, 1.0))


def test_the_reference_is_asked_once_and_remembered(framing: Framing, tmp_path: Path) -> None:
    found, scorer, path = some_pairs(framing), Scripted(), tmp_path / REFERENCE_NAME
    attach(found, scorer, path)
    again = attach(found, scorer, path)
    assert scorer.num_asked == 1
    streams = [reply.reference_logprobs for pair in again.members for reply in pair.replies]
    assert [None if one is None else one.tolist() for one in streams] == [[-2.0] * 4, [-2.0] * 3] * 2


def test_what_was_remembered_must_belong_to_the_pairs(framing: Framing, tmp_path: Path) -> None:
    path = tmp_path / REFERENCE_NAME
    with pytest.raises(CorruptRecord, match="it is missing, and the weights"):
        attach(some_pairs(framing), None, path)
    attach(some_pairs(framing), Scripted(), path)
    stream = load_file(path)["logprobs"]
    assert len(stream) == 14
    with pytest.raises(CorruptRecord, match="it belongs to other pairs"):
        attach(some_pairs(framing, 3), None, path)
    save_file({"logprobs": stream[:-1]}, path, metadata={"pairs": some_pairs(framing).digest})
    with pytest.raises(CorruptRecord, match="it belongs to other pairs"):
        attach(some_pairs(framing), None, path)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CorruptRecord, match="it cannot be read"):
        attach(some_pairs(framing), None, path)


def compose(
    root: Path, model_dir: Path, framing: Framing, *, worst: str = "no", **sections: Any
) -> Composition:
    root.mkdir(parents=True, exist_ok=True)
    rollouts = [
        one
        for n in range(6)
        for one in (roll(framing, n, GOLD, 1.0), roll(framing, n, worst, 0.0), roll(framing, n, "x!", 0.3))
    ]
    source = write_run(root / "source", rollouts)
    dpo = {"source": str(source), "pairs_per_step": 3} | sections.pop("dpo", {})
    train = {"terms": "dpo", "steps": 8} | sections.pop("train", {})
    spec = tiny_spec(train=train, dpo=dpo, **sections)
    found = pack_pairs(read_pairs(spec.dpo, framing))
    return Composition(spec, model_dir, new_run(root / "runs"), preferences=found)


@pytest.mark.parametrize("loss", ["dpo", "pref_ipo"])
def test_a_run_learns_to_prefer(tmp_path: Path, tiny_model_dir: Path, framing: Framing, loss: str) -> None:
    made = compose(tmp_path, tiny_model_dir, framing, dpo={"loss": loss})
    made.run()
    lines = made.run_dir.metrics.read()
    # The policy is its own reference: h = 0. -log sigmoid(0) = ln 2, and (0 - 1 / 0.2)^2 = 25.
    assert lines[0]["loss"] == pytest.approx({"dpo": math.log(2), "pref_ipo": 25.0}[loss], rel=1e-4)
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    for line in lines:
        # 4 tokens of the better and 3 of the worse reply of each pair
        assert (line["num_pairs"], line["num_pair_tokens"]) == (3, 21)
        assert "drift_mean_nats" not in line
        assert line["pair_margin_nats"] == pytest.approx(
            line["pair_better_gain_nats"] - line["pair_worse_gain_nats"], abs=1e-4
        )
    # The policy begins as its own reference, and learns to tell them apart.
    assert lines[0]["pair_margin_nats"] == pytest.approx(0.0, abs=1e-4)
    assert lines[-1]["pair_margin_nats"] > 0.1
    assert lines[-1]["pair_accuracy"] == 1.0
    assert made.notes.causes("tripwire") == []
    assert (made.run_dir.path / REFERENCE_NAME).exists()


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, tiny_model_dir: Path, framing: Framing) -> None:
    whole = compose(tmp_path / "whole", tiny_model_dir, framing, train={"steps": 4})
    whole.run()
    parted = compose(tmp_path / "parted", tiny_model_dir, framing, train={"steps": 4})
    half = parted.spec.model_copy(update={"train": parted.spec.train.model_copy(update={"steps": 2})})
    replace(parted, spec=half).run()
    take_up(parted).run()
    assert read_curve(parted.run_dir.path) == read_curve(whole.run_dir.path)


def test_a_policy_that_has_learned_is_not_taken_for_its_reference(
    tmp_path: Path, tiny_model_dir: Path, framing: Framing
) -> None:
    """What the reference said is gone, and the weights that said it are too."""
    made = compose(tmp_path, tiny_model_dir, framing, train={"steps": 4})
    half = made.spec.model_copy(update={"train": made.spec.train.model_copy(update={"steps": 2})})
    replace(made, spec=half).run()
    (made.run_dir.path / REFERENCE_NAME).unlink()
    with pytest.raises(CorruptRecord, match=r"it is missing, and the weights .* are gone"):
        take_up(made).run()


def test_other_pairs_are_another_run(tmp_path: Path, tiny_model_dir: Path, framing: Framing) -> None:
    made = compose(tmp_path, tiny_model_dir, framing, train={"steps": 2})
    made.run()
    other = compose(tmp_path / "other", tiny_model_dir, framing, worst="on", train={"steps": 4})
    with pytest.raises(CheckRefused, match=r"began with another preferences \("):
        take_up(made, spec=other.spec, preferences=other.preferences).run()


def test_a_reference_of_its_own_is_asked(tmp_path: Path, tiny_model_dir: Path, framing: Framing) -> None:
    reference = {"model": str(tiny_model_dir)}
    made = compose(tmp_path, tiny_model_dir, framing, reference=reference, train={"steps": 1})
    roles = made.run()
    assert "reference" in roles.frozen_dirs
    assert set(learner_of(roles).frozen) == {"reference"}
    assert made.run_dir.metrics.read()[0]["loss"] == pytest.approx(math.log(2), rel=1e-4)


def test_too_few_pairs_and_foreign_rollouts_are_refused(
    tmp_path: Path, tiny_model_dir: Path, framing: Framing
) -> None:
    with pytest.raises(DataError, match=r"dpo\.pairs_per_step=9 and there are 6 pairs"):
        compose(tmp_path / "few", tiny_model_dir, framing, dpo={"pairs_per_step": 9})
    spec = tiny_spec(train={"terms": "dpo"}, dpo={"source": str(tmp_path / "nowhere")})
    with pytest.raises(DataError, match=r"dpo\.source=.*nowhere does not exist"):
        read_pairs(spec.dpo, framing)
    assert find_offline_source(tiny_spec()) is None
