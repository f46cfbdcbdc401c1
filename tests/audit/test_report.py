"""What an audit says, how it is kept, and what of it may be accepted."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from strop.audit import (
    AuditReport,
    ProbeResult,
    ProbeStatus,
    Verdict,
    accept_probes,
    describe_acceptance,
    find_audit,
    stored_audit_path,
    write_audit,
)
from strop.audit.report import SCHEMA
from strop.errors import CorruptRecord
from tests.audit.test_audit import Capitals, MatchesEitherWay, PaysForTheQuestion, audit


def result(probe: str, status: ProbeStatus) -> ProbeResult:
    return ProbeResult(probe=probe, status=status, num=0 if status is ProbeStatus.NOT_APPLICABLE else 1)


@pytest.mark.parametrize(
    ("probes", "verdict"),
    [
        ([], Verdict.GREEN),
        ([result("echo", ProbeStatus.WARN), result("noop", ProbeStatus.WARN)], Verdict.GREEN),
        ([result(name, ProbeStatus.WARN) for name in ("echo", "noop", "cost")], Verdict.AMBER),
        ([result("constant", ProbeStatus.FAIL)], Verdict.AMBER),
        ([result("determinism", ProbeStatus.FAIL)], Verdict.RED),
        ([result("constant", ProbeStatus.FAIL), result("echo", ProbeStatus.FAIL)], Verdict.RED),
        ([result("gold", ProbeStatus.FAIL)], Verdict.RED),
        ([result("cost", ProbeStatus.ERROR)], Verdict.RED),
        ([result("label_leak", ProbeStatus.NOT_APPLICABLE)], Verdict.GREEN),
    ],
)
def test_the_verdict_follows_from_the_probes(probes: list[ProbeResult], verdict: Verdict) -> None:
    assert replace(audit(Capitals(), probes=()), probes=tuple(probes)).verdict is verdict


def test_a_stored_audit_is_found_by_the_tasks_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path))
    report = audit(MatchesEitherWay())
    write_audit(report, stored_audit_path("capitals", "1"))
    assert find_audit("capitals", "1") == report
    assert find_audit("capitals", "2") is None


@pytest.mark.parametrize(
    "change", [{"verdict": "green"}, {"probes": []}, {"schema": SCHEMA + 1}, {"chance": None}]
)
def test_a_changed_audit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path))
    path = stored_audit_path("capitals", "1")
    write_audit(audit(MatchesEitherWay()), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CorruptRecord, match=r"is not a whole audit .*run `strop audit` again"):
        find_audit("capitals", "1")


def test_an_audit_by_other_probes_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path))
    write_audit(audit(Capitals(), probes=("noop",)), stored_audit_path("capitals", "1"))
    monkeypatch.setattr("strop.audit.report.SCHEMA", SCHEMA + 1)
    assert find_audit("capitals", "1") is None


def test_a_report_holds_all_that_it_was_made_of() -> None:
    before = time.time()
    report = audit(MatchesEitherWay(), num_examples=8, seed=3)
    values = report.to_json()
    assert list(values) == [*sorted(set(values) - {"digest"}), "digest"]
    assert before <= values["started_at"] <= time.time()
    assert {key: values[key] for key in ("task", "task_version", "variant", "isolation", "seed")} == {
        "task": "capitals",
        "task_version": "1",
        "variant": None,
        "isolation": None,
        "seed": 3,
    }
    assert (values["max_reward"], values["chance"], values["num_examples"]) == (1.0, 0.0, 8)
    assert sum(values["counts"].values()) == len(values["probes"])
    (garbage,) = [probe for probe in values["probes"] if probe["probe"] == "garbage"]
    assert set(garbage) == {*("probe", "status", "value", "limit", "num", "seconds", "detail", "evidence")}
    assert set(garbage["evidence"][0]) == {"example_id", "reply", "reply_digest", "reward", "detail"}
    # Another second in the same audit gives another digest; the same values give the same.
    digests = [replace(report, seconds=seconds).to_json()["digest"] for seconds in (1.0, 1.0, 2.0)]
    assert digests[0] == digests[1] != digests[2]


def red_report() -> AuditReport:
    return audit(PaysForTheQuestion(), probes=("noop", "echo"))


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("echo", Verdict.GREEN),
        ("echo@1", Verdict.GREEN),
        ("echo@2", Verdict.RED),
        # What passed needs no acceptance.
        ("noop", Verdict.RED),
    ],
)
def test_an_acceptance_holds_for_its_probe_and_its_version(name: str, verdict: Verdict) -> None:
    report = accept_probes(red_report(), {name: "echoes are asked for"})
    assert (report.verdict, report.accepted_verdict) == (Verdict.RED, verdict)
    line = describe_acceptance(report, {name: "echoes are asked for"})
    assert line.startswith(f"{verdict}: echo fail")
    assert ("accepted: echo" in line) == (verdict is Verdict.GREEN)
    assert ("train.accept = 'audit.echo@1: reason' goes on" in line) == (verdict is Verdict.RED)
    assert ("not for this one: echo@2" in line) == (name == "echo@2")


def test_an_acceptance_is_kept_with_the_report(tmp_path: Path) -> None:
    report = accept_probes(red_report(), {"echo": "echoes are asked for"})
    write_audit(report, tmp_path / "audit.json")
    kept = json.loads((tmp_path / "audit.json").read_text())
    assert (kept["verdict"], kept["accepted_verdict"]) == ("red", "green")
    (entry,) = kept["accepted"]
    assert (entry["probe"], entry["reason"], entry["task_version"]) == ("echo", "echoes are asked for", "1")


def test_a_user_without_a_name_can_accept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", fail)
    assert [entry.user for entry in accept_probes(red_report(), {"echo": "asked for"}).accepted] == [
        str(os.getuid())
    ]
