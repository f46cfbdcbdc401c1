"""Incidents that an alarm while a run goes on must name, injected into real runs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strop.cluster import Roles
from strop.engine import Completion, Engine, GenerationRequest
from strop.errors import RunStopped
from strop.evaluate import EvalSettings, Validity
from strop.io import verify_directory
from strop.policy.learner import LossTerm, Term
from strop.policy.objective import ScoredTokens, TokenTerms
from strop.policy.optimizer import StepPlan, StepReport
from strop.record import Event
from strop.record.rollouts import read_rollouts
from strop.rollout import Example, FailureOwner, FinishReason, Message, Outcome, Split, make_example
from strop.tasks.generated import Arithmetic
from strop.tasks.mathematics import last_number
from strop.tokenizer import Tokenizer
from strop.train.watch.trends import NUM_STOP
from tests.evaluate.arithmetic_world import add, make_engine, make_spec, make_tokenizer
from tests.fixtures.evaluating import evaluate_task
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import Composition, Notes, learner_of, new_run, tiny_spec

ACCEPT = {
    "accept": "weights: a random model for a test; audit: it is paid for little; parity: said by a script"
}


def alarms_of(made: Composition, cause: str) -> list[Event]:
    return [
        event for event in made.run_dir.events.read() if event.cause == cause and event.kind == "tripwire"
    ]


class Adds(SpellTask):
    """What is n + 1? The last number counts."""

    def __init__(self) -> None:
        super().__init__(stop_strings=())

    def examples(self, split: Split) -> Sequence[Example]:
        first = 0 if split is Split.TRAIN else 12
        return [make_example(self.name, {"n": n}, str(n + 1)) for n in range(first, first + 12)]

    def render(self, example: Example) -> tuple[Message, ...]:
        return (Message(role="user", content=f"What is {example.fields['n']} + 1?"),)

    async def verify(self, example: Example, text: str) -> Outcome:
        found = last_number(text)
        is_right = found is not None and found.text == example.answer
        return Outcome(parts={"right": float(is_right)}, is_correct=is_right, format_ok=True)


@dataclass
class Says:
    """An engine under which the policy says given texts, with the log-probabilities that it has for them."""

    engine: Engine
    tokenizer: Tokenizer
    texts: Sequence[str]
    num_said: int = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        text = self.texts[self.num_said % len(self.texts)]
        self.num_said += 1
        ids = np.append(self.tokenizer.encode(text), self.tokenizer.eos_id).astype(np.int32)
        score = await self.engine.score(request.prompt_ids, ids, request.sampling.temperature)
        return Completion(
            token_ids=ids,
            logprobs=score.logprobs,
            text=text,
            finish_reason=FinishReason.EOS,
            policy_version=score.policy_version,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def saying(*texts: str) -> Callable[[Roles], Roles]:
    """Exchange the engine of a run for one that says these texts, one after the other."""
    return lambda roles: replace(
        roles, engine=Says(engine=roles.engine, tokenizer=roles.tokenizer, texts=texts)
    )


@pytest.mark.parametrize(
    ("behind", "is_running"),
    [
        (". That is one more.", False),
        ("\n\nNext riddle => A farmer has 12 cows, sells 5. How many are left?\nReply => 7", True),
    ],
)
def test_rew_3_a_model_that_goes_on_to_questions_of_its_own_is_named(
    tmp_path: Path, tiny_model_dir: Path, behind: str, *, is_running: bool
) -> None:
    """Incident: 81 % of the replies ran on to an invented question, in a format that was no stop."""
    made = Composition(
        tiny_spec(train={"steps": 1, **ACCEPT}, tripwires={"max_zero_variance_frac": None}),
        tiny_model_dir,
        new_run(tmp_path),
        task=Adds(),
    )
    made.run(saying(*(f"{n}{behind}" for n in (3, 7, 11))))
    (line,) = made.notes.steps
    assert line["runaway_frac"] == float(is_running)
    found = alarms_of(made, "runaway")
    assert len(found) == is_running
    for alarm in found:
        assert alarm.detail.startswith("runaway_frac=1 is above 0.3: replies go on")
        assert "add what begins it to task.stop; for example '" in alarm.detail
        assert behind.strip()[:12] in alarm.detail
        assert len(alarm.example_ids) == 3


class PaysTooMuch(SpellTask):
    """After the gate, every third reply earns what no reply can."""

    def __init__(self, notes: Notes, score: float) -> None:
        super().__init__()
        self.notes = notes
        self.score = score
        self.calls = itertools.count()

    async def verify(self, example: Example, text: str) -> Outcome:
        if self.notes.is_past_gate and next(self.calls) % 3 == 0:
            return Outcome(parts={"spelled": self.score}, is_correct=True)
        return await super().verify(example, text)


@pytest.mark.parametrize(
    ("score", "cause"), [(2.39, "ceiling"), (-1.0, "impossible_value"), (float("inf"), "impossible_value")]
)
def test_rew_10_a_score_beyond_its_bounds_is_masked_and_named(
    tmp_path: Path, tiny_model_dir: Path, score: float, cause: str
) -> None:
    """Incident: an accuracy of 2.39 came from a simulated scorer and was used as a reward."""
    notes = Notes()
    made = Composition(
        tiny_spec(train={"steps": 2}),
        tiny_model_dir,
        new_run(tmp_path),
        task=PaysTooMuch(notes, score),
        notes=notes,
    )
    made.run()
    assert [event.step for event in alarms_of(made, cause)] == [0, 1]
    for line, alarm in zip(notes.steps, alarms_of(made, cause), strict=True):
        rollouts = read_rollouts(made.run_dir.rollouts_path(int(line["step"])))
        lost = [rollout for rollout in rollouts if rollout.outcome.failure is not None]
        assert len(lost) == 4  # of 12
        assert {(r.outcome.failure.owner, r.outcome.failure.kind) for r in lost if r.outcome.failure} == {
            (FailureOwner.TASK, cause)
        }
        assert {rollout.outcome.reward for rollout in lost} == {None}
        assert {rollout.outcome.is_correct for rollout in lost} == {None}
        # What was said stays, for whoever mends the grader.
        said = {rollout.outcome.parts["spelled"] for rollout in lost}
        assert said == ({None} if score == float("inf") else {score})
        assert line["failed_frac"] == pytest.approx(4 / 12)
        assert (0.0 <= line["reward_mean"] <= 0.4, line["accuracy"]) == (True, 0.0)
        scored = [rollout for rollout in rollouts if rollout.outcome.failure is None]
        assert line["num_scored_tokens"] == sum(rollout.num_sampled_tokens for rollout in scored)
        assert set(alarm.example_ids) == {rollout.example.example_id for rollout in lost}
        assert "4 of 12 rollouts have a score that cannot be, and are not trained on" in alarm.detail
    assert notes.causes("rollout_lost") == [cause]


def test_rew_10_a_grader_that_only_gives_impossible_scores_ends_the_run(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: a score of 2.39 of 1 was trained on for ten steps, and nothing said so."""
    notes = Notes()
    task = PaysTooMuch(notes, 2.39)
    task.calls = itertools.repeat(0)  # type: ignore[assignment]
    made = Composition(tiny_spec(), tiny_model_dir, new_run(tmp_path), task=task, notes=notes)
    with pytest.raises(
        RunStopped, match=r"all 12 rollouts of step 1 failed: task, ceiling: a score of 2\.39"
    ):
        made.run()
    assert made.run_dir.metrics.read() == []
    assert len(alarms_of(made, "ceiling")) == 1


