"""The probes of a task whose replies are judged as text.

Each takes a world and returns a result. A limit that speaks of chance is the declared chance plus three
standard errors of a mean over the examples asked; where nothing can be had by chance, nothing may be.
"""

from __future__ import annotations

import re
import time
import unicodedata
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from decimal import Decimal

from strop.audit.attacks import as_lookup
from strop.audit.measure import (
    MAX_LATE_FRAC,
    MINOR_FRAC,
    SLACK,
    bound,
    chance_limit,
    failed,
    is_full,
    judge_kinds,
    mean_share,
    measured,
    not_applicable,
    show_evidence,
    warn_of_late,
)
from strop.audit.report import MAX_EVIDENCE, Evidence, ProbeResult, ProbeStatus
from strop.audit.world import ENOUGH_S, AuditWorld, Judged
from strop.rollout import Example
from strop.tasks.answers import parse_number
from strop.tasks.bounds import is_within
from strop.tasks.selftest import excess_goldless
from strop.tasks.traits import limits_of

Probe = Callable[[AuditWorld], Awaitable[ProbeResult]]

_COINCIDENCE_FRAC = 0.01
"""Share of wrong replies that are right all the same: a neighbour's answer, a number of the question."""
_MAX_CONSTANT_FRAC = 0.2
_MIN_GOLD_FRAC = 0.95
_MAX_CUT_FRAC = 0.05
_MIN_LEAK_CHARS = 20
_NUM_LEAK_WORDS = 8
_MAX_LEAK_FRAC = 0.8
"""Share of a long answer's runs of `_NUM_LEAK_WORDS` words that its prompt may hold."""
_MAX_CPU_S = 5.0
"""What one judgement in the process of the run may compute: everything else there waits for it."""
_NUM_REPEATS = 5
_MIN_REPEATS = 3
"""Where judging is slow."""
_NUM_NULL_REPLIES = 100
_NUM_OVERDONE = 4
_MAX_NULL_S = {False: 0.005, True: 0.2}
"""Wall time of judging nothing, by whether replies are judged in processes of their own."""
_TERMINATORS = "<|im_end|>\n<|endoftext|></s>"
_WORDS = (
    *("stone", "river", "window", "table", "quiet", "yellow", "often", "between", "market", "letter"),
    *("summer", "carry", "bright", "under", "garden", "seldom", "answer", "corner", "listen", "paper"),
)
_NUM_COMMON = 3
_RETURNED = ("0", "1", "True", "None", "[]", "")
_GENERIC = ("the", "text", "answer", "yes", "e", "a")
_MAX_SHARED_WORDS = 4
"""Words that all prompts have in common, and as many pieces that right replies have: letters and words."""
_MAX_PART = 0.25
"""Share of full marks that one reply to every example may earn by parts of the marks."""
_MUCH_OF_PART = 0.1
"""From here on it is a warning."""
_CONSTANTS = ("0", "1", "2", "yes", "no", "A", "B", "True", "False", "[]")


async def probe_noop(world: AuditWorld) -> ProbeResult:
    """No reply at all earns nothing, and is judged."""
    judged = await world.judge_all((example, "") for example in world.examples)
    return bound(world, "noop", {"no reply": judged}, 0.0)


async def probe_empty(world: AuditWorld) -> ProbeResult:
    """White space and the marks that end a text earn nothing; white space is not in the asked form."""
    blanks = {"blank": " ", "line": "\n", "lines": " \n\t\n"}
    by_kind = await judge_kinds(world, lambda example: blanks)
    result = bound(world, "empty", by_kind, 0.0)
    if result.status is not ProbeStatus.PASS:
        return result
    formed = [j for judged in by_kind.values() for j in judged if j.outcome.format_ok]
    if formed:
        return failed("empty", formed, "an empty reply counts as well-formed")
    # These are letters all the same: what any text earns by chance, they may.
    ended = await judge_kinds(world, lambda example: {"terminators": _TERMINATORS})
    result_of_ends = bound(world, "empty", ended, world.task.limits.chance)
    return result if result_of_ends.status is ProbeStatus.PASS else result_of_ends


