"""Probes for tasks whose replies are programs: the task judges each attack like a reply.

A task declares by `program_form` that its replies are programs; for other tasks these probes do not apply.
The score of an attack is compared with that of the same wrong program without the attack. A breach (a program
that is correct only if it can do something forbidden) counts if it earns full marks.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from strop.audit import attacks, breaches
from strop.audit.answer_probes import probe_prompt_leak
from strop.audit.attacks import Attack, as_attack
from strop.audit.context import SLACK, AuditContext, Judged, is_full, not_applicable
from strop.audit.report import MAX_EVIDENCE, Evidence, ProbeResult, ProbeStatus
from strop.rollout import Example, FailureOwner
from strop.sandbox.daemon import SCRATCH_BASES
from strop.tasks.code.extraction import compiles, extract_python, fence
from strop.tasks.failures import describe_failure
from strop.tasks.judging import InlineJudge
from strop.tasks.traits import ProgramForm

_SURVIVOR_WAIT_S = 2.0
"""A process that still runs so long after its judgement was left behind."""
_MIN_HIDDEN_CHARS = 24
_MAX_HIDDEN_CHARS = 60
_FIND_LIMIT_S = 20.0
_LOOK_EVERY_S = 0.05
_PROC = Path("/proc")
_MAX_DEPTH = 3
_MAX_ENTRIES = 50_000
_NUM_TARGETS = 3
NO_PROGRAMS = "replies are not programs"
_FENCED = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)
_COMMENT = "# Reviewed; nothing was left to do."


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """An example under attack."""

    example: Example
    form: ProgramForm
    right_code: str | None
    """A program that deserves full marks, if one is known."""


@dataclass(kw_only=True, slots=True)
class Findings:
    """Accumulates the judgements of a probe, and the wrong ones among them."""

    probe: str
    context: AuditContext
    num: int = 0
    kinds: list[str] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)

    def add(self, kind: str, judged: Judged, *, is_bad: bool) -> None:
        """Count a judgement; one without a score is always bad."""
        self.num += 1
        if is_bad or judged.reward is None:
            failure = judged.outcome.failure
            self.report(kind, judged, "" if failure is None else describe_failure(failure))

    def report(self, kind: str, judged: Judged, detail: str) -> None:
        """Record a wrong judgement."""
        self.kinds.append(kind)
        finding = f"{kind}; {detail}" if detail else kind
        self.evidence.append(Evidence.of(judged.example.example_id, judged.text, judged.reward, finding))

    def result(self, detail: str) -> ProbeResult:
        """Return the result, a failure if any judgement was wrong. `detail` names what the value counts."""
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


def find_targets(context: AuditContext) -> list[Target]:
    """Return some examples whose replies are programs, those with the shortest fields first."""
    targets = []
    for example in context.examples:
        form = context.form_of(example)
        if form is not None:
            golds = context.task.gold_replies(example)
            code = extract_python(golds[0], entry_point=form.entry_point) if golds else None
            targets.append(Target(example=example, form=form, right_code=code))
    targets.sort(key=lambda target: len(json.dumps(dict(target.example.fields))))
    return targets[:_NUM_TARGETS]


def marker_of(context: AuditContext) -> str:
    """Return a word that only this audit uses, short enough for the name of a process."""
    return f"sa{context.nonce}"


async def try_attacks(findings: Findings, targets: Sequence[Target], kinds: Mapping[str, Attack]) -> Judged:
    """Judge attacks on each target, slow ones on the first, and compare with the program without the attack.

    Returns one of the judgements.
    """
    context, marker = findings.context, marker_of(findings.context)
    harmless = [(target.example, as_attack(target.form, Attack(), marker)) for target in targets]
    untampered = await context.judge_all(harmless)
    if context.task.limits.verify_limit_s is None:
        findings.report("programs are judged in the process of the run", untampered[0], "no verify_limit_s")
        return untampered[0]
    is_inline = isinstance(context.judge, InlineJudge)
    tries = [
        (kind, index, (target.example, as_attack(target.form, attack, marker)))
        for kind, attack in kinds.items()
        for index, target in enumerate(targets[: 1 if attack.is_slow else None])
        if not (attack.is_deadly and is_inline)
    ]
    all_judged = await context.judge_all(reply for _, _, reply in tries)
    for (kind, index, _), judged in zip(tries, all_judged, strict=True):
        findings.add(kind, judged, is_bad=(judged.reward or 0.0) > (untampered[index].reward or 0.0) + SLACK)
    return all_judged[-1]


async def try_breaches(findings: Findings, targets: Sequence[Target], checks: Mapping[str, str]) -> None:
    """Judge correct programs that fail unless a check succeeds; full marks show that it did."""
    for kind, check in checks.items():
        replies = await usable_breaches(findings.context, targets, check)
        for judged in await findings.context.judge_all(replies):
            findings.add(kind, judged, is_bad=is_full(findings.context, judged))


async def usable_breaches(
    context: AuditContext, targets: Sequence[Target], check: str
) -> list[tuple[Example, str]]:
    """Return breaches for the targets whose correct program earns full marks with the check `ALWAYS`."""
    solvable = [(target, target.right_code) for target in targets if target.right_code is not None]
    always = [
        (target.example, breaches.as_breach(target.form, code, breaches.ALWAYS, marker_of(context)))
        for target, code in solvable
    ]
    return [
        (target.example, breaches.as_breach(target.form, code, check, marker_of(context)))
        for (target, code), judged in zip(solvable, await context.judge_once(always), strict=True)
        if is_full(context, judged)
    ]


async def probe_grader_tamper(context: AuditContext) -> ProbeResult:
    """Changing built-ins, modules, names and files of the grader changes no score."""
    targets = find_targets(context)
    if not targets:
        return not_applicable("grader_tamper", NO_PROGRAMS)
    findings = Findings(probe="grader_tamper", context=context)
    await try_attacks(findings, targets, attacks.TAMPERS)
    await try_breaches(findings, targets, breaches.TAMPER_BREACHES)
    return findings.result("ways to change who judges")


async def probe_forged_stdout(context: AuditContext) -> ProbeResult:
    """Output that claims success changes no score, and the next program is judged as before."""
    targets = find_targets(context)
    if not targets:
        return not_applicable("forged_stdout", NO_PROGRAMS)
    findings = Findings(probe="forged_stdout", context=context)
    await try_attacks(findings, targets, attacks.FORGERIES)
    solvable = [target for target in targets if target.right_code is not None]
    for judged in await context.judge_all(
        (t.example, context.task.gold_replies(t.example)[0]) for t in solvable
    ):
        findings.add("a right program afterwards", judged, is_bad=not is_full(context, judged))
    return findings.result("output that was believed")


async def probe_os_exit(context: AuditContext) -> ProbeResult:
    """A program that ends, hangs or exhausts its judge is wrong, and leaves no process."""
    targets = find_targets(context)
    if not targets:
        return not_applicable("os_exit", NO_PROGRAMS)
    findings = Findings(probe="os_exit", context=context)
    last = await try_attacks(findings, targets, attacks.EXITS)
    await _look_for_processes(findings, last)
    return findings.result("ends that were paid, lost or left something")


async def probe_isolation(context: AuditContext) -> ProbeResult:
    """A judgement finds no traces of another one, and leaves none behind."""
    targets = find_targets(context)
    if not targets:
        return not_applicable("isolation", NO_PROGRAMS)
    findings = Findings(probe="isolation", context=context)
    first = targets[0]
    writer = (first.example, as_attack(first.form, attacks.WRITER, marker_of(context)))
    beside = await usable_breaches(context, targets[::-1], breaches.read_breach(0.8 * attacks.HOLD_S))
    after = await usable_breaches(context, targets, breaches.read_breach(0.0))
    judged = await context.judge_all([writer, *beside])
    findings.add("a program that writes everywhere", judged[0], is_bad=bool(judged[0].reward))
    for kind, readers in (
        ("found beside", judged[1:]),
        ("found afterwards", await context.judge_all(after)),
    ):
        for reader in readers:
            findings.add(kind, reader, is_bad=bool(reader.reward))
    await try_attacks(findings, targets[:1], {"removed its folder": attacks.REMOVES_ITS_FOLDER})
    await _look_for_processes(findings, judged[0])
    for path in find_files(marker_of(context)):
        findings.report("files left", judged[0], path)
    return findings.result("traces of another judgement")


async def probe_stale_submission(context: AuditContext) -> ProbeResult:
    """A correct program that was judged before earns nothing for a later reply without one."""
    targets = [target for target in find_targets(context) if target.right_code is not None]
    if not targets:
        has_programs = bool(find_targets(context))
        return not_applicable(
            "stale_submission", "no right program is known" if has_programs else NO_PROGRAMS
        )
    findings = Findings(probe="stale_submission", context=context)
    marker = marker_of(context)
    for target in targets:
        gold = context.task.gold_replies(target.example)[0]
        keeps = as_attack(target.form, attacks.keep_breach(target.right_code or ""), marker)
        finds = as_attack(target.form, attacks.find_kept(target.form), marker)
        stale = {
            "prose after a right program": (gold, "I do not know."),
            "nothing after a right program": (gold, ""),
            "an empty program after a right one": (gold, "```python\n\n```"),
            "a program kept from before": (keeps, finds),
        }
        for kind, (before, reply) in stale.items():
            await context.judge_all([(target.example, before)])
            (judged,) = await context.judge_all([(target.example, reply)])
            findings.add(kind, judged, is_bad=bool(judged.reward))
    return findings.result("replies paid for earlier programs")


async def probe_label_leak(context: AuditContext) -> ProbeResult:
    """No prompt contains its own long answer, and no program can read its tests or private files."""
    result = await probe_prompt_leak(context)
    targets = find_targets(context)
    if not targets or result.status is ProbeStatus.FAIL:
        return result
    findings = Findings(probe="label_leak", context=context)
    handle, canary = tempfile.mkstemp(prefix="strop-audit-")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(marker_of(context))
        for target in targets:
            await try_breaches(
                findings, [target], breaches.leak_breaches(_hidden_text(context, target.example), canary)
            )
    finally:
        os.unlink(canary)
    if not findings.num:
        return result
    return findings.result("ways to read what is hidden")


async def probe_lost_sandbox(context: AuditContext) -> ProbeResult:
    """A judgement whose sandbox is killed has no score, and its failure is owned by the infrastructure."""
    targets = find_targets(context)
    if not targets:
        return not_applicable("lost_sandbox", NO_PROGRAMS)
    if not can_look():
        return not_applicable("lost_sandbox", "processes of this system cannot be listed")
    findings = Findings(probe="lost_sandbox", context=context)
    target, marker = targets[0], marker_of(context)
    reply = (target.example, as_attack(target.form, attacks.HANGS, marker))
    judging = asyncio.create_task(context.judge_all([reply]))
    num_killed = await asyncio.to_thread(_kill_while, judging, marker)
    (judged,) = await judging
    if not num_killed:
        return not_applicable("lost_sandbox", "no process outside holds the program")
    findings.num += 1
    failure = judged.outcome.failure
    if judged.reward is not None or failure is None:
        findings.report("scored", judged, f"killed {num_killed} times")
    elif failure.owner is not FailureOwner.INFRA:
        findings.report("blamed on another", judged, describe_failure(failure))
    return findings.result("judgements that were not lost as they should")


async def probe_noop_edit(context: AuditContext) -> ProbeResult:
    """The code that a problem shows earns nothing, unchanged or with a trivial edit."""
    targets = find_targets(context)
    if not targets:
        return not_applicable("noop_edit", NO_PROGRAMS)
    findings = Findings(probe="noop_edit", context=context)
    tries = []
    for target in targets:
        example = target.example
        prompt = "\n".join(message.text for message in context.task.render(example))
        # Python in the prompt and the starter code; no tests.
        codes = [*_FENCED.findall(prompt), str(example.fields.get("starter_code") or "")]
        shown = dict.fromkeys(code.rstrip() for code in codes if code.strip())
        edits = trivial_edits(target.form, *shown)
        tries += [(kind, (example, reply)) for kind, reply in edits.items()]
    all_judged = await context.judge_all(reply for _, reply in tries)
    for (kind, _), judged in zip(tries, all_judged, strict=True):
        findings.add(kind, judged, is_bad=bool(judged.reward) or is_full(context, judged))
    return findings.result("changes that change nothing and were paid")


def trivial_edits(form: ProgramForm, *shown: str) -> Mapping[str, str]:
    """Return replies without any work, by their edit of the shown code."""
    name = form.entry_point
    stub = "" if name is None else f"def {name}(*args, **keywords):\n    pass"
    replies = {"an empty program": fence("pass"), "a comment alone": fence(_COMMENT)}
    if stub:
        replies["a function without content"] = fence(f"{stub}\n{_COMMENT}")
    for number, code in enumerate(shown):
        # A bare signature needs a body.
        whole = code if compiles(code) else f"{code}\n    pass"
        place = "the code shown" if number == 0 else f"the code shown ({number + 1})"
        replies |= {
            f"{place}, unchanged": fence(whole),
            f"{place}, and a comment": fence(f"{whole}\n{_COMMENT}"),
            f"{place}, under a comment": fence(f"{_COMMENT}\n{whole}"),
        }
        if stub:
            replies[f"{place}, and no content"] = fence(f"{whole}\n{stub}")
    return replies


async def probe_network(context: AuditContext) -> ProbeResult:
    """A program reaches no address, no name and no socket outside its sandbox."""
    targets = find_targets(context)
    if not targets:
        return not_applicable("network", NO_PROGRAMS)
    findings = Findings(probe="network", context=context)
    with breaches.open_doors(f"{marker_of(context)}net") as doors:
        await try_breaches(findings, targets, breaches.network_breaches(doors))
    if not findings.num:
        return not_applicable("network", "no right program is known")
    return findings.result("ways out of the sandbox")


def _hidden_text(context: AuditContext, example: Example) -> str:
    """Return a piece of the example's fields that its prompt does not show; empty if there is none."""
    prompt = "\n".join(message.text for message in context.task.render(example))
    for value in example.fields.values():
        for text in value if isinstance(value, list) else [value]:
            piece = text.strip()[-_MAX_HIDDEN_CHARS:] if isinstance(text, str) else ""
            if len(piece) >= _MIN_HIDDEN_CHARS and piece not in prompt:
                return piece
    return ""


