"""Probes for environments: what is said to tools and in turns must not reach the grader or this machine.

They bear the names of the probes for programs, and ask the same: is the grader changed, a forged result
believed, the process ended, a file or an address of this machine reached, an earlier or a simultaneous
attempt found? A class in the process of the rollouts is attacked in a process of its own, forked for each
attempt, so that an attack that succeeds harms nobody.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from strop.audit import world_attacks as attacks
from strop.audit.answer_probes import probe_prompt_leak
from strop.audit.code_probes import Findings, marker_of
from strop.audit.context import SLACK, AuditContext, Judged, not_applicable
from strop.audit.probes import INJECTIONS
from strop.audit.report import ProbeResult, ProbeStatus
from strop.audit.world_attacks import fill, find_slots, pairs
from strop.environments.worlds import WorldTask
from strop.rollout import Example, FailureOwner, Outcome
from strop.tasks.contract import TURN, Task
from strop.tasks.failures import catch_failure
from strop.tasks.judging.judge import outcome_from_json, outcome_to_json
from strop.tasks.judging.pool import CallFailure, WorkerPool
from strop.tasks.traits import world_of

_ATTACK_LIMIT_S = 10.0
"""Wall time of an attempt in a process of its own; several in one have more."""
_MOST_LIMITS = 4
_AT_ONCE = 2
_NO_PROCESS = "this audit has no process of its own for the class; `strop audit` has"
Script = Sequence[str]
"""What is said in an attempt, one reply a turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """An attempt that was attacked."""

    replies: Script
    told: str
    """All that the world said after its opening."""
    outcome: Outcome


async def play_scripts(
    world: WorldTask, example: Example, scripts: Sequence[Script], *, is_held: bool
) -> list[Seen]:
    """Play attempts one after the other; `is_held`: none is closed before all are over."""
    held, found = [], []
    for replies in scripts:
        environment = world.make_environment()
        told: list[str] = []
        with catch_failure(FailureOwner.TASK) as caught:
            outcome = await world.converse(environment, example, replies, told)
        if caught.failure is not None:
            outcome = Outcome(parts={}, failure=caught.failure)
        found.append(Seen(replies=replies, told="\n".join(told), outcome=outcome))
        held.append(environment)
        if not is_held:
            await environment.close()
    for environment in held:
        with catch_failure(FailureOwner.TASK):
            await environment.close()
    return found


# A class that lives in the process of the rollouts is played in a fork: what becomes of that is seen from
# outside. Runs in a worker, which has one thread.


def _make_player(make_task: Callable[[], Task]) -> Callable[[Any], Any]:
    task = make_task()
    # What is read of the class once is read before the forks.
    world_of(task).make_environment()
    return partial(_play_in_fork, task)


def _play_in_fork(task: Task, order: Mapping[str, Any]) -> Any:
    answer_r, answer_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(answer_r)
        try:
            work = play_scripts(
                world_of(task), Example(**order["example"]), order["scripts"], is_held=order["is_held"]
            )
            seen = [{"told": one.told, "outcome": outcome_to_json(one.outcome)} for one in asyncio.run(work)]
            with os.fdopen(answer_w, "w") as answers:
                json.dump(seen, answers)
        finally:
            os._exit(0)
    os.close(answer_w)
    text, until = b"", time.monotonic() + _ATTACK_LIMIT_S * min(len(order["scripts"]), _MOST_LIMITS)
    while select.select([answer_r], [], [], max(0.0, until - time.monotonic()))[0]:
        part = os.read(answer_r, 1 << 16)
        if not part:
            break
        text += part
    os.close(answer_r)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        return json.loads(text)
    except ValueError:
        lost = Outcome.lost(FailureOwner.TASK, "process_ended", "the process of the rollouts hung, or ended")
        return [{"told": "", "outcome": outcome_to_json(lost)} for _ in order["scripts"]]


