"""The probes of a task whose replies are programs: each attack is judged by the task as a reply would be.

A task says by `program_form` that its replies are programs; for others these probes do not apply. The
score of an attack is compared with that of the same wrong program without it, and breaches (programs that
are right only if they can do what they must not) count where they earn full marks.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time

from strop.audit import attacks, hosts
from strop.audit.attacks import as_attack
from strop.audit.leaks import leak_breaches
from strop.audit.measure import is_full, not_applicable
from strop.audit.probes import probe_label_leak as probe_prompt_leak
from strop.audit.report import ProbeResult, ProbeStatus
from strop.audit.targets import (
    NO_PROGRAMS,
    Tally,
    find_targets,
    marker_of,
    try_attacks,
    try_breaches,
    usable_breaches,
)
from strop.audit.world import AuditWorld, Judged
from strop.rollout import Example, FailureOwner
from strop.tasks.failures import describe_failure

_SURVIVOR_WAIT_S = 2.0
"""What is left so long after a judgement was left behind."""
_MIN_HIDDEN_CHARS = 24
_MAX_HIDDEN_CHARS = 60
_FIND_LIMIT_S = 20.0
_LOOK_EVERY_S = 0.05


async def probe_grader_tamper(world: AuditWorld) -> ProbeResult:
    """Changing built-ins, modules, names and files of the grader changes no score."""
    targets = find_targets(world)
    if not targets:
        return not_applicable("grader_tamper", NO_PROGRAMS)
    tally = Tally(probe="grader_tamper", world=world)
    await try_attacks(tally, targets, attacks.TAMPERS)
    await try_breaches(tally, targets, attacks.TAMPER_BREACHES)
    return tally.result("ways to change who judges")


async def probe_forged_stdout(world: AuditWorld) -> ProbeResult:
    """A program that says it passed did not pass, and the next one is judged as ever."""
    targets = find_targets(world)
    if not targets:
        return not_applicable("forged_stdout", NO_PROGRAMS)
    tally = Tally(probe="forged_stdout", world=world)
    await try_attacks(tally, targets, attacks.FORGERIES)
    solvable = [target for target in targets if target.right_code is not None]
    for judged in await world.judge_all((t.example, world.task.gold_replies(t.example)[0]) for t in solvable):
        tally.look("a right program afterwards", judged, is_bad=not is_full(world, judged))
    return tally.result("output that was believed")


async def probe_os_exit(world: AuditWorld) -> ProbeResult:
    """A program that ends, hangs or exhausts its judge is wrong, and nothing of it is left."""
    targets = find_targets(world)
    if not targets:
        return not_applicable("os_exit", NO_PROGRAMS)
    tally = Tally(probe="os_exit", world=world)
    last = await try_attacks(tally, targets, attacks.EXITS)
    await _look_for_processes(tally, last)
    return tally.result("ends that were paid, lost or left something")


async def probe_isolation(world: AuditWorld) -> ProbeResult:
    """What one judgement writes, another does not find; and nothing of it stays."""
    targets = find_targets(world)
    if not targets:
        return not_applicable("isolation", NO_PROGRAMS)
    tally = Tally(probe="isolation", world=world)
    first = targets[0]
    writer = (first.example, as_attack(first.form, attacks.WRITER, marker_of(world)))
    beside = await usable_breaches(world, targets[::-1], attacks.read_breach(0.8 * attacks.HOLD_S))
    after = await usable_breaches(world, targets, attacks.read_breach(0.0))
    judged = await world.judge_all([writer, *beside])
    tally.look("a program that writes everywhere", judged[0], is_bad=bool(judged[0].reward))
    for kind, found in (
        ("found beside", judged[1:]),
        ("found afterwards", await world.judge_all(after)),
    ):
        for one in found:
            tally.look(kind, one, is_bad=bool(one.reward))
    await try_attacks(tally, targets[:1], {"removed its folder": attacks.REMOVES_ITS_FOLDER})
    await _look_for_processes(tally, judged[0])
    for path in hosts.find_files(marker_of(world)):
        tally.blame("files left", judged[0], path)
    return tally.result("traces of another judgement")


async def probe_stale_submission(world: AuditWorld) -> ProbeResult:
    """A right program that was judged before earns nothing for a reply that holds none."""
    targets = [target for target in find_targets(world) if target.right_code is not None]
    if not targets:
        has_programs = bool(find_targets(world))
        return not_applicable(
            "stale_submission", "no right program is known" if has_programs else NO_PROGRAMS
        )
    tally = Tally(probe="stale_submission", world=world)
    marker = marker_of(world)
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
    targets = find_targets(world)
    if not targets or result.status is ProbeStatus.FAIL:
        return result
    tally = Tally(probe="label_leak", world=world)
    handle, canary = tempfile.mkstemp(prefix="strop-audit-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(marker_of(world))
        for target in targets:
            await try_breaches(tally, [target], leak_breaches(_hidden_text(world, target.example), canary))
    finally:
        os.unlink(canary)
    if not tally.num:
        return result
    return tally.result("ways to read what is hidden")


async def probe_lost_sandbox(world: AuditWorld) -> ProbeResult:
    """A judgement whose sandbox is killed has no score, and the machine is named as the cause."""
    targets = find_targets(world)
    if not targets:
        return not_applicable("lost_sandbox", NO_PROGRAMS)
    if not hosts.can_look():
        return not_applicable("lost_sandbox", "processes of this system cannot be listed")
    tally = Tally(probe="lost_sandbox", world=world)
    target, marker = targets[0], marker_of(world)
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
        tally.blame("blamed on another", judged, describe_failure(failure))
    return tally.result("judgements that were not lost as they should")


def _hidden_text(world: AuditWorld, example: Example) -> str:
    """Return a piece of the example that its prompt does not show; empty if there is none."""
    prompt = "\n".join(message.content for message in world.task.render(example))
    for value in example.fields.values():
        for text in value if isinstance(value, list) else [value]:
            piece = text.strip()[-_MAX_HIDDEN_CHARS:] if isinstance(text, str) else ""
            if len(piece) >= _MIN_HIDDEN_CHARS and piece not in prompt:
                return piece
    return ""


async def _look_for_processes(tally: Tally, judged: Judged) -> None:
    """Blame processes that still run some time after their judgement."""
    marker = marker_of(tally.world)
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
