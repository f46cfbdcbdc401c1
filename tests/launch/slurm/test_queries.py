"""Output of four versions of Slurm, read into the same answers; and garbage, which never becomes a state."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.errors import StoreError
from strop.launch.contract import JobState
from strop.launch.slurm.queries import ClientReply, answer_for, ask_client, list_jobs
from strop.launch.slurm.states import (
    ReportedState,
    read_accounting,
    read_json,
    read_plain,
    read_restarts,
    read_state,
)

OUTPUTS = Path(__file__).with_name("outputs")
NOW = 1795293509.0
VERSIONS = ("20.11", "22.05", "23.02", "24.11")
EXPECTED = {
    ("22", 0): (JobState.SUCCEEDED, "", 0, "n1"),
    ("23", 0): (JobState.FAILED, "exit 3", 0, "n1"),
    ("24", 0): (JobState.FAILED, "signal 15", 0, "n1"),
    ("26", 0): (JobState.RUNNING, "", 1, "n1"),
    ("27", 0): (JobState.RUNNING, "", 0, "n1"),
    ("27", 1): (JobState.QUEUED, "JobArrayTaskLimit", 0, ""),
    ("27", 2): (JobState.QUEUED, "JobArrayTaskLimit", 0, ""),
    ("27", 3): (JobState.QUEUED, "JobArrayTaskLimit", 0, ""),
    ("28", 0): (JobState.RUNNING, "", 0, "n1,c1"),
    ("30", 0): (JobState.QUEUED, "held: JobHeldUser", 0, ""),
    ("31", 0): (JobState.QUEUED, "BeginTime", 0, ""),
    ("33", 0): (JobState.CANCELLED, "", 0, "n2"),
}


class FakeClient:
    """Answers as one version does, and notes what it was asked."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str]) -> ClientReply:
        program = argv[0]
        self.asked.append(program)
        if program == "sacct":
            return ClientReply(code=1, output="", errors="Slurm accounting storage is disabled\n")
        if "--json" in argv:
            if self.version == "20.11":
                return ClientReply(code=1, output="", errors="squeue: unrecognized option '--json'\n")
            return _said(f"squeue-{self.version}.json")
        return _said("squeue-22.05.txt" if program == "squeue" else "scontrol-22.05.txt")


def _said(name: str) -> ClientReply:
    return ClientReply(code=0, output=(OUTPUTS / name).read_bytes().decode(), errors="")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_gives_the_same_answers(version: str) -> None:
    client = FakeClient(version)
    answers = answer_for({job_id for job_id, _ in EXPECTED}, client=client, now=NOW)
    found = {key: (one.state, one.reason, one.num_restarts, one.nodes) for key, one in answers.items()}
    assert found == EXPECTED
    assert client.asked == (["squeue", "squeue", "scontrol"] if version == "20.11" else ["squeue"])


@pytest.mark.parametrize("version", VERSIONS)
def test_tags_folders_and_times_are_read_from_every_version(version: str) -> None:
    jobs = {job.own_id: job for job in list_jobs(client=FakeClient(version), now=NOW)}
    comments = {job_id: job.comment.removeprefix("strop:") for job_id, job in jobs.items() if job.comment}
    ids, tags = ("22", "23", "26", "27", "34", "28", "29"), ("aaaa", "bbbb", "cccc", "dddd", "dddd")
    assert comments == dict(zip(ids, (*tags, "eeee", "eeee"), strict=True))
    assert {job.work_path for job in jobs.values()} == {"/runs/demo"}
    assert (jobs["29"].base_id, jobs["29"].component, jobs["34"].base_id) == ("28", 1, "27")
    assert jobs["22"].submitted_at > 1.7e9


def test_lau_1_a_job_whose_log_could_not_be_opened_says_so() -> None:
    answers = answer_for(["25"], client=FakeClient("22.05"), now=NOW)
    assert answers["25", 0].reason.startswith("could not start: its log's folder is missing")


def test_jobs_that_only_accounting_remembers() -> None:
    lines = [
        "7|COMPLETED|0:0|n1",
        "8_0|FAILED|3:0|n1",
        "8_1|CANCELLED by 1000|0:15|n2",
        "9+0|TIMEOUT|0:0|n1",
        "9+1|TIMEOUT|0:0|c1",
        # Lost without a trace: the database has not been told of an end.
        "10|RUNNING|0:0|n1",
        "garbage",
    ]

    def client(argv: Sequence[str]) -> ClientReply:
        if argv[0] == "sacct":
            assert argv[argv.index("-j") + 1] == "7,8,9,10,11"
            return ClientReply(code=0, output="\n".join(lines) + "\n", errors="")
        return ClientReply(code=0, output='{"jobs": []}', errors="")

    answers = answer_for(["11", "10", "9", "8", "7"], client=client, now=NOW)
    assert {key: (one.state, one.nodes) for key, one in answers.items()} == {
        ("7", 0): (JobState.SUCCEEDED, "n1"),
        ("8", 0): (JobState.FAILED, "n1"),
        ("8", 1): (JobState.CANCELLED, "n2"),
        ("9", 0): (JobState.TIMEOUT, "n1,c1"),
    }


