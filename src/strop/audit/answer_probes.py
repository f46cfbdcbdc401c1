"""Probes around a task's correct answers: gold replies, near misses, leaks, trivial rules, changed examples.

Correct replies must earn full marks and nearly correct ones must not; a reply must earn the same in any order
and beside any other replies. A trivial rule is learned on every second example and judged on the others: it
copies one feature, or looks up the commonest answer for its value. Features are the fields that the prompt
shows, its first and last words and numbers, and for each word whether it occurs.
"""

from __future__ import annotations

import json
import re
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from strop.audit.attacks import as_lookup
from strop.audit.context import (
    ENOUGH_S,
    MAX_LATE_FRAC,
    AuditContext,
    Judged,
    bound,
    chance_limit,
    is_full,
    judge_kinds,
    measured,
    not_applicable,
    show_evidence,
    warn_of_late,
)
from strop.audit.report import MAX_EVIDENCE, Evidence, ProbeResult, ProbeStatus
from strop.rollout import Example, make_example
from strop.tasks.answers import parse_number
from strop.tasks.selftest import excess_goldless
from strop.tasks.task import TURN

_MIN_GOLD_FRAC = 0.95
_NUM_FORGED = 2
_MAX_CUT_FRAC = 0.05
_MIN_LEAK_CHARS = 20
_NUM_LEAK_WORDS = 8
_MAX_LEAK_FRAC = 0.8
"""Share of a long answer's runs of `_NUM_LEAK_WORDS` words that its prompt may contain."""
_NUM_REPEATS = 5
_MIN_REPEATS = 3
"""Repeats if judging is slow."""


async def probe_gold(context: AuditContext) -> ProbeResult:
    """Gold replies earn full marks on at least 95 % of the examples."""
    # If each judgement needs a sandbox, further forms of a gold reply are tried on the first examples only.
    num_few = len(context.few_examples)
    golds = [
        (example, text)
        for index, example in enumerate(context.examples)
        for text in context.task.gold_replies(example)[: None if index < num_few else 1]
    ]
    judged = await context.judge_all(golds)
    late = [j for j in judged if j.is_late]
    bad = [j for j in judged if not is_full(context, j) and not j.is_late]
    if len(late) > MAX_LATE_FRAC * len(judged):
        bad += late
    bad_ids = {j.example.example_id for j in bad}
    without = excess_goldless(context.task, context.examples)
    if not judged and not without:
        detail = "no right reply is known, so that nothing shows what one earns"
        return ProbeResult(probe="gold", status=ProbeStatus.WARN, detail=detail)
    share = 1.0 - (len(bad_ids) + len(without)) / len(context.examples)
    detail = f"{len(without)} examples without any right reply" if without else "share with full marks"
    result = ProbeResult(
        probe="gold",
        status=ProbeStatus.PASS if share >= _MIN_GOLD_FRAC else ProbeStatus.FAIL,
        value=share,
        limit=_MIN_GOLD_FRAC,
        num=len(judged),
        detail=detail,
        # All of them, since mending the data needs the whole list.
        evidence=show_evidence(bad, most=len(bad)),
    )
    return warn_of_late(result, late)


async def probe_near_miss(context: AuditContext) -> ProbeResult:
    """A number close to the answer does not earn full marks."""

    def near_misses(example: Example) -> dict[str, str]:
        gold = parse_number(example.answer or "")
        if gold is None:
            return {}
        misses = {"off by one": gold + 1}
        if gold:
            misses |= {"sign": -gold, "factor": gold * 10}
        if abs(gold) >= 10 and gold == int(gold):
            misses["last digit"] = Decimal(int(gold / 10))
        return {kind: context.in_form(example, str(value)) for kind, value in misses.items()}

    by_kind = await judge_kinds(context, near_misses, context.examples)
    if not by_kind:
        return not_applicable("near_miss", "no answer is a number")
    return bound(context, "near_miss", by_kind, 0.0, is_partial_fine=True)