async def probe_garbage(world: AuditWorld) -> ProbeResult:
    """Text without any sense earns nothing beyond chance, and is judged in time."""
    words = world.random("garbage")
    # Without digits: a number among them would be a guess.
    noise = bytes(words.choice([*range(32), *range(128, 256)]) for _ in range(400))
    kinds = {
        "asdf": "asdf",
        "letter": "a",
        "words": " ".join(words.choice(_WORDS) for _ in range(200)),
        # As a tokenizer decodes bytes that are no text, and as one that takes each for a letter.
        "bytes": noise.decode(errors="replace") + noise.decode("latin-1"),
        "controls": "\u202e\u0000\u200b\x1b[m\ufeff\U0001f9ea\x07",
        "brackets": "{}[]()<>",
        "long": "lorem " * 17_000,
    }
    by_kind = await judge_kinds(world, lambda example: kinds)
    result = bound(world, "garbage", by_kind, world.task.limits.chance)
    slow = [j for judged in by_kind.values() for j in judged if (j.cpu_s or 0.0) > _MAX_CPU_S]
    if result.status is ProbeStatus.PASS and slow:
        return failed("garbage", slow, f"replies that take more than {_MAX_CPU_S:g} s to judge")
    return result


async def probe_echo(world: AuditWorld) -> ProbeResult:
    """The question given back earns nothing beyond chance."""
    by_kind = await judge_kinds(world, lambda example: _echoes(world, example), world.few_examples)
    result = bound(world, "echo", by_kind, max(world.task.limits.chance, _COINCIDENCE_FRAC))
    # A question may hold its answer by coincidence. A part of the marks for giving it back is no coincidence.
    parts = [
        (reward, judged)
        for judged in (j for kind in by_kind.values() for j in kind)
        if MINOR_FRAC * world.max_reward < (reward := judged.reward or 0.0) < world.max_reward - SLACK
    ]
    if result.status is not ProbeStatus.PASS or not parts or world.task.limits.chance:
        return result
    highest, best = max(parts, key=lambda part: part[0])
    detail = f"{result.detail}; {len(parts)} partly paid, up to {highest:.3g}"
    return replace(result, status=ProbeStatus.WARN, detail=detail, evidence=show_evidence([best]))


def _echoes(world: AuditWorld, example: Example) -> dict[str, str]:
    prompt = "\n".join(message.content for message in world.task.render(example))
    sentences = [part for part in re.split(r"(?<=[.?!])\s+", prompt.strip()) if part]
    question = str(example.fields.get("question", prompt))
    return {
        "prompt": prompt,
        "prompt and its numbers": f"{prompt}\n{' '.join(re.findall(r'-?[0-9.]+', prompt))}",
        "last sentence": sentences[-1] if sentences else prompt,
        "question as the answer": world.in_form(example, question),
    }


async def probe_constant(world: AuditWorld) -> ProbeResult:
    """No single answer is right on a fifth of all examples."""
    texts = [example for example in world.examples if world.form_of(example) is None]
    common = Counter(example.answer for example in texts if example.answer is not None)
    spoken = [*_CONSTANTS, *(answer for answer, _ in common.most_common(_NUM_COMMON))]
    # Of programs the answers are long texts; what they return is one of a few values.
    constants = dict.fromkeys(spoken if texts else _RETURNED)
    by_kind = await judge_kinds(
        world, lambda example: _constants(world, example, constants), world.few_examples
    )
    means = {constant: mean_share(world, judged) for constant, judged in by_kind.items()}
    best = max(means, key=lambda constant: means[constant])
    num = len(by_kind[best])
    # The answer to one example is right on that one, however few are asked.
    limit = max(_MAX_CONSTANT_FRAC, 1.0 / num, chance_limit(world.task.limits.chance, num))
    kept = [judged for judged in by_kind[best] if (judged.reward or 0.0) > 0.0]
    return measured("constant", means[best], limit, kept, num, f"always answering {best[:40]!r}")


def _constants(world: AuditWorld, example: Example, constants: Iterable[str]) -> dict[str, str]:
    replies = {constant: world.in_form(example, constant) for constant in constants}
    form = world.form_of(example)
    if form is None:
        return replies
    prompt = "\n".join(message.content for message in world.task.render(example))
    lookup = as_lookup(form, prompt)
    return replies if lookup is None else {**replies, "the answers of the shown tests": lookup}


