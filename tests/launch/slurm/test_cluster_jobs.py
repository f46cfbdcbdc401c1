"""Jobs on a real cluster: submission, what a job finds around it, and its end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import CheckRefused
from strop.hardware.findings import Severity
from strop.launch.contract import JobEnvironment, JobState
from strop.launch.job_dir import job_path_of
from strop.launch.launcher import Launcher
from strop.launch.slurm.options import SlurmSite
from tests.launch.slurm.conftest import log_in
from tests.launch.slurm.plans import ALL_ENDS, LoginNode, a_role, gpus, seen, slurm_log, verdict
from tools.slurm_cluster import Cluster

pytestmark = pytest.mark.slow


def test_a_submission_that_was_killed_before_it_was_noted_is_found_again(
    login: LoginNode, cluster: Cluster
) -> None:
    request = login.request(a_role("--held"))
    first = login.launcher.submit(request)
    (job_path_of(first.ref.home) / "ref.json").unlink()
    again = login.launcher.submit(request)
    assert (again.is_new, again.ref.job_id, again.ref.home) == (False, first.ref.job_id, first.ref.home)
    assert len(cluster.run("squeue", "-h").splitlines()) == 1
    assert [ref.job_id for ref in login.backend.list_tagged()] == [first.ref.job_id]


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("partition", {"options": {"partition": "nowhere"}}),
        ("resources", {"resources": gpus(1), "options": {"gpu_type": "h200"}}),
        ("resources", {"resources": gpus(5)}),
        ("resources", {"resources": gpus(1, nodes=3)}),
        ("resources", {"resources": gpus(1, memory="900G")}),
        ("image", {"options": {"container_image": "/nowhere/image.sif"}}),
        ("image", {"options": {"container_image": "image.sqsh"}}),
    ],
)
def test_a_check_finds_what_would_stop_a_job(
    login: LoginNode, cluster: Cluster, code: str, changes: dict[str, object]
) -> None:
    request = login.request(**changes)
    findings = login.launcher.check(login.launcher.plan(request))
    assert code in [finding.code for finding in findings if finding.severity is Severity.ERROR], findings
    with pytest.raises(CheckRefused):
        login.launcher.submit(request)
    assert not Path(request.home).exists()
    assert cluster.run("squeue", "-h") == ""


def test_a_check_finds_a_home_that_cannot_be_made_and_a_missing_interpreter(login: LoginNode) -> None:
    (login.root / "file").write_text("")
    request = replace(login.request(), home=str(login.root / "file" / "run-1"), python="/nowhere/python")
    findings = login.backend.probe(login.launcher.plan(request))
    assert [finding.code for finding in findings] == ["home", "python"]
    # A good plan finds nothing, and an account that nobody can look up is a question and no error.
    request = login.request(resources=gpus(2), options={"gpu_type": "h100", "partition": "high"})
    assert login.launcher.check(login.launcher.plan(request)) == []
    findings = login.launcher.check(login.launcher.plan(login.request(options={"account": "lab"})))
    assert [(finding.code, finding.severity) for finding in findings] == [("account", Severity.UNKNOWN)]


def test_what_sbatch_refuses_is_said_in_its_own_words(login: LoginNode) -> None:
    plan = login.launcher.plan(login.request())
    with pytest.raises(CheckRefused, match=r"Unable to open file .*/job/job\.sh"):
        login.backend.submit(plan)


def test_a_whole_node_and_slices_give_roles_what_they_asked_for(login: LoginNode) -> None:
    # --exclusive shows all four; a slice is asked for by its type.
    whole = login.submit(a_role(gpus=2), name="whole", resources=gpus(2, is_whole_node=True))
    options = {"partition": "mig", "gpu_type": "1g.10gb"}
    sliced = login.submit(a_role(gpus=2), name="sliced", resources=gpus(2), options=options)
    for ref in (whole, sliced):
        assert login.wait_for(ref, *ALL_ENDS).state is JobState.SUCCEEDED, slurm_log(ref)
        assert seen(ref, f"{ref.job_id}-0")["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_secret_reaches_its_role_and_nothing_else(
    login: LoginNode, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = "k3y, \"with\" $HOME `x` 'y'"
    monkeypatch.setenv("API_KEY", value)
    launcher = Launcher(login.backend, environ={**login.launcher.environ, "API_KEY": value})
    environment = JobEnvironment(variables={"MODE": "a,b 'c' $d"}, secrets=("API_KEY",))
    ref = launcher.submit(login.request(a_role("--held"), environment=environment)).ref
    login.wait_for(ref, JobState.RUNNING)
    shown = cluster.run("scontrol", "show", "job", ref.job_id) + cluster.run(
        "scontrol", "write", "batch_script", ref.job_id, "-"
    )
    assert "k3y" not in shown
    login.let_go(ref)
    assert login.wait_for(ref, *ALL_ENDS).state is JobState.SUCCEEDED, slurm_log(ref)
    path = next(Path(ref.home).glob("seen-*.json"))
    found = json.loads(path.read_text())
    assert (found["API_KEY"], found["MODE"]) == (value, "a,b 'c' $d")
    path.unlink()
    login.wait_until(lambda: not (job_path_of(ref.home) / "secrets.json").exists())
    holders = [file for file in Path(ref.home).rglob("*") if file.is_file() and b"k3y" in file.read_bytes()]
    assert holders == []


def test_sec_5_a_job_in_a_home_of_quotes_and_signs_inherits_nothing_and_leaves_nothing_behind(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is submitted from inside another job."""
    inherited = {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "7", "SBATCH_PARTITION": "cpu", "MASTER_ADDR": "far"}
    for name, value in {**inherited, "RANK": "3", "CUDA_VISIBLE_DEVICES": "9"}.items():
        monkeypatch.setenv(name, value)
    login = log_in(cluster, tmp_path / "a b$HOME'q\"z`id` %j;#&", monkeypatch)
    ref = login.submit(a_role("--steps", "3"))
    status = login.wait_for(ref, *ALL_ENDS)
    assert status.state is JobState.SUCCEEDED, slurm_log(ref)
    assert "begins at step 0" not in slurm_log(ref)
    assert (job_path_of(ref.home) / f"slurm-{ref.job_id}.out").exists()
    end = verdict(login, ref)
    assert (end["exit_code"], end["signal"], end["number"]) == (0, "", 0)
    assert end["nodes"] in (["n1"], ["n2"])
    assert end["started_at"] <= end["ended_at"]
    found = seen(ref, f"{ref.job_id}-0")
    assert (found["MASTER_ADDR"], found["RANK"], found["CUDA_VISIBLE_DEVICES"] or None) == (None, None, None)
    assert found["slurm"]["SLURM_JOB_ID"] == ref.job_id
    assert found["slurm"]["SLURM_JOB_PARTITION"] == "low"
    assert found["slurm"]["SLURM_NTASKS"] == "1"
    login.wait_until(lambda: not Path(found["TMPDIR"]).parent.exists())