async def probe_wrong_order(context: AuditContext) -> ProbeResult:
    """The gold reply to another example does not earn full marks."""
    replies = []
    for index, example in enumerate(context.examples):
        others = [*context.examples[index + 1 :], *context.examples[:index]]
        other = next((other for other in others if other.answer != example.answer), None)
        if other is not None and (golds := context.task.gold_replies(other)):
            replies.append((example, golds[0]))
    if not replies:
        return not_applicable("wrong_order", "no two examples with different right replies")
    texts = {example.example_id: text for example, text in replies}
    examples = [example for example, _ in replies]
    by_kind = await judge_kinds(context, lambda example: {"neighbor": texts[example.example_id]}, examples)
    judged = by_kind["neighbor"]
    full = [j for j in judged if is_full(context, j)]
    limit = max(_MAX_CUT_FRAC, chance_limit(context.task.limits.chance, len(judged)))
    return measured("wrong_order", len(full) / len(judged), limit, full, len(judged), "share with full marks")


async def probe_prompt_leak(context: AuditContext) -> ProbeResult:
    """No prompt contains its own long answer, in any case and spacing, nor most of its words."""
    leaks, num = [], 0
    for example in context.examples:
        prompt = " ".join(m.text for m in context.task.render(example))
        for text in (example.answer or "", *context.task.gold_replies(example)):
            is_long = len(_plain(text)) >= _MIN_LEAK_CHARS
            num += is_long
            # A gold reply may repeat words of the prompt; the answer itself may not.
            has_words = text == example.answer and _share_of_words(text, prompt) > _MAX_LEAK_FRAC
            if is_long and (has_words or _plain(text) in _plain(prompt)):
                leaks.append(Evidence.of(example.example_id, text, None, "stands in the prompt"))
                break
    if not num:
        return not_applicable("label_leak", f"no answer of {_MIN_LEAK_CHARS} characters or more")
    return ProbeResult(
        probe="label_leak",
        status=ProbeStatus.FAIL if leaks else ProbeStatus.PASS,
        value=len(leaks) / len(context.examples),
        limit=0.0,
        num=num,
        detail="share of prompts that hold their answer",
        evidence=tuple(leaks[:MAX_EVIDENCE]),
    )


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _share_of_words(answer: str, prompt: str) -> float:
    """Return the share of an answer's runs of words that a prompt contains; 0 if the answer is too short.

    Numbers and single letters are no words: every question about a grid contains its cells.
    """

    def runs_of(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"[^\W\d_]{2,}", _plain(text))
        starts = range(len(words) - _NUM_LEAK_WORDS + 1)
        return {tuple(words[start : start + _NUM_LEAK_WORDS]) for start in starts}

    runs = runs_of(answer)
    return len(runs & runs_of(prompt)) / len(runs) if runs else 0.0


async def probe_determinism(context: AuditContext) -> ProbeResult:
    """A reply earns the same whenever it is judged, and beside any other replies."""
    all_repeats: list[tuple[Judged, ...]] = []
    started_at = time.perf_counter()
    for part in context.in_time(context.few_examples, num_first=1):
        replies = []
        for example in part:
            golds = context.task.gold_replies(example)
            other = context.examples[list(context.examples).index(example) - 1]
            # A correct reply and a wrong one.
            replies += [(example, golds[0] if golds else "asdf"), (example, str(other.answer))]
        rounds: list[list[Judged]] = []
        while len(rounds) < _NUM_REPEATS:
            rounds.append(await context.judge_all(replies))
            if len(rounds) >= _MIN_REPEATS and time.perf_counter() - started_at > ENOUGH_S:
                break
        all_repeats += zip(*rounds, strict=True)
    differing = []
    for repeats in all_repeats:
        outcomes = {(j.reward, j.outcome.is_correct, j.outcome.format_ok) for j in repeats if not j.is_late}
        if len(outcomes) > 1:
            differing.append(repeats)
    result = measured(
        "determinism",
        len(differing) / len(all_repeats),
        0.0,
        [repeats[0] for repeats in differing],
        len(all_repeats),
        "share that changed",
    )
    evidence = []
    for first, *others in differing[:MAX_EVIDENCE]:
        rewards = " then ".join(f"{judged.reward}" for judged in (first, *others))
        evidence.append(Evidence.of(first.example.example_id, first.text, first.reward, f"scored {rewards}"))
    # Any changing score is a failure: measurements with it cannot be repeated.
    status = ProbeStatus.FAIL if differing else result.status
    result = replace(result, status=status, evidence=tuple(evidence))
    return warn_of_late(result, [j for repeats in all_repeats for j in repeats if j.is_late])


