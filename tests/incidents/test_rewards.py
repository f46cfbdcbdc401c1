"""Incidents of the group on rewards, by id: verifiers of tasks, and graders that the audit answers for."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from strop.audit import AuditReport, AuditSettings, ProbeResult, ProbeStatus, Verdict, run_audit
from strop.errors import CheckRefused
from strop.record.rollouts import read_rollouts
from strop.rollout import (
    Example,
    FailureOwner,
    Message,
    Outcome,
    Split,
    make_example,
)
from strop.tasks import Task, build_task
from strop.tasks.code.judge import JudgeJob, judge_python
from strop.tasks.instructions import rules
from strop.tasks.instructions.rules import detect_language
from strop.tasks.instructions.tasks import InstructionSpec
from strop.tasks.judging import Judge
from strop.tasks.mathematics import last_number, read_value
from strop.tasks.rows.judged_rows import JudgedRows, PresetSpec
from tests.fixtures.judging import run_self_test, verdict
from tests.fixtures.sandboxed import best_level
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import Composition, Notes, new_run, tiny_spec

WORD_PROBLEMS = [
    make_example("gsm8k", {"question": "6 times 3?", "solution": "6 * 3 = 18\n#### 18"}, "18"),
    make_example("gsm8k", {"question": "2 less 7?", "solution": "2 - 7 = -5\n#### -5"}, "-5"),
]


def gsm8k() -> JudgedRows:
    return JudgedRows(PresetSpec(name="gsm8k", source="unused.jsonl"))


class Mutated(JudgedRows):
    """Finds right what another rule finds right."""

    def __init__(self, rule: Callable[[Example, str], bool]) -> None:
        super().__init__(PresetSpec(name="gsm8k", source="unused.jsonl"))
        self._rule = rule

    async def verify(self, example: Example, text: str) -> Outcome:
        is_correct = self._rule(example, text)
        return Outcome(parts={"correct": float(is_correct)}, is_correct=is_correct)


def last_value(text: str) -> Fraction | None:
    found = last_number(text)
    return None if found is None else found.value


def without_signs(text: str | None) -> str:
    return (text or "").replace("-", "")


@pytest.mark.parametrize(
    ("rule", "probes"),
    [
        (lambda e, t: last_value(t) == e.fields["solution"], {"gold"}),
        (lambda e, t: last_value(without_signs(t)) == read_value(e.answer), {"gold", "near_miss"}),
        (lambda e, t: last_value(without_signs(t)) == read_value(without_signs(e.answer)), {"near_miss"}),
        (lambda e, t: t == f"The answer is {e.answer}.", {"gold"}),
        (lambda e, t: f"#### {e.answer}" in t or last_value(t) == read_value(e.answer), {"near_miss"}),
    ],
    ids=["the whole solution", "no signs in replies", "no signs at all", "one phrase", "a part of a number"],
)
def test_rew_2_mutated_verifiers_fail_the_self_test(
    rule: Callable[[Example, str], bool], probes: set[str]
) -> None:
    """Incident: answers were judged backwards, without signs, or only in one phrase."""
    assert run_self_test(gsm8k(), WORD_PROBLEMS) == []
    findings = run_self_test(Mutated(rule), WORD_PROBLEMS)
    assert {finding.probe for finding in findings} == probes
    answers = {example.example_id: example.answer for example in WORD_PROBLEMS}
    # Both texts and the example can be read from the finding.
    for entry in (entry for finding in findings for entry in finding.evidence):
        assert (answers[entry.example_id], bool(entry.reply)) == (entry.answer, True)


class RaisesSometimes(SpellTask):
    """Raises on about a third of the replies of a random model, and on no reply of the self-test."""

    async def verify(self, example: Example, text: str) -> Outcome:
        if len(text) > 8:
            raise TypeError("can only concatenate str")
        return await super().verify(example, text)


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


class RightInAnyForm(SpellTask):
    """Finds every reply right; the form that was asked for is kept for the first two steps only."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes

    async def verify(self, example: Example, text: str) -> Outcome:
        if not self.notes.is_past_gate:
            return await super().verify(example, text)
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


def one(*constraints: tuple[str, dict[str, Any]]) -> Example:
    listed = [{"id": id_, "arguments": arguments} for id_, arguments in constraints]
    return make_example("if-multi", {"prompt": "Write of the sea.", "constraints": listed}, None)


def multi() -> Task:
    return build_task(InstructionSpec(name="if-multi", source="unused.jsonl"))


