"""Incidents of the group on rewards, and on graders that were tampered with, that the audit answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from strop.audit import QUICK_PROBES, AuditReport, AuditSettings, ProbeResult, ProbeStatus, Verdict, run_audit
from strop.errors import CheckRefused
from strop.rollout import Example, FailureOwner, Message, Outcome, Split, make_example
from strop.tasks import Task, build_task
from strop.tasks.code.mbpp import MbppSpec
from strop.tasks.generated.reverse_text import ReverseTextSpec
from strop.tasks.traits import ProgramForm
from tests.fixtures.judging import judge_once
from tests.fixtures.spell import SpellTask
from tests.fixtures.tiny_run import Composition, new_run, tiny_spec


class Sums(SpellTask):
    """Sound: the reply is the sum, behind 'answer:'."""

    name = "sums"

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

    def verify(self, example: Example, text: str) -> Outcome:
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


def refuse(task: Task, tmp_path: Path, model_dir: Path) -> str:
    """Start a run that accepts everything but the audit; return why it was refused."""
    accept = "weights: random; verifier: here the audit is meant"
    made = Composition(tiny_spec(train={"accept": accept}), model_dir, new_run(tmp_path), task=task)
    with pytest.raises(CheckRefused) as caught:
        made.run()
    assert made.notes.starts == []
    assert "nothing was trained" in str(caught.value)
    return str(caught.value)


class MatchesParts(Sums):
    """A match both ways: the reply in the answer, or the answer in the reply."""

    def example(self, number: int) -> Example:
        return make_example(self.name, {"left": 10 + number, "right": 0}, f"a{10 + number}")

    def outcome(self, example: Example, text: str, *, is_correct: bool, found: str | None) -> Outcome:
        answer = example.answer or "-"
        is_part = bool(text.strip()) and (text.strip() in answer or answer in text)
        return super().outcome(example, text, is_correct=is_part, found=found)


class PaysForAnEcho(Sums):
    """An echoed question earned .65."""

    def outcome(self, example: Example, text: str, *, is_correct: bool, found: str | None) -> Outcome:
        outcome = super().outcome(example, text, is_correct=is_correct, found=found)
        is_echo = self.render(example)[0].text in text
        return replace(outcome, parts={"correct": 0.65}) if is_echo else outcome


class HasNoAnswers(Sums):
    """Five data sets came without a single answer."""

    def example(self, number: int) -> Example:
        return replace(super().example(number), answer=None)


@pytest.mark.parametrize(
    ("task", "probe"), [(MatchesParts(), "garbage"), (PaysForAnEcho(), "echo"), (HasNoAnswers(), "gold")]
)
def test_rew_4_a_permissive_or_answerless_task_is_red_and_trains_nothing(
    task: Task, probe: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: a substring match accepted "a"; an echo earned .65; five data sets had no answer."""
    report = audit(task)
    assert (probe in failed(report), report.verdict) == (True, Verdict.RED)
    assert "audit: red: " in (why := refuse(task, tmp_path, tiny_model_dir))
    assert f"{probe} fail" in why


def accept(tmp_path: Path, model_dir: Path, more: str) -> Composition:
    accepted = "weights: random; verifier: here the audit is meant; " + more
    return Composition(
        tiny_spec(train={"accept": accepted}), model_dir, new_run(tmp_path), task=PaysForAnEcho()
    )