async def probe_one_word(world: AuditWorld) -> ProbeResult:
    """No single word earns a part of the marks on example after example.

    A policy that is paid for one learns to say it to everybody, and its reward rises while it solves nothing.
    Full marks do not count: who guesses one answer of four is right on a quarter, which is chance.
    """
    examples = [example for example in world.few_examples if world.form_of(example) is None]
    if not examples:
        return not_applicable("one_word", "replies are programs")
    words = _words_for_all(world, examples)
    by_kind = await judge_kinds(
        world, lambda example: {word: world.in_form(example, word) for word in words}, examples
    )
    parts = {word: [j for j in judged if not is_full(world, j)] for word, judged in by_kind.items()}
    means = {
        word: sum(max(j.reward or 0.0, 0.0) for j in part) / (len(by_kind[word]) * world.max_reward)
        for word, part in parts.items()
    }
    best = max(means, key=lambda word: means[word])
    paid = [judged for judged in parts[best] if (judged.reward or 0.0) > 0.0]
    detail = f"parts of the marks for always saying {best[:40]!r}"
    result = measured("one_word", means[best], _MAX_PART, paid, len(by_kind[best]), detail)
    if result.status is ProbeStatus.PASS and means[best] > _MUCH_OF_PART:
        return replace(result, status=ProbeStatus.WARN, evidence=show_evidence(paid))
    return result


def _words_for_all(world: AuditWorld, examples: Sequence[Example]) -> list[str]:
    """Return words to say to every example: common ones, those that all prompts hold, pieces of answers."""
    asked = [set(re.findall(r"[^\W\d_]{3,}", m.content)) for e in examples for m in world.task.render(e)[-1:]]
    shared = sorted(set.intersection(*asked), key=lambda word: (len(word), word))[:_MAX_SHARED_WORDS]
    answers = [example.answer for example in examples if example.answer]
    letters = Counter(letter for answer in answers for letter in answer.strip() if letter.isalnum())
    often = [letter for letter, _ in letters.most_common(_MAX_SHARED_WORDS)]
    words = [word for word, _ in Counter(w for answer in answers for w in answer.split()).most_common(2)]
    return list(dict.fromkeys([*_GENERIC, *shared, *often[:2], "".join(often), *words]))


async def probe_gold(world: AuditWorld) -> ProbeResult:
    """What the task calls right earns full marks on at least 95 % of the examples."""
    # Where each judgement needs a sandbox, the other forms of a right reply are tried on some examples.
    num_few = len(world.few_examples)
    golds = [
        (example, text)
        for index, example in enumerate(world.examples)
        for text in world.task.gold_replies(example)[: None if index < num_few else 1]
    ]
    judged = await world.judge_all(golds)
    late = [j for j in judged if j.is_late]
    bad = [j for j in judged if not is_full(world, j) and not j.is_late]
    if len(late) > MAX_LATE_FRAC * len(judged):
        bad += late
    bad_ids = {j.example.example_id for j in bad}
    without = excess_goldless(world.task, world.examples)
    share = 1.0 - (len(bad_ids) + len(without)) / len(world.examples)
    detail = f"{len(without)} examples without any right reply" if without else "share with full marks"
    result = ProbeResult(
        probe="gold",
        status=ProbeStatus.PASS if share >= _MIN_GOLD_FRAC else ProbeStatus.FAIL,
        value=share,
        limit=_MIN_GOLD_FRAC,
        num=len(judged),
        detail=detail,
        # All of them: who mends the data needs the whole list.
        evidence=show_evidence(bad, most=len(bad)),
    )
    return warn_of_late(result, late)


async def probe_near_miss(world: AuditWorld) -> ProbeResult:
    """A number that is nearly right is wrong."""
    by_kind = await judge_kinds(world, lambda example: _near_misses(world, example), world.examples)
    if not by_kind:
        return not_applicable("near_miss", "no answer is a number")
    return bound(world, "near_miss", by_kind, 0.0, is_partial_fine=True)


