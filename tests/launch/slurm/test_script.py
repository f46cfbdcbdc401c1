"""The batch script: golden texts, values that a shell or sbatch could trip over, and codes made one."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.launch.build_request import make_plan
from strop.launch.contract import JobPlan, Resources
from strop.launch.slurm.backend import SlurmBackend
from strop.launch.slurm.options import SlurmSite
from strop.launch.slurm.queries import clean_environment
from strop.launch.slurm.script import write_script
from tests.launch.slurm.plans import a_request, gpus

GOLDEN = Path(__file__).with_name("golden")
TRICKY = st.text(alphabet=st.sampled_from("ab0'\"$`\\ #;&|<>(){}*?!~%=-\tü日"), min_size=1, max_size=12)
ONE_LINE = TRICKY.map(lambda text: text.replace("\t", " "))


def _plan(root: Path, profile: SlurmSite | None = None, **more: Any) -> JobPlan:
    profile = profile or SlurmSite()
    return make_plan(a_request(root, profile=profile, **more), SlurmBackend(profile))


CASES: dict[str, dict[str, Any]] = {
    "small": {"resources": gpus(2), "profile": SlurmSite(wrap=("podman", "run", "two words"))},
    "whole-node": {
        "resources": gpus(8, nodes=2, is_whole_node=True, memory="900G", gpu_type="h100"),
        "profile": SlurmSite(
            partition="gpu",
            account="lab",
            qos="high",
            constraint="ib&h100",
            reservation="course",
            exclude="n7",
            signal="USR1",
            setup=("module load cuda",),
            sbatch_args=("--mail-type=END",),
        ),
    },
    "sweep": {"sweep": (("optimizer.lr=1e-5",), ("optimizer.lr=2e-5",)), "options": {"array": 1}},
    "cpu-part": {
        "resources": replace(gpus(4), num_cpu_nodes=2, cpus=16),
        "profile": SlurmSite(partition="gpu", cpu_partition="cpu", container_image="/images/strop.sif"),
        "options": {"dependency": "afterok:7", "comment": "night run"},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_scripts_are_the_golden_ones(name: str, tmp_path: Path) -> None:
    request = a_request(tmp_path, python="/env/bin/python", **CASES[name])
    profile = request.site.profile
    assert isinstance(profile, SlurmSite)
    request = replace(request, home="/runs/run-1", project_path=Path("/project"))
    plan = replace(make_plan(request, SlurmBackend(profile)), plan_hash="0123456789abcdef")
    plan = SlurmBackend(profile).render(plan, request)
    golden_path = GOLDEN / f"{name}.sh"
    assert plan.files["job.sh"] == golden_path.read_text()
    subprocess.run(["bash", "-n"], input=plan.files["job.sh"], text=True, check=True)


def test_the_command_says_where_and_the_header_says_what(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    assert plan.argv == (
        *("sbatch", "--parsable", "--export=ALL"),
        f"--chdir={tmp_path}/run-1",
        f"--output={tmp_path}/run-1/job/slurm-%j.out",
        f"{tmp_path}/run-1/job/job.sh",
    )
    assert "#SBATCH --export" not in plan.files["job.sh"]
    assert "set -e" not in plan.files["job.sh"]
    assert "set -x" not in plan.files["job.sh"]


def test_a_percent_sign_in_a_path_is_no_pattern(tmp_path: Path) -> None:
    plan = _plan(tmp_path / "50%j")
    assert plan.argv[4] == f"--output={tmp_path}/50%%j/run-1/job/slurm-%j.out"
    assert plan.argv[3] == f"--chdir={tmp_path}/50%j/run-1"


@settings(deadline=None, max_examples=60)
@given(name=ONE_LINE.filter(str.strip), value=ONE_LINE, python=TRICKY)
def test_lau_4_any_value_comes_through_the_header_and_the_shell(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: str, python: str
) -> None:
    """Incident: values were pasted between quotation marks, and `$` and backticks in them were run."""
    root = tmp_path_factory.getbasetemp() / "quoting"
    plan = replace(_plan(root), name=name, python=python, home=f"{root}/{python.replace('/', '')}")
    plan = replace(plan, trials=(replace(plan.trials[0], path=plan.home),))
    options = SlurmSite(comment=value, constraint=value, exclude=value)
    script = write_script(plan, options)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, capture_output=True)
    headers = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    words = [word for line in headers for word in shlex.split(line)]
    assert f"--job-name={name}" in words
    assert f"--constraint={value}" in words
    assert any(word.startswith("--comment=strop:") and word.endswith(f" {value}") for word in words)
    # What bash itself makes of the lines that hold values.
    lines = [line for line in script.splitlines() if line.startswith(("home=", "agent="))]
    shown = f'trial=m attempt=a number=0\n{lines[0]}\n{lines[1]})\nprintf \'%s\\0\' "$home" "${{agent[0]}}"\n'
    said = subprocess.run(["bash", "-u"], input=shown, capture_output=True, text=True, check=True)
    assert said.stdout.split("\0")[:2] == [plan.home, python]


def options(**given: Any) -> dict[str, Any]:
    return {"options": given}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (options(partitoin="gpu"), "did you mean partition\\?"),
        (options(comment="two\nlines"), "comment='two\\\\nlines'"),
        (options(gpu_type="gpu:h100") | {"resources": gpus(1)}, "gpu:h100"),
        (options(array=3), "array"),
        (options(wrap=("podman",), container_image="x"), "site.wrap together with"),
        (options(array=0) | {"sweep": ((), ())}, "site.array=0"),
        (options(array="some") | {"sweep": ((), ())}, "site.array='some'"),
        (options(partition=""), "site.partition=''"),
        (options(sbatch_args=("--export=A=1",)), "--export"),
        (options(sbatch_args=("--open-mode=truncate",)), "--open-mode"),
        (options(sbatch_args=("mail",)), "--mail-type=END"),
        ({"resources": Resources(num_cpu_nodes=1), "sweep": ((), ())}, "arrays"),
    ],
)
def test_what_slurm_cannot_be_given_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        _plan(tmp_path, **changes)


@pytest.mark.parametrize("change", [{"name": "two\nlines"}, {"name": " "}, {"home": "/runs/back\\slash"}])
def test_names_and_homes_that_slurm_would_spoil_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    request = a_request(tmp_path)
    backend = SlurmBackend(SlurmSite())
    plan = replace(make_plan(request, backend), **change)
    with pytest.raises(ConfigError):
        backend.render(plan, request)


def test_the_options_of_a_job_win_over_the_profile(tmp_path: Path) -> None:
    profile = SlurmSite(partition="gpu", account="lab", time_limit="1h")
    plan = _plan(tmp_path, profile, options={"partition": "debug"})
    script = plan.files["job.sh"]
    assert "#SBATCH --partition=debug\n" in script
    assert "#SBATCH --account=lab\n" in script
    assert "#SBATCH --no-requeue\n" in _plan(tmp_path / "once", max_requeue=0).files["job.sh"]


@pytest.mark.parametrize(
    ("time_limit_s", "said"), [(300.0, "00:05:00"), (90061.0, "1-01:01:01"), (None, None)]
)
def test_the_time_limit_is_said_as_slurm_reads_it(
    tmp_path: Path, time_limit_s: float | None, said: str | None
) -> None:
    plan = _plan(tmp_path, resources=Resources(time_limit_s=time_limit_s))
    assert ("--time=" in plan.files["job.sh"]) is (said is not None)
    assert said is None or f"#SBATCH --time={said}\n" in plan.files["job.sh"]
    assert any("no time limit is asked for" in notice for notice in plan.notices) is (said is None)


@pytest.mark.parametrize(("array", "said"), [(None, "0-1"), (1, "0-1%1"), (2, "0-1%2")])
def test_a_sweep_is_an_array_of_its_trials(tmp_path: Path, array: int | None, said: str) -> None:
    sweep = (("optimizer.lr=1e-5",), ("optimizer.lr=2e-5",))
    plan = _plan(tmp_path, options={"array": array}, sweep=sweep)
    assert f"#SBATCH --array={said}\n" in plan.files["job.sh"]
    assert plan.argv[4].endswith("/job/slurm-%A_%a.out")


def test_the_environment_of_a_submission_is_nobodys_but_the_users() -> None:
    kept = {"HOME": "/home/a", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JWT": "t"}
    dropped = ("SLURM_JOB_ID", "SBATCH_QOS", "MASTER_ADDR", "RANK", "CUDA_VISIBLE_DEVICES", "API_KEY")
    assert clean_environment(kept | dict.fromkeys(dropped, "7"), secrets=["API_KEY"]) == kept
