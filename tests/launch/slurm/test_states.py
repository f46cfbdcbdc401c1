"""What Slurm's states mean, for every name that it has; and that no other name means anything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.launch.contract import JobState
from strop.launch.slurm.states import ReportedState, read_state

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


@pytest.mark.parametrize(
    ("seen", "state", "reason"),
    [
        (ReportedState(names=("PENDING",), reason="Resources"), Q, "Resources"),
        (
            ReportedState(names=("PENDING",), reason="DependencyNeverSatisfied"),
            F,
            "dependency: DependencyNeverSatisfied",
        ),
        (ReportedState(names=("PENDING",), reason="JobHeldUser"), Q, "held: JobHeldUser"),
        (ReportedState(names=("PENDING",), reason="JobHeldAdmin", num_restarts=1), Q, "held: JobHeldAdmin"),
        (ReportedState(names=("PENDING",), reason="BeginTime", num_restarts=1), P, "BeginTime"),
        (ReportedState(names=("FAILED",), exit_code=3), F, "exit 3"),
        (ReportedState(names=("FAILED",), exit_code=75), F, "exit 75: saved, and not started again"),
        (ReportedState(names=("FAILED",), exit_code=76), F, "exit 76: preflight"),
        (ReportedState(names=("FAILED",), exit_code=143), F, "signal 15"),
        (
            ReportedState(names=("FAILED",), exit_code=0, exit_signal=15, reason="JobLaunchFailure"),
            F,
            "signal 15",
        ),
        (
            ReportedState(names=("FAILED",), exit_code=0, exit_signal=53, reason="JobLaunchFailure"),
            F,
            "could not start: its log's folder is missing or not writable (JobLaunchFailure 0:53)",
        ),
        (ReportedState(names=("FAILED",), reason="NonZeroExitCode"), F, "NonZeroExitCode"),
        (ReportedState(names=("NODE_FAIL",), nodes="n7"), F, "a node was lost on n7"),
        (
            ReportedState(names=("OUT_OF_MEMORY",), reason="OutOfMemory", nodes="n7"),
            F,
            "out of memory (OutOfMemory) on n7",
        ),
        # A cancelled job can show any exit code.
        (ReportedState(names=("CANCELLED by 1000",), exit_code=75), C, ""),
        (ReportedState(names=("TIMEOUT",), exit_code=0, exit_signal=9), T, "its time limit ended it"),
        (ReportedState(names=("PREEMPTED",), may_requeue=False), F, "preempted, and not started again"),
        (ReportedState(names=("PREEMPTED",), may_requeue=True, ended_ago_s=3.0), P, ""),
        (
            ReportedState(names=("PREEMPTED",), may_requeue=True, ended_ago_s=300.0),
            F,
            "preempted, and not started again",
        ),
    ],
)
def test_reasons_are_slurms_own_or_say_more(seen: ReportedState, state: JobState, reason: str) -> None:
    assert read_state(seen) == (state, reason)