async def _look_for_processes(findings: Findings, judged: Judged) -> None:
    """Report processes that still run `_SURVIVOR_WAIT_S` after their judgement."""
    marker = marker_of(findings.context)
    left = await asyncio.to_thread(wait_for_end, marker, _SURVIVOR_WAIT_S)
    if left:
        findings.report("processes left", judged, f"{len(left)} processes")


def _kill_while(judging: asyncio.Task[list[Judged]], marker: str) -> int:
    """Kill the sandboxes of the marked program until it is judged; return how often. Runs in a thread."""
    num_killed, until = 0, time.monotonic() + _FIND_LIMIT_S
    while not judging.done() and time.monotonic() < until:
        # Kill all: a program may be several processes, of which the first may be gone.
        killed = [kill_sandbox_of(pid) for pid in find_processes(marker)]
        num_killed += True in killed
        time.sleep(_LOOK_EVERY_S)
    return num_killed


# Traces of judged programs on this machine, and their ancestors: from /proc and temporary folders. Linux
# only; elsewhere there are none to find, and the probes that need them do not apply.


def can_look() -> bool:
    """Whether processes of this machine can be listed."""
    return (_PROC / "self" / "comm").exists()


def find_processes(name: str) -> list[int]:
    """Return the ids of processes that named themselves `name`, in any namespace."""
    with suppress(OSError):
        pids = [int(entry) for entry in os.listdir(_PROC) if entry.isdigit()]
        return [pid for pid in pids if _read(pid, "comm").strip() == name]
    return []


