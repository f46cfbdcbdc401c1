"""The probes that change the example and not the reply: its order, its parts, what of it is missing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from strop.audit.attacks import as_lookup
from strop.audit.measure import is_full, measured
from strop.audit.report import MAX_EVIDENCE, Evidence, ProbeResult
from strop.audit.world import AuditWorld, Judged
from strop.rollout import Example, make_example

_NUM_BARE = 4
_PART_WORDS = ("test", "constraint", "instruction", "criteri")
"""In the names of fields that list what a reply is judged by."""


async def probe_order(world: AuditWorld) -> ProbeResult:
    """Scores depend neither on the order of judgements, nor on how many run at once, nor on that of tests."""
    num, differing = 0, []
    for part in world.in_time(world.few_examples):
        replies = [(example, text) for example in part for text in _replies(world, example)]
        forward = await world.judge_all(replies)
        shuffled = list(range(len(replies)))
        world.random("order").shuffle(shuffled)
        for index in shuffled:
            (alone,) = await world.judge_all([replies[index]])
            num += 1
            if _differ(alone, forward[index]):
                differing.append(forward[index])
        permuted = [
            (first, (other, first.text))
            for first in forward
            if (other := permute_parts(first.example)) is not None
        ]
        judged = await world.judge_all(reply for _, reply in permuted)
        num += len(judged)
        pairs = zip(permuted, judged, strict=True)
        differing += [one for (first, _), one in pairs if _differ(one, first)]
    return measured("order", len(differing) / num, 0.0, differing, num, "share that changed")


def _differ(one: Judged, other: Judged) -> bool:
    return one.reward != other.reward and not (one.is_late or other.is_late)


def _replies(world: AuditWorld, example: Example) -> Sequence[str]:
    """Return right replies, or a wrong one where none is known; with parts also some that pass a few."""
    golds = tuple(world.task.gold_replies(example)) or ("a",)
    form = world.form_of(example)
    prompt = "\n".join(message.content for message in world.task.render(example))
    if permute_parts(example) is not None:
        golds = tuple(dict.fromkeys((*golds, "a", prompt)))
    if form is None:
        return golds
    shown = [line for line in prompt.splitlines() if line.strip().startswith("assert ")]
    lookup = as_lookup(form, "\n".join(shown[:1]))
    return golds if lookup is None else (*golds, lookup)


def permute_parts(example: Example) -> Example | None:
    """Return an example with its tests or constraints in reverse; None if it lists none.

    Its id is kept: what is asked is the same.
    """
    fields = dict(example.fields)
    changed = {key: found for key, value in fields.items() if (found := _reverse(key, value)) is not None}
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
    reversed_lists = {name: found[::-1] for name, found in lists.items()}
    return json.dumps({**tests, **reversed_lists})


async def probe_failure_paths(world: AuditWorld) -> ProbeResult:
    """An example without content, or that lacks what it is judged by, has no score, and surely not 0.

    A right reply to an example that lacks its answer or a field is right, or cannot be judged.
    """
    hollow = make_example(world.task.name, {}, None)
    judged = await world.judge_all([(hollow, "asdf"), (hollow, "")])
    bare = [
        (example, text, name, without)
        for example in world.few_examples[:_NUM_BARE]
        for text in world.task.gold_replies(example)[:1]
        for name, without in _without_a_part(example).items()
    ]
    whole = await world.judge_once([(example, text) for example, text, _, _ in bare])
    lacking = await world.judge_all((without, text) for _, text, _, without in bare)
    wrong = [("no content", one) for one in judged if one.reward is not None]
    wrong += [
        (name, one)
        for (_, _, name, _), one, before in zip(bare, lacking, whole, strict=True)
        if one.reward is not None and is_full(world, before) and not is_full(world, one)
    ]
    num = len(judged) + len(lacking)
    detail = "scores given without what they rest on"
    result = measured("failure_paths", float(len(wrong)), 0.0, (), num, detail)
    evidence = [Evidence.of(one.example.example_id, one.text, one.reward, name) for name, one in wrong]
    return replace(result, evidence=tuple(evidence[-MAX_EVIDENCE:]))


def _without_a_part(example: Example) -> Mapping[str, Example]:
    """Return the example without its answer, and without each of its fields."""
    bare = {
        f"no {key}": replace(example, fields={k: v for k, v in example.fields.items() if k != key})
        for key in example.fields
    }
    return bare if example.answer is None else {**bare, "no answer": replace(example, answer=None)}
