"""Each probe finds the fault that it is there for, and a sound task passes all of them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from strop.audit import PROBE_IDS, AuditReport, AuditSettings, ProbeResult, Verdict, run_audit
from strop.errors import ConfigError, DataError
from strop.rollout import Example, Message, Outcome, Split, make_example
from strop.tasks import build_task
from strop.tasks.generated import ArithmeticSpec
from strop.tasks.task import Task, TaskLimits


class Capitals(Task):
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

    async def verify(self, example: Example, text: str) -> Outcome:
        if example.answer is None:
            raise DataError("no answer. Allowed: one. Next: mend the row.")
        found = self.found(text)
        is_correct = found == example.answer
        return Outcome(
            parts={"correct": float(is_correct)}, is_correct=is_correct, format_ok=found is not None
        )

    def gold_replies(self, example: Example) -> tuple[str, ...]:
        return (f"answer: {example.answer}",)


class Faulty(Capitals):
    """Pays by a rule: of the example, the reply, and whether it is right; its other methods may be given."""

    def __init__(self, pays: Callable[[Example, str, bool], object] | None = None, **methods: object) -> None:
        self.pays = pays or (lambda example, text, is_right: is_right)
        vars(self).update(methods)

    async def verify(self, example: Example, text: str) -> Outcome:
        outcome = await super().verify(example, text)
        return replace(outcome, parts={"correct": float(self.pays(example, text, bool(outcome.is_correct)))})  # type: ignore[arg-type]


def posed(question: str, answer: Callable[[int], str]) -> Callable[[int], Example]:
    """Return a method `example`, whose question names its number."""
    return lambda index: make_example("capitals", {"question": question.format(index)}, answer(index))


def found(text: str) -> str:
    return Capitals().found(text) or ""


def number_of(index: int) -> str:
    return str(index * 37 + 11)


def wraps(
    outcome_of: Callable[[Example, str, Outcome], Outcome],
) -> Callable[[Example, str], Awaitable[Outcome]]:
    """Return a method `verify` that changes the sound one's outcome."""

    async def verify(example: Example, text: str) -> Outcome:
        return outcome_of(example, text, await Capitals().verify(example, text))

    return verify


class RemembersTheLast(Capitals):
    """REW-5: a score that depends on what was judged before."""

    last = ""

    async def verify(self, example: Example, text: str) -> Outcome:
        outcome = await super().verify(example, text)
        is_late, self.last = example.example_id < self.last, example.example_id
        return replace(outcome, parts={"correct": float(bool(outcome.is_correct) and not is_late)})


class StopsAtTheFirstTest(Capitals):
    """REW-5: early bail-out, so the order of the tests decided."""

    def example(self, index: int) -> Example:
        example = super().example(index)
        return make_example(
            self.name, {**example.fields, "tests": ["a", "r", example.answer]}, example.answer
        )

    async def verify(self, example: Example, text: str) -> Outcome:
        passed = itertools.takewhile(text.__contains__, example.fields["tests"])
        return Outcome(parts={"correct": len(list(passed)) / 3}, format_ok=bool(text.strip()))


class CallsItWrongWithoutItsKey(Capitals):
    """REW-1: a column that was lost in reading made everything wrong."""

    def example(self, index: int) -> Example:
        example = super().example(index)
        return make_example(self.name, {**example.fields, "key": example.answer}, example.answer)

    async def verify(self, example: Example, text: str) -> Outcome:
        return await super().verify(replace(example, answer=str(example.fields.get("key", ""))), text)


def follows_from_a_word(index: int) -> Example:
    """REW-11: the label is whether the passenger is a woman."""
    sex = "female" if (index * 11) % 16 < 7 else "male"
    question = f"Passenger {index}, {sex}, paid {index * 37 % 91}. Who survives?"
    return make_example("capitals", {"question": question}, "yes" if sex == "female" else "no")


def equals_a_column(index: int) -> Example:
    """REW-11: the label stands in a column of the question."""
    kind = ("red", "green", "blue", "grey")[index * 7 % 11 % 4]
    return make_example("capitals", {"question": f"Item {index} is {kind}: which?", "kind": kind}, kind)


async def calls_it_wrong_without_content(example: Example, text: str) -> Outcome:
    """REW-1: what could not be judged counted as wrong."""
    is_right = bool(example.answer) and f"answer: {example.answer}" == text
    return Outcome(parts={"correct": float(is_right)}, is_correct=is_right)