def test_a_forgotten_job_without_accounting_has_no_answer() -> None:
    assert answer_for(["999"], client=FakeClient("22.05"), now=NOW) == {}


def test_lau_6_a_failing_query_is_an_error_and_no_state() -> None:
    """Incident: one flag that a version did not know, and a running job was cancelled as dead."""

    def broken(argv: Sequence[str]) -> ClientReply:
        return ClientReply(code=1, output="", errors="squeue: error: something new")

    with pytest.raises(StoreError, match="squeue failed with 1: squeue: error: something new"):
        list_jobs(client=broken)


def test_lau_6_no_controller_is_no_empty_list() -> None:
    """Recorded: `squeue --json` exits with 0 and lists no job where it could not ask anybody."""

    def alone(argv: Sequence[str]) -> ClientReply:
        if "--json" in argv:
            return _said("squeue-22.05-down.json")
        errors = "slurm_load_jobs error: Unable to contact slurm controller"
        return ClientReply(code=1, output="", errors=errors)

    with pytest.raises(StoreError, match="Unable to contact slurm controller"):
        answer_for(["7"], client=alone)


_WORDS = st.sampled_from(
    [
        "job_id",
        "job_state",
        "RUNNING",
        "jobs",
        "exit_code",
        "array_job_id",
        "array_task_string",
        "number",
        "set",
    ]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | _WORDS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(_WORDS | st.text(max_size=8), inner, max_size=6)
    ),
)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.dictionaries(_WORDS, _JSON, max_size=8), max_size=4))
def test_odd_json_is_left_out_or_read_and_never_fails(jobs: list[object]) -> None:
    found = read_json(json.dumps({"jobs": jobs}), now=NOW)
    assert found is not None
    for job in found:
        state, _ = read_state(job.state)
        assert state is JobState.UNKNOWN or set(job.state.names) & {"RUNNING"}


@settings(deadline=None)
@given(st.text())
def test_garbage_is_no_job(text: str) -> None:
    assert read_json(text, now=NOW) in (None, [])
    assert read_plain(text) == []
    assert read_accounting(text) == []
    assert read_restarts(text) == {}


@pytest.mark.parametrize("read", [read_plain, lambda text: read_json(text, now=NOW)])
def test_an_answer_that_was_cut_short_has_no_job_too_many(read: Callable[[str], list[object] | None]) -> None:
    name = "squeue-22.05.txt" if read is read_plain else "squeue-22.05.json"
    whole = (OUTPUTS / name).read_bytes().decode()
    complete = read(whole) or []
    for length in range(0, len(whole), 97):
        assert all(job in complete for job in (read(whole[:length]) or [])[:-1])


def test_a_missing_client_is_told_with_what_to_do() -> None:
    with pytest.raises(StoreError, match=r"squeue is not on PATH\. Allowed: a login node"):
        ask_client(("squeue",), environ={"PATH": "/nowhere"})


def test_a_silent_controller_is_told_with_its_words(tmp_path: Path) -> None:
    client = tmp_path / "squeue"
    client.write_text(
        "#!/bin/sh\necho 'error: Unable to contact slurm controller (connect failure)' >&2\nexit 1\n"
    )
    client.chmod(0o755)
    with pytest.raises(StoreError, match=r"does not answer .*Unable to contact slurm controller"):
        ask_client((str(client),), environ={})


# What Slurm's states mean, for every name that it has; and that no other name means anything.


