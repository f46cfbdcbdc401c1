"""Probes around a task's correct answers: gold replies, near misses, leaks, trivial rules, changed examples.

A trivial rule is learned on every second example and judged on the others: it copies one feature, or looks
up the commonest answer for its value. Features are the fields that the prompt shows, its first and last words
and numbers, and for each word whether it occurs.
"""

from __future__ import annotations

import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from strop.audit.context import (
    GOLD_FRAC,
    MAX_EVIDENCE,
    WRONG_FRAC,
    AuditContext,
    Judged,
    bounded,
    worst_of,
)
from strop.audit.report import Evidence, ProbeResult, ProbeStatus
from strop.rollout import Example, make_example
from strop.tasks.mathematics import read_value
from strop.tasks.task import TURN

_LATE = "verifier_timeout"
_NUM_FORGED = 2
_NUM_BARE = 4
_NUM_REPEATS = 3
_MIN_LEAK_CHARS = 20
_PART_WORDS = ("test", "constraint", "instruction", "criteri")
"""Parts of the names of fields that list a reply's tests or constraints."""
_MIN_EXAMPLES = 8
_MAX_WORDS = 300
_MAX_VALUES_FRAC = 1 / 3
"""Share of the training examples: a feature with more values than this identifies the example."""


def _full(judged: Judged) -> float:
    return float(judged.is_full)


async def probe_gold(context: AuditContext) -> ProbeResult:
    """Gold replies, cut at stop strings as they would be, earn full marks."""
    judged = await context.judge_all((e, text) for e in context.examples for text in context.golds(e))
    bad = [j for j in judged if not j.is_right]
    fracs = {e.example_id: context.task.limits_of(e).max_goldless_frac for e in context.examples}
    without = [e.example_id for e in context.examples if not context.task.gold_replies(e)]
    # Those whose task promises no gold for each are a fault if they are more than it says.
    if sum(fracs[name] > 0.0 for name in without) <= sum(fracs.values()):
        without = [name for name in without if not fracs[name]]
    if not judged and not without:
        detail = "no right reply is known, so that nothing shows what one earns"
        return ProbeResult(status=ProbeStatus.WARN, detail=detail)
    share = 1.0 - len({*without, *(j.example.example_id for j in bad)}) / len(fracs)
    return ProbeResult(
        status=ProbeStatus.PASS if share >= GOLD_FRAC else ProbeStatus.FAIL,
        value=share,
        limit=GOLD_FRAC,
        num=len(judged),
        detail=f"{len(without)} examples without any right reply" if without else "share with full marks",
        # All of them, since mending the data needs the whole list.
        evidence=tuple(judged.show() for judged in bad),
    )