class Arena:
    """An environment under attack, for all probes of an audit."""

    def __init__(self, context: AuditContext) -> None:
        world = world_of(context.task)
        assert isinstance(world, WorldTask)
        self.world = world
        self.max_turns: int = world.make_environment().max_turns
        self.slots = find_slots(world.tools, has_step=world.has_step)
        self.example = context.examples[0]
        self._pool: WorkerPool | None = None
        """Where a class is played that would else live in this process."""
        if not world.is_apart and context.make_task is not None:
            make_handler = partial(_make_player, context.make_task)
            self._pool = WorkerPool(make_handler, num_workers=_AT_ONCE, limit_s=6 * _ATTACK_LIMIT_S)
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._best: float | None = None

    @property
    def may_die(self) -> bool:
        """Whether an attack may end the process that it is played in."""
        return self.world.is_apart or self._pool is not None

    async def play(self, *scripts: Script, is_held: bool = False) -> list[Seen]:
        """Play attempts in one process."""
        async with self._room:
            if self._pool is None:
                return await play_scripts(self.world, self.example, scripts, is_held=is_held)
            order = {"example": asdict(self.example), "is_held": is_held}
            found = await self._pool.call({**order, "scripts": [list(one) for one in scripts]})
        if isinstance(found, CallFailure):
            lost = Outcome.lost(FailureOwner.TASK, found.kind, found.detail)
            return [Seen(replies=replies, told="", outcome=lost) for replies in scripts]
        return [
            Seen(replies=replies, told=one["told"], outcome=outcome_from_json(one["outcome"]))
            for replies, one in zip(scripts, found, strict=True)
        ]

    async def find_best(self) -> float:
        """Return what harmless words earn at most, in the places of the attacks."""
        if self._best is None:
            texts = [slot.script(text) for slot in self.slots for text in attacks.HARMLESS]
            found = await asyncio.gather(*map(self.play, texts))
            self._best = max((one.outcome.reward or 0.0 for (one,) in found), default=0.0)
        return self._best

    async def close(self) -> None:
        """End its processes."""
        if self._pool is not None:
            await self._pool.close()


@dataclass(kw_only=True, slots=True)
class _Attacking:
    """One probe under way."""

    context: AuditContext
    arena: Arena
    findings: Findings
    best: float

    @classmethod
    async def begin(cls, context: AuditContext, name: str) -> _Attacking:
        """Make the audit's arena where this is its first probe."""
        arena = context.arena = context.arena or Arena(context)
        findings = Findings(probe=name, context=context)
        return cls(context=context, arena=arena, findings=findings, best=await arena.find_best())

    async def try_all(self, kinds: Mapping[str, str], is_bad: Callable[[Seen], bool]) -> None:
        """Say each attack at each place, as many as there is time for."""
        for part in self.context.in_time(list(pairs(self.arena.slots, kinds))):
            seen = await asyncio.gather(*(self.arena.play(slot.script(text)) for _, slot, text in part))
            for (kind, _, _), (one,) in zip(part, seen, strict=True):
                self.note(kind, one, is_bad=is_bad(one))

    def note(self, kind: str, seen: Seen, *, is_bad: bool) -> None:
        """Count an attempt, and report it if the attack worked."""
        self.findings.num += 1
        judged = Judged(example=self.arena.example, text=TURN.join(seen.replies), outcome=seen.outcome)
        self.context.all_judged.append(judged)
        if is_bad:
            failure = seen.outcome.failure
            self.findings.report(kind, judged, "" if failure is None else failure.kind)

    def is_paid(self, seen: Seen) -> bool:
        """Whether an attack earned full marks that nothing else that says little earns."""
        full = self.context.max_reward - SLACK
        return (seen.outcome.reward or 0.0) >= full > self.best