def test_rew_1_an_exception_of_a_checker_is_not_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One benchmark read 0 % for every model, because a broad except hid a TypeError."""
    pytest.importorskip("langdetect")

    def broken(text: str) -> str:
        raise TypeError("detector")

    monkeypatch.setattr(rules, "detect_language", broken)
    example = one(("language:response_language", {"language": "de"}))
    with pytest.raises(TypeError, match="detector"):
        verdict(multi(), example, "Das Meer ist blau und weit.")
    with pytest.raises(TypeError, match="detector"):
        asyncio.run(Judge(multi()).judge(example, "Das Meer ist blau und weit."))


def test_rew_5_the_language_of_a_text_does_not_change() -> None:
    """An unseeded detector gave one reply different scores; so did calls at the same time."""
    pytest.importorskip("langdetect")
    torn = "Das ist not sure ob it gut is und maybe non lo so."
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(detect_language, [torn] * 40))
    assert len(found) == 1


@pytest.mark.slow
def test_rew_8_all_tests_of_a_reply_share_one_sandbox() -> None:
    """Incident: with a container for each test, a problem of 1,440 tests took 10 to 40 minutes."""
    numbers = range(1440)
    job = JudgeJob(
        source="print(int(input()) + 1)",
        input_output=json.dumps(
            {"inputs": [f"{n}\n" for n in numbers], "outputs": [f"{n + 1}\n" for n in numbers]}
        ),
        num_tests=len(numbers),
        wall_s=600.0,
        test_s=60.0,
    )
    started_at = time.monotonic()
    verdict = asyncio.run(judge_python(job, min_isolation=best_level()))
    assert (verdict.metrics["tests_passed"], verdict.is_correct) == (1440, True)
    # Far from ten minutes; how fast it is where nothing else runs is a benchmark's business.
    assert time.monotonic() - started_at < 300.0


class Sums(SpellTask):
    """Sound: the reply is the sum, behind 'answer:'."""

    name = "sums"

    def __init__(self) -> None:
        super().__init__(stop_strings=())

    def examples(self, split: Split) -> Sequence[Example]:
        first = 0 if split is Split.TRAIN else 40
        return [self.example(number) for number in range(first, first + 40)]

    def example(self, number: int) -> Example:
        left, right = 11 + 37 * number, 5 + 13 * number
        return make_example(self.name, {"left": left, "right": right}, str(left + right))

    def render(self, example: Example) -> tuple[Message, ...]:
        text = f"What is {example.fields['left']} + {example.fields['right']}?"
        return (Message(role="user", content=text),)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return () if example.answer is None else (f"answer: {example.answer}",)

    async def verify(self, example: Example, text: str) -> Outcome:
        found = text.rpartition("answer:")[2].strip() if "answer:" in text else None
        is_correct = found == str(example.fields["left"] + example.fields["right"])
        return self.outcome(example, text, is_correct=is_correct, found=found)

    def outcome(self, example: Example, text: str, *, is_correct: bool, found: str | None) -> Outcome:
        return Outcome(
            parts={"correct": float(is_correct)}, is_correct=is_correct, format_ok=found is not None
        )


def audit(task: Task, *probes: str, num_examples: int = 32) -> AuditReport:
    settings = AuditSettings(num_examples=num_examples)
    return asyncio.run(run_audit(task, replace(settings, probes=probes) if probes else settings))


def failed(report: AuditReport) -> dict[str, ProbeResult]:
    return {result.probe: result for result in report.probes if result.status is ProbeStatus.FAIL}


class PaysForAnEcho(Sums):
    """An echoed question earned .65."""

    def outcome(self, example: Example, text: str, *, is_correct: bool, found: str | None) -> Outcome:
        outcome = super().outcome(example, text, is_correct=is_correct, found=found)
        is_echo = self.render(example)[0].text in text
        return replace(outcome, parts={"correct": 0.65}) if is_echo else outcome


def test_rew_4_what_is_accepted_by_name_and_reason_is_trained_and_recorded(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    version = PaysForAnEcho().version
    accepted = f"weights: random; audit.echo@{version[:12]}: an echo is what is asked for here"
    spec = tiny_spec(train={"accept": accepted})
    made = Composition(spec, tiny_model_dir, new_run(tmp_path), task=PaysForAnEcho())
    made.run()
    kept = json.loads((made.run_dir.path / "audit.json").read_text())
    (acceptance,) = kept["accepted"]
    assert (kept["verdict"], kept["accepted_verdict"]) == ("red", "green")
    assert (acceptance["probe"], acceptance["reason"]) == ("echo", "an echo is what is asked for here")
    assert (kept["task_version"], bool(acceptance["user"])) == (version, True)
    assert abs(acceptance["accepted_at"] - time.time()) < 600.0
    # Whoever reads the results is told when the run begins and when it ends.
    said = [(event.cause, event.step) for event in made.notes.events if event.kind.value == "notice"]
    assert said == [("audit", 0), ("audit", 3)]


class SurvivesIfFemale(Sums):
    """The label of every passenger is whether she is a woman."""

    def example(self, number: int) -> Example:
        is_woman = (number * 11) % 16 < 7
        fields = {"age": number * 29 % 71, "sex": "female" if is_woman else "male"}
        return make_example(self.name, fields, "yes" if is_woman else "no")

    def render(self, example: Example) -> tuple[Message, ...]:
        text = f"Age {example.fields['age']}, sex {example.fields['sex']}. Did this passenger survive?"
        return (Message(role="user", content=text),)

    async def verify(self, example: Example, text: str) -> Outcome:
        found = text.rpartition("answer:")[2].strip() if "answer:" in text else None
        return self.outcome(example, text, is_correct=found == example.answer, found=found)


def test_rew_11_a_task_that_nobody_audited_is_audited_by_the_gate(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: labels that follow from a rule: only a whole audit looked for them."""
    task = SurvivesIfFemale()
    accept = "weights: random"
    made = Composition(tiny_spec(train={"accept": accept}), tiny_model_dir, new_run(tmp_path), task=task)
    with pytest.raises(CheckRefused, match="trivial_rule fail"):
        made.run()
    assert made.notes.starts == []