async def probe_near_miss(context: AuditContext) -> ProbeResult:
    """A number close to the answer, a cut one, and the answer to another example earn no full marks."""

    def misses(example: Example) -> dict[str, str]:
        numbers, texts = {}, {}
        if (gold := read_value(example.answer or "")) is not None:
            numbers = {"off by one": gold + 1, **({"sign": -gold, "factor": gold * 10} if gold else {})}
        for text in context.golds(example)[:1]:
            # The cut is inside the answer: a reply that only lost its closing tag may still be right. So may
            # be one whose answer stands before it, too.
            answer = example.answer if example.answer and example.answer in text else text
            head = text[: text.rindex(answer)]
            cuts = (25, 50, 75) if answer not in head else ()
            texts = {f"cut at {percent} %": head + answer[: len(answer) * percent // 100] for percent in cuts}
        other = next((one for one in context.examples if one.answer != example.answer), None)
        for gold_text in context.golds(other)[:1] if other else ():
            texts["the answer to another"] = gold_text
        return texts | {kind: context.in_form(example, str(value)) for kind, value in numbers.items()}

    by_kind = await context.judge_kinds(misses)
    nothing = "no right reply and no number is known"
    return worst_of(by_kind, _full, chance=context.task.limits.chance, floor=WRONG_FRAC, nothing=nothing)


async def probe_forgeries(context: AuditContext) -> ProbeResult:
    """Attempts that a workspace's class names as forged have a score, and not full marks."""
    forge = getattr(context.task.world, "forgeries", lambda _: ())

    def texts(example: Example) -> dict[str, str]:
        return {f"forgery {n}": TURN.join(replies) for n, replies in enumerate(forge(example), 1)}

    by_kind = await context.judge_kinds(texts, context.examples[:_NUM_FORGED])
    return worst_of(by_kind, _full, nothing="no class of an environment names any")


async def probe_label_leak(context: AuditContext) -> ProbeResult:
    """No prompt contains its own long answer, in any case, spacing and punctuation."""
    leaks, num = [], 0
    for example in context.examples:
        prompt = _plain(context.prompt(example))
        texts = [example.answer or "", *context.task.gold_replies(example)]
        long = [text for text in texts if len(_plain(text)) >= _MIN_LEAK_CHARS]
        num += len(long)
        shown = [text for text in long if _plain(text) in prompt]
        leaks += [Evidence.of(example, text, None, "stands in the prompt") for text in shown[:1]]
    if not num:
        return ProbeResult(status=ProbeStatus.NOT_APPLICABLE, detail="no long answer")
    share = len(leaks) / len(context.examples)
    return bounded(share, 0.0, leaks, num, "share of prompts that hold their answer")


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


async def probe_determinism(context: AuditContext) -> ProbeResult:
    """A reply earns the same again, alone, in another order, and with its tests in reverse."""
    num, evidence = 0, []
    for part in context.in_time(context.examples):
        replies = [(example, text) for example in part for text in _replies(context, example)]
        rounds = [await context.judge_all(replies) for _ in range(_NUM_REPEATS)]
        order = random.Random(context.seed).sample(range(len(replies)), len(replies))
        alone = {index: await context.judge_all([replies[index]]) for index in order}
        rounds.append([alone[index][0] for index in range(len(replies))])
        if any(permute_parts(example) for example in part):
            rounds.append(await context.judge_all((permute_parts(e) or e, text) for e, text in replies))
        num += len(replies)
        for repeats in zip(*rounds, strict=True):
            # Those that a busy machine had no time for say nothing.
            in_time = [j.outcome for j in repeats if getattr(j.outcome.failure, "kind", "") != _LATE]
            if len({(outcome.reward, outcome.is_correct, outcome.format_ok) for outcome in in_time}) > 1:
                rewards = " then ".join(f"{judged.reward}" for judged in repeats)
                evidence.append(repeats[0].show(f"scored {rewards}"))
    return bounded(len(evidence) / num, 0.0, evidence, num, "share that changed")


def _replies(context: AuditContext, example: Example) -> Sequence[str]:
    """Return right and wrong replies; where there are parts also partly correct ones."""
    other = context.examples[list(context.examples).index(example) - 1]
    replies = [*context.task.gold_replies(example)[:1], str(other.answer)]
    if permute_parts(example) is not None:
        replies += [*context.task.gold_replies(example), "a", context.prompt(example)]
    return list(dict.fromkeys(replies))


def permute_parts(example: Example) -> Example | None:
    """Return an example with its tests or constraints in reverse; None if it lists none.

    It keeps its id, since its question is the same.
    """
    lists = {
        key: value[::-1]
        for key, value in example.fields.items()
        if isinstance(value, list) and len(value) > 1 and any(word in key for word in _PART_WORDS)
    }
    return replace(example, fields={**example.fields, **lists}) if lists else None


async def probe_failure_paths(context: AuditContext) -> ProbeResult:
    """An example without content has no score, not a score of 0.

    A gold reply to an example that lacks its answer or a field earns full marks, or cannot be judged.
    """
    num_judged = len(context.all_judged)
    hollow = make_example(context.task.name, {}, None)
    replies = [("no content", hollow, "asdf"), ("no content", hollow, "")]
    for example in context.examples[:_NUM_BARE]:
        golds = context.task.gold_replies(example)[:1]
        # Where the gold reply is not right, `probe_gold` says so.
        if golds and (await context.judge_all([(example, golds[0])]))[0].is_right:
            for key in example.fields:
                fields = {name: value for name, value in example.fields.items() if name != key}
                replies.append((f"no {key}", replace(example, fields=fields), golds[0]))
            if example.answer is not None:
                replies.append(("no answer", replace(example, answer=None), golds[0]))
    judged = await context.judge_all((example, text) for _, example, text in replies)
    # That these have no score is no fault.
    del context.all_judged[num_judged:]
    wrong = [
        j.show(name)
        for (name, *_), j in zip(replies, judged, strict=True)
        if j.reward is not None and (name == "no content" or not j.is_full)
    ]
    detail = "scores of examples without content, answer or a field"
    return bounded(float(len(wrong)), 0.0, wrong[-MAX_EVIDENCE:], len(judged), detail)


async def probe_trivial_rule(context: AuditContext) -> ProbeResult:
    """No rule of one feature answers the examples that it was not learned on."""
    asked = [example for example in context.spoken() if example.answer is not None]
    if len(asked) < _MIN_EXAMPLES:
        return ProbeResult(status=ProbeStatus.NOT_APPLICABLE, detail="too few answers in words")
    features, answers = _features(context, asked), [str(example.answer) for example in asked]
    best, guesses, best_num = "", [""], 0
    for name in dict.fromkeys(name for values in features for name in values):
        known = [(values.get(name, ""), answer) for values, answer in zip(features, answers, strict=True)]
        learned: dict[str, Counter[str]] = defaultdict(Counter)
        for value, answer in known[::2]:
            learned[value][answer] += 1
        tables = [(f"is the {name}", {value: value for value, _ in known})]
        if 1 < len(learned) <= max(2.0, _MAX_VALUES_FRAC * len(known[::2])):
            most = {value: counts.most_common(1)[0][0] for value, counts in learned.items()}
            tables.append((f"follows from the {name}", most))
        for rule, table in tables:
            num = sum(table.get(value) == answer for value, answer in known[::2])
            if num > best_num:
                best, guesses, best_num = rule, [table.get(value, "") for value, _ in known], num
    if not best_num:
        return bounded(0.0, GOLD_FRAC, (), len(asked), "no rule was ever right")
    texts = {e.example_id: context.in_form(e, guess) for e, guess in zip(asked, guesses, strict=True)}
    by_kind = await context.judge_kinds(lambda e: {best: texts[e.example_id]}, asked[1::2])
    # An answer that is nearly always right is the matter of `probe_constant`.
    most_common = Counter(answers[1::2]).most_common(1)[0][1] / len(answers[1::2])
    return worst_of(by_kind, _full, floor=max(GOLD_FRAC, most_common), detail="the answer {}")


def _features(context: AuditContext, examples: Sequence[Example]) -> list[dict[str, str]]:
    """Return the features of each example by name."""
    prompts = [context.prompt(example) for example in examples]
    words_of = [re.findall(r"[^\W\d_]+(?:[:=] ?\w+)?", prompt.lower()) for prompt in prompts]
    # Words that some prompts contain and others do not, the most common first.
    counts = Counter(word for words in words_of for word in set(words))
    telling = [word for word, num in counts.most_common() if 1 < num < len(prompts)][:_MAX_WORDS]
    features = []
    for example, prompt, words in zip(examples, prompts, words_of, strict=True):
        fields = {f"field {k}": str(v) for k, v in example.fields.items() if str(v) and str(v) in prompt}
        for kind, values in (("word", words), ("number", re.findall(r"-?\d+(?:\.\d+)?", prompt))):
            fields |= {f"first {kind}": values[0], f"last {kind}": values[-1]} if values else {}
        features.append(fields | {f"word {word!r}": str(word in words) for word in telling})
    return features
