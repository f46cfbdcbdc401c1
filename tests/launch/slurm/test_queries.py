"""Output of four versions of Slurm, read into the same answers; and garbage, which never becomes a state."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.errors import StoreError
from strop.launch.contract import JobState
from strop.launch.slurm.queries import ClientReply, answer_for, ask_client, list_jobs
from strop.launch.slurm.states import read_accounting, read_json, read_plain, read_restarts, read_state

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
    assert {job_id: job.comment for job_id, job in jobs.items() if job.comment} == {
        "22": "strop:aaaa",
        "23": "strop:bbbb",
        "26": "strop:cccc",
        "27": "strop:dddd",
        "34": "strop:dddd",
        "28": "strop:eeee",
        "29": "strop:eeee",
    }
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
