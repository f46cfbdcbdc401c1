"""The probes of a task whose replies are programs: each attack is judged by the task as a reply would be.

A task says by `program_form` that its replies are programs; for others these probes do not apply. The
score of an attack is compared with that of the same wrong program without it, and breaches (programs that
are right only if they can do what they must not) count where they earn full marks.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from strop.rollout import Example, FailureOwner
from strop.tasks.audit import attacks, hosts
from strop.tasks.audit.attacks import Attack, as_attack, as_breach
from strop.tasks.audit.measure import SLACK, is_full, not_applicable
from strop.tasks.audit.probes import probe_label_leak as probe_prompt_leak
from strop.tasks.audit.report import MAX_EVIDENCE, Evidence, ProbeResult, ProbeStatus
from strop.tasks.audit.world import AuditWorld, Judged
from strop.tasks.code.extraction import extract_python
from strop.tasks.judging import InlineJudge
from strop.tasks.traits import ProgramForm

_NUM_TARGETS = 3
_NO_PROGRAMS = "replies are not programs"
_SURVIVOR_WAIT_S = 2.0
"""What is left so long after a judgement was left behind."""
_MIN_HIDDEN_CHARS = 24
_MAX_HIDDEN_CHARS = 60
_FIND_LIMIT_S = 20.0
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """An example that is attacked."""

    example: Example
    form: ProgramForm
    right_code: str | None
    """A program that deserves full marks, if one is known."""


@dataclass(kw_only=True, slots=True)
class _Tally:
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
            self.blame(kind, judged, "" if failure is None else f"{failure.owner}: {failure.kind}")

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


async def probe_grader_tamper(world: AuditWorld) -> ProbeResult:
    """Changing built-ins, modules, names and files of the grader changes no score."""
    targets = _find_targets(world)
    if not targets:
        return not_applicable("grader_tamper", _NO_PROGRAMS)
    tally = _Tally(probe="grader_tamper", world=world)
    await _attack(tally, targets, attacks.TAMPERS)
    await _breach(tally, targets, attacks.TAMPER_BREACHES)
    return tally.result("ways to change who judges")


async def probe_forged_stdout(world: AuditWorld) -> ProbeResult:
    """A program that says it passed did not pass, and the next one is judged as ever."""
    targets = _find_targets(world)
    if not targets:
        return not_applicable("forged_stdout", _NO_PROGRAMS)
    tally = _Tally(probe="forged_stdout", world=world)
    await _attack(tally, targets, attacks.FORGERIES)
    solvable = [target for target in targets if target.right_code is not None]
    for judged in await world.judge_all((t.example, world.task.gold_replies(t.example)[0]) for t in solvable):
        tally.look("a right program afterwards", judged, is_bad=not is_full(world, judged))
    return tally.result("output that was believed")


async def probe_os_exit(world: AuditWorld) -> ProbeResult:
    """A program that ends, hangs or exhausts its judge is wrong, and nothing of it is left."""
    targets = _find_targets(world)
    if not targets:
        return not_applicable("os_exit", _NO_PROGRAMS)
    tally = _Tally(probe="os_exit", world=world)
    last = await _attack(tally, targets, attacks.EXITS)
    await _look_for_processes(tally, last)
    return tally.result("ends that were paid, lost or left something")


async def probe_isolation(world: AuditWorld) -> ProbeResult:
    """What one judgement writes, another does not find; and nothing of it stays."""
    targets = _find_targets(world)
    if not targets:
        return not_applicable("isolation", _NO_PROGRAMS)
    tally = _Tally(probe="isolation", world=world)
    first = targets[0]
    writer = (first.example, as_attack(first.form, attacks.WRITER, _marker(world)))
    beside = await _usable_breaches(world, targets[::-1], attacks.read_breach(0.8 * attacks.HOLD_S))
    after = await _usable_breaches(world, targets, attacks.read_breach(0.0))
    judged = await world.judge_all([writer, *beside])
    tally.look("a program that writes everywhere", judged[0], is_bad=bool(judged[0].reward))
    for kind, found in (
        ("found beside", judged[1:]),
        ("found afterwards", await world.judge_all(after)),
    ):
        for one in found:
            tally.look(kind, one, is_bad=bool(one.reward))
    await _attack(tally, targets[:1], {"removed its folder": attacks.REMOVES_ITS_FOLDER})
    await _look_for_processes(tally, judged[0])
    for path in hosts.find_files(_marker(world)):
        tally.blame("files left", judged[0], path)
    return tally.result("traces of another judgement")


async def probe_stale_submission(world: AuditWorld) -> ProbeResult:
    """A right program that was judged before earns nothing for a reply that holds none."""
    targets = [target for target in _find_targets(world) if target.right_code is not None]
    if not targets:
        has_programs = bool(_find_targets(world))
        return not_applicable(
            "stale_submission", "no right program is known" if has_programs else _NO_PROGRAMS
        )
    tally = _Tally(probe="stale_submission", world=world)
    marker = _marker(world)
    for target in targets:
        gold = world.task.gold_replies(target.example)[0]
        keeps = as_attack(target.form, attacks.keep_breach(target.right_code or ""), marker)
        finds = as_attack(target.form, attacks.find_kept(target.form), marker)
        stale = {
            "prose after a right program": (gold, "I do not know."),
            "nothing after a right program": (gold, ""),
            "an empty program after a right one": (gold, "```python\n\n```"),
            "a program kept from before": (keeps, finds),
        }
        for kind, (before, reply) in stale.items():
            await world.judge_all([(target.example, before)])
            (judged,) = await world.judge_all([(target.example, reply)])
            tally.look(kind, judged, is_bad=bool(judged.reward))
    return tally.result("replies paid for what was there before")


async def probe_label_leak(world: AuditWorld) -> ProbeResult:
    """No long answer stands in its own prompt, and no program can read its tests or private files."""
    result = await probe_prompt_leak(world)
    targets = _find_targets(world)
    if not targets or result.status is ProbeStatus.FAIL:
        return result
    tally = _Tally(probe="label_leak", world=world)
    handle, canary = tempfile.mkstemp(prefix="strop-audit-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(_marker(world))
        for target in targets:
            await _breach(tally, [target], attacks.leak_breaches(_hidden_text(world, target.example), canary))
    finally:
        os.unlink(canary)
    if not tally.num:
        return result
    return tally.result("ways to read what is hidden")


async def probe_lost_sandbox(world: AuditWorld) -> ProbeResult:
    """A judgement whose sandbox is killed has no score, and the machine is named as the cause."""
    targets = _find_targets(world)
    if not targets:
        return not_applicable("lost_sandbox", _NO_PROGRAMS)
    if not hosts.can_look():
        return not_applicable("lost_sandbox", "processes of this system cannot be listed")
    tally = _Tally(probe="lost_sandbox", world=world)
    target, marker = targets[0], _marker(world)
    reply = (target.example, as_attack(target.form, attacks.HANGS, marker))
    judging = asyncio.create_task(world.judge_all([reply]))
    num_killed = await asyncio.to_thread(_kill_while, judging, marker)
    (judged,) = await judging
    if not num_killed:
        return not_applicable("lost_sandbox", "no process outside holds the program")
    tally.num += 1
    failure = judged.outcome.failure
    if judged.reward is not None or failure is None:
        tally.blame("scored", judged, f"killed {num_killed} times")
    elif failure.owner is not FailureOwner.INFRA:
        tally.blame("blamed on another", judged, f"{failure.owner}: {failure.kind}")
    return tally.result("judgements that were not lost as they should")


def _find_targets(world: AuditWorld) -> list[_Target]:
    """Return some examples whose replies are programs, those with little to run first."""
    found = [(example, world.form_of(example)) for example in world.examples]
    targets = [
        _Target(example=example, form=form, right_code=_right_code(world, example, form))
        for example, form in found
        if form is not None
    ]
    targets.sort(key=lambda target: len(json.dumps(dict(target.example.fields))))
    return targets[:_NUM_TARGETS]


def _right_code(world: AuditWorld, example: Example, form: ProgramForm) -> str | None:
    golds = world.task.gold_replies(example)
    return extract_python(golds[0], entry_point=form.entry_point) if golds else None


def _marker(world: AuditWorld) -> str:
    """Return a word of this audit; it is short enough for the name of a process."""
    return f"sa{world.nonce}"


async def _attack(tally: _Tally, targets: Sequence[_Target], kinds: Mapping[str, Attack]) -> Judged:
    """Judge attacks on each target, slow ones on the first; compare with the same program without them.

    Returns one of the judgements.
    """
    world, marker = tally.world, _marker(tally.world)
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


async def _breach(tally: _Tally, targets: Sequence[_Target], checks: Mapping[str, str]) -> None:
    for kind, check in checks.items():
        replies = await _usable_breaches(tally.world, targets, check)
        for judged in await tally.world.judge_all(replies):
            tally.look(kind, judged, is_bad=is_full(tally.world, judged))


async def _usable_breaches(
    world: AuditWorld, targets: Sequence[_Target], check: str
) -> list[tuple[Example, str]]:
    """Return breaches for the targets whose right program earns full marks where nothing spoils it."""
    known = [(target, target.right_code) for target in targets if target.right_code is not None]
    always = [
        (target.example, as_breach(target.form, code, attacks.ALWAYS, _marker(world)))
        for target, code in known
    ]
    fine = [is_full(world, judged) for judged in await world.judge_once(always)]
    return [
        (target.example, as_breach(target.form, code, check, _marker(world)))
        for (target, code), is_fine in zip(known, fine, strict=True)
        if is_fine
    ]


def _hidden_text(world: AuditWorld, example: Example) -> str:
    """Return a piece of the example that its prompt does not show; empty if there is none."""
    prompt = "\n".join(message.content for message in world.task.render(example))
    for value in example.fields.values():
        for text in value if isinstance(value, list) else [value]:
            piece = text.strip()[-_MAX_HIDDEN_CHARS:] if isinstance(text, str) else ""
            if len(piece) >= _MIN_HIDDEN_CHARS and piece not in prompt:
                return piece
    return ""


async def _look_for_processes(tally: _Tally, judged: Judged) -> None:
    """Blame processes that still run some time after their judgement."""
    marker = _marker(tally.world)
    left = await asyncio.to_thread(hosts.wait_for_end, marker, _SURVIVOR_WAIT_S)
    if left:
        tally.blame("processes left", judged, f"{len(left)} processes")


def _kill_while(judging: asyncio.Task[list[Judged]], marker: str) -> int:
    """Kill what holds the marked program whenever there is one; return how often. Runs in a thread."""
    num_killed, until = 0, time.monotonic() + _FIND_LIMIT_S
    while not judging.done() and time.monotonic() < until:
        # All of them: one program may be several processes, of which the first may be gone.
        killed = [hosts.kill_keeper_of(pid) for pid in hosts.find_processes(marker)]
        num_killed += True in killed
        time.sleep(_LOOK_EVERY_S)
    return num_killed
