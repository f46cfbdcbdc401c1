"""The probes of a task whose replies are judged as text.

Each takes a world and returns a result. A limit that speaks of chance is the declared chance plus three
standard errors of a mean over the examples asked; where nothing can be had by chance, nothing may be.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from decimal import Decimal

from strop.rollout import Example, make_example
from strop.tasks.answers import parse_number
from strop.tasks.audit.report import MAX_EVIDENCE, Evidence, ProbeResult, ProbeStatus
from strop.tasks.audit.world import AuditWorld, Judged

Probe = Callable[[AuditWorld], Awaitable[ProbeResult]]

_NUM_ERRORS = 3.0
_COINCIDENCE_FRAC = 0.01
"""Share of wrong replies that are right all the same: a neighbour's answer, a number of the question."""
_MINOR_FRAC = 0.02
"""Up to here, what should earn nothing is a warning: some graders give a hundredth to every reply."""
_MAX_CONSTANT_FRAC = 0.2
_MIN_GOLD_FRAC = 0.95
_MAX_CUT_FRAC = 0.05
_SLACK = 1e-9
_MIN_LEAK_CHARS = 20
_NUM_REPEATS = 3
_NUM_NULL_REPLIES = 100
_MAX_NULL_S = {False: 0.005, True: 0.2}
"""Wall time of judging nothing, by whether replies are judged in processes of their own."""
_WORDS = (
    *("stone", "river", "window", "table", "quiet", "yellow", "often", "between", "market", "letter"),
    *("summer", "carry", "bright", "under", "garden", "seldom", "answer", "corner", "listen", "paper"),
)
_CONSTANTS = ("0", "1", "2", "yes", "no", "A", "B", "True", "False", "[]")


async def probe_noop(world: AuditWorld) -> ProbeResult:
    """No reply at all earns nothing, and is judged."""
    judged = await world.judge_all((example, "") for example in world.examples)
    return _bound(world, "noop", {"no reply": judged}, 0.0)


async def probe_empty(world: AuditWorld) -> ProbeResult:
    """White space earns nothing and is not in the asked form."""
    kinds = {"blank": " ", "line": "\n", "lines": " \n\t\n"}
    by_kind = await _judge_kinds(world, lambda example: kinds)
    result = _bound(world, "empty", by_kind, 0.0)
    formed = [j for judged in by_kind.values() for j in judged if j.outcome.format_ok]
    if result.status is ProbeStatus.PASS and formed:
        return _failed("empty", formed, "an empty reply counts as well-formed")
    return result


async def probe_garbage(world: AuditWorld) -> ProbeResult:
    """Text without any sense earns nothing beyond chance."""
    words = world.random("garbage")
    kinds = {
        "asdf": "asdf",
        "letter": "a",
        "words": " ".join(words.choice(_WORDS) for _ in range(200)),
        "controls": "\u202e\u0000\u200b\x1b[m\ufeff\U0001f9ea\x07",
        "brackets": "{}[]()<>",
        "long": "lorem " * 17_000,
    }
    by_kind = await _judge_kinds(world, lambda example: kinds)
    return _bound(world, "garbage", by_kind, world.task.limits.chance)


async def probe_echo(world: AuditWorld) -> ProbeResult:
    """The question given back earns nothing beyond chance."""
    by_kind = await _judge_kinds(world, lambda example: _echoes(world, example))
    return _bound(world, "echo", by_kind, max(world.task.limits.chance, _COINCIDENCE_FRAC))


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
    common = Counter(example.answer for example in world.examples if example.answer is not None)
    constants = dict.fromkeys([*_CONSTANTS, *(answer for answer, _ in common.most_common(3))])
    by_kind = await _judge_kinds(
        world, lambda example: {constant: world.in_form(example, constant) for constant in constants}
    )
    means = {constant: _mean(world, judged) for constant, judged in by_kind.items()}
    best = max(means, key=lambda constant: means[constant])
    limit = max(_MAX_CONSTANT_FRAC, _chance_limit(world, world.task.limits.chance))
    kept = [judged for judged in by_kind[best] if (judged.reward or 0.0) > 0.0]
    return _measured(
        "constant", means[best], limit, kept, len(by_kind[best]), f"always answering {best[:40]!r}"
    )


async def probe_gold(world: AuditWorld) -> ProbeResult:
    """What the task calls right earns full marks on at least 95 % of the examples."""
    golds = [(example, text) for example in world.examples for text in world.task.gold_replies(example)]
    judged = await world.judge_all(golds)
    bad = [j for j in judged if not _is_full(world, j)]
    bad_ids = {j.example.example_id for j in bad}
    without = [example for example in world.examples if not world.task.gold_replies(example)]
    share = 1.0 - (len(bad_ids) + len(without)) / len(world.examples)
    detail = f"{len(without)} examples without any right reply" if without else "share with full marks"
    return ProbeResult(
        probe="gold",
        status=ProbeStatus.PASS if share >= _MIN_GOLD_FRAC else ProbeStatus.FAIL,
        value=share,
        limit=_MIN_GOLD_FRAC,
        num=len(judged),
        detail=detail,
        evidence=_evidence(bad),
    )