PODMAN = """#!/bin/bash
printf "%s\\n" "$@" >>{asked}
while [ "$1" != "image:1" ]; do shift; done
shift; exec "$@"
"""
PYXIS = """#!/bin/bash
case $* in *--help*) echo "  --container-image=[USER@]REGISTRY"; exit ;; esac
printf "%s\\n" "$@" >>{asked}
for word; do shift; case $word in --container-*) ;; *) set -- "$@" "$word" ;; esac; done
exec /usr/bin/srun "$@"
"""


@pytest.mark.parametrize(
    ("program", "text", "asked_for"),
    [
        ("podman", PODMAN, {"run", "--rm", "--volume=/data:/data:ro", "--volume=/models:/models"}),
        ("srun", PYXIS, {"--container-image=image:1"}),
    ],
    ids=["podman", "pyxis"],
)
def test_steps_run_in_an_image_where_one_is_asked_for(
    login: LoginNode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    text: str,
    asked_for: set[str],
) -> None:
    """No image here: a program that notes what it was asked for, and runs the command as it is."""
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin" / program
    path.write_text(text.format(asked=tmp_path / "asked"))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    login.backend.profile = SlurmSite(container_mounts=("/data:/data:ro", "/models"))
    ref = login.submit(a_role("--steps", "1"), options={"container_image": "image:1"})
    assert login.wait_for(ref, *ALL_ENDS).state is JobState.SUCCEEDED, slurm_log(ref)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked_for <= set(asked)
    assert "--device=nvidia.com/gpu=all" not in asked
    if program == "srun":
        mounts = next(word for word in asked if word.startswith("--container-mounts="))
        assert f"={ref.home}:{ref.home}," in mounts
        assert mounts.endswith(",/data:/data:ro,/models:/models")
        assert f"--container-workdir={ref.home}" in asked
    else:
        assert f"--volume={ref.home}:{ref.home}" in asked
    assert f"image image:1 by {'pyxis' if program == 'srun' else program}" in slurm_log(ref)


def test_the_words_of_the_site_stand_before_an_agent_and_the_verdict(
    login: LoginNode, tmp_path: Path
) -> None:
    path = tmp_path / "wrapped"
    path.write_text(f'#!/bin/bash\necho "$*" >>{tmp_path}/asked\nshift; exec "$@"\n')
    path.chmod(0o755)
    login.backend.profile = SlurmSite(wrap=(str(path), "two words"))
    ref = login.submit(a_role("--steps", "1"))
    assert login.wait_for(ref, *ALL_ENDS).state is JobState.SUCCEEDED, slurm_log(ref)
    # The run's own record says its end before the script asks for the verdict.
    login.wait_until(lambda: len((tmp_path / "asked").read_text().splitlines()) == 2)
    agent, verdict = (tmp_path / "asked").read_text().splitlines()
    assert f"two words {login.python} -m strop.launch.node " in agent
    assert f"two words {login.python} -m strop.launch.slurm.verdict " in verdict