async def probe_grader_tamper(context: AuditContext) -> ProbeResult:
    """Nothing that is said changes the score, the object, or the class's file."""
    name = "grader_tamper"
    probe = await _Attacking.begin(context, name)
    if not probe.arena.may_die:
        return not_applicable(name, _NO_PROCESS)
    best = repr(context.max_reward)
    await probe.try_all({k: fill(t, MAX=best) for k, t in attacks.TAMPERS.items()}, probe.is_paid)
    writes = {k: fill(t, FILE=repr(str(probe.arena.world.file))) for k, t in attacks.WRITES.items()}
    await probe.try_all(writes, lambda seen: attacks.SHOWN in seen.told)
    return probe.findings.result("ways to change who judges")


async def probe_forged_stdout(context: AuditContext) -> ProbeResult:
    """Saying that all is well earns nothing, and the next attempt is scored as ever."""
    name = "forged_stdout"
    probe = await _Attacking.begin(context, name)
    await probe.try_all(attacks.FORGERIES, probe.is_paid)
    for gold in context.task.gold_replies(probe.arena.example)[:1]:
        (seen,) = await probe.arena.play(gold.split(TURN))
        is_lost = (seen.outcome.reward or 0.0) < context.max_reward - SLACK
        probe.note("a right attempt afterwards", seen, is_bad=is_lost)
    return probe.findings.result("results that were believed")


async def probe_judge_injection(context: AuditContext) -> ProbeResult:
    """Words that speak to the judge earn nothing."""
    name = "judge_injection"
    probe = await _Attacking.begin(context, name)
    await probe.try_all(INJECTIONS, probe.is_paid)
    return probe.findings.result("words that talked the judge into it")


async def probe_os_exit(context: AuditContext) -> ProbeResult:
    """Nothing that is said ends the attempt without a score: who can do that chooses which attempts count."""
    name = "os_exit"
    probe = await _Attacking.begin(context, name)
    if not probe.arena.may_die:
        return not_applicable(name, _NO_PROCESS)
    await probe.try_all(attacks.EXITS, lambda seen: _has_ended(seen) or probe.is_paid(seen))
    return probe.findings.result("ends that were paid, or lost the attempt")


_ENDED = frozenset(
    {"process_ended", "crash", "timeout", "tool_timeout", "step_timeout", "exited", "killed", "disconnected"}
    | {"out_of_memory", "output_flood", "over_limit", "sandbox_killed", "forged"}
)


def _has_ended(seen: Seen) -> bool:
    failure = seen.outcome.failure
    return failure is not None and failure.kind in _ENDED


async def probe_isolation(context: AuditContext) -> ProbeResult:
    """What one attempt writes, another that is under way does not find."""
    name, word = "isolation", f"{marker_of(context)}note"
    probe = await _Attacking.begin(context, name)
    if not probe.arena.may_die:
        return not_applicable(name, _NO_PROCESS)
    # In the working directory, and where all may write.
    for path in (word, os.path.join(tempfile.gettempdir(), word)):
        try:
            await _look_for_notes(probe, path, word)
        finally:
            for left in (path, os.path.join(os.getcwd(), word)):
                with suppress(OSError):
                    os.unlink(left)
    return probe.findings.result("traces of another attempt")


async def _look_for_notes(probe: _Attacking, path: str, word: str) -> None:
    """Leave a note at a path, and have another attempt look for it in the same way, or by its path."""
    # What it says stands in no attack that reads it.
    content, slots = word[::-1], probe.arena.slots
    notes = {kind: fill(t, PATH=_quote(path), WORD=_quote(content)) for kind, t in attacks.NOTES.items()}
    writes = [(kind, slot, slot.say(text)) for kind, text in notes.items() for slot in slots]
    for one, other in itertools.permutations(slots, 2):
        if one.tool is not None and one.tool == other.tool:
            writes.append(("a path", one, one.say(path, **{other.parameter: content})))
    for kind, slot, write in itertools.chain.from_iterable(probe.context.in_time(writes, num_first=1)):
        ways = dict.fromkeys((kind, "a path"))
        reads = [fill(attacks.READS[way], PATH=_quote(path), BARE=path) for way in ways]
        scripts = _in_few_attempts([(one, read) for read in reads for one in slots], probe.arena.max_turns)
        wrote, *seen = await probe.arena.play([write], *scripts, is_held=True)
        if _has_ended(wrote):
            # It was not written, so nothing can be said of who reads it.
            continue
        for found in seen:
            where = os.path.dirname(path) or "its own directory"
            probe.note(f"{kind} in {slot.name}, in {where}", found, is_bad=content in found.told)