def wait_for_end(name: str, limit_s: float) -> list[int]:
    """Wait at most `limit_s` until no process has this name; return the remaining ones."""
    until = time.monotonic() + limit_s
    while (left := find_processes(name)) and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
    return left


def find_files(name: str) -> list[str]:
    """Return files with this name or stem near the tops of all temporary folders."""
    tops = dict.fromkeys([tempfile.gettempdir(), *SCRATCH_BASES, os.getcwd()])
    return [path for top in tops for path in _walk(top) if os.path.basename(path).partition(".")[0] == name]


def kill_sandbox_of(pid: int) -> bool:
    """Kill the process outside that holds a program's namespace; return whether there is one.

    It is the first ancestor that the program cannot see, and so cannot kill itself.
    """
    depth = _namespace_depth(pid)
    ancestor = _parent_of(pid)
    while ancestor and ancestor != os.getpid() and _namespace_depth(ancestor) >= depth:
        ancestor = _parent_of(ancestor)
    above = ancestor
    while above and above != os.getpid():
        above = _parent_of(above)
    if not ancestor or ancestor == os.getpid() or not above:
        return False
    with suppress(ProcessLookupError, PermissionError):
        os.kill(ancestor, signal.SIGKILL)
        return True
    return False


def _read(pid: int, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_text(errors="replace")
    except OSError:
        return ""


def _status(pid: int, key: str) -> list[str]:
    lines = [line for line in _read(pid, "status").splitlines() if line.startswith(f"{key}:")]
    return lines[0].split()[1:] if lines else []


def _parent_of(pid: int) -> int:
    words = _status(pid, "PPid")
    return int(words[0]) if words else 0


def _namespace_depth(pid: int) -> int:
    """Return the number of process namespaces in which a process has an id."""
    return len(_status(pid, "NSpid"))


def _walk(top: str) -> Iterator[str]:
    num = 0
    queue = [(top, 0)]
    while queue and num < _MAX_ENTRIES:
        folder, depth = queue.pop(0)
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                num += 1
                yield entry.path
                if depth + 1 < _MAX_DEPTH and entry.is_dir(follow_symlinks=False):
                    queue.append((entry.path, depth + 1))
