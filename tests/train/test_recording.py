"""What a run records of its rollouts is what its learner was given, and what became of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strop.cluster import Roles
from strop.engine.native import NativeEngine
from strop.engine.pool import EnginePool
from strop.environments import RolloutPlan, choose_environment, run_group
from strop.environments.worlds import BuiltInWorld
from strop.errors import Interrupted
from strop.hardware.busy_clock import BusyClock
from strop.policy.learner import Learner, LossTerm, Term
from strop.policy.optimizer import StepPlan, StepReport
from strop.record.rollouts import StoredRollout, list_rows, read_row
from strop.rollout import Group
from strop.tasks import Task
from strop.train import EvalSummary
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import (
    Composition,
    StopAfterOne,
    learner_of,
    new_run,
    summary,
    take_up,
    tiny_spec,
)
from tests.train.test_asynchronous import FlatOnEven, compose
from tests.train.test_turns import EarningLetters, LettersSpec

Told = dict[tuple[bytes, bytes], set[bytes]]
"""By what came before a reply and the reply itself: the advantages of its tokens."""


class Overheard:
    """Keeps what a learner is given of each step."""

    def __init__(self, learner: Learner) -> None:
        self._step_terms = learner.step_terms
        learner.step_terms = self.step_terms  # type: ignore[method-assign]
        self.told: list[Told] = []
        self.num_tokens: list[int] = []

    def step_terms(self, terms: Sequence[Term], plan: StepPlan | None = None) -> StepReport:
        told: Told = defaultdict(set)
        num_tokens = 0
        (term,) = terms
        assert isinstance(term, LossTerm)
        for group in term.groups:
            for reply in group.replies:
                ids = np.concatenate([group.prompt_ids, reply.token_ids])
                is_scored = np.concatenate([np.zeros(len(group.prompt_ids), bool), reply.is_scored])
                worth = np.full(len(ids), np.nan, np.float32)
                worth[is_scored] = (
                    reply.advantage if reply.token_advantages is None else reply.token_advantages
                )
                edges = np.flatnonzero(np.diff(is_scored.astype(int))) + 1
                for start, end in zip([*edges[::2]], [*edges[1::2], len(ids)], strict=False):
                    told[ids[:start].tobytes(), ids[start:end].tobytes()].add(worth[start:end].tobytes())
                num_tokens += int(is_scored.sum())
        self.told.append(dict(told))
        self.num_tokens.append(num_tokens)
        return self._step_terms(terms, plan)


def overhear(made: Composition) -> Overheard:
    """Run, and return what the learner was given."""
    kept: list[Overheard] = []

    def change(roles: Roles) -> Roles:
        kept.append(Overheard(learner_of(roles)))
        return roles

    made.run(change)
    return kept[0]


def read_stored(path: Path) -> list[StoredRollout]:
    data = path.read_bytes()
    return [read_row(data, path.name, row.index) for row in list_rows(data, path.name)]


def compose_with(root: Path, model_dir: Path, asked: Task, /, **sections: Any) -> Composition:
    train = {"steps": 1, "prompts_per_step": 3, "group_size": 4, **sections.pop("train", {})}
    spec = tiny_spec(train=train, **sections)
    return Composition(spec=spec, model_dir=model_dir, run_dir=new_run(root), task=asked)


GUESS = {"task": {"name": "guess-number"}}
CASES: dict[str, tuple[Task, dict[str, Any]]] = {
    "group-mean": (SpellTask(), {}),
    "per-turn": (
        BuiltInWorld(LettersSpec(), EarningLetters),
        {**GUESS, "algorithm": {"credit": "turn", "turn_discount": 0.9}},
    ),
    "reward-kl": (SpellTask(), {"algorithm": {"name": "reinforce_pp"}, "reference": {"kl_beta": 0.5}}),
    "mini-batches": (SpellTask(), {"train": {"mini_batches": 3}}),
}


@pytest.mark.parametrize("case", CASES)
def test_recorded_advantages_are_those_that_the_learner_was_given(
    case: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    task, sections = CASES[case]
    made = compose_with(tmp_path, tiny_model_dir, task, **sections)
    learner = overhear(made)
    told: Told = defaultdict(set)
    for part in learner.told:
        for key, worths in part.items():
            told[key] |= worths
    num_tokens = 0
    for stored in read_stored(made.run_dir.rollouts_path(1)):
        worth_of = {
            id(turn): worth for turn, worth in zip(stored.rollout.turns, stored.advantages, strict=True)
        }
        for sample in stored.rollout.samples:
            before = np.zeros(0, np.int32)
            for turn in sample:
                worth = worth_of[id(turn)]
                key = (before.tobytes(), turn.token_ids.tobytes())
                before = np.concatenate([before, turn.token_ids])
                if worth is None:
                    assert not turn.is_sampled or key not in told
                    continue
                assert worth.dtype == np.float32
                assert worth.tobytes() in told[key]
                num_tokens += len(worth)
    assert num_tokens == sum(learner.num_tokens) > 0


def test_the_fate_of_each_rollout_is_recorded(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = compose(
        tmp_path,
        tiny_model_dir,
        task=FlatOnEven(),
        zero_variance="resample",
        max_staleness=1,
        prompts_per_step=2,
        steps=3,
    )
    made.run()
    ages: set[int | None] = set()
    num_filtered = 0
    for line in made.notes.steps:
        step = int(line["step"])
        trained = read_stored(made.run_dir.rollouts_path(step))
        assert {one.status for one in trained} == {"trained"}
        # Every group of the batch has a difference: those of even examples were replaced.
        assert len({one.rollout.example.example_id for one in trained}) == 2
        assert all(int(one.rollout.example.fields["n"]) % 2 for one in trained)
        assert line["zero_variance_frac"] == 0.0
        ages |= {one.staleness for one in trained}
        assert max(one.staleness or 0 for one in trained) == line["staleness_max"]
        path = made.run_dir.discarded_path(step)
        if not line.get("num_filtered_groups"):
            assert not path.exists()
            continue
        discarded = read_stored(path)
        num_filtered += 1
        assert 0.0 < line["wasted_token_frac"] < 1.0
        assert len(discarded) == 4 * line["num_filtered_groups"]
        assert {one.status for one in discarded} == {"filtered"}
        assert all(not any(worth is not None for worth in one.advantages) for one in discarded)
        kept = {one.rollout.example.example_id for one in trained}
        assert not kept & {one.rollout.example.example_id for one in discarded}
    assert ages == {0, 1}
    assert num_filtered


def test_what_gave_no_gradient_has_no_advantage(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = compose_with(tmp_path, tiny_model_dir, FlatOnEven())
    made.run()
    found = read_stored(made.run_dir.rollouts_path(1))
    by_status = {one.status: one.advantages for one in found}
    assert by_status.keys() == {"trained", "skipped"}
    assert by_status["skipped"] == (None, None)
    assert all(one.staleness == 0 for one in found)


def test_what_was_discarded_is_cut_off_on_resume(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = compose_with(tmp_path, tiny_model_dir, FlatOnEven(), algorithm={"zero_variance": "resample"})
    made.run()
    assert made.run_dir.discarded_path(1).exists()
    with made.run_dir as run:
        run.truncate_after(1)
        assert run.discarded_path(1).exists()
        run.truncate_after(0)
        assert not run.discarded_path(1).exists()
    # Nor is it among what was trained while it is there.
    assert made.run_dir.rollouts_files() == []


def read_spans(made: Composition) -> list[tuple[int, dict[str, Any]]]:
    lines = made.run_dir.timeline.read_lines()
    return [(line["step"], span) for line in lines for span in line["spans"]]


async def look(step: int, on_progress: Callable[[], None]) -> EvalSummary:
    await asyncio.sleep(0.01)
    return summary(step)


def test_a_run_tells_when_who_did_what(tmp_path: Path, tiny_model_dir: Path) -> None:
    before = time.time()
    made = compose_with(
        tmp_path,
        tiny_model_dir,
        FlatOnEven(),
        train={"steps": 2, "checkpoint_every": 1},
        eval={"every": 2},
        algorithm={"zero_variance": "resample"},
    )
    made.evaluate = look
    made.run()
    spans = read_spans(made)
    assert all(before <= span["start"] < span["end"] <= time.time() + 0.001 for _, span in spans)
    names = {(step, span["lane"], span["name"]) for step, span in spans}
    certain = {
        (0, "learner", "gate"),
        *((step, "learner", "evaluate") for step in (0, 2)),
        *((step, "learner", name) for step in (1, 2) for name in ("wait", "learn", "record", "checkpoint")),
        *((step, *one) for step in (1, 2) for one in (("environments", "group"), ("engine", "generate"))),
    }
    # What may take less than is shown.
    brief = {(step, *one) for step in (1, 2) for one in (("learner", "sync"), ("verifier", "verify"))}
    assert certain <= names <= certain | brief
    for step in (1, 2):
        wait, *_ = (span for at, span in spans if (at, span["name"]) == (step, "wait"))
        groups = [span for at, span in spans if at == step and span["lane"] == "environments"]
        line = made.notes.steps[step - 1]
        ended = Counter(span["detail"]["status"] for span in groups)
        assert ended == {"trained": 3, "filtered": line["num_filtered_groups"]}
        assert len({span["detail"]["number"] for span in groups}) == len(groups)
        ids = {one.rollout.example.example_id for one in read_stored(made.run_dir.rollouts_path(step))}
        assert ids == {span["detail"]["example"] for span in groups if span["detail"]["status"] == "trained"}
        # While the step waits for them, groups are attempted, and the engine works for these.
        for span in groups + [span for at, span in spans if (at, span["lane"]) == (step, "engine")]:
            assert wait["start"] - 0.002 <= span["start"] < span["end"] <= wait["end"] + 0.002


def test_each_of_several_engines_has_a_lane(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = compose_with(tmp_path, tiny_model_dir, SpellTask(), train={"prompts_per_step": 4})

    def change(roles: Roles) -> Roles:
        other = NativeEngine(learner_of(roles).model, roles.tokenizer)
        return replace(roles, engine=EnginePool({"engine-0": roles.engine, "engine-1": other}))

    made.run(change)
    lanes = {span["lane"] for step, span in read_spans(made) if step == 1}
    assert {"engine 0", "engine 1"} <= lanes
    assert "engine" not in lanes


def test_workers_elsewhere_tell_their_engines_and_judges(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = compose_with(tmp_path, tiny_model_dir, SpellTask())
    busy = {"engine-0": BusyClock(), "engine-1": BusyClock(), "verifier": BusyClock()}

    def change(roles: Roles) -> Roles:
        async def attempt(plans: Sequence[RolloutPlan]) -> Group:
            begun_at = time.perf_counter()
            group = await run_group(choose_environment(made.task), roles.engine, roles.tokenizer, plans)
            for clock in busy.values():
                clock.add((begun_at, time.perf_counter()))
            return group

        return replace(roles, run_group=attempt, busy=busy)

    made.run(change)
    lanes = {span["lane"] for step, span in read_spans(made) if step == 1}
    assert lanes == {"learner", "environments", "engine 0", "engine 1", "verifier"}


def test_a_resumed_run_tells_each_step_once(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = compose_with(tmp_path, tiny_model_dir, SpellTask(), train={"steps": 3, "checkpoint_every": 2})
    made.notes = StopAfterOne()
    with pytest.raises(Interrupted):
        made.run()
    again = take_up(made)
    again.run()
    waits = [step for step, span in read_spans(again) if span["name"] == "wait"]
    assert waits == [1, 2, 3]