def _near_misses(world: AuditWorld, example: Example) -> dict[str, str]:
    gold = parse_number(example.answer or "")
    if gold is None:
        return {}
    misses = {"off by one": gold + 1}
    if gold:
        misses |= {"sign": -gold, "factor": gold * 10}
    if abs(gold) >= 10 and gold == int(gold):
        misses["last digit"] = Decimal(int(gold / 10))
    return {kind: world.in_form(example, str(value)) for kind, value in misses.items()}


async def probe_wrong_order(world: AuditWorld) -> ProbeResult:
    """The right reply to another example is wrong here."""
    replies = []
    for index, example in enumerate(world.examples):
        others = [*world.examples[index + 1 :], *world.examples[:index]]
        other = next((o for o in others if o.answer != example.answer), None)
        if other is not None and (golds := world.task.gold_replies(other)):
            replies.append((example, golds[0]))
    if not replies:
        return not_applicable("wrong_order", "no two examples with different right replies")
    texts = {example.example_id: text for example, text in replies}
    asked = [example for example, _ in replies]
    by_kind = await judge_kinds(world, lambda example: {"neighbor": texts[example.example_id]}, asked)
    judged = by_kind["neighbor"]
    full = [j for j in judged if is_full(world, j)]
    limit = max(_MAX_CUT_FRAC, chance_limit(world.task.limits.chance, len(judged)))
    return measured("wrong_order", len(full) / len(judged), limit, full, len(judged), "share with full marks")


async def probe_label_leak(world: AuditWorld) -> ProbeResult:
    """No long answer stands in its own prompt, whatever its case and spaces, nor most of its words."""
    leaks, num = [], 0
    for example in world.examples:
        prompt = " ".join(m.content for m in world.task.render(example))
        for text in (example.answer or "", *world.task.gold_replies(example)):
            is_long = len(_plain(text)) >= _MIN_LEAK_CHARS
            num += is_long
            # A right reply may well say again what the prompt says; the answer in it may not.
            has_words = text == example.answer and _share_of_words(text, prompt) > _MAX_LEAK_FRAC
            if is_long and (has_words or _plain(text) in _plain(prompt)):
                leaks.append(Evidence.of(example.example_id, text, None, "stands in the prompt"))
                break
    if not num:
        return not_applicable("label_leak", f"no answer of {_MIN_LEAK_CHARS} characters or more")
    return ProbeResult(
        probe="label_leak",
        status=ProbeStatus.FAIL if leaks else ProbeStatus.PASS,
        value=len(leaks) / len(world.examples),
        limit=0.0,
        num=num,
        detail="share of prompts that hold their answer",
        evidence=tuple(leaks[:MAX_EVIDENCE]),
    )


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _share_of_words(answer: str, prompt: str) -> float:
    """Return the share of an answer's runs of words that a prompt holds; 0 if it has no such run.

    Numbers and single letters are no words: the cells of a grid stand in every question about it.
    """
    ours, theirs = (_runs(re.findall(r"[^\W\d_]{2,}", _plain(text))) for text in (answer, prompt))
    return len(ours & theirs) / len(ours) if ours else 0.0


def _runs(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[at : at + _NUM_LEAK_WORDS]) for at in range(len(words) - _NUM_LEAK_WORDS + 1)}


async def probe_determinism(world: AuditWorld) -> ProbeResult:
    """One reply earns the same whenever and beside whatever it is judged."""
    all_repeats: list[tuple[Judged, ...]] = []
    started_at = time.perf_counter()
    for part in world.in_time(world.few_examples, num_first=1):
        replies = [(example, text) for example in part for text in _repeated(world, example)]
        rounds: list[list[Judged]] = []
        while len(rounds) < _NUM_REPEATS:
            rounds.append(await world.judge_all(replies))
            if len(rounds) >= _MIN_REPEATS and time.perf_counter() - started_at > ENOUGH_S:
                break
        all_repeats += zip(*rounds, strict=True)
    differing = [
        repeats for repeats in all_repeats if len({_verdict(j) for j in repeats if not j.is_late}) > 1
    ]
    result = measured(
        "determinism",
        len(differing) / len(all_repeats),
        0.0,
        [repeats[0] for repeats in differing],
        len(all_repeats),
        "share that changed",
    )
    shown = tuple(_show_repeats(repeats) for repeats in differing[:MAX_EVIDENCE])
    # No share of changing scores is small: nothing that was measured with them can be repeated.
    status = ProbeStatus.FAIL if differing else result.status
    result = replace(result, status=status, evidence=shown)
    return warn_of_late(result, [j for repeats in all_repeats for j in repeats if j.is_late])