class PaysTooMuchForAll(Arithmetic):
    """A simulated scorer."""

    async def verify(self, example: Example, text: str) -> Outcome:
        return Outcome(parts={"accuracy": 2.39}, is_correct=True)


def test_rew_10_an_evaluation_counts_an_impossible_score_as_none(tmp_path: Path) -> None:
    """Incident: an accuracy of 2.39 stood in a table."""
    tokenizer = make_tokenizer(tmp_path)
    result = asyncio.run(
        evaluate_task(
            task=PaysTooMuchForAll(make_spec()),
            engine=make_engine(tokenizer, add),
            tokenizer=tokenizer,
            settings=EvalSettings(run_seed=0, step=0, split=Split.HELD_OUT),
            model_digest="m",
            trained_ids=frozenset(),
            max_positions=None,
        )
    )
    assert result.validity is Validity.VERIFIER
    assert (result.greedy.accuracy, result.greedy.reward_mean) == (None, None)
    assert {cause.failure.kind for cause in result.causes} == {"ceiling"}


class PaysForBrevity(SpellTask):
    """Each prompt has a word of its own; a short reply earns a part of the marks, whatever it says."""

    def examples(self, split: Split) -> Sequence[Example]:
        first = 0 if split is Split.TRAIN else 60
        return [make_example(self.name, {"n": n}, f"Q{n}Z") for n in range(first, first + 60)]

    async def verify(self, example: Example, text: str) -> Outcome:
        is_right = text == example.answer
        return Outcome(parts={"spelled": 1.0 if is_right else 0.5 / (1 + len(text))}, is_correct=is_right)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_alarm", "lr"),
    # So slow that it comes after the first steps, which later ones are compared with; and within them.
    [("stop-on-collapse", 7e-4), ("warn", 3e-3), ("stop-on-collapse", 3e-3)],
)
def test_opt_6_a_collapse_ends_the_run_by_itself_with_the_checkpoint_before_it(
    tmp_path: Path, tiny_model_dir: Path, on_alarm: str, lr: float
) -> None:
    """Incident: reward rose at an accuracy of 0, replies became one word, and no alarm was raised."""
    tripwires = {} if on_alarm == "stop-on-collapse" else {"on_alarm": on_alarm}
    train = {"prompts_per_step": 6, "group_size": 6, "checkpoint_every": 5, "keep_checkpoints": 9, **ACCEPT}
    train["steps"] = 24 if on_alarm == "warn" else 40
    made = Composition(
        tiny_spec(train=train, tripwires=tripwires, optimizer={"lr": lr}),
        tiny_model_dir,
        new_run(tmp_path),
        task=PaysForBrevity(),
    )
    if on_alarm == "warn":
        made.run()
        assert made.run_dir.is_finished
        assert len(alarms_of(made, "reply_collapse")) > NUM_STOP
        return
    with pytest.raises(RunStopped) as caught:
        made.run()
    lines, step = made.notes.steps, len(made.notes.steps)
    assert lines[-1]["reward_mean"] > 1.3 * lines[0]["reward_mean"]
    assert {line["accuracy"] for line in lines} == {0.0}
    assert step < 32
    said = str(caught.value)
    assert f"for {NUM_STOP} steps in a row the policy collapses: " in said
    assert "reply_collapse" in said
    assert "tripwires.on_alarm='warn' goes on in any case" in said
    # The weights behind the first of these steps are suspect; the checkpoint before them is not.
    good = [kept for kept in made.run_dir.checkpoint_steps() if kept < step - NUM_STOP][-1]
    assert f"to go on from step-{good:06d} before it" in said or f"from checkpoint step-{good:06d}." in said
    verify_directory(made.run_dir.checkpoint_path(good))
    (alarm, *_) = alarms_of(made, "reply_collapse")
    assert alarm.detail.count("; for example ") == 1
    assert len(alarm.example_ids) > 1
    assert made.run_dir.events.read()[-1].kind == "stop"


