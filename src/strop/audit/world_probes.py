"""Probes for environments: texts in tool calls and turns must not reach the grader or this machine.

They have the names and the questions of the probes for programs: is the grader changed, a forged result
believed, the process ended, a file or an address of this machine reached, an earlier or a concurrent attempt
found? A class that runs in the process of the rollouts is attacked in a forked process for each attempt,
where a successful attack does no harm.
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
from strop.audit.context import SLACK, AuditContext, Findings, Judged, marker_of, not_applicable
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
"""Wall time limit of an attempt in a forked process; for several, up to `_MOST_LIMITS` times as much."""
_MOST_LIMITS = 4
_AT_ONCE = 2
_NO_PROCESS = "this audit has no separate process for the class; `strop audit` has"
Script = Sequence[str]
"""The replies of an attempt, one a turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """A played attempt."""

    replies: Script
    transcript: str
    """All texts of the world after its opening."""
    outcome: Outcome


async def play_scripts(
    world: WorldTask, example: Example, scripts: Sequence[Script], *, is_held: bool
) -> list[Attempt]:
    """Play attempts one after the other. With `is_held`, none is closed before all are over."""
    held, attempts = [], []
    for replies in scripts:
        environment = world.make_environment()
        texts: list[str] = []
        with catch_failure(FailureOwner.TASK) as caught:
            outcome = await world.converse(environment, example, replies, texts)
        if caught.failure is not None:
            outcome = Outcome(parts={}, failure=caught.failure)
        attempts.append(Attempt(replies=replies, transcript="\n".join(texts), outcome=outcome))
        held.append(environment)
        if not is_held:
            await environment.close()
    for environment in held:
        with catch_failure(FailureOwner.TASK):
            await environment.close()
    return attempts


# A class that runs in the process of the rollouts is played in a fork, whose end is observed from outside.
# The fork is made in a worker, which has one thread.


def _make_player(make_task: Callable[[], Task]) -> Callable[[Any], Any]:
    task = make_task()
    # Files that the class reads once are read before the forks.
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
            played = [
                {"transcript": attempt.transcript, "outcome": outcome_to_json(attempt.outcome)}
                for attempt in asyncio.run(work)
            ]
            with os.fdopen(answer_w, "w") as answers:
                json.dump(played, answers)
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
        return [{"transcript": "", "outcome": outcome_to_json(lost)} for _ in order["scripts"]]


class Arena:
    """The environment under attack, for all probes of an audit."""

    def __init__(self, context: AuditContext) -> None:
        world = world_of(context.task)
        assert isinstance(world, WorldTask)
        self.world = world
        self.max_turns: int = world.make_environment().max_turns
        self.slots = find_slots(world.tools, has_step=world.has_step)
        self.example = context.examples[0]
        self._pool: WorkerPool | None = None
        """Plays the class, which would otherwise run in this process."""
        if context.make_task is not None:
            make_handler = partial(_make_player, context.make_task)
            self._pool = WorkerPool(make_handler, num_workers=_AT_ONCE, limit_s=6 * _ATTACK_LIMIT_S)
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._best: float | None = None

    @property
    def may_die(self) -> bool:
        """Whether an attack may end the process that it is played in."""
        return self._pool is not None

    async def play(self, *scripts: Script, is_held: bool = False) -> list[Attempt]:
        """Play attempts in one process."""
        async with self._turn:
            if self._pool is None:
                return await play_scripts(self.world, self.example, scripts, is_held=is_held)
            order = {"example": asdict(self.example), "is_held": is_held}
            played = await self._pool.call({**order, "scripts": [list(replies) for replies in scripts]})
        if isinstance(played, CallFailure):
            lost = Outcome.lost(FailureOwner.TASK, played.kind, played.detail)
            return [Attempt(replies=replies, transcript="", outcome=lost) for replies in scripts]
        return [
            Attempt(
                replies=replies,
                transcript=attempt["transcript"],
                outcome=outcome_from_json(attempt["outcome"]),
            )
            for replies, attempt in zip(scripts, played, strict=True)
        ]

    async def find_best(self) -> float:
        """Return the largest reward of harmless words in the places of the attacks."""
        if self._best is None:
            scripts = [slot.script(text) for slot in self.slots for text in attacks.HARMLESS]
            played = await asyncio.gather(*map(self.play, scripts))
            self._best = max((attempt.outcome.reward or 0.0 for (attempt,) in played), default=0.0)
        return self._best

    async def close(self) -> None:
        """End the processes of the pool."""
        if self._pool is not None:
            await self._pool.close()


