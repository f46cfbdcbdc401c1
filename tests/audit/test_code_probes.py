"""Attacks on graders of programs: the built-in ones hold, and the attacks find the holes of others."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strop.audit import (
    QUICK_PROBES,
    AuditReport,
    AuditSettings,
    ProbeResult,
    ProbeStatus,
    Verdict,
    examples_to_attack,
    run_audit,
)
from strop.audit.attacks import as_lookup
from strop.audit.context import AuditContext
from strop.rollout import Split
from strop.spec.task import TaskSpec
from strop.tasks import Task, build_task, build_warm_task
from strop.tasks.code.apps import AppsSpec
from strop.tasks.code.extraction import compiles, defines, extract_python
from strop.tasks.code.humaneval import HumanEvalSpec
from strop.tasks.code.mbpp import MbppSpec
from strop.tasks.judging import InlineJudge, Judge, open_judge
from strop.tasks.mixture import MixtureSpec
from strop.tasks.traits import ProgramForm, program_form_of
from tests.fixtures.program_attacks import attacks, breaches
from tests.fixtures.program_attacks.breaches import HostDoors, leak_breaches, network_breaches, open_doors
from tests.fixtures.program_attacks.probes import PROBES, find_files, find_processes, wait_for_end
from tests.fixtures.unsafe_graders import (
    BelievesOutput,
    BelievesTheExit,
    CountsALossAsWrong,
    PaysAnyChange,
    ReachesTheNetwork,
    RunsBesideTheRun,
    RunsWhatWasThere,
    SharesAFolder,
    SharesItsNames,
    ShowsAnAnswerFile,
    ShowsItsTests,
    SoundGrader,
)

needs_bubblewrap = pytest.mark.usefixtures("bubblewrap")


async def attack(task: Task, judge: Judge, probes: Sequence[str], num_examples: int) -> list[ProbeResult]:
    examples = examples_to_attack(task)[:num_examples]
    context = AuditContext(task=task, judge=judge, examples=examples, seed=0)
    return [await PROBES[name](context) for name in probes]


def audit(task: Task, *probes: str, num_examples: int = 2) -> list[ProbeResult]:
    return asyncio.run(attack(task, InlineJudge(task), probes, num_examples))


def failed(results: Sequence[ProbeResult]) -> set[str]:
    return {result.probe for result in results if result.status is ProbeStatus.FAIL}


def shares_a_folder(tmp_path: Path) -> Task:
    tmp_path.chmod(0o777)
    grader = SharesAFolder()
    grader.folder = str(tmp_path)
    return grader


def shows_an_answer_file(tmp_path: Path) -> Task:
    tmp_path.chmod(0o755)
    (tmp_path / "test_answers.csv").write_text("id,answer\n1,14\n")
    grader = ShowsAnAnswerFile()
    grader.folder = str(tmp_path)
    return grader


HOLES: dict[str, tuple[Callable[[Path], Task], set[str]]] = {
    "none": (lambda path: SoundGrader(), set()),
    "believes output": (lambda path: BelievesOutput(), {"forged_stdout"}),
    "believes the exit": (lambda path: BelievesTheExit(), {"os_exit"}),
    "shares its names": (lambda path: SharesItsNames(), {"grader_tamper"}),
    # What one judgement leaves in it, a later one may run.
    "shares a folder": (shares_a_folder, {"isolation", "stale_submission"}),
    "runs what was there": (lambda path: RunsWhatWasThere(), {"stale_submission"}),
    "counts a loss as wrong": (lambda path: CountsALossAsWrong(), {"lost_sandbox"}),
    "shows its tests": (lambda path: ShowsItsTests(), {"label_leak"}),
    "shows an answer file": (shows_an_answer_file, {"label_leak"}),
    "reaches the network": (lambda path: ReachesTheNetwork(), {"network"}),
}


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize("hole", HOLES)
def test_each_hole_is_found_by_its_probe_and_by_no_other(hole: str, tmp_path: Path) -> None:
    make, probes = HOLES[hole]
    # A hole shows with one example; that a sound grader has none is asked of two.
    found = failed(audit(make(tmp_path), *PROBES, num_examples=1 if probes else 2))
    assert found == probes


@needs_bubblewrap
@pytest.mark.slow
def test_a_change_of_nothing_is_found_where_it_is_paid() -> None:
    (result,) = audit(PaysAnyChange(), "noop_edit", num_examples=1)
    assert "the code shown, and a comment" in result.detail
    # The code as it was given is no change, and was not paid.
    assert "unchanged" not in result.detail


@needs_bubblewrap
def test_a_program_with_the_network_of_this_machine_is_found_by_every_door() -> None:
    (result,) = audit(ReachesTheNetwork(), "network", num_examples=1)
    found = result.detail.removeprefix("ways out of the sandbox: ").split(", ")
    assert {"loopback of this machine (127.0.0.1)", "abstract sockets of this machine"} <= set(found)
    # Its files are its own all the same.
    assert "socket files of this machine" not in found


@needs_bubblewrap
def test_evidence_names_the_attack() -> None:
    (result,) = audit(BelievesOutput(), "forged_stdout", num_examples=1)
    assert result.detail.startswith("output that was believed: result lines, ")
    assert "result lines; " not in result.evidence[0].detail
    assert (result.evidence[0].detail, result.evidence[0].reward) == ("result lines", 1.0)
    assert "PASSED" in result.evidence[0].reply
    # All but those on standard error: it has six other kinds.
    assert result.value == 6.0


EVERY_ATTACK = {
    **attacks.TAMPERS,
    **attacks.FORGERIES,
    **attacks.EXITS,
    "writer": attacks.WRITER,
    "folder": attacks.REMOVES_ITS_FOLDER,
    "hangs": attacks.HANGS,
    "keeps": attacks.keep_breach("def f(x): return x"),
    "finds": attacks.find_kept(ProgramForm(entry_point="f")),
}
EVERY_BREACH = {
    **breaches.TAMPER_BREACHES,
    **network_breaches(
        HostDoors(loopback_ports={"127.0.0.1": 9, "::1": 9}, abstract_name="sa0net", socket_path="/tmp/door")
    ),
    **leak_breaches("a text of the tests", "/tmp/canary"),
    "always": breaches.ALWAYS,
    "reads": breaches.read_breach(0.5),
}


@pytest.mark.parametrize("entry_point", ["f", None])
@pytest.mark.parametrize("kind", [*EVERY_ATTACK, *EVERY_BREACH])
def test_every_attack_reaches_its_grader_whole(kind: str, entry_point: str | None) -> None:
    """A marker in its text, or a slip of syntax, would make an attack that nobody ever runs."""
    form = ProgramForm(entry_point=entry_point)
    if kind in EVERY_ATTACK:
        reply = attacks.as_attack(form, EVERY_ATTACK[kind], "sa0")
    else:
        reply = breaches.as_breach(form, "def f(x): return x", EVERY_BREACH[kind], "sa0")
    code = extract_python(reply, entry_point=entry_point)
    assert code is not None
    assert code.strip() == reply.removeprefix("```python\n").removesuffix("\n```").strip()
    assert defines(code, "f") if entry_point else compiles(code)
    assert attacks.MARKER not in code


def test_the_doors_of_this_machine_are_open_to_whom_nothing_keeps_away() -> None:
    """Each check of the network finds its door from a plain process: none is empty."""
    with open_doors(f"sa{os.getpid():x}net") as doors:
        checks = network_breaches(doors)
        assert len(checks) == 6
        # The last two ask for the world beyond this machine, which it may not have itself.
        for kind, check in list(checks.items())[:4]:
            names: dict[str, Any] = {}
            exec(check, names)
            assert names["breached"]() is True, kind
    for kind, check in list(checks.items())[:3]:
        names = {}
        exec(check, names)
        assert names["breached"]() is False, kind


@needs_bubblewrap
def test_programs_in_the_process_of_the_run_are_a_finding_and_not_attacked() -> None:
    (result,) = audit(RunsBesideTheRun(), "os_exit", num_examples=1)
    assert (result.status, result.num) == (ProbeStatus.FAIL, 0)
    assert result.detail.endswith("programs are judged in the process of the run")


def write_rows(folder: Path, train: list[dict[str, Any]], test: list[dict[str, Any]]) -> str:
    folder.mkdir(exist_ok=True)
    for stem, rows in (("train", train), ("test", test)):
        (folder / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(folder)


def mbpp_row(number: int) -> dict[str, Any]:
    tests = [f"assert plus{number}({n}) == {n + number}" for n in (1, 5, -3)]
    code = f"def plus{number}(x):\n    return x + {number}"
    return {
        "task_id": number,
        "text": f"Write a function to add {number}.",
        "code": code,
        "test_list": tests,
        "test_setup_code": "",
        "challenge_test_list": [f"assert plus{number}(10**6) == {10**6 + number}"],
    }


def mbpp(folder: Path) -> TaskSpec:
    source = write_rows(folder, [mbpp_row(n) for n in range(2, 8)], [mbpp_row(n) for n in (10, 11)])
    return MbppSpec(name="mbpp", source=source)


def apps(folder: Path) -> TaskSpec:
    def row(number: int) -> dict[str, Any]:
        if number % 2:
            tests: dict[str, Any] = {
                "inputs": ["1\n", "5\n"],
                "outputs": [f"{number + 1}\n", f"{number + 5}\n"],
            }
            code = f"print(int(input()) + {number})"
        else:
            tests = {"fn_name": "plus", "inputs": [[1], [5]], "outputs": [number + 1, number + 5]}
            code = f"class Solution:\n    def plus(self, x):\n        return x + {number}"
        return {
            "question": f"Add {number}.",
            "input_output": json.dumps(tests),
            "solutions": json.dumps([code]),
            "difficulty": "introductory",
            "starter_code": "",
        }

    source = write_rows(folder, [row(n) for n in range(2, 8)], [row(n) for n in (10, 11)])
    return AppsSpec(name="apps", source=source)


def humaneval(folder: Path) -> TaskSpec:
    def row(number: int) -> dict[str, Any]:
        return {
            "task_id": f"Own/{number}",
            "prompt": f'def plus{number}(x: int) -> int:\n    """ Add {number}. """\n',
            "canonical_solution": f"    return x + {number}\n",
            "test": f"def check(candidate):\n    assert candidate(4) == {number + 4}\n"
            f"    assert candidate(-1) == {number - 1}\n",
            "entry_point": f"plus{number}",
        }

    return HumanEvalSpec(name="humaneval", source=write_rows(folder, [], [row(n) for n in range(6)]))


def audit_in_workers(spec: TaskSpec, *probes: str, num_examples: int) -> AuditReport:
    task = build_task(spec)

    async def attack() -> AuditReport:
        judge = open_judge(task, partial(build_warm_task, spec))
        try:
            return await run_audit(task, AuditSettings(num_examples=num_examples, probes=probes), judge)
        finally:
            await judge.close()

    return asyncio.run(attack())


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize("make", [mbpp, apps, humaneval], ids=lambda make: make.__name__)
def test_the_built_in_code_tasks_hold(make: Callable[[Path], TaskSpec], tmp_path: Path) -> None:
    spec = make(tmp_path)
    task = build_task(spec)

    async def attack_in_workers() -> list[ProbeResult]:
        judge = open_judge(task, partial(build_warm_task, spec))
        try:
            return await attack(task, judge, list(PROBES), 3)
        finally:
            await judge.close()

    results = [*asyncio.run(attack_in_workers())]
    results += audit_in_workers(spec, "order", "failure_paths", num_examples=3).probes
    assert {(r.probe, r.status, r.detail) for r in results if r.status is not ProbeStatus.PASS} == set()


@needs_bubblewrap
@pytest.mark.slow
def test_visible_tests_that_can_be_learned_by_heart_make_mbpp_amber(tmp_path: Path) -> None:
    """Known of MBPP: the prompt shows every test of a training problem."""
    report = audit_in_workers(mbpp(tmp_path), *QUICK_PROBES, num_examples=4)
    assert (failed(report.probes), report.verdict) == ({"constant"}, Verdict.AMBER)
    (constant,) = [result for result in report.probes if result.probe == "constant"]
    assert (constant.value, constant.detail) == (1.0, "always answering 'the answers of the shown tests'")


def test_the_answers_of_shown_tests_are_read_from_the_prompt() -> None:
    prompt = "Tests:\nassert f(1, [2]) == {'a': 3}\nassert g(1) == 2\nassert f(3) != 4\nassert f(\nf(5) == 6"
    reply = as_lookup(ProgramForm(entry_point="f"), prompt)
    assert reply is not None
    names: dict[str, Any] = {}
    exec(reply.removeprefix("```python\n").removesuffix("\n```"), names)
    assert names["f"](1, [2]) == {"a": 3}
    with pytest.raises(StopIteration):
        names["f"](3)
    assert as_lookup(ProgramForm(entry_point="h"), prompt) is None
    assert as_lookup(ProgramForm(entry_point=None), prompt) is None


def test_a_mixture_and_a_curriculum_say_what_their_parts_say(tmp_path: Path) -> None:
    parts: dict[str, Any] = {
        "code": {"name": "mbpp", "source": mbpp(tmp_path).source},  # type: ignore[attr-defined]
        "sums": {"name": "arithmetic", "max_value": 12},
    }
    mixed = build_task(MixtureSpec(name="mixture", parts=parts))
    forms = {e.task: program_form_of(mixed, e) for e in mixed.examples(Split.TRAIN)}
    assert forms == {"mbpp": ProgramForm(entry_point="plus7"), "arithmetic": None}
    order = tmp_path / "order.jsonl"
    code = build_task(mbpp(tmp_path))
    order.write_text(json.dumps({"example_id": code.examples(Split.TRAIN)[0].example_id}))
    ordered = build_task(mbpp(tmp_path).model_copy(update={"order_file": str(order)}))
    assert program_form_of(ordered, ordered.examples(Split.TRAIN)[0]) == ProgramForm(entry_point="plus2")


def test_what_a_judgement_leaves_on_this_machine_is_found(tmp_path: Path) -> None:
    name = f"sa{os.getpid():x}{time.time_ns() % 10**4}"
    assert (find_processes(name), find_files(name)) == ([], [])
    kept = Path("/tmp", name)
    code = f"open('/proc/self/comm', 'w').write('{name}'); open('{kept}', 'w').close(); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        try:
            while not kept.exists():
                time.sleep(0.01)
            assert (find_processes(name), find_files(name)) == ([child.pid], [str(kept)])
            assert wait_for_end(name, 0.1) == [child.pid]
        finally:
            kept.unlink(missing_ok=True)
            child.kill()
    assert wait_for_end(name, 5.0) == []
