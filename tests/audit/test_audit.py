"""Each probe finds the fault that it is there for, and a sound task passes all of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from strop.audit import PROBE_IDS, AuditReport, AuditSettings, ProbeResult, Verdict, run_audit
from strop.errors import ConfigError, DataError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.spec.task import TaskSpec
from strop.tasks import build_task
from strop.tasks.contract import Task, TaskLimits
from strop.tasks.generated.arithmetic import ArithmeticSpec
from strop.tasks.generated.reverse_text import ReverseTextSpec


class Capitals:
    """Sound: the word behind 'answer:' must be the right one."""

    name = "capitals"
    version = "1"
    limits = TaskLimits(max_reply_tokens=8)

    def examples(self, split: Split) -> Sequence[Example]:
        number = 0 if split is Split.TRAIN else 40
        return [self.example(index) for index in range(number, number + 40)]

    def example(self, index: int) -> Example:
        word = "".join(chr(ord("b") + (index * 7 + place * (index + 5)) % 20) for place in range(5)) + str(
            index
        )
        return make_example(self.name, {"question": f"Which word has number {index * 3 + 1}?"}, word)

    def render(self, example: Example) -> tuple[Message, ...]:
        return (Message(role="user", content=str(example.fields["question"])),)

    def found(self, text: str) -> str | None:
        _, mark, tail = text.partition("answer:")
        return tail.strip() if mark else None

    def verify(self, example: Example, text: str) -> Outcome:
        if example.answer is None:
            raise DataError("no answer. Allowed: one. Next: mend the row.")
        found = self.found(text)
        is_correct = found == example.answer
        return Outcome(
            parts={"correct": float(is_correct)}, is_correct=is_correct, format_ok=found is not None
        )

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return (f"answer: {example.answer}",)


class PaysForSilence(Capitals):
    def verify(self, example: Example, text: str) -> Outcome:
        return super().verify(example, text if text else f"answer: {example.answer}")


class PaysForBlanks(Capitals):
    def verify(self, example: Example, text: str) -> Outcome:
        return super().verify(example, f"answer: {example.answer}" if text and text.isspace() else text)


class CallsBlanksWellFormed(Capitals):
    def verify(self, example: Example, text: str) -> Outcome:
        return replace(super().verify(example, text), format_ok=True)


class MatchesEitherWay(Capitals):
    """REW-4: a two-way substring match accepted 'a'."""

    def verify(self, example: Example, text: str) -> Outcome:
        outcome = super().verify(example, text)
        is_part = bool(text.strip()) and text.strip() in f"a{example.answer}"
        return replace(outcome, parts={"correct": float(is_part or bool(outcome.is_correct))})


class PaysForTheQuestion(Capitals):
    """REW-4: an echoed question earned .65."""

    def verify(self, example: Example, text: str) -> Outcome:
        if str(example.fields.get("question")) in text:
            return Outcome(parts={"correct": 1.0})
        return super().verify(example, text)


class MostlyYes(Capitals):
    def example(self, index: int) -> Example:
        return make_example(
            self.name, {"question": f"Is {index} fine?"}, "yes" if index % 3 else f"no{index}"
        )


class WithoutGold(Capitals):
    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return ()


class RefusesItsGold(Capitals):
    """REW-2: the answer was compared with the whole solution."""

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return (f"The answer: is {example.answer}",)


class DropsTheSign(Capitals):
    """REW-2: -5 passed for 5."""

    def example(self, index: int) -> Example:
        return make_example(self.name, {"question": f"Which number is {index}th?"}, str(index * 37 + 11))

    def found(self, text: str) -> str | None:
        found = super().found(text)
        return found if found is None else found.lstrip("-")


class PaysForAnyWord(Capitals):
    def verify(self, example: Example, text: str) -> Outcome:
        outcome = super().verify(example, text)
        found = self.found(text) or ""
        return replace(outcome, parts={"correct": float(found[-1:].isdigit() and len(found) > 5)})


class ShowsItsAnswer(Capitals):
    def example(self, index: int) -> Example:
        answer = f"the word of number {index} is long enough"
        return make_example(self.name, {"question": f"Hint: {answer}. What is it?"}, answer)


class RollsDice(Capitals):
    """REW-5: process-wide random state decided."""

    def verify(self, example: Example, text: str) -> Outcome:
        outcome = super().verify(example, text)
        return replace(outcome, parts={"correct": float(bool(outcome.is_correct) and random.random() < 0.9)})


class RemembersTheLast(Capitals):
    """REW-5: a score that depends on what was judged before."""

    last = ""

    def verify(self, example: Example, text: str) -> Outcome:
        outcome = super().verify(example, text)
        is_late, self.last = example.example_id < self.last, example.example_id
        return replace(outcome, parts={"correct": float(bool(outcome.is_correct) and not is_late)})


class PaysForHalf(Capitals):
    def verify(self, example: Example, text: str) -> Outcome:
        found = self.found(text) or ""
        is_begun = len(found) >= 3 and (example.answer or "").startswith(found)
        return replace(super().verify(example, text), parts={"correct": float(is_begun)})


class ScoresWithoutContent(Capitals):
    """REW-1: what could not be judged counted as wrong."""

    def verify(self, example: Example, text: str) -> Outcome:
        return Outcome(parts={"correct": 0.0}) if example.answer is None else super().verify(example, text)


class PaysTooMuch(Capitals):
    """REW-10: accuracy 2.39."""

    def verify(self, example: Example, text: str) -> Outcome:
        outcome = super().verify(example, text)
        return replace(outcome, parts={"correct": 2.39 if outcome.is_correct else 0.0})


class PaysForALetter(Capitals):
    """REW-4: one letter was accepted."""

    def verify(self, example: Example, text: str) -> Outcome:
        outcome = super().verify(example, text)
        return replace(outcome, parts={"correct": float(len(text) == 1 or bool(outcome.is_correct))})


class PaysForOneAnswer(Capitals):
    """Whatever was asked, 'yes' is right."""

    def verify(self, example: Example, text: str) -> Outcome:
        outcome = super().verify(example, text)
        return replace(
            outcome, parts={"correct": float(self.found(text) == "yes" or bool(outcome.is_correct))}
        )


class CountsItsCalls(Capitals):
    """REW-5: state of the process, shared by all that is judged."""

    num_calls = 0

    def verify(self, example: Example, text: str) -> Outcome:
        CountsItsCalls.num_calls += 1
        outcome = super().verify(example, text)
        is_lucky = CountsItsCalls.num_calls % 7 == 0 and example.answer not in {None, ""}
        return replace(outcome, parts={"correct": float(bool(outcome.is_correct) and not is_lucky)})


class FollowsFromAWord(Capitals):
    """REW-11: the label is whether the passenger is a woman."""

    def example(self, index: int) -> Example:
        sex = "female" if (index * 11) % 16 < 7 else "male"
        question = f"Passenger {index}, {sex}, paid {index * 37 % 91}. Who survives?"
        return make_example(self.name, {"question": question}, "yes" if sex == "female" else "no")


class EqualsAColumn(Capitals):
    """REW-11: the label stands in a column of the question."""

    def example(self, index: int) -> Example:
        kind = ("red", "green", "blue", "grey")[index * 7 % 11 % 4]
        return make_example(self.name, {"question": f"Item {index} is {kind}: which?", "kind": kind}, kind)


class PaysForBytes(Capitals):
    """Counts what no font shows."""

    def verify(self, example: Example, text: str) -> Outcome:
        outcome = super().verify(example, text)
        is_odd = "\ufffd" in text or text == "\x85"
        return replace(outcome, parts={"correct": float(is_odd or bool(outcome.is_correct))})


class PaysForAnEnd(Capitals):
    """Takes the marks that end a text for an answer."""

    def verify(self, example: Example, text: str) -> Outcome:
        outcome = super().verify(example, text)
        is_end = text.strip().startswith("<|")
        return replace(outcome, parts={"correct": float(is_end or bool(outcome.is_correct))})


class LosesADigit(DropsTheSign):
    """A strict pattern without a final period lost the last digit."""

    def verify(self, example: Example, text: str) -> Outcome:
        found, answer = self.found(text) or "", example.answer or "-"
        is_correct = found in {answer, answer[:-1]}
        return Outcome(parts={"correct": float(is_correct)}, format_ok=bool(found))


class PaysForEachTime(Capitals):
    """Every occurrence of the answer counts."""

    def verify(self, example: Example, text: str) -> Outcome:
        outcome = super().verify(example, text.strip().splitlines()[0] if text.strip() else text)
        num = text.count(f"answer: {example.answer}")
        return replace(outcome, parts={"correct": float(num)}, is_correct=num > 0)


class ShowsItsAnswerLoudly(Capitals):
    def example(self, index: int) -> Example:
        answer = f"the word of number {index} is long enough"
        return make_example(self.name, {"question": f"Hint:  {answer.upper()}\nWhich?"}, answer)


class ShowsMostOfItsAnswer(Capitals):
    """Its words stand in the question, with other marks between them."""

    def example(self, index: int) -> Example:
        words = "seven quiet rivers carry yellow paper boats under every old stone bridge at night"
        return make_example(
            self.name,
            {"question": f"Story {index}: {words.replace(' ', ', ')}. Tell it."},
            f"{words} ({index})",
        )


class AnswersInFull(Capitals):
    """Sound: a right reply says the question again, and then what nobody could read there."""

    def example(self, index: int) -> Example:
        words = "seven quiet rivers carry yellow paper boats under every old stone bridge at night"
        return make_example(
            self.name, {"question": f"In story {index}, {words}. Where to?"}, super().example(index).answer
        )

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return (f"{example.fields['question']} answer: {example.answer}",)


class CallsItWrongWithoutItsKey(Capitals):
    """REW-1: a column that was lost in reading made everything wrong."""

    def example(self, index: int) -> Example:
        example = super().example(index)
        return make_example(self.name, {**example.fields, "key": example.answer}, example.answer)

    def verify(self, example: Example, text: str) -> Outcome:
        known = replace(example, answer=str(example.fields.get("key", "")))
        return super().verify(known, text)


class StopsAtTheFirstTest(Capitals):
    """REW-5: early bail-out, so the order of the tests decided."""

    def example(self, index: int) -> Example:
        example = super().example(index)
        tests = ["a", "r", example.answer]
        return make_example(self.name, {**example.fields, "tests": tests}, example.answer)

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return (f"answer: {example.answer}",)

    def verify(self, example: Example, text: str) -> Outcome:
        num = 0
        for part in example.fields["tests"]:
            if part not in text:
                break
            num += 1
        return Outcome(parts={"correct": num / 3}, format_ok=bool(text.strip()))


class CannotRender(Capitals):
    def render(self, example: Example) -> tuple[Message, ...]:
        raise KeyError("problem")


FAULTS: dict[type[Capitals], dict[str, str]] = {
    PaysForSilence: {"noop": "fail"},
    PaysForBlanks: {"empty": "fail"},
    CallsBlanksWellFormed: {"empty": "fail"},
    MatchesEitherWay: {"garbage": "fail"},
    PaysForTheQuestion: {"echo": "fail"},
    MostlyYes: {"constant": "fail"},
    WithoutGold: {"gold": "fail", "wrong_order": "n/a", "truncation": "n/a"},
    RefusesItsGold: {"gold": "fail"},
    DropsTheSign: {"near_miss": "fail"},
    PaysForAnyWord: {"wrong_order": "fail"},
    ShowsItsAnswer: {"label_leak": "fail"},
    RollsDice: {"determinism": "fail", "order": "fail"},
    RemembersTheLast: {"order": "fail"},
    PaysForHalf: {"truncation": "fail"},
    ScoresWithoutContent: {"failure_paths": "fail"},
    PaysTooMuch: {"ceiling": "fail"},
    PaysForALetter: {"garbage": "fail"},
    PaysForOneAnswer: {"constant": "fail"},
    CountsItsCalls: {"determinism": "fail"},
    FollowsFromAWord: {"trivial_rule": "fail"},
    EqualsAColumn: {"trivial_rule": "fail"},
    PaysForBytes: {"garbage": "fail"},
    PaysForAnEnd: {"empty": "fail"},
    LosesADigit: {"near_miss": "fail"},
    PaysForEachTime: {"ceiling": "fail", "gold": "pass"},
    ShowsItsAnswerLoudly: {"label_leak": "fail"},
    ShowsMostOfItsAnswer: {"label_leak": "fail"},
    AnswersInFull: {"label_leak": "pass", "gold": "pass"},
    CallsItWrongWithoutItsKey: {"failure_paths": "fail"},
    StopsAtTheFirstTest: {"order": "fail"},
    CannotRender: {"echo": "error", "label_leak": "error"},
}


def audit(task: Task, **settings: object) -> AuditReport:
    return asyncio.run(run_audit(task, AuditSettings(**settings)))  # type: ignore[arg-type]


def statuses(report: AuditReport) -> dict[str, str]:
    return {result.probe: result.status.value for result in report.probes}


def test_a_sound_task_passes_every_probe() -> None:
    report = audit(Capitals())
    assert report.verdict is Verdict.GREEN
    fine = dict.fromkeys(PROBE_IDS, "pass")
    fine |= dict.fromkeys(["near_miss", "label_leak", "forgeries", "judge_injection", "judge_length"], "n/a")
    # Time depends on the machine.
    assert statuses(report) | {"cost": "pass"} == fine
    assert (report.num_examples, report.chance, report.max_reward) == (32, 0.0, 1.0)


class SomeWithoutGold(Capitals):
    """Knows no right reply to every fourth example."""

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return () if hash_of(example) % 4 == 0 else super().gold_replies(example)


def hash_of(example: Example) -> int:
    return int(example.example_id, 16)


@pytest.mark.parametrize(("share", "status"), [(0.0, "fail"), (0.5, "pass")])
def test_examples_without_gold_count_beyond_the_share_that_the_task_declares(
    share: float, status: str
) -> None:
    task = SomeWithoutGold()
    task.limits = replace(task.limits, max_goldless_frac=share)
    assert statuses(audit(task))["gold"] == status


@pytest.mark.parametrize("faulty", FAULTS, ids=lambda faulty: faulty.__name__)
def test_rew_4_each_fault_is_found_by_its_probe(faulty: type[Capitals]) -> None:
    found = statuses(audit(faulty()))
    assert {probe: found[probe] for probe in FAULTS[faulty]} == FAULTS[faulty]


def find(report: AuditReport, probe: str) -> ProbeResult:
    (found,) = [result for result in report.probes if result.probe == probe]
    return found


def test_the_field_whose_loss_makes_a_right_reply_wrong_is_named() -> None:
    result = find(audit(CallsItWrongWithoutItsKey(), probes=("failure_paths",)), "failure_paths")
    # It scores what has no content at all too.
    assert [entry.detail for entry in result.evidence] == ["no content", *["no key"] * 4]
    assert {entry.reward for entry in result.evidence} == {0.0}


def test_every_right_reply_that_is_not_paid_is_listed() -> None:
    result = find(audit(RefusesItsGold()), "gold")
    assert (result.num, len(result.evidence)) == (32, 32)


def test_evidence_names_the_example_and_shows_the_reply() -> None:
    report = audit(MatchesEitherWay())
    (garbage,) = [result for result in report.probes if result.probe == "garbage"]
    assert (garbage.detail, garbage.value, len(garbage.evidence)) == ("letter", 1.0, 5)
    ids = {example.example_id for example in MatchesEitherWay().examples(Split.TRAIN)}
    assert {entry.example_id for entry in garbage.evidence} <= ids
    assert {(entry.reply, entry.reward) for entry in garbage.evidence} == {("a", 1.0)}
    assert garbage.describe() == "garbage fail 1 (limit 1e-09) letter, for example 'a'"


def test_a_declared_chance_is_allowed_and_no_more() -> None:
    class Quarter(Capitals):
        limits = replace(Capitals.limits, chance=0.25)

        def verify(self, example: Example, text: str) -> Outcome:
            outcome = super().verify(example, text)
            is_lucky = bool(text) and not text.isspace() and int(example.example_id, 16) % 4 == 0
            return replace(outcome, parts={"correct": float(is_lucky or bool(outcome.is_correct))})

    class Half(Quarter):
        limits = replace(Capitals.limits, chance=0.02)

    # 8 of 32 are expected, and 0.25 + 3 * sqrt(0.25 * 0.75 / 32) = 0.48 is allowed; else 0.02 + 0.07.
    assert statuses(audit(Quarter()))["garbage"] == "pass"
    assert statuses(audit(Half()))["garbage"] == "fail"


@pytest.mark.parametrize(
    "spec", [ArithmeticSpec(), ArithmeticSpec(min_value=0), ReverseTextSpec(name="reverse-text")]
)
def test_the_built_in_tasks_are_green(spec: TaskSpec) -> None:
    assert audit(build_task(spec)).verdict is Verdict.GREEN


def test_an_unknown_probe_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^probe ecko\. Allowed: noop, .*, ceiling\. Next: correct the name"
    ):
        audit(Capitals(), probes=("echo", "ecko"))


def test_a_task_without_examples_is_refused() -> None:
    class Empty(Capitals):
        def examples(self, split: Split) -> Sequence[Example]:
            return []

    with pytest.raises(DataError, match="an audit of task capitals, which has no examples"):
        audit(Empty())


def test_a_task_for_evaluation_only_is_audited_on_its_held_out_examples() -> None:
    class HeldOutOnly(Capitals):
        def examples(self, split: Split) -> Sequence[Example]:
            return super().examples(split) if split is Split.HELD_OUT else []

    assert audit(HeldOutOnly()).verdict is Verdict.GREEN