@dataclass(kw_only=True, slots=True)
class _RunningProbe:
    """A running probe."""

    context: AuditContext
    arena: Arena
    findings: Findings
    best: float

    @classmethod
    async def begin(cls, context: AuditContext, name: str) -> _RunningProbe:
        """Begin a probe; the audit's first one makes the arena."""
        arena = context.arena = context.arena or Arena(context)
        findings = Findings(probe=name, context=context)
        return cls(context=context, arena=arena, findings=findings, best=await arena.find_best())

    async def try_all(self, kinds: Mapping[str, str], is_bad: Callable[[Attempt], bool]) -> None:
        """Play each attack in each place, as far as time allows."""
        for part in self.context.in_time(list(pairs(self.arena.slots, kinds))):
            played = await asyncio.gather(*(self.arena.play(slot.script(text)) for _, slot, text in part))
            for (kind, _, _), (attempt,) in zip(part, played, strict=True):
                self.note(kind, attempt, is_bad=is_bad(attempt))

    def note(self, kind: str, attempt: Attempt, *, is_bad: bool) -> None:
        """Count an attempt, and report it if the attack worked."""
        self.findings.num += 1
        judged = Judged(example=self.arena.example, text=TURN.join(attempt.replies), outcome=attempt.outcome)
        self.context.all_judged.append(judged)
        if is_bad:
            failure = attempt.outcome.failure
            self.findings.report(kind, judged, "" if failure is None else failure.kind)

    def is_paid(self, attempt: Attempt) -> bool:
        """Whether an attack earned full marks, and harmless words do not."""
        full = self.context.max_reward - SLACK
        return (attempt.outcome.reward or 0.0) >= full > self.best


async def probe_grader_tamper(context: AuditContext) -> ProbeResult:
    """No text changes the score, the environment's object, or the class's file."""
    name = "grader_tamper"
    probe = await _RunningProbe.begin(context, name)
    if not probe.arena.may_die:
        return not_applicable(name, _NO_PROCESS)
    best = repr(context.max_reward)
    await probe.try_all({k: fill(t, MAX=best) for k, t in attacks.TAMPERS.items()}, probe.is_paid)
    writes = {k: fill(t, FILE=repr(str(probe.arena.world.file))) for k, t in attacks.WRITES.items()}
    await probe.try_all(writes, lambda attempt: attacks.SHOWN in attempt.transcript)
    return probe.findings.result("ways to change who judges")


async def probe_forged_stdout(context: AuditContext) -> ProbeResult:
    """Claims of success earn nothing, and the next attempt is scored as before."""
    name = "forged_stdout"
    probe = await _RunningProbe.begin(context, name)
    await probe.try_all(attacks.FORGERIES, probe.is_paid)
    for gold in context.task.gold_replies(probe.arena.example)[:1]:
        (attempt,) = await probe.arena.play(gold.split(TURN))
        is_lost = (attempt.outcome.reward or 0.0) < context.max_reward - SLACK
        probe.note("a right attempt afterwards", attempt, is_bad=is_lost)
    return probe.findings.result("results that were believed")


async def probe_judge_injection(context: AuditContext) -> ProbeResult:
    """Texts that address the judge earn nothing."""
    name = "judge_injection"
    probe = await _RunningProbe.begin(context, name)
    await probe.try_all(INJECTIONS, probe.is_paid)
    return probe.findings.result("words that talked the judge into it")


async def probe_os_exit(context: AuditContext) -> ProbeResult:
    """No text ends the attempt without a score; otherwise the policy could choose which attempts count."""
    name = "os_exit"
    probe = await _RunningProbe.begin(context, name)
    if not probe.arena.may_die:
        return not_applicable(name, _NO_PROCESS)
    await probe.try_all(attacks.EXITS, lambda attempt: _has_ended(attempt) or probe.is_paid(attempt))
    for replies in probe.arena.world.forgeries(probe.arena.example):
        (attempt,) = await probe.arena.play(replies)
        probe.note("code that ends its grader", attempt, is_bad=_has_ended(attempt) or probe.is_paid(attempt))
    return probe.findings.result("ends that were paid, or lost the attempt")


_ENDED = frozenset(
    {"process_ended", "crash", "timeout", "tool_timeout", "step_timeout", "exited", "killed", "disconnected"}
    | {"out_of_memory", "output_flood", "over_limit", "sandbox_killed", "forged"}
)


def _has_ended(attempt: Attempt) -> bool:
    failure = attempt.outcome.failure
    return failure is not None and failure.kind in _ENDED


async def probe_isolation(context: AuditContext) -> ProbeResult:
    """An attempt does not find the files of a concurrent one."""
    name, word = "isolation", f"{marker_of(context)}note"
    probe = await _RunningProbe.begin(context, name)
    if not probe.arena.may_die:
        return not_applicable(name, _NO_PROCESS)
    # In the working directory, and in a folder where every user may write.
    for path in (word, os.path.join(tempfile.gettempdir(), word)):
        try:
            await _look_for_notes(probe, path, word)
        finally:
            for left in (path, os.path.join(os.getcwd(), word)):
                with suppress(OSError):
                    os.unlink(left)
    return probe.findings.result("traces of another attempt")