def _repeated(world: AuditWorld, example: Example) -> tuple[str, str]:
    """Return a right and a wrong reply to an example."""
    golds = world.task.gold_replies(example)
    other = world.examples[list(world.examples).index(example) - 1]
    return golds[0] if golds else "asdf", str(other.answer)


def _verdict(judged: Judged) -> tuple[float | None, bool | None, bool | None]:
    return judged.reward, judged.outcome.is_correct, judged.outcome.format_ok


def _show_repeats(repeats: Sequence[Judged]) -> Evidence:
    """Show one reply with all that it earned."""
    first = repeats[0]
    rewards = " then ".join(f"{judged.reward}" for judged in repeats)
    return Evidence.of(first.example.example_id, first.text, first.reward, f"scored {rewards}")


async def probe_truncation(world: AuditWorld) -> ProbeResult:
    """A right reply that is cut earns full marks on few examples only."""
    by_kind = await judge_kinds(world, lambda example: _cut(world, example), world.few_examples)
    if not by_kind:
        return not_applicable("truncation", "no right reply is known")
    shares = {kind: [j for j in judged if is_full(world, j)] for kind, judged in by_kind.items()}
    worst = max(shares, key=lambda kind: len(shares[kind]))
    share = len(shares[worst]) / len(by_kind[worst])
    limit = max(_MAX_CUT_FRAC, chance_limit(world.task.limits.chance, len(by_kind[worst])))
    return measured("truncation", share, limit, shares[worst], len(by_kind[worst]), f"cut at {worst}")


def _cut(world: AuditWorld, example: Example) -> dict[str, str]:
    """Cut the right reply inside its answer; a reply that only lost its closing tag is not cut enough."""
    golds = world.task.gold_replies(example)
    if not golds:
        return {}
    reply, answer = golds[0], example.answer
    head = reply[: reply.rindex(answer)] if answer and answer in reply else ""
    body = answer if head or answer == reply else reply
    return {
        f"{percent} %": head + (body or "")[: len(body or "") * percent // 100] for percent in (25, 50, 75)
    }


async def probe_ceiling(world: AuditWorld) -> ProbeResult:
    """No reply of any probe earned more than full marks, or less than the lowest. Runs last.

    Right replies said twice, and with a great deal before and behind them, are tried here.
    """
    await judge_kinds(world, lambda example: _overdone(world, example), world.few_examples[:_NUM_OVERDONE])
    rewards = [(j, j.reward) for j in world.all_judged if j.reward is not None]
    beyond = [j for j, reward in rewards if not is_within(reward, limits_of(world.task, j.example))]
    value = max((reward for _, reward in rewards), default=0.0)
    return measured(
        "ceiling", float(len(beyond)), 0.0, beyond, len(rewards), f"scores out of bounds; highest {value:g}"
    )


def _overdone(world: AuditWorld, example: Example) -> dict[str, str]:
    golds = world.task.gold_replies(example)
    if not golds:
        return {}
    padding = " ".join(_WORDS * 5)
    return {"twice": f"{golds[0]}\n{golds[0]}", "long": f"{padding}\n\n{golds[0]}\n\n{padding}"}


async def probe_cost(world: AuditWorld) -> ProbeResult:
    """Judging nothing costs next to nothing."""
    example = world.examples[0]
    started_at, started_cpu_s = time.perf_counter(), time.process_time()
    await world.judge_all((example, "") for _ in range(_NUM_NULL_REPLIES))
    each_s = (time.perf_counter() - started_at) / _NUM_NULL_REPLIES
    each_cpu_s = (time.process_time() - started_cpu_s) / _NUM_NULL_REPLIES
    limit_s = _MAX_NULL_S[world.task.limits.verify_limit_s is not None]
    return ProbeResult(
        probe="cost",
        status=ProbeStatus.PASS if each_s <= limit_s else ProbeStatus.WARN,
        value=each_s,
        limit=limit_s,
        num=_NUM_NULL_REPLIES,
        detail=f"seconds per empty reply; {each_cpu_s:.2g} of them computed in this process",
    )