def _in_few_attempts(said: Sequence[tuple[attacks.Slot, str]], max_turns: int) -> list[list[str]]:
    """Return scripts that say texts at places: a plain reply in every turn, calls one after the other."""
    plain = [slot.script(text) for slot, text in said if slot.tool is None]
    calls = [slot.say(text) for slot, text in said if slot.tool is not None]
    size = max(1, max_turns - 1)
    return plain + [[*calls[first : first + size], "Done."] for first in range(0, len(calls), size)]


async def probe_stale_submission(context: AuditContext) -> ProbeResult:
    """A right attempt, over or under way, earns nothing for one that says nothing."""
    name = "stale_submission"
    probe = await _Attacking.begin(context, name)
    golds = context.task.gold_replies(probe.arena.example)
    if not golds:
        return not_applicable(name, "no right attempt is known")
    for kind, is_held in (("after a right attempt", False), ("beside a right attempt", True)):
        _, seen = await probe.arena.play(golds[0].split(TURN), ["I do not know."], is_held=is_held)
        reward = seen.outcome.reward or 0.0
        # Full marks are too much even where right attempts of earlier probes are what pays for all words.
        probe.note(kind, seen, is_bad=reward > min(probe.best, context.max_reward - 2 * SLACK) + SLACK)
    return probe.findings.result("attempts paid for what another did")


async def probe_label_leak(context: AuditContext) -> ProbeResult:
    """No long answer stands in its opening, and nothing that is said reads a file of this machine."""
    name, secret = "label_leak", f"{marker_of(context)}canary"
    result = await probe_prompt_leak(context)
    if result.status is ProbeStatus.FAIL:
        return result
    probe = await _Attacking.begin(context, name)
    with tempfile.NamedTemporaryFile("w", prefix="strop-audit-") as canary:
        os.chmod(canary.name, 0o644)
        canary.write(secret)
        canary.flush()
        path = canary.name
        reads = {
            f"{k} that reads a file": fill(t, PATH=_quote(path), BARE=path) for k, t in attacks.READS.items()
        }
        await probe.try_all(reads, lambda seen: secret in seen.told)
    return probe.findings.result("ways to read what is hidden")


async def probe_network(context: AuditContext) -> ProbeResult:
    """Nothing that is said reaches a server of this machine."""
    name, visits = "network", []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(1)
        writer.close()

    probe = await _Attacking.begin(context, name)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = str(server.sockets[0].getsockname()[1])
        words = {"URL": f"http://127.0.0.1:{port}/", "PORT": port}
        asked = list(pairs(probe.arena.slots, attacks.CALLS))
        for kind, slot, text in itertools.chain.from_iterable(context.in_time(asked)):
            visits.clear()
            (seen,) = await probe.arena.play(slot.script(fill(text, **words)))
            probe.note(kind, seen, is_bad=bool(visits))
    return probe.findings.result("ways to a server of this machine")


def _quote(text: str) -> str:
    """Return a text in quotes that Python and a shell read alike."""
    return f"'{text}'"


WORLD_PROBES = {
    "grader_tamper": probe_grader_tamper,
    "forged_stdout": probe_forged_stdout,
    "os_exit": probe_os_exit,
    "isolation": probe_isolation,
    "network": probe_network,
    "stale_submission": probe_stale_submission,
    "label_leak": probe_label_leak,
    "judge_injection": probe_judge_injection,
}
"""Asked of environments in the place of the probes of the same names."""
