"""Incidents of the group on data that this path can meet, by id."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.cluster import Roles
from strop.engine import Completion, Engine, GenerationRequest
from strop.environments import run_group
from strop.errors import CheckRefused, RunStopped
from strop.record.rollouts import read_rollouts
from strop.rollout import Example, Group, IntArray, Message, Outcome, Split
from strop.tasks import build_task, render_prompt
from strop.tasks.rows.judged_rows import PresetSpec
from strop.train.batch import ExampleSchedule
from tests.fixtures.spell import NUM_TRAIN, SpellTask
from tests.fixtures.tiny_run import Composition, new_run, tiny_spec


def ids_of(folder: Path, rows: list[dict[str, str]], num_train: int | None = None) -> dict[str, str]:
    """Write the rows as training data and return the ids by question."""
    folder.mkdir()
    test = {"question": "0 + 0?", "answer": "#### 0"}
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text(json.dumps(test) + "\n")
    task = build_task(PresetSpec(name="gsm8k", source=str(folder), num_train=num_train))
    return {example.fields["question"]: example.example_id for example in task.examples(Split.TRAIN)}


def test_dat_1_ids_survive_filtering_and_reordering(tmp_path: Path) -> None:
    """Incident: ids were positional, so 1,960 of 4,691 listed ones matched nothing after a filter."""
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(20)]
    all_ids = ids_of(tmp_path / "all", rows)
    assert len(set(all_ids.values())) == 20
    filtered = ids_of(tmp_path / "filtered", rows[1::3])
    shuffled = ids_of(tmp_path / "shuffled", random.Random(0).sample(rows, 20))
    assert shuffled == all_ids
    assert filtered == {question: all_ids[question] for question in filtered}
    assert ids_of(tmp_path / "limited", rows, num_train=5).items() <= all_ids.items()


class LosesSome(SpellTask):
    """Judges short replies only, as a verifier that runs out of time now and then does."""

    async def verify(self, example: Example, text: str) -> Outcome:
        if len(text) > 8:
            raise TimeoutError
        return await super().verify(example, text)


TWICE = 3


class ServesOneTwice(LosesSome):
    """Has an order in which one example comes twice in each epoch, and a verifier that loses some."""

    is_ordered = True

    def epoch_order(self, seed: int, epoch: int) -> Sequence[int]:
        return [*range(NUM_TRAIN), TWICE]


class Late:
    """Answers one example of a prompt's number long after all others."""

    def __init__(self, inner: Engine, prompt_ids: IntArray) -> None:
        self._inner = inner
        self._late = prompt_ids.tobytes()
        self.num_late = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        completion = await self._inner.generate(request)
        if request.prompt_ids.tobytes() == self._late:
            self.num_late += 1
            await asyncio.sleep(0.05)
        return completion

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_dat_2_delays_losses_and_duplicates_conserve_every_attempt(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: late copies cancelled those of the new epoch; duplicates collapsed into one."""
    # 13 uses an epoch at 5 a step: 13 steps are five epochs, and most epochs begin inside a step.
    spec = tiny_spec(train={"steps": 13, "prompts_per_step": 5, "checkpoint_every": 13})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=ServesOneTwice())
    late: list[Late] = []

    def delay_the_last(roles: Roles) -> Roles:
        example = made.task.examples(Split.TRAIN)[-1]
        _, prompt_ids = render_prompt(roles.tokenizer, made.task.render(example), "auto")
        late.append(Late(roles.engine, prompt_ids))
        return replace(roles, engine=late[0])

    made.run(delay_the_last)
    # 5 uses of 4 attempts each, and the gate's probes if it asked for that example.
    assert late[0].num_late >= 20
    uses: Counter[int] = Counter()
    num_lost = 0
    for step in range(1, 14):
        rollouts = read_rollouts(made.run_dir.rollouts_path(step))
        assert len(rollouts) == 20
        uses.update(int(r.example.fields["n"]) for r in rollouts if r.sample_index == 0)
        num_lost += sum(rollout.outcome.failure is not None for rollout in rollouts)
    assert num_lost > 0
    assert uses == dict.fromkeys(range(NUM_TRAIN), 5) | {TWICE: 10}
    assert "fate_leak" not in made.notes.causes("tripwire")


@pytest.mark.parametrize("fault", ["dropped", "doubled", "foreign"])
def test_dat_2_a_fate_that_is_lost_or_doubled_is_an_alarm(
    fault: str, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: as above; nobody counted, so nobody saw which prompts were gone."""
    num_groups = 0

    async def leak(*arguments: Any) -> Group:
        nonlocal num_groups
        num_groups += 1
        is_first = num_groups == 1
        first = await run_group(*arguments)
        if not is_first:
            return first
        rollouts = {
            "dropped": first.rollouts[:-1],
            "doubled": (*first.rollouts[:-1], first.rollouts[0]),
            "foreign": (*first.rollouts[:-1], replace(first.rollouts[-1], sample_index=99)),
        }[fault]
        return replace(first, rollouts=rollouts)

    monkeypatch.setattr("strop.train.generation.run_group", leak)
    spec = tiny_spec(tripwires={"on_alarm": "stop"})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=SpellTask())
    with pytest.raises(RunStopped, match="fate_leak"):
        made.run()
    (alarm,) = (event for event in made.notes.events if event.cause == "fate_leak")
    # A doubled one stands in the place of another, which is lost.
    num_leaked = 2 if fault == "doubled" else 1
    assert f"{num_leaked} of 12 attempts of the step did not end in exactly one fate" in alarm.detail
    assert f"and {int(fault == 'foreign')} ended that nobody asked for" in alarm.detail
    assert len(alarm.example_ids) == 1


