"""Jobs on a real cluster that end before they are done, and live again or do not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from strop.errors import CheckRefused
from strop.launch.contract import JobState
from tests.launch.slurm.plans import ALL_ENDS, LoginNode, a_role, gpus, seen, slurm_log, verdict
from tools.slurm_cluster import Cluster

pytestmark = pytest.mark.slow


def test_a_failure_on_one_of_two_nodes_is_not_hidden_by_75_on_the_other(login: LoginNode) -> None:
    """Each node has an agent, and four GPUs."""
    role = a_role("--steps", "3", "--codes", "75", "--special", "n2=1", nodes="all", gpus=4)
    ref = login.submit(role, resources=gpus(4, nodes=2, is_whole_node=True))
    status = login.wait_for(ref, *ALL_ENDS)
    assert status.state is JobState.FAILED
    assert "role train ended with exit code 1" in status.reason
    # The script goes on after its verdict; once it has ended, Slurm says so too.
    login.wait_until(lambda: login.backend.poll([ref])[ref.job_id, 0].state.is_terminal)
    answer = login.backend.poll([ref])[ref.job_id, 0]
    assert (answer.state, answer.num_restarts) == (JobState.FAILED, 0)
    end = verdict(login, ref)
    assert (end["exit_code"], end["nodes"]) == (1, ["n1", "n2"])
    found = [seen(ref, f"{ref.job_id}-0", node) for node in (0, 1)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["0,1,2,3", "0,1,2,3"]
    assert {one["slurm"]["SLURMD_NODENAME"] for one in found if "SLURMD_NODENAME" in one["slurm"]} == set()
    assert found[1]["STROP_NODE_ADDRESS"] == "127.0.0.1"
    folder = Path(ref.home) / f"attempts/{ref.job_id}-0"
    agents = [json.loads((folder / f"agent-{node}.json").read_text()) for node in (0, 1)]
    assert sorted(agent["host"] for agent in agents) == ["n1", "n2"]


@pytest.mark.parametrize("words", [(), ("--ignore-signals",)], ids=["saves", "ignores signals"])
def test_lau_3_a_preempted_job_makes_room_and_lives_again(login: LoginNode, words: tuple[str, ...]) -> None:
    role = a_role("--steps", "5000,5", *words, gpus=4)
    low = login.submit(role, name="low", resources=gpus(4), options={"nodelist": "n1"})
    login.wait_for_step(low)
    asked_at = time.monotonic()
    options = {"partition": "high", "nodelist": "n1"}
    high = login.submit(a_role("--held", gpus=4), name="high", resources=gpus(4), options=options)
    login.wait_for(high, JobState.RUNNING)
    # Far below the job's own end, and far above what it takes: 3 s, and 25 s of who does not listen.
    assert time.monotonic() - asked_at < (60.0 if not words else 90.0)
    login.wait_for(low, JobState.PREEMPTED)
    login.let_go(high)
    assert login.wait_for(high, *ALL_ENDS).state is JobState.SUCCEEDED
    status = login.wait_for(low, *ALL_ENDS, attempt=1)
    assert status.state is JobState.SUCCEEDED, slurm_log(low)
    begin = seen(low, f"{low.job_id}-1")["begin"]
    assert begin == 0 if words else begin > 0


def test_lau_3_a_signal_that_wakes_the_waiting_script_is_no_end_and_cancelling_names_what_is(
    login: LoginNode, cluster: Cluster
) -> None:
    """`wait` returns 128 + n for any signal with a trap, and for a resumed job Slurm sends CONT."""
    running = login.submit(a_role("--held", gpus=4), name="running", resources=gpus(4, nodes=2))
    login.wait_for_step(running)
    for target in ("--batch", "--full"):
        cluster.run("scancel", target, "--signal=CONT", str(running.job_id))
        # For a script that would take it for an end.
        time.sleep(0.5)
    waiting = login.submit(a_role(gpus=4), name="waiting", resources=gpus(4, nodes=2))
    assert login.wait_for(waiting, JobState.QUEUED).reason in {"Resources", "Priority", "PENDING", "None"}
    outcome = login.launcher.cancel(waiting, grace_s=60.0)
    assert (outcome.ended_by, outcome.statuses[0].state) == ("TERM", JobState.CANCELLED)
    outcome = login.launcher.cancel(running, grace_s=60.0)
    assert (outcome.ended_by, outcome.statuses[0].state) == ("TERM", JobState.CANCELLED)
    assert "saved at step" in (Path(running.home) / f"attempts/{running.job_id}-0/0/train.log").read_text()
    assert login.launcher.cancel(running, grace_s=60.0).ended_by == "it had ended"
    # TERM means that somebody else decides: it ends with 75, and does not requeue itself.
    time.sleep(1.0)
    answer = login.backend.poll([running])[running.job_id, 0]
    assert (answer.state, answer.num_restarts) == (JobState.CANCELLED, 0)
    assert slurm_log(running).count("started train") == 1
    end = verdict(login, running)
    assert (end["exit_code"], end["signal"]) == (75, "SIGTERM")
    # Slurm itself says nothing of a job that it does not know.
    cluster.run("scancel", "99999")


def test_a_held_job_and_a_broken_dependency_say_so(login: LoginNode, cluster: Cluster) -> None:
    first = login.submit(a_role("--held", "--codes", "3", gpus=4), name="first", resources=gpus(4, 2))
    after = login.submit(a_role(), name="after", options={"dependency": f"afterok:{first.job_id}"})
    held = login.submit(a_role(gpus=4), name="held", resources=gpus(4, 2))
    cluster.run("scontrol", "hold", held.job_id)
    login.wait_until(lambda: login.status(held).reason == "held: JobHeldAdmin")
    assert (login.status(held).state, login.status(after).state) == (JobState.QUEUED, JobState.QUEUED)
    assert login.status(after).reason == "Dependency"
    login.let_go(first)
    assert login.wait_for(first, *ALL_ENDS).state is JobState.FAILED
    assert login.wait_for(after, *ALL_ENDS).state is JobState.CANCELLED
    # Now it is known to be impossible.
    with pytest.raises(CheckRefused, match="a dependency can never be met"):
        login.submit(a_role(), name="late", options={"dependency": f"afterok:{first.job_id}"})