async def probe_forgeries(context: AuditContext) -> ProbeResult:
    """Attempts that a workspace's class names as forged have a score, and not full marks."""
    name = "forgeries"
    forge: Callable[[Example], Sequence[Sequence[str]]] = getattr(
        context.task.world, "forgeries", lambda _: ()
    )
    if context.task.world is None:
        return not_applicable(name, "attempts leave no files")

    def texts(example: Example) -> dict[str, str]:
        return {f"forgery {n}": TURN.join(replies) for n, replies in enumerate(forge(example), 1)}

    by_kind = await judge_kinds(context, texts, context.examples[:_NUM_FORGED])
    if not by_kind:
        return not_applicable(name, "the class names none")
    return bound(context, name, by_kind, 0.0, is_partial_fine=True)


async def probe_truncation(context: AuditContext) -> ProbeResult:
    """Truncated gold replies earn full marks on few examples only."""

    def cut(example: Example) -> dict[str, str]:
        # The cut is inside the answer: a reply that only lost its closing tag may still be right.
        golds = context.task.gold_replies(example)
        if not golds:
            return {}
        reply, answer = golds[0], example.answer
        head = reply[: reply.rindex(answer)] if answer and answer in reply else ""
        body = (answer if head or answer == reply else reply) or ""
        return {f"{percent} %": head + body[: len(body) * percent // 100] for percent in (25, 50, 75)}

    by_kind = await judge_kinds(context, cut, context.few_examples)
    if not by_kind:
        return not_applicable("truncation", "no right reply is known")
    shares = {kind: [j for j in judged if is_full(context, j)] for kind, judged in by_kind.items()}
    worst = max(shares, key=lambda kind: len(shares[kind]))
    share = len(shares[worst]) / len(by_kind[worst])
    limit = max(_MAX_CUT_FRAC, chance_limit(context.task.limits.chance, len(by_kind[worst])))
    return measured("truncation", share, limit, shares[worst], len(by_kind[worst]), f"cut at {worst}")


_NUM_BARE = 4
_PART_WORDS = ("test", "constraint", "instruction", "criteri")
"""Parts of the names of fields that list a reply's tests or constraints."""


async def probe_order(context: AuditContext) -> ProbeResult:
    """Scores depend neither on the order or concurrency of judgements nor on the order of tests."""
    num, differing = 0, []
    for part in context.in_time(context.few_examples):
        replies = [(example, text) for example in part for text in _replies(context, example)]
        forward = await context.judge_all(replies)
        shuffled = list(range(len(replies)))
        context.random("order").shuffle(shuffled)
        for index in shuffled:
            (alone,) = await context.judge_all([replies[index]])
            num += 1
            if _differ(alone, forward[index]):
                differing.append(forward[index])
        permuted = [
            (first, (other, first.text))
            for first in forward
            if (other := permute_parts(first.example)) is not None
        ]
        judged = await context.judge_all(reply for _, reply in permuted)
        num += len(judged)
        pairs = zip(permuted, judged, strict=True)
        differing += [again for (first, _), again in pairs if _differ(again, first)]
    return measured("order", len(differing) / num, 0.0, differing, num, "share that changed")


def _differ(first: Judged, second: Judged) -> bool:
    return first.reward != second.reward and not (first.is_late or second.is_late)


def _replies(context: AuditContext, example: Example) -> Sequence[str]:
    """Return gold replies, or a wrong one if there is none; for parts and tests also partly correct ones."""
    golds = tuple(context.task.gold_replies(example)) or ("a",)
    form = context.form_of(example)
    prompt = "\n".join(message.text for message in context.task.render(example))
    if permute_parts(example) is not None:
        golds = tuple(dict.fromkeys((*golds, "a", prompt)))
    if form is None:
        return golds
    shown = [line for line in prompt.splitlines() if line.strip().startswith("assert ")]
    lookup = as_lookup(form, "\n".join(shown[:1]))
    return golds if lookup is None else (*golds, lookup)


def permute_parts(example: Example) -> Example | None:
    """Return an example with its tests or constraints in reverse; None if it lists none.

    It keeps its id, since its question is the same.
    """
    fields = dict(example.fields)
    changed = {key: new for key, value in fields.items() if (new := _reverse(key, value)) is not None}
    return replace(example, fields={**fields, **changed}) if changed else None


def _reverse(key: str, value: Any) -> Any:
    if isinstance(value, list) and len(value) > 1 and any(word in key for word in _PART_WORDS):
        return value[::-1]
    if not isinstance(value, str) or not value.startswith("{"):
        return None
    try:
        tests = json.loads(value)
    except (ValueError, RecursionError):
        return None
    if not isinstance(tests, dict):
        return None
    lists = {name: tests[name] for name in ("inputs", "outputs") if isinstance(tests.get(name), list)}
    if len(lists) < 2 or min(map(len, lists.values())) < 2:
        return None
    reversed_lists = {name: values[::-1] for name, values in lists.items()}
    return json.dumps({**tests, **reversed_lists})


async def probe_failure_paths(context: AuditContext) -> ProbeResult:
    """An example without content has no score, not a score of 0.

    A gold reply to an example that lacks its answer or a field earns full marks, or cannot be judged.
    """
    hollow = make_example(context.task.name, {}, None)
    judged = await context.judge_all([(hollow, "asdf"), (hollow, "")])
    bare = [
        (example, text, name, without)
        for example in context.few_examples[:_NUM_BARE]
        for text in context.task.gold_replies(example)[:1]
        for name, without in _without_a_part(example).items()
    ]
    whole = await context.judge_once([(example, text) for example, text, _, _ in bare])
    lacking = await context.judge_all((without, text) for _, text, _, without in bare)
    wrong = [("no content", j) for j in judged if j.reward is not None]
    wrong += [
        (name, j)
        for (_, _, name, _), j, before in zip(bare, lacking, whole, strict=True)
        if j.reward is not None and is_full(context, before) and not is_full(context, j)
    ]
    num = len(judged) + len(lacking)
    detail = "scores of examples without content, answer or a field"
    result = measured("failure_paths", float(len(wrong)), 0.0, (), num, detail)
    evidence = [Evidence.of(j.example.example_id, j.text, j.reward, name) for name, j in wrong]
    return replace(result, evidence=tuple(evidence[-MAX_EVIDENCE:]))


def _without_a_part(example: Example) -> Mapping[str, Example]:
    """Return the example without its answer, and without each of its fields."""
    bare = {
        f"no {key}": replace(example, fields={k: v for k, v in example.fields.items() if k != key})
        for key in example.fields
    }
    return bare if example.answer is None else {**bare, "no answer": replace(example, answer=None)}


_MIN_EXAMPLES = 8
_MAX_RULE_FRAC = 0.95
"""A better rule would pass as a gold reply (`_MIN_GOLD_FRAC`)."""
_MAX_WORDS = 300
_MAX_VALUES_FRAC = 1 / 3
"""Share of the training examples: a feature with more values than this identifies the example."""
Features = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    """A rule whose answer is one feature's value, or the table's entry for it."""

    feature: str
    table: Mapping[str, str] | None = None

    def answer(self, features: Features) -> str:
        value = features.get(self.feature, "")
        return value if self.table is None else self.table.get(value, "")


async def probe_trivial_rule(context: AuditContext) -> ProbeResult:
    """No rule of one feature answers the examples that it was not learned on."""
    labelled = [
        (e, e.answer) for e in context.examples if e.answer is not None and context.form_of(e) is None
    ]
    if len(labelled) < _MIN_EXAMPLES:
        return not_applicable("trivial_rule", f"fewer than {_MIN_EXAMPLES} examples with an answer in words")
    prompts = [" ".join(m.text for m in context.task.render(example)) for example, _ in labelled]
    # Words that some prompts contain and others do not, the most common first.
    counts = Counter(word for prompt in prompts for word in set(_words(prompt)))
    words = [word for word, num in counts.most_common() if 1 < num < len(prompts)][:_MAX_WORDS]
    features = [
        _features(example, prompt, words) for (example, _), prompt in zip(labelled, prompts, strict=True)
    ]
    answers = [answer for _, answer in labelled]
    rule = _best_rule(features[::2], answers[::2])
    if rule is None:
        return measured("trivial_rule", 0.0, _MAX_RULE_FRAC, (), len(labelled), "no rule was ever right")
    tested = list(zip(labelled, features, strict=True))[1::2]
    judged: list[Judged] = []
    for part in context.in_time(tested):
        judged += await context.judge_all(
            (example, context.in_form(example, rule.answer(values))) for (example, _), values in part
        )
    full = [j for j in judged if is_full(context, j)]
    # An answer that is nearly always right is the matter of `probe_constant`.
    most_common = Counter(answers[1::2]).most_common(1)[0][1] / len(tested)
    return measured(
        "trivial_rule",
        len(full) / len(judged),
        max(_MAX_RULE_FRAC, most_common),
        full,
        len(judged),
        f"the answer {'is' if rule.table is None else 'follows from'} the {rule.feature}",
    )


def _words(prompt: str) -> list[str]:
    return re.findall(r"[^\W\d_]+(?:[:=] ?\w+)?", prompt.lower())


def _features(example: Example, prompt: str, words: Sequence[str]) -> Features:
    prompt_words, numbers = _words(prompt), re.findall(r"-?\d+(?:\.\d+)?", prompt)
    features = {
        f"field {key}": str(value)
        for key, value in example.fields.items()
        if isinstance(value, str | int | float) and str(value) in prompt
    }
    for kind, values in (("word", prompt_words), ("number", numbers)):
        if values:
            features |= {f"first {kind}": values[0], f"last {kind}": values[-1]}
    present = set(prompt_words)
    return features | {f"word {word!r}": str(word in present) for word in words}


def _best_rule(features: Sequence[Features], answers: Sequence[str]) -> _Rule | None:
    """Return the rule that answers most examples, None if no rule answers any."""
    best, best_num = None, 0
    for name in dict.fromkeys(name for values in features for name in values):
        by_value: dict[str, Counter[str]] = defaultdict(Counter)
        for values, answer in zip(features, answers, strict=True):
            by_value[values.get(name, "")][answer] += 1
        rules = [_Rule(feature=name)]
        if 1 < len(by_value) <= max(2.0, _MAX_VALUES_FRAC * len(features)):
            table = {value: counts.most_common(1)[0][0] for value, counts in by_value.items()}
            rules.append(_Rule(feature=name, table=table))
        for rule in rules:
            num = sum(rule.answer(values) == answer for values, answer in zip(features, answers, strict=True))
            if num > best_num:
                best, best_num = rule, num
    return best