CALLS = itertools.count(1)
LONG = "the word of number {} is long enough".format
WORDS = "seven quiet rivers carry yellow paper boats under every old stone bridge at night"
OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
CHOOSES = {
    "example": posed(f"Is {{}} fine? Say one of: {' '.join(OPTIONS)}", lambda index: OPTIONS[0]),
    "gold_replies": lambda example: OPTIONS,
}
MATCHES_EITHER_WAY = Faulty(lambda e, t, right: right or bool(t.strip() and t.strip() in f"a{e.answer}"))
PAYS_FOR_THE_QUESTION = Faulty(
    verify=wraps(lambda e, t, sound: Outcome(parts={"correct": 1.0}) if e.fields["question"] in t else sound)
)
PAYS_FOR_A_LETTER = Faulty(lambda e, t, right: right or len(t) == 1)
REFUSES_ITS_GOLD = Faulty(gold_replies=lambda example: (f"The answer: is {example.answer}",))
FAULTS: dict[str, tuple[Capitals, dict[str, str]]] = {
    "pays for silence": (Faulty(lambda e, t, right: right or not t), {"empty": "fail"}),
    "pays for blanks": (Faulty(lambda e, t, right: right or t.isspace()), {"empty": "fail"}),
    # REW-4: a two-way substring match accepted 'a', an echoed question earned .65, one letter was accepted.
    "matches either way": (MATCHES_EITHER_WAY, {"garbage": "fail"}),
    "pays for the question": (PAYS_FOR_THE_QUESTION, {"echo": "fail"}),
    "pays for a letter": (PAYS_FOR_A_LETTER, {"garbage": "fail"}),
    "mostly yes": (
        Faulty(example=posed("Is {} fine?", lambda index: "yes" if index % 3 else f"no{index}")),
        {"constant": "warn"},
    ),
    "without gold": (
        Faulty(gold_replies=lambda example: ()),
        {"gold": "fail", "near_miss": "n/a"},
    ),
    # REW-2: the answer was compared with the whole solution; -5 passed for 5; a last digit was lost.
    "refuses its gold": (REFUSES_ITS_GOLD, {"gold": "fail"}),
    "drops the sign": (
        Faulty(
            lambda e, t, right: found(t).lstrip("-") == e.answer,
            example=posed("Which number is {}th?", number_of),
        ),
        {"near_miss": "fail"},
    ),
    "loses a digit": (
        Faulty(
            lambda e, t, right: found(t) in {e.answer, (e.answer or "-")[:-1]},
            example=posed("Which number is {}th?", number_of),
        ),
        {"near_miss": "fail"},
    ),
    "pays for any word": (
        Faulty(lambda e, t, right: found(t)[-1:].isdigit() and len(found(t)) > 5),
        {"near_miss": "fail"},
    ),
    "shows its answer": (
        Faulty(example=lambda n: posed(f"Hint: {LONG(n)}. What is it?", LONG)(n)),
        {"label_leak": "fail"},
    ),
    "shows its answer loudly": (
        Faulty(example=lambda n: posed(f"Hint:  {LONG(n).upper()}\nWhich?", LONG)(n)),
        {"label_leak": "fail"},
    ),
    # Its words stand in the question, with other marks between them.
    "shows most of its answer": (
        Faulty(example=posed(f"Story {{}}: {WORDS.replace(' ', ', ')}. Tell it.", lambda n: f"{n} {WORDS}")),
        {"label_leak": "fail"},
    ),
    # Sound: a right reply says the question again, and then what nobody could read there.
    "answers in full": (
        Faulty(
            example=posed(f"In story {{}}, {WORDS}. Where to?", lambda n: Capitals().example(n).answer or ""),
            gold_replies=lambda e: (f"{e.fields['question']} answer: {e.answer}",),
        ),
        {"label_leak": "pass", "gold": "pass"},
    ),
    # REW-5: state of the process, shared by all that is judged, and its generator.
    "rolls dice": (
        Faulty(lambda e, t, right: right and random.random() < 0.9),
        {"determinism": "fail"},
    ),
    "counts its calls": (
        Faulty(lambda e, t, right: right and not (next(CALLS) % 7 == 0 and e.answer)),
        {"determinism": "fail"},
    ),
    "remembers the last": (RemembersTheLast(), {"determinism": "fail"}),
    "stops at the first test": (StopsAtTheFirstTest(), {"determinism": "fail"}),
    "pays for half": (
        Faulty(lambda e, t, right: len(found(t)) >= 3 and (e.answer or "").startswith(found(t))),
        {"near_miss": "fail"},
    ),
    # REW-1: what could not be judged counted as wrong.
    "scores without content": (
        Faulty(verify=calls_it_wrong_without_content),
        {"failure_paths": "fail"},
    ),
    "calls it wrong without its key": (CallsItWrongWithoutItsKey(), {"failure_paths": "fail"}),
    # REW-10: accuracy 2.39; every occurrence of the answer counts.
    "pays too much": (Faulty(lambda e, t, right: 2.39 * right), {"ceiling": "fail"}),
    "pays for each time": (
        Faulty(lambda e, t, right: t.count(f"answer: {e.answer}")),
        {"ceiling": "fail", "gold": "pass"},
    ),
    "pays for one answer": (Faulty(lambda e, t, right: right or found(t) == "yes"), {"constant": "warn"}),
    "follows from a word": (Faulty(example=follows_from_a_word), {"trivial_rule": "fail"}),
    "equals a column": (Faulty(example=equals_a_column), {"trivial_rule": "fail"}),
    "pays for bytes that no font shows": (
        Faulty(lambda e, t, right: right or "\ufffd" in t or t == "\x85"),
        {"garbage": "fail"},
    ),
    "takes marks that end a text for an answer": (
        Faulty(lambda e, t, right: right or t.strip().startswith("<|")),
        {"garbage": "fail"},
    ),
    "cannot render": (
        Faulty(render=lambda example: example.fields["problem"]),
        {"echo": "error", "label_leak": "error"},
    ),
    # Published graders: a checker of instructions looked for the reply in the options, and not the other way
    # round; an empty reply has no commas; the strict pattern of GSM8K took the last character for a period;
    # an environment whose end was never told paid no one.
    "checks options": (
        Faulty(lambda e, t, right: t.strip() and any(t.strip() in one for one in OPTIONS), **CHOOSES),
        {"garbage": "fail"},
    ),
    "wants no commas": (
        Faulty(lambda e, t, right: "," not in t, **CHOOSES),
        {"empty": "fail", "garbage": "fail"},
    ),
    "wants a period": (
        Faulty(
            lambda e, t, right: found(t)[:-1] == e.answer,
            gold_replies=lambda e: (f"answer: {e.answer}.", f"answer: {e.answer}"),
        ),
        {"gold": "fail"},
    ),
    "forgot its answers": (Faulty(lambda e, t, right: False), {"gold": "fail"}),
}


