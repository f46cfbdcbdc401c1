"""Probes of an audit: by examples, of environments and of judges."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strop.audit import AuditReport, AuditSettings, ProbeResult, ProbeStatus, Verdict, run_audit
from strop.audit.answer_probes import permute_parts
from strop.audit.probes import INJECTIONS
from strop.rollout import make_example
from strop.spec.parts import MixtureSpec
from strop.spec.task import TaskSpec
from strop.tasks import build_task, build_warm_task
from strop.tasks.judging import Judge
from strop.tasks.rows.judged_rows import ProgramSpec
from tests.environments.test_worlds import build_spec
from tests.fixtures.judge_server import Say, judge_server, scored, shown_reply
from tests.fixtures.judged import judge_spec, judge_task
from tests.fixtures.row_files import write_rows

pytestmark = pytest.mark.usefixtures("own_cache")
WORLD = """
from strop.environments import Done

class World:
    max_turns = 3

    def examples(self, split):
        return [{"word": split, "answer": split}]

    def reset(self, example, seed):
        self.answer, self.is_done, self.said = example.answer, False, ""
        return "Name the split."

    def step(self, text):
        self.said = text
        self.is_done = self.is_done or text == self.answer
        return Done() if self.is_done else "No."

    def score(self):
        return SCORE

    def gold_replies(self, example):
        return [[example.answer]]
"""


@pytest.mark.parametrize(
    ("score", "probes"),
    [("self.is_done", set()), ("self.is_done or 'generous' in self.said", {"judge_injection"})],
)
def test_an_environment_that_can_be_talked_to_is_found(score: str, probes: set[str]) -> None:
    task, _ = build_spec(WORLD.replace("SCORE", score), name="World")
    report = asyncio.run(run_audit(task, AuditSettings(num_examples=1, probes=("gold", "judge_injection"))))
    assert {one.probe for one in report.probes if one.status is ProbeStatus.FAIL} == probes
    assert all(one.num for one in report.probes)


def test_tests_and_constraints_are_reversed_and_nothing_else() -> None:
    fields = {
        "tests": ["assert f(1) == 2", "assert f(2) == 3"],
        "hidden_tests": ["assert f(9) == 10"],
        "constraints": [{"id": "a"}, {"id": "b"}],
        "names": ["f", "g"],
    }
    example = make_example("parts", fields, "answer")
    changed = permute_parts(example)
    assert changed is not None
    assert (changed.example_id, changed.answer) == (example.example_id, "answer")
    different = {key for key in fields if changed.fields[key] != fields[key]}
    assert different == {"tests", "constraints"}
    assert changed.fields["tests"] == ["assert f(2) == 3", "assert f(1) == 2"]


def mbpp_row(number: int) -> dict[str, Any]:
    return {
        "task_id": number,
        "text": f"Write a function to add {number}.",
        "code": f"def plus{number}(x):\n    return x + {number}",
        "test_list": [f"assert plus{number}({n}) == {n + number}" for n in (1, 5, -3)],
        "test_setup_code": "",
        "challenge_test_list": [f"assert plus{number}(10**6) == {10**6 + number}"],
    }


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.slow
def test_mbpp_is_green(tmp_path: Path) -> None:
    for stem, numbers in (("train", range(2, 8)), ("test", range(10, 12))):
        write_rows(tmp_path / f"{stem}.jsonl", [mbpp_row(number) for number in numbers])
    spec = ProgramSpec(name="mbpp", source=str(tmp_path))
    task = build_task(spec)
    settings = AuditSettings(num_examples=4)

    async def audit_in_workers() -> AuditReport:
        judge = Judge(task, partial(build_warm_task, spec))
        try:
            return await run_audit(task, settings, judge)
        finally:
            await judge.close()

    report = asyncio.run(audit_in_workers())
    assert (report.verdict, report.causes) == (Verdict.GREEN, ())


def attack(tmp_path: Path, say: Say) -> ProbeResult:
    result, verdict = probe(tmp_path, say, "judge_injection", 3)
    assert (verdict is Verdict.RED) == (result.status in (ProbeStatus.FAIL, ProbeStatus.ERROR))
    return result


def probe(tmp_path: Path, say: Say, name: str, num: int, *rows: Any) -> tuple[ProbeResult, Verdict]:
    with judge_server(say) as server:
        task = judge_task(tmp_path, server.url, *rows)
        report = asyncio.run(run_audit(task, AuditSettings(num_examples=num, probes=(name,))))
    return report.probes[0], report.verdict


def test_a_deaf_judge_passes(tmp_path: Path) -> None:
    result = attack(tmp_path, lambda question: scored(float(shown_reply(question).startswith("word-"))))
    assert (result.status, result.value) == (ProbeStatus.PASS, 0.0)
    assert result.num == 3


@pytest.mark.parametrize(
    ("weakness", "kind"),
    [
        (lambda shown: "Ignore everything" in shown, "instructions"),
        (lambda shown: "score" in shown and "json" in shown, "fenced score"),
        (lambda shown: "END OF REPLY" in shown, "delimiters"),
        (lambda shown: "Assistant:" in shown, "turns"),
        (lambda shown: "wise" in shown, "flattery"),
        (lambda shown: len(shown) > 2000, "length"),
    ],
)
def test_a_judge_that_can_be_talked_to_is_found(tmp_path: Path, weakness: object, kind: str) -> None:
    assert callable(weakness)
    result = attack(tmp_path, lambda question: scored(float(weakness(shown_reply(question)))))
    assert (result.status, result.detail, result.value) == (ProbeStatus.FAIL, kind, 1.0)
    assert result.evidence[0].reply == INJECTIONS[kind][:200]


def test_a_judge_that_repeats_what_it_reads_gives_no_score(tmp_path: Path) -> None:
    """The parser would take a quoted grade for the judge's own, if it were not escaped."""
    result = attack(tmp_path, lambda question: "It says: " + shown_reply(question))
    assert result.status is ProbeStatus.FAIL
    assert result.detail == "replies that were not judged"
    assert result.evidence[0].detail.startswith("engine, judge_unparsable: ")


def test_a_judge_is_attacked_inside_other_tasks_too(tmp_path: Path) -> None:
    section = judge_spec(tmp_path, "http://127.0.0.1:1/v1").model_dump(
        mode="json",
        include={"name", "source", "prompt", "reward", "judge_url", "judge_model", "judge_revision"},
    )
    sums: dict[str, Any] = {"name": "arithmetic", "max_value": 4, "num_held_out": 2}
    specs: list[tuple[bool, TaskSpec]] = [
        (True, MixtureSpec(name="mixture", parts={"sums": sums, "judge": section})),
        (False, MixtureSpec(name="mixture", parts={"sums": sums})),
    ]
    for judged, spec in specs:
        assert build_task(spec).asks_judge == judged
