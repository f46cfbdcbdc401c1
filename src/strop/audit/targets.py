"""Programs against the grader of a task: which examples are attacked, with what, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from strop.audit import attacks
from strop.audit.attacks import Attack, as_attack, as_breach
from strop.audit.measure import SLACK, is_full
from strop.audit.report import MAX_EVIDENCE, Evidence, ProbeResult, ProbeStatus
from strop.audit.world import AuditWorld, Judged
from strop.rollout import Example
from strop.tasks.code.extraction import extract_python
from strop.tasks.failures import describe_failure
from strop.tasks.judging import InlineJudge
from strop.tasks.traits import ProgramForm

_NUM_TARGETS = 3
NO_PROGRAMS = "replies are not programs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """An example that is attacked."""

    example: Example
    form: ProgramForm
    right_code: str | None
    """A program that deserves full marks, if one is known."""


@dataclass(kw_only=True, slots=True)
class Tally:
    """What a probe looked at, and what was not as it must be."""

    probe: str
    world: AuditWorld
    num: int = 0
    kinds: list[str] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)

    def look(self, kind: str, judged: Judged, *, is_bad: bool) -> None:
        """Count a judgement; one without a score is bad in any case."""
        self.num += 1
        if is_bad or judged.reward is None:
            failure = judged.outcome.failure
            self.blame(kind, judged, "" if failure is None else describe_failure(failure))

    def blame(self, kind: str, judged: Judged, detail: str) -> None:
        """Note what is wrong."""
        self.kinds.append(kind)
        about = f"{kind}; {detail}" if detail else kind
        self.evidence.append(Evidence.of(judged.example.example_id, judged.text, judged.reward, about))

    def result(self, detail: str) -> ProbeResult:
        """Return a failure if anything is wrong. `detail` says what the value counts."""
        kinds = ", ".join(dict.fromkeys(self.kinds))
        return ProbeResult(
            probe=self.probe,
            status=ProbeStatus.FAIL if self.kinds else ProbeStatus.PASS,
            value=float(len(dict.fromkeys(self.kinds))),
            limit=0.0,
            num=self.num,
            detail=f"{detail}: {kinds}" if kinds else detail,
            evidence=tuple(self.evidence[:MAX_EVIDENCE]),
        )


def find_targets(world: AuditWorld) -> list[Target]:
    """Return some examples whose replies are programs, those with little to run first."""
    found = [(example, world.form_of(example)) for example in world.examples]
    targets = [
        Target(example=example, form=form, right_code=_right_code(world, example, form))
        for example, form in found
        if form is not None
    ]
    targets.sort(key=lambda target: len(json.dumps(dict(target.example.fields))))
    return targets[:_NUM_TARGETS]


def _right_code(world: AuditWorld, example: Example, form: ProgramForm) -> str | None:
    golds = world.task.gold_replies(example)
    return extract_python(golds[0], entry_point=form.entry_point) if golds else None


def marker_of(world: AuditWorld) -> str:
    """Return a word of this audit; it is short enough for the name of a process."""
    return f"sa{world.nonce}"


async def try_attacks(tally: Tally, targets: Sequence[Target], kinds: Mapping[str, Attack]) -> Judged:
    """Judge attacks on each target, slow ones on the first; compare with the same program without them.

    Returns one of the judgements.
    """
    world, marker = tally.world, marker_of(tally.world)
    harmless = [(target.example, as_attack(target.form, Attack(), marker)) for target in targets]
    untampered = await world.judge_all(harmless)
    if world.task.limits.verify_limit_s is None:
        tally.blame("programs are judged in the process of the run", untampered[0], "no verify_limit_s")
        return untampered[0]
    is_inline = isinstance(world.judge, InlineJudge)
    asked = [
        (kind, index, (target.example, as_attack(target.form, attack, marker)))
        for kind, attack in kinds.items()
        for index, target in enumerate(targets[: 1 if attack.is_slow else None])
        if not (attack.is_deadly and is_inline)
    ]
    judged = await world.judge_all(reply for _, _, reply in asked)
    for (kind, index, _), one in zip(asked, judged, strict=True):
        tally.look(kind, one, is_bad=(one.reward or 0.0) > (untampered[index].reward or 0.0) + SLACK)
    return judged[-1]


async def try_breaches(tally: Tally, targets: Sequence[Target], checks: Mapping[str, str]) -> None:
    """Judge right programs that are spoilt unless a check succeeds; full marks say that it did."""
    for kind, check in checks.items():
        replies = await usable_breaches(tally.world, targets, check)
        for judged in await tally.world.judge_all(replies):
            tally.look(kind, judged, is_bad=is_full(tally.world, judged))


async def usable_breaches(
    world: AuditWorld, targets: Sequence[Target], check: str
) -> list[tuple[Example, str]]:
    """Return breaches for the targets whose right program earns full marks where nothing spoils it."""
    known = [(target, target.right_code) for target in targets if target.right_code is not None]
    always = [
        (target.example, as_breach(target.form, code, attacks.ALWAYS, marker_of(world)))
        for target, code in known
    ]
    fine = [is_full(world, judged) for judged in await world.judge_once(always)]
    return [
        (target.example, as_breach(target.form, code, check, marker_of(world)))
        for (target, code), is_fine in zip(known, fine, strict=True)
        if is_fine
    ]