class OneInTwelveIsLong(SpellTask):
    """Has a training prompt that leaves no room for a reply."""

    def render(self, example: Example) -> tuple[Message, ...]:
        content = "#" * 600 if example.fields["n"] == 7 else f"#{example.fields['n']}"
        return (Message(role="user", content=content),)


def test_dat_4_overlong_prompts_are_refused_above_the_allowance(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Incident: overlong prompts gave empty outputs that were retried for ever."""
    made = Composition(tiny_spec(), tiny_model_dir, new_run(tmp_path), task=OneInTwelveIsLong())
    with pytest.raises(
        CheckRefused, match=r"prompt: the longest prompt has 6\d\d tokens .* 512 pos"
    ) as caught:
        made.run()
    assert made.run_dir.metrics.read() == []
    # 1 / 12 = 8.3 %, of which the default allows 1 %.
    message = str(caught.value)
    assert (
        "1 of 12 measured prompts (8.3%) leave no room for a reply, and task.max_too_long_frac=0.01"
        in message
    )
    assert caught.value.exit_code == 76


@pytest.mark.parametrize("prompts_per_step", [1, 3])
def test_dat_4_within_the_allowance_they_have_a_fate_and_the_run_ends(
    tmp_path: Path, tiny_model_dir: Path, prompts_per_step: int
) -> None:
    """Incident: as above. Two epochs here, at one and at three prompts a step.

    With one prompt a step the whole step is too long; that stops nothing either.
    """
    steps = 2 * NUM_TRAIN // prompts_per_step
    spec = tiny_spec(
        task={"name": "arithmetic", "max_too_long_frac": 0.1},
        train={"steps": steps, "prompts_per_step": prompts_per_step, "checkpoint_every": steps},
    )
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=OneInTwelveIsLong())
    made.run()
    assert [line["step"] for line in made.run_dir.metrics.read()] == list(range(1, steps + 1))
    (shown,) = (event.detail for event in made.notes.events if event.cause == "prompt")
    assert "1 of 12 measured prompts (8.3%) leave no room for a reply" in shown
    served, lost = [], []
    for step in range(1, steps + 1):
        rollouts = read_rollouts(made.run_dir.rollouts_path(step))
        too_long = [rollout for rollout in rollouts if rollout.outcome.is_too_long]
        served += [int(r.example.fields["n"]) for r in rollouts if r.sample_index == 0]
        lost += too_long
        line = made.notes.steps[step - 1]
        assert line["prompt_too_long_frac"] == len(too_long) / len(rollouts)
        assert line["failed_frac"] == 0.0
    # Tried once per epoch and attempt, never again; the prompt was rendered and nobody was asked.
    assert len(lost) == 2 * 4
    for rollout in lost:
        assert rollout.example.fields["n"] == 7
        assert rollout.outcome.failure is not None
        assert (rollout.outcome.failure.owner, rollout.outcome.failure.kind) == ("task", "prompt_too_long")
        assert [turn.role for turn in rollout.turns] == ["prompt"]
    noted = [event for event in made.notes.events if event.cause == "prompt_too_long"]
    assert [(event.kind.value, event.example_ids) for event in noted] == [
        ("rollout_lost", (lost[0].example.example_id,))
    ] * 2
    # Two epochs: the same set, in the order that the schedule declares.
    first, second = served[:NUM_TRAIN], served[NUM_TRAIN:]
    assert sorted(first) == sorted(second) == list(range(NUM_TRAIN))
    schedule = ExampleSchedule(
        made.task.examples(Split.TRAIN), seed=spec.seed, prompts_per_step=prompts_per_step
    )
    declared = [int(example.fields["n"]) for step in range(steps) for example in schedule.examples(step)]
    assert served == declared