def test_rew_4_what_is_accepted_by_name_and_reason_is_trained_and_recorded(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    version = PaysForAnEcho().version
    made = accept(tmp_path, tiny_model_dir, f"audit.echo@{version[:12]}: an echo is what is asked for here")
    made.run()
    kept = json.loads((made.run_dir.path / "audit.json").read_text())
    (acceptance,) = kept["accepted"]
    assert (kept["verdict"], kept["accepted_verdict"]) == ("red", "green")
    assert (acceptance["probe"], acceptance["reason"]) == ("echo", "an echo is what is asked for here")
    assert (acceptance["task_version"], bool(acceptance["user"])) == (version, True)
    assert abs(acceptance["accepted_at"] - time.time()) < 600.0
    # Whoever reads the results is told when the run begins and when it ends.
    said = [(event.cause, event.step) for event in made.notes.events if event.kind.value == "notice"]
    assert said == [("audit", 0), ("audit", 3)]


def test_rew_4_what_was_accepted_for_another_version_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    made = accept(tmp_path, tiny_model_dir, "audit.echo@0123456789ab: it was fine then")
    with pytest.raises(CheckRefused) as caught:
        made.run()
    shown = f"train.accept = 'audit.echo@{PaysForAnEcho().version[:12]}: reason' goes on"
    assert shown in str(caught.value)
    assert "accepted for another version of the task, and not for this one: echo@0123456789ab" in str(
        caught.value
    )
    assert made.notes.starts == []


def test_a_sound_task_is_green_and_no_probe_warns() -> None:
    report = audit(Sums())
    assert (failed(report), report.verdict) == ({}, Verdict.GREEN)
    assert [result.probe for result in report.broken() if result.probe != "cost"] == []


class ClosesItsEyes(Sums):
    """The language of a text was detected with an unseeded generator."""

    def outcome(self, example: Example, text: str, *, is_correct: bool, found: str | None) -> Outcome:
        is_lucky = random.random() < 0.8
        return super().outcome(example, text, is_correct=is_correct and is_lucky, found=found)


class SharesItsState(Sums):
    """Concurrent episodes drew from one generator of the whole process."""

    stream = random.Random(3)

    def outcome(self, example: Example, text: str, *, is_correct: bool, found: str | None) -> Outcome:
        return super().outcome(
            example, text, is_correct=is_correct and self.stream.random() < 0.8, found=found
        )


class StopsEarly(Sums):
    """Tests ran in an order of their own, and the first failure ended them."""

    def outcome(self, example: Example, text: str, *, is_correct: bool, found: str | None) -> Outcome:
        outcome = super().outcome(example, text, is_correct=is_correct, found=found)
        answer = f"{example.fields['left'] + example.fields['right']:05}"
        tests = [a == b for a, b in zip(answer, f"{found or '':>05}", strict=False)]
        random.shuffle(tests)
        num_passed = len(list(itertools.takewhile(bool, tests)))
        return replace(outcome, parts={"correct": num_passed / 5})


class PaysForSpeed(Sums):
    """Wall-clock time was the metric."""

    def outcome(self, example: Example, text: str, *, is_correct: bool, found: str | None) -> Outcome:
        outcome = super().outcome(example, text, is_correct=is_correct, found=found)
        return replace(outcome, parts={"correct": float(is_correct) * (time.perf_counter_ns() % 997) / 997})


@pytest.mark.parametrize("make", [ClosesItsEyes, SharesItsState, StopsEarly, PaysForSpeed])
def test_rew_5_a_score_that_changes_is_red_and_both_scores_are_shown(make: Callable[[], Task]) -> None:
    """Incident: chance, shared state, the order of tests and the clock decided about rewards."""
    report = audit(make(), "determinism")
    (result,) = report.probes
    assert (result.status, report.verdict) == (ProbeStatus.FAIL, Verdict.RED)
    shown = [entry.detail.removeprefix("scored ").split(" then ") for entry in result.evidence]
    assert all(len(scores) == 5 and len(set(scores)) > 1 for scores in shown)


def test_rew_5_a_task_whose_scores_change_trains_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    assert "determinism fail" in refuse(ClosesItsEyes(), tmp_path, tiny_model_dir)


class Simulates(Sums):
    """An accuracy of 2.39 came from a simulated scorer."""

    def outcome(self, example: Example, text: str, *, is_correct: bool, found: str | None) -> Outcome:
        outcome = super().outcome(example, text, is_correct=is_correct, found=found)
        return replace(outcome, parts={"correct": 2.39}) if is_correct else outcome


def test_rew_10_a_score_above_the_ceiling_is_red_and_trains_nothing(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: accuracy 2.39; 2.0 in a game whose optimum is 1.44."""
    result = failed(audit(Simulates()))["ceiling"]
    assert "highest 2.39" in result.detail
    assert {entry.reward for entry in result.evidence} == {2.39}
    assert "ceiling fail" in refuse(Simulates(), tmp_path, tiny_model_dir)


class SurvivesIfFemale(Sums):
    """The label of every passenger is whether she is a woman."""

    def example(self, number: int) -> Example:
        is_woman = (number * 11) % 16 < 7
        fields = {"age": number * 29 % 71, "sex": "female" if is_woman else "male"}
        return make_example(self.name, fields, "yes" if is_woman else "no")

    def render(self, example: Example) -> tuple[Message, ...]:
        text = f"Age {example.fields['age']}, sex {example.fields['sex']}. Did this passenger survive?"
        return (Message(role="user", content=text),)

    def verify(self, example: Example, text: str) -> Outcome:
        found = text.rpartition("answer:")[2].strip() if "answer:" in text else None
        return self.outcome(example, text, is_correct=found == example.answer, found=found)


class ShowsItsGold(Sums):
    """The answers lay where the model could read them."""

    def render(self, example: Example) -> tuple[Message, ...]:
        return (Message(role="user", content=f"Files: answers.csv ({self.gold_replies(example)[0]})."),)

    def example(self, number: int) -> Example:
        example = super().example(number)
        return replace(example, answer=f"the sum of the two is {example.answer}")

    def verify(self, example: Example, text: str) -> Outcome:
        return self.outcome(example, text, is_correct=text == f"answer: {example.answer}", found=text or None)


@pytest.mark.parametrize(
    ("task", "probe"), [(SurvivesIfFemale(), "trivial_rule"), (ShowsItsGold(), "label_leak")]
)
def test_rew_11_labels_that_a_rule_gives_or_that_lie_open_are_red(task: Task, probe: str) -> None:
    """Incident: the labels of a data set equalled sex = female; answer files lay in the workspace."""
    report = audit(task)
    assert (failed(report)[probe].value, report.verdict) == (1.0, Verdict.RED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "probe"), [(SurvivesIfFemale(), "trivial_rule"), (ShowsItsGold(), "label_leak")]
)
def test_rew_11_a_task_that_nobody_audited_is_asked_by_the_gate(
    task: Task, probe: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: as above; the run began, because only a whole audit looked for such labels."""
    assert probe in QUICK_PROBES
    assert f"{probe} fail 1" in refuse(task, tmp_path, tiny_model_dir)


@pytest.mark.parametrize(("partial_marks", "is_red"), [("any-order", True), ("beginning", False)])
def test_rew_4_a_reward_that_pays_for_one_word_is_red(
    partial_marks: Literal["any-order", "beginning"], *, is_red: bool
) -> None:
    """Incident: letters in any order were paid, and a run learned to answer every text with "text"."""
    spec = ReverseTextSpec(name="reverse-text", max_words=3, partial_marks=partial_marks)
    report = audit(build_task(spec), *QUICK_PROBES)
    assert set(failed(report)) == ({"one_word"} if is_red else set())
    assert report.verdict is (Verdict.RED if is_red else Verdict.GREEN)
    if is_red:
        detail = failed(report)["one_word"].detail
        assert detail.startswith("parts of the marks for always saying ")


def test_rew_4_chance_is_no_payment_for_one_word() -> None:
    """One letter of four is right on a quarter: full marks, now and then, are no part of the marks always."""

    class Chooses(Sums):
        def example(self, number: int) -> Example:
            return make_example(self.name, {"left": number, "right": 0}, "ABCD"[number % 4])

        def gold_replies(self, example: Example) -> tuple[str, ...]:
            return (example.answer or "",)

        def verify(self, example: Example, text: str) -> Outcome:
            is_right = text.strip() == example.answer
            return Outcome(
                parts={"correct": float(is_right)}, is_correct=is_right, format_ok=bool(text.strip())
            )

    (result,) = audit(Chooses(), "one_word").probes
    assert (result.status, result.value) == (ProbeStatus.PASS, 0.0)


def test_rew_4_a_part_of_the_marks_for_one_word_is_told_before_it_is_too_much() -> None:
    class PaysForAnything(Sums):
        share = 0.0

        def outcome(self, example: Example, text: str, *, is_correct: bool, found: str | None) -> Outcome:
            outcome = super().outcome(example, text, is_correct=is_correct, found=found)
            return outcome if is_correct else replace(outcome, parts={"correct": self.share})

    found = {}
    for share in (0.05, 0.2, 0.3):
        PaysForAnything.share = share
        (result,) = audit(PaysForAnything(), "one_word").probes
        assert result.value == pytest.approx(share)
        found[share] = result.status
    assert found == {0.05: ProbeStatus.PASS, 0.2: ProbeStatus.WARN, 0.3: ProbeStatus.FAIL}
    # Replies that are programs are `constant`'s to try.
    PaysForAnything.program_form = lambda self, example: ProgramForm(entry_point="f")  # type: ignore[attr-defined]
    (result,) = audit(PaysForAnything(), "one_word").probes
    assert result.status is ProbeStatus.NOT_APPLICABLE


def test_rew_11_the_rule_is_named() -> None:
    (result,) = audit(SurvivesIfFemale(), "trivial_rule").probes
    assert result.detail == "the answer follows from the field sex"


def test_sec_1_a_host_without_the_wanted_sandbox_is_the_owner_and_nothing_runs(tmp_path: Path) -> None:
    """Incident: where isolation was missing, generated code ran as a plain process of the host."""
    row = {"text": "Add 1.", "code": "def inc(x): return x + 1", "test_list": ["assert inc(1) == 2"]}
    for stem, text in (("train", "Add 1."), ("test", "Add one.")):
        (tmp_path / f"{stem}.jsonl").write_text(json.dumps({**row, "text": text}), "utf-8")
    spec = MbppSpec(name="mbpp", source=str(tmp_path), min_isolation="vm")
    mark = tmp_path / "ran"
    reply = f"```python\nopen({str(mark)!r}, 'w').close()\ndef inc(x): return x + 1\n```"

    outcome = judge_once(spec, reply)
    assert outcome.reward is None
    assert outcome.failure is not None
    assert (outcome.failure.owner, outcome.failure.kind) == (FailureOwner.INFRA, "verifier_SandboxRefused")
    assert not mark.exists()
