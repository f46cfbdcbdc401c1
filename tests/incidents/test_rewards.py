"""Incidents of the group on rewards that tasks and the rollout path can meet, by id."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest

from strop.environments import Action, Environment, SingleTurn, run_group
from strop.errors import CheckRefused, RunStopped
from strop.record.rollouts import read_rollouts
from strop.rollout import (
    Example,
    FailureOwner,
    FinishReason,
    Group,
    Message,
    Outcome,
    make_example,
)
from strop.tasks import Task, build_task
from strop.tasks.answers import last_number, parse_number
from strop.tasks.generated.arithmetic import Arithmetic, ArithmeticSpec
from strop.tasks.mathematics.gsm8k import Gsm8k, Gsm8kSpec
from strop.tokenizer import Tokenizer
from tests.fixtures.builders import plan_for
from tests.fixtures.dummy_engine import DummyEngine
from tests.fixtures.judging import run_self_test
from tests.fixtures.scripted_environment import ScriptedEnvironment
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import Composition, Notes, new_run, tiny_spec
from tests.fixtures.tiny_tokenizer import tiny_tokenizer

SUM = make_example("arithmetic", {"a": 3, "b": 4}, "7")
WORD_PROBLEMS = [
    make_example("gsm8k", {"question": "6 times 3?", "solution": "6 * 3 = 18\n#### 18"}, "18"),
    make_example("gsm8k", {"question": "2 less 7?", "solution": "2 - 7 = -5\n#### -5"}, "-5"),
]


def gsm8k() -> Gsm8k:
    return Gsm8k(Gsm8kSpec(name="gsm8k", source="unused.jsonl"))


def judged(is_correct: bool) -> Outcome:
    return Outcome(parts={"correct": float(is_correct)}, is_correct=is_correct)


def attempt(
    make_environment: Callable[[], Environment], replies: Sequence[str], model_dir: Path, *, num_rollouts: int
) -> Group:
    tokenizer = Tokenizer.load(tiny_tokenizer(model_dir))
    plans = [plan_for(SUM, max_reply_tokens=64, sample_index=index) for index in range(num_rollouts)]
    return asyncio.run(run_group(make_environment, DummyEngine(tokenizer, replies), tokenizer, plans))


class TypeErrorVerifier(Arithmetic):
    """Hides a bug that raises TypeError."""

    def verify(self, example: Example, text: str) -> Outcome:
        return super().verify(example, text + 1)  # type: ignore[operator]


class SometimesBrokenVerifier(Arithmetic):
    """Raises on replies in capitals."""

    def verify(self, example: Example, text: str) -> Outcome:
        if text.isupper():
            raise TypeError(text)
        return super().verify(example, text)


def test_rew_1_verifier_with_a_type_error_fails_the_self_test() -> None:
    """Incident: a broad except hid a TypeError, and a benchmark read 0 % for every model."""
    task = TypeErrorVerifier(ArithmeticSpec())
    findings = run_self_test(task, [SUM])
    gold = [finding for finding in findings if finding.probe == "gold"]
    assert {finding.reward for finding in gold} == {None}
    (detail,) = {finding.detail for finding in gold}
    assert re.fullmatch(r"task, TypeError: .* \(test_rewards\.py:\d+\)", detail)


def test_rew_1_a_verifier_error_masks_the_rollout_and_never_scores_0(tmp_path: Path) -> None:
    """Incident: every exception or time-out in a verifier scored 0."""
    task = SometimesBrokenVerifier(ArithmeticSpec())
    # 3 of 10 replies make the verifier raise.
    replies = ["7", "8", "SEVEN", "7", "7", "EIGHT", "9", "7", "SEVEN", "7"]
    group = attempt(partial(SingleTurn, task), replies, tmp_path, num_rollouts=10)
    outcomes = [rollout.outcome for rollout in group.rollouts]
    assert [outcome.reward for outcome in outcomes] == [1, 0, None, 1, 1, None, 0, 1, None, 1]
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    assert {(failure.owner, failure.kind) for failure in failures} == {(FailureOwner.TASK, "TypeError")}
    assert "TypeError: SEVEN" in failures[0].detail


class ComparesWithSolution(Gsm8k):
    """Mutation: the answer is compared with the whole worked solution."""

    def verify(self, example: Example, text: str) -> Outcome:
        return judged(str(last_number(text)) == example.fields["solution"])


class DropsSigns(Gsm8k):
    """Mutation: the normaliser deletes minus signs from the reply."""

    def verify(self, example: Example, text: str) -> Outcome:
        return judged(last_number(text.replace("-", "")) == parse_number(example.answer or ""))


class DropsAllSigns(Gsm8k):
    """Mutation: the normaliser deletes minus signs from reply and gold."""

    def verify(self, example: Example, text: str) -> Outcome:
        gold = (example.answer or "").replace("-", "")
        return judged(last_number(text.replace("-", "")) == parse_number(gold))


class WantsOnePhrase(Gsm8k):
    """Mutation: only one phrase counts, so most right answers do not."""

    def verify(self, example: Example, text: str) -> Outcome:
        return judged(text == f"The answer is {example.answer}.")


class ReadsPrefix(Gsm8k):
    """Mutation: the gold number may be a part of a larger one."""

    def verify(self, example: Example, text: str) -> Outcome:
        return judged(f"#### {example.answer}" in text or super().verify(example, text).is_correct is True)


@pytest.mark.parametrize(
    ("mutated", "probes"),
    [
        (ComparesWithSolution, {"gold"}),
        (DropsSigns, {"gold", "sign"}),
        (DropsAllSigns, {"sign"}),
        (WantsOnePhrase, {"gold"}),
        (ReadsPrefix, {"factor"}),
    ],
)
def test_rew_2_mutated_verifiers_fail_the_self_test(mutated: type[Gsm8k], probes: set[str]) -> None:
    """Incident: answers were judged backwards, without signs, or only in one phrase."""
    assert run_self_test(gsm8k(), WORD_PROBLEMS) == []
    findings = run_self_test(mutated(Gsm8kSpec(name="gsm8k", source="unused.jsonl")), WORD_PROBLEMS)
    assert {finding.probe for finding in findings} == probes
    for finding in findings:
        # Both texts and the example can be read from the finding.
        assert finding.example_id in {example.example_id for example in WORD_PROBLEMS}
        assert repr(finding.text[:80]) in finding.describe()
        assert repr(finding.gold) in finding.describe()


def test_rew_3_an_invented_follow_up_question_is_not_judged() -> None:
    """Incident: extraction took the last number, and 81 % of replies ran on after the answer."""
    task = gsm8k()
    assert task.verify(WORD_PROBLEMS[0], "18 Q: 2+3? A: 5").is_correct
    assert task.verify(WORD_PROBLEMS[0], "18\n\nQuestion: 2+3?\nAnswer: 5").is_correct
    assert not task.verify(WORD_PROBLEMS[0], "5 Q: 6 times 3? A: 18").is_correct


def test_rew_3_stops_of_the_task_end_the_reply(tmp_path: Path) -> None:
    """Incident: only some of the markers that a model writes were stops."""
    tokenizer = Tokenizer.load(tiny_tokenizer(tmp_path))
    plan = plan_for(WORD_PROBLEMS[0], max_reply_tokens=64, prompt_format="base")
    engine = DummyEngine(tokenizer, ["18 Question: 2+3?"])
    group = asyncio.run(run_group(partial(SingleTurn, gsm8k()), engine, tokenizer, [plan]))
    (rollout,) = group.rollouts
    assert rollout.reply is not None
    assert (rollout.reply.text, rollout.reply.finish_reason) == ("18 ", FinishReason.STOP_STRING)
    assert rollout.outcome.reward == 1.0


class SubstringGrader(Arithmetic):
    """Accepts whatever is part of the gold answer, or holds it."""

    def verify(self, example: Example, text: str) -> Outcome:
        return judged((example.answer or "") in text or text.strip() in (example.answer or ""))


class EchoGrader(Arithmetic):
    """Pays for the words of the question."""

    def verify(self, example: Example, text: str) -> Outcome:
        return judged("What is" in text or super().verify(example, text).is_correct is True)


class Answerless(Arithmetic):
    """Knows no right reply."""

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return ()


@pytest.mark.parametrize(
    ("task", "probe"),
    [
        (SubstringGrader(ArithmeticSpec()), "empty"),
        (EchoGrader(ArithmeticSpec()), "echo"),
        (Answerless(ArithmeticSpec()), "gold"),
    ],
)
def test_rew_4_permissive_and_answerless_tasks_fail_the_self_test(task: Task, probe: str) -> None:
    """Incident: a substring match accepted one letter; an echoed question earned 0.65."""
    assert probe in {finding.probe for finding in run_self_test(task, [SUM])}


def test_rew_7_being_right_and_keeping_the_format_are_told_apart() -> None:
    """Incident: strict-format match fell from 58 % to 1.2 % while accuracy rose."""
    task = gsm8k()
    kept = [task.verify(WORD_PROBLEMS[0], "6 * 3 = 18\n#### 18") for _ in range(4)]
    drifted = [task.verify(WORD_PROBLEMS[0], "So it is 18, I think") for _ in range(4)]
    assert {outcome.is_correct for outcome in [*kept, *drifted]} == {True}
    assert [outcome.format_ok for outcome in [*kept, *drifted]] == [True] * 4 + [False] * 4


def judge_reply(example: Example, actions: tuple[Action, ...]) -> Outcome:
    return judged(bool(actions) and last_number(actions[-1].text) == Decimal(example.answer or "0"))


def test_rew_9_a_world_that_never_finishes_is_ended_and_paid(tmp_path: Path) -> None:
    """Incident: the done flag was never set in four experiments, so no reward was ever paid."""
    ask = [Message(role="user", content="3 + 4?")]

    def endless() -> Environment:
        return ScriptedEnvironment(ask, [ask], judge_reply, never_done=True)

    # Two turns each; the oracle reaches the maximum, idle talk the minimum.
    oracle = attempt(endless, ["7", "7"], tmp_path, num_rollouts=1)
    idle = attempt(endless, ["well", "well"], tmp_path, num_rollouts=1)
    assert [group.rollouts[0].outcome.reward for group in (oracle, idle)] == [1.0, 0.0]
    assert [turn.text for turn in oracle.rollouts[0].turns if turn.is_sampled] == ["7", "7"]


def test_rew_9_a_reward_that_raises_says_which_type(tmp_path: Path) -> None:
    """Incident: a reward object without a name failed every rollout, and nothing said so."""

    def nameless(example: Example, actions: tuple[Action, ...]) -> Outcome:
        raise AttributeError("name")

    world = partial(ScriptedEnvironment, [Message(role="user", content="3 + 4?")], [], nameless)
    group = attempt(world, ["7", "7", "7"], tmp_path, num_rollouts=3)
    failures = [rollout.outcome.failure for rollout in group.rollouts]
    assert [failure and (failure.owner, failure.kind) for failure in failures] == [
        (FailureOwner.TASK, "AttributeError")
    ] * 3


def test_built_in_tasks_pass_the_test_that_the_broken_ones_fail() -> None:
    tasks: list[Task] = [build_task(ArithmeticSpec()), gsm8k()]
    assert [run_self_test(tasks[0], [SUM]), run_self_test(tasks[1], WORD_PROBLEMS)] == [[], []]


class RaisesSometimes(SpellTask):
    """Raises on about a third of the replies of a random model, and on no reply of the self-test."""

    def verify(self, example: Example, text: str) -> Outcome:
        if len(text) > 8:
            raise TypeError("can only concatenate str")
        return super().verify(example, text)


def test_rew_1_a_verifier_that_raises_now_and_then_is_an_alarm(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Incident: every exception in a verifier scored 0."""
    made = Composition(tiny_spec(), tiny_model_dir, new_run(tmp_path), task=RaisesSometimes())
    made.run()
    assert set(made.notes.causes("tripwire")) == {"verifier_errors"}
    for line in made.notes.steps:
        rollouts = read_rollouts(made.run_dir.rollouts_path(int(line["step"])))
        lost = [rollout for rollout in rollouts if rollout.outcome.failure is not None]
        assert 0 < len(lost) < len(rollouts)
        assert line["failed_frac"] == pytest.approx(len(lost) / len(rollouts))
        for rollout in lost:
            assert rollout.outcome.reward is None
            assert rollout.outcome.failure is not None
            assert (rollout.outcome.failure.owner, rollout.outcome.failure.kind) == (
                FailureOwner.TASK,
                "TypeError",
            )
        # Masked: their tokens are in no normaliser. One that is left alone is compared with nobody.
        scored = [rollout for rollout in rollouts if rollout.outcome.failure is None]
        of_example = Counter(rollout.example.example_id for rollout in scored)
        counted = [rollout for rollout in scored if of_example[rollout.example.example_id] > 1]
        assert line["num_scored_tokens"] == sum(rollout.num_sampled_tokens for rollout in counted)