class Backwards(Sums):
    """Words to be written backwards; letters of the answer are paid in any order, or from its beginning."""

    def __init__(self, *, is_any_order: bool) -> None:
        super().__init__()
        self.is_any_order = is_any_order

    def example(self, number: int) -> Example:
        words = ("lantern", "meadow", "needle", "orchard", "ribbon", "silver", "timber", "velvet", "garden")
        text = " ".join(words[place % len(words)] for place in (number, number // 2 + 3, number // 7 + 5))
        return make_example(self.name, {"text": text}, text[::-1])

    def render(self, example: Example) -> tuple[Message, ...]:
        return (Message(role="user", content=f"Write this backwards: {example.fields['text']}"),)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return (example.answer or "",)

    async def verify(self, example: Example, text: str) -> Outcome:
        gold, reply = example.fields["text"][::-1], text.strip()
        shared, ends = Counter(reply) & Counter(gold), range(1, len(reply) + 1)
        num_paid = shared.total() if self.is_any_order else sum(gold.startswith(reply[:end]) for end in ends)
        is_correct, share = reply == gold, 1.8 * num_paid / (len(reply) + len(gold))
        return Outcome(parts={"letters": 1.0 if is_correct else share}, is_correct=is_correct, format_ok=True)


@pytest.mark.parametrize("is_any_order", [True, False])
def test_rew_4_a_reward_that_pays_for_one_word_is_red(*, is_any_order: bool) -> None:
    """Incident: letters in any order were paid, and a run learned to answer every text with "text"."""
    report = audit(Backwards(is_any_order=is_any_order))
    assert ("constant" in failed(report)) is is_any_order
    assert report.verdict is (Verdict.RED if is_any_order else Verdict.GREEN)


def test_rew_4_chance_is_a_warning() -> None:
    """One letter of four is right on a quarter: full marks, now and then, are no part of the marks always."""

    class Chooses(Sums):
        def example(self, number: int) -> Example:
            return make_example(self.name, {"left": number, "right": 0}, "ABCD"[number % 4])

        def gold_replies(self, example: Example) -> tuple[str, ...]:
            return (example.answer or "",)

        async def verify(self, example: Example, text: str) -> Outcome:
            is_right = text.strip() == example.answer
            return Outcome(
                parts={"correct": float(is_right)}, is_correct=is_right, format_ok=bool(text.strip())
            )

    (result,) = audit(Chooses(), "constant").probes
    assert result.status is ProbeStatus.WARN


def test_rew_4_a_part_of_the_marks_for_one_word_is_told_before_it_is_too_much() -> None:
    class PaysForAnything(Sums):
        share = 0.0

        def outcome(self, example: Example, text: str, *, is_correct: bool, found: str | None) -> Outcome:
            outcome = super().outcome(example, text, is_correct=is_correct, found=found)
            return outcome if is_correct else replace(outcome, parts={"correct": self.share})

    found = {}
    for share in (0.05, 0.22, 0.3):
        PaysForAnything.share = share
        (result,) = audit(PaysForAnything(), "constant").probes
        assert result.value == pytest.approx(share, abs=0.03)
        found[share] = result.status
    assert found == {0.05: ProbeStatus.PASS, 0.22: ProbeStatus.WARN, 0.3: ProbeStatus.FAIL}