def nothing(tokens: ScoredTokens, /) -> TokenTerms:
    """A loss that was zeroed out."""
    zero_M = 0.0 * tokens.advantage_M
    return TokenTerms(loss_N=zero_M, grad_N=zero_M)


@pytest.mark.parametrize("is_zeroed", [True, False])
def test_cfg_4_a_loss_that_was_zeroed_out_is_named_in_its_first_step(
    tmp_path: Path, tiny_model_dir: Path, *, is_zeroed: bool
) -> None:
    """Incident: tests of losses looked at shapes alone, and forked loops lost what they were for."""

    def zero_out(roles: Roles) -> Roles:
        learner = learner_of(roles)
        step_terms = learner.step_terms

        def step(terms: Sequence[Term], plan: StepPlan | None = None) -> StepReport:
            return step_terms(
                [replace(term, token_terms=nothing) for term in terms if isinstance(term, LossTerm)], plan
            )

        if is_zeroed:
            learner.step_terms = step  # type: ignore[method-assign]
        return roles

    made = Composition(tiny_spec(train={"steps": 1}), tiny_model_dir, new_run(tmp_path))
    made.run(zero_out)
    (line,) = made.notes.steps
    assert line["num_signal_tokens"] > 0.0
    found = alarms_of(made, "no_gradient")
    assert len(found) == is_zeroed
    assert (line["grad_norm"] == 0.0) is is_zeroed