async def probe_near_miss(world: AuditWorld) -> ProbeResult:
    """A number that is nearly right is wrong."""
    by_kind: dict[str, list[Judged]] = {}
    for example in world.examples:
        gold = parse_number(example.answer or "")
        for kind, value in _near_misses(gold) if gold is not None else ():
            by_kind.setdefault(kind, []).extend(
                await world.judge_all([(example, world.in_form(example, str(value)))])
            )
    if not by_kind:
        return _not_applicable("near_miss", "no answer is a number")
    return _bound(world, "near_miss", by_kind, 0.0, is_partial_fine=True)


def _near_misses(gold: Decimal) -> list[tuple[str, Decimal]]:
    misses = [("off by one", gold + 1)]
    return [*misses, ("sign", -gold), ("factor", gold * 10)] if gold else misses


async def probe_wrong_order(world: AuditWorld) -> ProbeResult:
    """The right reply to another example is wrong here."""
    replies = []
    for index, example in enumerate(world.examples):
        others = [*world.examples[index + 1 :], *world.examples[:index]]
        other = next((o for o in others if o.answer != example.answer), None)
        if other is not None and (golds := world.task.gold_replies(other)):
            replies.append((example, golds[0]))
    if not replies:
        return _not_applicable("wrong_order", "no two examples with different right replies")
    judged = await world.judge_all(replies)
    full = [j for j in judged if _is_full(world, j)]
    limit = max(_MAX_CUT_FRAC, _chance_limit(world, world.task.limits.chance))
    return _measured(
        "wrong_order", len(full) / len(judged), limit, full, len(judged), "share with full marks"
    )


async def probe_label_leak(world: AuditWorld) -> ProbeResult:
    """No long answer stands in its own prompt."""
    leaks, num = [], 0
    for example in world.examples:
        prompt = " ".join(" ".join(m.content for m in world.task.render(example)).split())
        for text in (example.answer or "", *world.task.gold_replies(example)):
            plain = " ".join(text.split())
            num += len(plain) >= _MIN_LEAK_CHARS
            if len(plain) >= _MIN_LEAK_CHARS and plain in prompt:
                leaks.append(Evidence.of(example.example_id, text, None, "stands in the prompt"))
                break
    if not num:
        return _not_applicable("label_leak", f"no answer of {_MIN_LEAK_CHARS} characters or more")
    return ProbeResult(
        probe="label_leak",
        status=ProbeStatus.FAIL if leaks else ProbeStatus.PASS,
        value=len(leaks) / len(world.examples),
        limit=0.0,
        num=num,
        detail="share of prompts that hold their answer",
        evidence=tuple(leaks[:MAX_EVIDENCE]),
    )


async def probe_determinism(world: AuditWorld) -> ProbeResult:
    """One reply earns the same whenever and beside whatever it is judged."""
    replies = []
    for index, example in enumerate(world.examples):
        golds = world.task.gold_replies(example)
        other = world.examples[index - 1]
        replies += [(example, golds[0] if golds else "asdf"), (example, str(other.answer))]
    rounds = [await world.judge_all(replies) for _ in range(_NUM_REPEATS)]
    differing = [
        judged[0]
        for judged in zip(*rounds, strict=True)
        if len({(j.reward, j.outcome.is_correct, j.outcome.format_ok) for j in judged}) > 1
    ]
    return _measured(
        "determinism", len(differing) / len(replies), 0.0, differing, len(replies), "share that changed"
    )


async def probe_order(world: AuditWorld) -> ProbeResult:
    """Scores do not depend on the order in which replies are judged."""
    replies = [
        (example, text) for example in world.examples for text in (world.task.gold_replies(example) or ("a",))
    ]
    forward = await world.judge_all(replies)
    shuffled = list(range(len(replies)))
    world.random("order").shuffle(shuffled)
    one_by_one: dict[int, Judged] = {}
    for index in shuffled:
        (one_by_one[index],) = await world.judge_all([replies[index]])
    differing = [judged for index, judged in enumerate(forward) if judged.reward != one_by_one[index].reward]
    return _measured(
        "order", len(differing) / len(replies), 0.0, differing, len(replies), "share that changed"
    )


async def probe_truncation(world: AuditWorld) -> ProbeResult:
    """A right reply that is cut earns full marks on few examples only."""
    by_kind = await _judge_kinds(world, lambda example: _cut(world, example))
    if not by_kind:
        return _not_applicable("truncation", "no right reply is known")
    shares = {kind: [j for j in judged if _is_full(world, j)] for kind, judged in by_kind.items()}
    worst = max(shares, key=lambda kind: len(shares[kind]))
    share = len(shares[worst]) / len(by_kind[worst])
    limit = max(_MAX_CUT_FRAC, _chance_limit(world, world.task.limits.chance))
    return _measured("truncation", share, limit, shares[worst], len(by_kind[worst]), f"cut at {worst}")


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


