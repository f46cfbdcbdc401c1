"""The probe that looks for a rule of one feature: a label that equals a column needs no ability.

A rule is learned on every second example and judged on the others. It either copies a feature, or looks up
the answer that goes most often with its value. Features are the fields that the prompt shows, its first and
last words and numbers, and for each word whether it occurs.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from strop.audit.measure import is_full, measured, not_applicable
from strop.audit.report import ProbeResult
from strop.audit.world import AuditWorld, Judged
from strop.rollout import Example

_MIN_EXAMPLES = 8
_MAX_RULE_FRAC = 0.95
"""A rule that does better is as good as the right replies must be."""
_MAX_WORDS = 300
_MAX_VALUES_FRAC = 1 / 3
"""Of the examples learned from: a feature with more values than this names the example."""

Features = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rule:
    name: str
    answer: Callable[[Features], str]


async def probe_trivial_rule(world: AuditWorld) -> ProbeResult:
    """No rule of one feature answers the examples that it was not learned from."""
    labelled = [(e, e.answer) for e in world.examples if e.answer is not None and world.form_of(e) is None]
    if len(labelled) < _MIN_EXAMPLES:
        return not_applicable("trivial_rule", f"fewer than {_MIN_EXAMPLES} examples with an answer in words")
    prompts = [" ".join(m.content for m in world.task.render(example)) for example, _ in labelled]
    words = _common_words(prompts)
    features = [
        _features(example, prompt, words) for (example, _), prompt in zip(labelled, prompts, strict=True)
    ]
    answers = [answer for _, answer in labelled]
    rule = _best_rule(features[::2], answers[::2])
    if rule is None:
        return measured("trivial_rule", 0.0, _MAX_RULE_FRAC, (), 0, "no rule was ever right")
    asked = list(zip(labelled, features, strict=True))[1::2]
    judged: list[Judged] = []
    for part in world.in_time(asked):
        judged += await world.judge_all(
            (example, world.in_form(example, rule.answer(found))) for (example, _), found in part
        )
    kept = [one for one in judged if is_full(world, one)]
    # Where one answer is nearly always right, the probe of constants says so.
    most_common = Counter(answers[1::2]).most_common(1)[0][1] / len(asked)
    return measured(
        "trivial_rule",
        len(kept) / len(judged),
        max(_MAX_RULE_FRAC, most_common),
        kept,
        len(judged),
        rule.name,
    )


def _common_words(prompts: Sequence[str]) -> list[str]:
    """Return the words that some prompts hold and others do not, the most common first."""
    counts = Counter(word for prompt in prompts for word in set(_words(prompt)))
    return [word for word, num in counts.most_common() if 1 < num < len(prompts)][:_MAX_WORDS]


def _words(prompt: str) -> list[str]:
    return re.findall(r"[^\W\d_]+(?:[:=] ?\w+)?", prompt.lower())


def _features(example: Example, prompt: str, words: Sequence[str]) -> Features:
    own_words, numbers = _words(prompt), re.findall(r"-?\d+(?:\.\d+)?", prompt)
    features = {
        f"field {key}": str(value)
        for key, value in example.fields.items()
        if isinstance(value, str | int | float) and str(value) in prompt
    }
    for kind, found in (("word", own_words), ("number", numbers)):
        if found:
            features |= {f"first {kind}": found[0], f"last {kind}": found[-1]}
    present = set(own_words)
    return features | {f"word {word!r}": str(word in present) for word in words}


def _best_rule(features: Sequence[Features], answers: Sequence[str]) -> _Rule | None:
    """Return the rule that answers most of the examples; None if there is no rule at all."""
    best, best_num = None, 0
    for name in dict.fromkeys(name for found in features for name in found):
        for rule in (_copy_rule(name), _lookup_rule(name, features, answers)):
            if rule is None:
                continue
            num = sum(rule.answer(found) == answer for found, answer in zip(features, answers, strict=True))
            if num > best_num:
                best, best_num = rule, num
    return best


def _copy_rule(name: str) -> _Rule:
    return _Rule(name=f"the answer is the {name}", answer=lambda found: found.get(name, ""))


def _lookup_rule(name: str, features: Sequence[Features], answers: Sequence[str]) -> _Rule | None:
    by_value: dict[str, Counter[str]] = defaultdict(Counter)
    for found, answer in zip(features, answers, strict=True):
        by_value[found.get(name, "")][answer] += 1
    if not 1 < len(by_value) <= max(2.0, _MAX_VALUES_FRAC * len(features)):
        return None
    table = {value: counts.most_common(1)[0][0] for value, counts in by_value.items()}
    return _Rule(
        name=f"the answer follows from the {name}", answer=lambda found: table.get(found.get(name, ""), "")
    )