class RaisesInTraining(SpellTask):
    """Passes the self-test and raises on every reply of the policy."""

    def verify(self, example: Example, text: str) -> Outcome:
        if text in {"", " \n", "asdf", "a", "#0", example.answer} or text.startswith("#"):
            return super().verify(example, text)
        raise AttributeError("'Reward' object has no attribute '__name__'")


def test_rew_9_a_reward_that_always_raises_ends_the_run_with_its_type(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: a reward object without a name failed every rollout while logs looked healthy."""
    # Without stop strings no reply is as short as the nonsense of the self-test.
    task = RaisesInTraining(stop_strings=())
    made = Composition(tiny_spec(), tiny_model_dir, new_run(tmp_path), task=task)
    with pytest.raises(RunStopped) as caught:
        made.run()
    assert "all 12 rollouts of step 1 failed: task, AttributeError: 'Reward' object" in str(caught.value)
    assert "'Reward' object has no attribute '__name__'" in str(caught.value)
    assert made.run_dir.metrics.read() == []
    assert made.run_dir.events.read()[-1].kind == "stop"


class TypeErrorSpelling(SpellTask):
    """Hides a bug that raises TypeError."""

    def verify(self, example: Example, text: str) -> Outcome:
        return super().verify(example, text + 1)  # type: ignore[operator]


def test_rew_1_the_gate_refuses_a_verifier_with_a_type_error(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Incident: a broad except hid a TypeError, and a benchmark read 0 % for every model."""
    made = Composition(tiny_spec(), tiny_model_dir, new_run(tmp_path), task=TypeErrorSpelling())
    with pytest.raises(CheckRefused, match=r"verifier: task, TypeError: .* in 72 of 72 findings") as caught:
        made.run()
    assert caught.value.exit_code == 76
    assert made.run_dir.metrics.read() == []


class RightInAnyForm(SpellTask):
    """Finds every reply right; the form that was asked for is kept for the first two steps only."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes

    def verify(self, example: Example, text: str) -> Outcome:
        if not self.notes.is_past_gate:
            return super().verify(example, text)
        is_late = len(self.notes.steps) >= 2
        return Outcome(parts={"spelled": 0.5}, is_correct=True, format_ok=not is_late)


def test_rew_7_a_form_that_is_lost_while_answers_stay_right_is_an_alarm(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: strict-format match fell from 58 % to 1.2 % while accuracy rose."""
    spec = tiny_spec(train={"steps": 4}, tripwires={"max_zero_variance_frac": None})
    notes = Notes()
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=RightInAnyForm(notes), notes=notes)
    made.run()
    assert [line["accuracy"] for line in made.notes.steps] == [1.0] * 4
    assert [line["format_ok_frac"] for line in made.notes.steps] == [1.0, 1.0, 0.0, 0.0]
    alarms = [event for event in made.notes.events if event.kind == "tripwire"]
    assert [(event.step, event.cause) for event in alarms] == [(3, "format_drift"), (4, "format_drift")]
    assert "format_ok_frac=0 was 1 in the first step, at accuracy 1 from 1" in alarms[0].detail