def audit(task: Task, **settings: object) -> AuditReport:
    return asyncio.run(run_audit(task, AuditSettings(**settings)))  # type: ignore[arg-type]


def statuses(report: AuditReport) -> dict[str, str]:
    return {result.probe: result.status.value for result in report.probes}


def test_a_sound_task_passes_every_probe() -> None:
    report = audit(Capitals())
    assert report.verdict is Verdict.GREEN
    fine = dict.fromkeys(PROBE_IDS, "pass")
    fine |= dict.fromkeys(["label_leak", "forgeries", "judge_injection"], "n/a")
    # Time depends on the machine.
    assert statuses(report) | {"cost": "pass"} == fine
    assert report.num_examples == 32


@pytest.mark.parametrize(("share", "status"), [(0.0, "fail"), (0.5, "pass")])
def test_examples_without_gold_count_beyond_the_share_that_the_task_declares(
    share: float, status: str
) -> None:
    task = Faulty(gold_replies=lambda e: (f"answer: {e.answer}",) if int(e.example_id, 16) % 4 else ())
    task.limits = replace(task.limits, max_goldless_frac=share)
    assert statuses(audit(task))["gold"] == status


@pytest.mark.parametrize("fault", FAULTS)
def test_rew_4_each_fault_is_found_by_its_probe(fault: str) -> None:
    task, expected = FAULTS[fault]
    shown = statuses(audit(task))
    assert {probe: shown[probe] for probe in expected} == expected


def find(report: AuditReport, probe: str) -> ProbeResult:
    (found,) = [result for result in report.probes if result.probe == probe]
    return found


def test_the_field_whose_loss_makes_a_right_reply_wrong_is_named() -> None:
    result = find(audit(CallsItWrongWithoutItsKey(), probes=("failure_paths",)), "failure_paths")
    # It scores what has no content at all too.
    assert [entry.detail for entry in result.evidence] == ["no content", *["no key"] * 4]
    assert {entry.reward for entry in result.evidence} == {0.0}


def test_every_right_reply_that_is_not_paid_is_listed() -> None:
    result = find(audit(REFUSES_ITS_GOLD), "gold")
    assert (result.num, len(result.evidence)) == (32, 32)


def test_evidence_names_the_example_and_shows_the_reply() -> None:
    garbage = find(audit(MATCHES_EITHER_WAY), "garbage")
    assert (garbage.detail, garbage.value, len(garbage.evidence)) == ("letter", 1.0, 5)
    ids = {example.example_id for example in Capitals().examples(Split.TRAIN)}
    assert {entry.example_id for entry in garbage.evidence} <= ids
    assert {(entry.reply, entry.reward) for entry in garbage.evidence} == {("a", 1.0)}


@pytest.mark.parametrize(("chance", "status"), [(0.25, "pass"), (0.02, "fail")])
def test_a_declared_chance_is_allowed_and_no_more(chance: float, status: str) -> None:
    task = Faulty(lambda e, t, right: right or (t.strip() != "" and int(e.example_id, 16) % 4 == 0))
    task.limits = replace(Capitals.limits, chance=chance)
    # 8 of 32 are expected, and 0.25 + 3 * sqrt(0.25 * 0.75 / 32) = 0.48 is allowed; else 0.02 + 0.07.
    assert statuses(audit(task))["garbage"] == status


def test_arithmetic_is_green() -> None:
    assert audit(build_task(ArithmeticSpec())).verdict is Verdict.GREEN


def test_an_unknown_probe_and_a_task_without_examples_are_refused() -> None:
    with pytest.raises(ConfigError, match="ecko"):
        audit(Capitals(), probes=("echo", "ecko"))
    with pytest.raises(DataError, match="capitals"):
        audit(Faulty(examples=lambda split: []))


def test_a_task_for_evaluation_only_is_audited_on_its_held_out_examples() -> None:
    def examples(split: Split) -> Sequence[Example]:
        return Capitals().examples(split) if split is Split.HELD_OUT else []

    assert audit(Faulty(examples=examples)).verdict is Verdict.GREEN