async def probe_failure_paths(world: AuditWorld) -> ProbeResult:
    """An example without content cannot be judged; it has no score, and surely not 0."""
    hollow = make_example(world.task.name, {}, None)
    judged = await world.judge_all([(hollow, "asdf"), (hollow, "")])
    scored = [j for j in judged if j.reward is not None]
    return _measured(
        "failure_paths",
        float(len(scored)),
        0.0,
        scored,
        len(judged),
        "scores given to an example without content",
    )


async def probe_ceiling(world: AuditWorld) -> ProbeResult:
    """No reply of any probe earned less than nothing or more than everything. Runs last."""
    rewards = [(j, j.reward) for j in world.all_judged if j.reward is not None]
    beyond = [j for j, reward in rewards if not -_SLACK <= reward <= world.max_reward + _SLACK]
    value = max((reward for _, reward in rewards), default=0.0)
    return _measured(
        "ceiling", float(len(beyond)), 0.0, beyond, len(rewards), f"scores out of bounds; highest {value:g}"
    )


async def probe_cost(world: AuditWorld) -> ProbeResult:
    """Judging nothing costs next to nothing."""
    example = world.examples[0]
    started_at = time.perf_counter()
    await world.judge_all((example, "") for _ in range(_NUM_NULL_REPLIES))
    each_s = (time.perf_counter() - started_at) / _NUM_NULL_REPLIES
    limit_s = _MAX_NULL_S[world.task.limits.verify_limit_s is not None]
    return ProbeResult(
        probe="cost",
        status=ProbeStatus.PASS if each_s <= limit_s else ProbeStatus.WARN,
        value=each_s,
        limit=limit_s,
        num=_NUM_NULL_REPLIES,
        detail="seconds per empty reply",
    )


async def _judge_kinds(
    world: AuditWorld, texts: Callable[[Example], dict[str, str]]
) -> dict[str, list[Judged]]:
    """Judge several kinds of reply to each example."""
    asked = [(kind, example, text) for example in world.examples for kind, text in texts(example).items()]
    judged = await world.judge_all((example, text) for _, example, text in asked)
    by_kind: dict[str, list[Judged]] = {}
    for (kind, _, _), one in zip(asked, judged, strict=True):
        by_kind.setdefault(kind, []).append(one)
    return by_kind


def _bound(
    world: AuditWorld,
    probe: str,
    by_kind: dict[str, list[Judged]],
    chance: float,
    *,
    is_partial_fine: bool = False,
) -> ProbeResult:
    """Compare the kind that earns most with what chance may give; every reply must be judged.

    `is_partial_fine` counts full marks only.
    """
    unscored = [j for judged in by_kind.values() for j in judged if j.reward is None]
    if unscored:
        return _failed(probe, unscored, "replies that could not be judged")
    if is_partial_fine:
        means = {kind: len([j for j in js if _is_full(world, j)]) / len(js) for kind, js in by_kind.items()}
    else:
        means = {kind: _mean(world, judged) for kind, judged in by_kind.items()}
    worst = max(means, key=lambda kind: means[kind])
    paid = sorted(by_kind[worst], key=lambda j: -(j.reward or 0.0))
    paid = [j for j in paid if (j.reward or 0.0) > 0.0]
    return _measured(probe, means[worst], _chance_limit(world, chance), paid, len(by_kind[worst]), worst)


def _chance_limit(world: AuditWorld, chance: float) -> float:
    error = math.sqrt(chance * (1.0 - chance) / len(world.examples))
    return chance + _NUM_ERRORS * error + _SLACK


def _mean(world: AuditWorld, judged: Sequence[Judged]) -> float:
    """Mean share of full marks."""
    return math.fsum(j.reward or 0.0 for j in judged) / (len(judged) * world.max_reward)


def _is_full(world: AuditWorld, judged: Judged) -> bool:
    return judged.reward is not None and judged.reward >= world.max_reward - _SLACK


def _measured(
    probe: str, value: float, limit: float, judged: Sequence[Judged], num: int, detail: str
) -> ProbeResult:
    is_fine = value <= limit + _SLACK
    bad = ProbeStatus.WARN if value <= _MINOR_FRAC else ProbeStatus.FAIL
    return ProbeResult(
        probe=probe,
        status=ProbeStatus.PASS if is_fine else bad,
        value=value,
        limit=limit,
        num=num,
        detail=detail,
        evidence=() if is_fine else _evidence(judged),
    )


def _failed(probe: str, judged: Sequence[Judged], detail: str) -> ProbeResult:
    return ProbeResult(
        probe=probe,
        status=ProbeStatus.FAIL,
        value=float(len(judged)),
        limit=0.0,
        num=len(judged),
        detail=detail,
        evidence=_evidence(judged),
    )


def _not_applicable(probe: str, detail: str) -> ProbeResult:
    return ProbeResult(probe=probe, status=ProbeStatus.NOT_APPLICABLE, detail=detail)


def _evidence(judged: Iterable[Judged]) -> tuple[Evidence, ...]:
    found = []
    for j in judged:
        failure = j.outcome.failure
        detail = "" if failure is None else f"{failure.kind}: {failure.detail.strip().splitlines()[-1]}"
        found.append(Evidence.of(j.example.example_id, j.text, j.reward, detail))
        if len(found) == MAX_EVIDENCE:
            break
    return tuple(found)