Q, S, R, P = JobState.QUEUED, JobState.STARTING, JobState.RUNNING, JobState.PREEMPTED
F, C, T, U = JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT, JobState.UNKNOWN
TABLE = [
    ("PENDING", "PD", 0, Q),
    ("PENDING", "PD", 2, P),
    ("CONFIGURING", "CF", 0, S),
    ("RUNNING", "R", 0, R),
    ("COMPLETING", "CG", 0, R),
    ("COMPLETED", "CD", 0, JobState.SUCCEEDED),
    ("FAILED", "F", 0, F),
    ("CANCELLED", "CA", 0, C),
    ("TIMEOUT", "TO", 0, T),
    ("PREEMPTED", "PR", 0, P),
    ("NODE_FAIL", "NF", 0, F),
    ("BOOT_FAIL", "BF", 0, F),
    ("OUT_OF_MEMORY", "OOM", 0, F),
    ("DEADLINE", "DL", 0, F),
    ("REQUEUED", "RQ", 0, P),
    ("REQUEUE_FED", "RF", 0, P),
    ("REQUEUE_HOLD", "RH", 0, Q),
    ("SPECIAL_EXIT", "SE", 0, Q),
    ("RESV_DEL_HOLD", "RD", 0, Q),
    ("SUSPENDED", "S", 0, R),
    ("STOPPED", "ST", 0, R),
    ("RESIZING", "RS", 0, U),
    ("SIGNALING", "SI", 0, U),
    ("STAGE_OUT", "SO", 0, U),
    ("REVOKED", "RV", 0, U),
]


@pytest.mark.parametrize(("long", "short", "restarts", "state"), TABLE)
def test_long_and_short_names_mean_the_same(long: str, short: str, restarts: int, state: JobState) -> None:
    for name in (long, short, long.lower()):
        assert read_state(ReportedState(names=(name,), num_restarts=restarts))[0] is state


@settings(deadline=None)
@given(st.text())
def test_lau_6_a_name_that_nobody_knows_is_unknown(name: str) -> None:
    known = {word for row in TABLE for word in row[:2]}
    if name.strip().upper().removesuffix("+") not in known:
        assert read_state(ReportedState(names=(name,)))[0] is U
        assert read_state(ReportedState(names=("RUNNING", name)))[0] in {U, R}
        assert read_state(ReportedState(names=("COMPLETED", name)))[0] is not F


@pytest.mark.parametrize(
    ("names", "state"),
    [
        # From 23.11 on: the base state with its flags.
        (("RUNNING", "CONFIGURING"), S),
        (("PENDING", "COMPLETING"), P),
        (("FAILED", "COMPLETING"), R),
        (("PENDING", "REQUEUE_HOLD"), Q),
        (("RUNNING", "STOPPED"), R),
        (("PENDING", "LAUNCH_FAILED"), Q),
        (("RUNNING", "HIBERNATING"), U),
        ((), U),
    ],
)
def test_flags_and_base_state_together(names: tuple[str, ...], state: JobState) -> None:
    assert read_state(ReportedState(names=names))[0] is state


def pending(reason: str, num_restarts: int = 0) -> ReportedState:
    return ReportedState(names=("PENDING",), reason=reason, num_restarts=num_restarts)


def failed(code: int | None = None, **more: Any) -> ReportedState:
    return ReportedState(names=("FAILED",), exit_code=code, **more)


def ended(name: str, **more: Any) -> ReportedState:
    return ReportedState(names=(name,), **more)


@pytest.mark.parametrize(
    ("seen", "state", "reason"),
    [
        (pending("Resources"), Q, "Resources"),
        (pending("DependencyNeverSatisfied"), F, "dependency: DependencyNeverSatisfied"),
        (pending("JobHeldUser"), Q, "held: JobHeldUser"),
        (pending("JobHeldAdmin", 1), Q, "held: JobHeldAdmin"),
        (pending("BeginTime", 1), P, "BeginTime"),
        (failed(3), F, "exit 3"),
        (failed(75), F, "exit 75"),
        (failed(76), F, "exit 76: preflight"),
        (failed(143), F, "signal 15"),
        (failed(0, exit_signal=15, reason="JobLaunchFailure"), F, "signal 15"),
        (failed(0, exit_signal=53, reason="JobLaunchFailure"), F, "could not start"),
        (failed(reason="NonZeroExitCode"), F, "NonZeroExitCode"),
        (ended("NODE_FAIL", nodes="n7"), F, "a node was lost on n7"),
        (ended("OUT_OF_MEMORY", reason="OutOfMemory", nodes="n7"), F, "out of memory (OutOfMemory) on n7"),
        # A cancelled job can show any exit code.
        (ended("CANCELLED by 1000", exit_code=75), C, ""),
        (ended("TIMEOUT", exit_code=0, exit_signal=9), T, "its time limit"),
        (ended("PREEMPTED", may_requeue=False), F, "preempted"),
        (ended("PREEMPTED", may_requeue=True, ended_ago_s=3.0), P, ""),
        (ended("PREEMPTED", may_requeue=True, ended_ago_s=300.0), F, "preempted"),
    ],
)
def test_reasons_are_slurms_own_or_say_more(seen: ReportedState, state: JobState, reason: str) -> None:
    found, told = read_state(seen)
    assert (found, told[: len(reason)], bool(told)) == (state, reason, bool(reason))