async def _look_for_notes(probe: _RunningProbe, path: str, word: str) -> None:
    """Leave a note at a path, and let another attempt look for it in the same way, or by its path."""
    # No attack that reads the note contains its content.
    content, slots = word[::-1], probe.arena.slots
    notes = {kind: fill(t, PATH=_quote(path), WORD=_quote(content)) for kind, t in attacks.NOTES.items()}
    writes = [(kind, slot, slot.say(text)) for kind, text in notes.items() for slot in slots]
    for target, source in itertools.permutations(slots, 2):
        if target.tool is not None and target.tool == source.tool:
            writes.append(("a path", target, target.say(path, **{source.parameter: content})))
    for kind, slot, write in itertools.chain.from_iterable(probe.context.in_time(writes, num_first=1)):
        ways = dict.fromkeys((kind, "a path"))
        reads = [fill(attacks.READS[way], PATH=_quote(path), BARE=path) for way in ways]
        pairs_of_reads = [(reader, read) for read in reads for reader in slots]
        scripts = _in_few_attempts(pairs_of_reads, probe.arena.max_turns)
        writer, *readers = await probe.arena.play([write], *scripts, is_held=True)
        if _has_ended(writer):
            # It wrote no note, so its readers show nothing.
            continue
        for reader in readers:
            where = os.path.dirname(path) or "its own directory"
            is_bad = content in reader.transcript
            probe.note(f"{kind} in {slot.name}, in {where}", reader, is_bad=is_bad)


def _in_few_attempts(texts: Sequence[tuple[attacks.Slot, str]], max_turns: int) -> list[list[str]]:
    """Return scripts with texts in places: a plain reply in every turn, tool calls one after the other."""
    plain = [slot.script(text) for slot, text in texts if slot.tool is None]
    calls = [slot.say(text) for slot, text in texts if slot.tool is not None]
    size = max(1, max_turns - 1)
    return plain + [[*calls[first : first + size], "Done."] for first in range(0, len(calls), size)]


async def probe_stale_submission(context: AuditContext) -> ProbeResult:
    """A correct attempt, finished or running, earns nothing for an attempt without an answer."""
    name = "stale_submission"
    probe = await _RunningProbe.begin(context, name)
    golds = context.task.gold_replies(probe.arena.example)
    if not golds:
        return not_applicable(name, "no right attempt is known")
    for kind, is_held in (("after a right attempt", False), ("beside a right attempt", True)):
        _, attempt = await probe.arena.play(golds[0].split(TURN), ["I do not know."], is_held=is_held)
        reward = attempt.outcome.reward or 0.0
        # Full marks are too much even if harmless words earn them: a correct attempt before may be the cause.
        probe.note(kind, attempt, is_bad=reward > min(probe.best, context.max_reward - 2 * SLACK) + SLACK)
    return probe.findings.result("attempts paid for what another did")


async def probe_label_leak(context: AuditContext) -> ProbeResult:
    """No opening contains its own long answer, and no text reads a file of this machine."""
    name, secret = "label_leak", f"{marker_of(context)}canary"
    result = await probe_prompt_leak(context)
    if result.status is ProbeStatus.FAIL:
        return result
    probe = await _RunningProbe.begin(context, name)
    with tempfile.NamedTemporaryFile("w", prefix="strop-audit-") as canary:
        os.chmod(canary.name, 0o644)
        canary.write(secret)
        canary.flush()
        path = canary.name
        reads = {
            f"{k} that reads a file": fill(t, PATH=_quote(path), BARE=path) for k, t in attacks.READS.items()
        }
        await probe.try_all(reads, lambda attempt: secret in attempt.transcript)
    return probe.findings.result("ways to read what is hidden")


async def probe_network(context: AuditContext) -> ProbeResult:
    """No text reaches a server of this machine."""
    name, visits = "network", []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(1)
        writer.close()

    probe = await _RunningProbe.begin(context, name)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = str(server.sockets[0].getsockname()[1])
        words = {"URL": f"http://127.0.0.1:{port}/", "PORT": port}
        calls = list(pairs(probe.arena.slots, attacks.CALLS))
        for kind, slot, text in itertools.chain.from_iterable(context.in_time(calls)):
            visits.clear()
            (attempt,) = await probe.arena.play(slot.script(fill(text, **words)))
            probe.note(kind, attempt, is_bad=bool(visits))
    return probe.findings.result("ways to a server of this machine")


def _quote(text: str) -> str:
    """Return a text in quotes that Python and a shell read the same."""
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
"""The probes that replace those of the same names for environments."""
