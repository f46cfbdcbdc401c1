"""Incidents of the loss group in whole runs, and of penalties whose direction is reversed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strop.cluster import Roles
from strop.errors import CheckRefused, RunStopped
from strop.io import verify_directory
from strop.record import EventKind, RunDir
from strop.record.rollouts import read_rollouts
from strop.rollout import Example, FloatArray, Outcome, Rollout
from strop.train.batch import pack_reply, share_prompts
from tests.fixtures.demonstrations import make_framing, read, write_rows
from tests.fixtures.spell import PaysAlways, SpellTask
from tests.fixtures.tiny_run import Composition, learner_of, new_run, tiny_spec


def test_opt_3_weight_1_beside_a_tiny_reward_loss_raises_the_alarm(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: as above, in a run whose rewards hardly differ."""
    rows = [{"prompt": f"#{n}", "completion": "Q7Z"} for n in range(4)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    spec = tiny_spec(
        train={"terms": "rl+sft", "steps": 1},
        sft={"source": str(path), "rows_per_step": 2},
        algorithm={"name": "rloo"},
    )
    made = Composition(
        spec,
        tiny_model_dir,
        new_run(tmp_path / "runs"),
        task=TinyReward(),
        demonstrations=read(path, make_framing(tiny_model_dir, SpellTask())),
    )
    made.run()
    assert "term_dominates" in made.notes.causes("tripwire")


class TinyReward(SpellTask):
    """Pays a ten thousandth of what others pay."""

    async def verify(self, example: Example, text: str) -> Outcome:
        outcome = await super().verify(example, text)
        earned = outcome.parts["spelled"] or 0.0
        return replace(outcome, parts={"spelled": earned if outcome.is_correct else 1e-4 * earned})


def test_opt_4_a_constant_reward_raises_an_alarm_in_step_1(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Incident: 58 % of the groups had one same reward, and two weeks went by."""
    made = Composition(tiny_spec(train={"steps": 1}), tiny_model_dir, new_run(tmp_path), task=PaysAlways())
    made.run()
    (alarm,) = [event for event in made.run_dir.events.read() if event.kind == "tripwire"]
    assert (alarm.step, alarm.cause) == (1, "zero_variance")
    assert "make the task harder or easier, or raise temperature" in alarm.detail


def test_opt_6_a_learning_rate_of_1_is_named_in_two_steps_and_the_checkpoint_before_it_offered(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: answers shrank to a quarter, KL reached 9,748, and nothing stopped the runs."""
    sizes = {"checkpoint_every": 1, "keep_checkpoints": 9, "steps": 3}
    calm = Composition(tiny_spec(train=sizes), tiny_model_dir, new_run(tmp_path))
    calm.run()
    run_dir = RunDir.open(calm.run_dir.path)
    run_dir.acquire()
    # The next update, step 4's, destroys the policy; step 5 is the first to sample from it. What it says
    # then hangs on roundings, and with it which alarm is first, at step 5 or soon after.
    spec = tiny_spec(optimizer={"lr": 1.0}, train={**sizes, "steps": 20}, tripwires={"on_alarm": "stop"})
    made = Composition(spec, tiny_model_dir, run_dir)
    with pytest.raises(RunStopped, match=r"step [5-7] raised ") as caught:
        made.run()
    path, (before, last) = run_dir.checkpoints_path, run_dir.checkpoint_steps()[-2:]
    assert 4 <= last <= 6
    assert (
        f"goes on from checkpoint step-{last:06d}, whose weights raised this alarm; remove "
        f"{path}/step-{last:06d} to go on from step-{before:06d} before it"
    ) in str(caught.value)
    verify_directory(path / "step-000003")
    # Back at the last step before the collapse, the run goes on as if nothing had been.
    for step in range(4, last + 1):
        shutil.rmtree(path / f"step-{step:06d}")
    run_dir = RunDir.open(run_dir.path)
    run_dir.acquire()
    Composition(tiny_spec(train={**sizes, "steps": 4}), tiny_model_dir, run_dir).run()
    lengths = [line["reply_tokens_mean"] for line in run_dir.metrics.read()]
    assert len(lengths) == 4
    assert max(lengths) < 4 * min(lengths)


def compose(root: Path, model_dir: Path, **sections: Any) -> Composition:
    reference = {"kl_beta": 0.05} | sections.pop("reference", {})
    return Composition(tiny_spec(reference=reference, **sections), model_dir, new_run(root))


def shift(roles: Roles) -> Roles:
    """Have a reference that is not the weights it says it is."""
    learner = learner_of(roles)
    right = learner.score

    def score(groups: Any, temperature: float, role: str | None = None) -> list[FloatArray]:
        scores = right(groups, temperature, role)
        return [one - np.float32(0.5) for one in scores] if role == "reference" else scores

    learner.score = score  # type: ignore[method-assign]
    return roles


def test_opt_1_the_gate_refuses_a_reference_that_differs_at_the_start(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    made = compose(tmp_path, tiny_model_dir)
    with pytest.raises(CheckRefused, match="are the same weights and disagree about the same tokens"):
        made.run(shift)


def test_opt_1_a_run_with_a_penalty_starts_at_0_and_stays_close(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The same run with a strong penalty ends nearer to where it began, by its own measure."""
    moved = {}
    for beta in (1e-6, 3.0):
        made = compose(tmp_path / str(beta), tiny_model_dir, reference={"kl_beta": beta}, train={"steps": 6})
        roles = made.run()
        gates = [event.detail for event in made.notes.events if event.kind is EventKind.GATE]
        assert any(detail.startswith("mean gap to the reference 0 nats") for detail in gates)
        moved[beta] = asyncio.run(distance(roles, read_rollouts(made.run_dir.rollouts_path(6))))
    assert moved[3.0] > 0.0
    assert moved[3.0] < 0.7 * moved[1e-6]


async def distance(roles: Roles, rollouts: Sequence[Rollout]) -> float:
    """Return the divergence of the policy from its reference, in nats per token that it sampled."""
    groups = share_prompts([(one.turns[0].token_ids, pack_reply(one.turns, 0.0, 0.0)) for one in rollouts])
    asked = [await roles.learner.score(groups, 1.0, role) for role in (None, "reference")]
    own, theirs = map(np.concatenate, asked)
    return float((own - theirs).mean())
