"""From what a user typed to a request, where every mistake that can be known is refused, and to a plan."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.launch.build_request import (
    MAX_TRIALS,
    SubmitOptions,
    expand_sweep,
    make_plan,
    read_request,
)
from strop.launch.contract import JobRequest, Need
from strop.launch.environment import read_environment, write_environment
from strop.launch.job_dir import plan_to_json
from strop.launch.slurm.options import SlurmSite
from tests.fixtures.scripted_jobs import NOW, World


def read(world: World, **given: object) -> object:
    options = SubmitOptions(**{"site": "local", "project_path": world.project, **given})  # type: ignore[arg-type]
    return read_request(str(world.project / "run.toml"), options, environ=world.environ, now=NOW)


def refusal(world: World, **given: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read(world, **given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("texts", "trials"),
    [
        ((), ()),
        (("a=1,2",), (("a=1",), ("a=2",))),
        (("a=1,2", "b=x,y"), (("a=1", "b=x"), ("a=1", "b=y"), ("a=2", "b=x"), ("a=2", "b=y"))),
        (("a=-1,-2.5e-3",), (("a=-1",), ("a=-2.5e-3",))),
        (('a=["x","y"],["z"]',), (('a=["x","y"]',), ('a=["z"]',))),
        (("a='x,y',z",), (("a='x,y'",), ("a=z",))),
        ((" a =1, 2 ,",), (("a=1",), ("a=2",))),
        (("a=b=c,d",), (("a=b=c",), ("a=d",))),
    ],
)
def test_a_sweep_is_all_combinations(texts: tuple[str, ...], trials: tuple[tuple[str, ...], ...]) -> None:
    assert expand_sweep(texts) == trials


@pytest.mark.parametrize(
    "texts", [("a",), ("a=",), ("=1",), (" =1",), ("a=,",), ("a=1", "a=2"), ("a=1", " a=2"), ("",)]
)
def test_what_is_no_sweep_is_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        expand_sweep(texts)


def test_a_sweep_has_an_end() -> None:
    numbers = ",".join(map(str, range(32)))
    # 32 * 32.
    with pytest.raises(ConfigError, match=f"1024 trials.*{MAX_TRIALS}"):
        expand_sweep((f"a={numbers}", f"b={numbers}"))


@pytest.mark.parametrize("key", ["name", "job.gpus", "output.dir", "store.uri"])
def test_what_all_trials_share_cannot_be_swept(world: World, key: str) -> None:
    assert f"--sweep varies {key}, which all trials share" in refusal(world, sweep=(f"{key}=1,2",))


@pytest.mark.parametrize(
    ("sweep", "words"), [("train.steps=2,none", "train.steps"), ("train.stesp=1,2", "train.steps")]
)
def test_a_trial_that_cannot_work_is_refused_before_anything_is_made(
    world: World, sweep: str, words: str
) -> None:
    assert words in refusal(world, sweep=(sweep,))
    assert not world.runs.exists()


def test_what_becomes_no_job_is_named(world: World) -> None:
    assert "'rm -rf /'" in refusal(world, command="rm -rf /")
    assert "absent is no folder" in refusal(world, project_path=world.project / "absent")
    world.sites('[sites.local]\nrun_root = "runs"\n')
    assert "run_root='runs'" in refusal(world)


def test_a_home_folder_of_a_site_is_written_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(world.folder))
    world.sites('[sites.local]\nrun_root = "~/runs"\n')
    assert world.request().home == f"{world.runs}/run-20260921-141320"


def test_a_word_of_the_site_is_as_if_its_profile_said_so(world: World) -> None:
    world.sites('[sites.lab]\nbackend = "slurm"\nqos = "low"\nconstraint = "ib"\n')
    words = ["site.qos=high", "site.constraint=none", "site.hf_home=/m", "site.cpus_per_gpu=4", "job.gpus=1"]
    words += ["site.comment=007", "site.partition=a", 'site.setup=["module load a", "b"]']
    request = read(world, site="lab", overrides=tuple(words))
    assert isinstance(request, JobRequest)
    profile = request.site.profile
    assert isinstance(profile, SlurmSite)
    assert (profile.qos, profile.constraint, profile.cpus_per_gpu) == ("high", None, 4)
    assert request.environment.variables["HF_HOME"] == "/m"
    assert request.resources.cpus_per_gpu == 4
    assert (profile.partition, profile.setup) == ("a", ("module load a", "b"))
    # What belongs to one job is in no record of the profile.
    assert profile.of_job() == {"comment": "007"}
    assert "comment" not in profile.model_dump()


def test_the_roles_of_a_job_are_argument_lists(world: World) -> None:
    request = world.request(
        "job.train_gpus=2", "job.cpu_nodes=1", "job.cpu_command=serve --name 'two words' $HOME"
    )
    train, sidecar = request.roles
    assert train.argv[1:] == ("-m", "strop.cli", "train", "{run}/job/spec.toml", "output.dir={run}")
    assert dict(train.gpus) == {"infer": 1, "train": 2}
    # Nothing is expanded: there is no shell.
    assert sidecar.argv == ("serve", "--name", "two words", "$HOME")
    assert (sidecar.nodes, sidecar.need) == ("cpu", Need.PRESENCE)


def test_every_other_node_joins_a_run_on_ray_as_a_role_of_its_own(world: World) -> None:
    train, ray = world.request("placement.kind=ray", "job.nodes=3", "job.train_gpus=2").roles
    assert (train.name, train.nodes) == ("train", "first")
    assert (ray.name, ray.nodes, ray.need) == ("ray", "others", Need.NOTHING)
    assert ray.argv[1:] == ("-m", "strop.cluster.ray.node", "{logs}")
    # As many devices there as on the first node: roles of the run live on both.
    assert dict(ray.gpus) == dict(train.gpus) == {"infer": 1, "train": 2}
    assert [role.name for role in world.request("placement.kind=ray").roles] == ["train"]
    ray = world.request("placement.kind=ray", "job.nodes=2", "ray.temp_dir=/scratch").roles[1]
    assert ray.argv[-2:] == ("--below", "/scratch")


def test_nodes_beside_a_run_that_join_its_ray_may_be_lost_and_need_no_shared_disk(world: World) -> None:
    world.sites('[sites.cloud]\nbackend = "sagemaker"\n')
    ray = world.request("job.cpu_nodes=1", "placement.rollout_workers=8", site="cloud").roles[-1]
    assert (ray.name, ray.nodes, ray.need) == ("ray", "cpu", Need.NOTHING)
    assert ray.argv[1:] == ("-m", "strop.cluster.ray.node", "{logs}")
    # Nothing would tell another command of the end of the run.
    assert "serve" in refusal(world, site="cloud", overrides=("job.cpu_nodes=1", "job.cpu_command=serve"))


def test_ray_over_hosts_without_a_common_disk_is_refused_only_where_weights_go_by_file(world: World) -> None:
    world.sites('[sites.cloud]\nbackend = "sagemaker"\n')
    overrides = ("placement.kind=ray", "job.nodes=2")
    assert [role.name for role in world.request(*overrides, site="cloud").roles] == ["train", "ray"]
    assert "transport" in refusal(world, site="cloud", overrides=(*overrides, "engine.transport=file"))


def test_limits_of_a_site_hold_where_the_run_file_is_silent(world: World) -> None:
    world.sites('[sites.lab]\nbackend = "slurm"\ntime_limit = "12h"\nmemory = "64G"\ngpu_type = "h200"\n')
    found = world.request(site="lab").resources
    assert (found.time_limit_s, found.memory, found.gpu_type) == (43200.0, "64G", "h200")
    assert world.request("job.time_limit=1h", "job.memory=2G", site="lab").resources.time_limit_s == 3600.0


def test_runs_and_files_of_secrets_in_the_project_are_no_code(world: World) -> None:
    (world.project / "my.env").write_text("MY_TOKEN=canary\n")
    (world.project / ".env").write_text("OTHER_TOKEN=canary\n")
    home = world.launcher.submit(world.request(f"output.root={world.project}")).ref.home
    assert Path(home).parent == world.project
    # Without git every file counts: not the home beside the code, and no file of variables.
    found = world.request(f"output.root={world.project}", env_file=world.project / "my.env").snapshot
    assert found is not None
    assert found.files == ("run.toml", "train_more.py")


def test_a_user_without_a_name_has_a_number(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def unnamed() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", unnamed)
    assert world.request().user == str(os.getuid())


SITES = """
[sites.lab]
backend = "slurm"
partition = "gpu's $HOME"
[sites.box]
backend = "local"
wrap = ["podman", "run", "registry.example/strop:1"]
[sites.cloud]
backend = "sagemaker"
region = "eu-central-1"
role = "arn:aws:iam::111122223333:role/training"
bucket = "strop-test"
image = "registry.example/strop:1"
[sites.desk]
backend = "local"
"""

# The request is read; from then on every touch of the world is refused: disk, network, clock, luck.
SEALED = """
import os, random, sys, time
from pathlib import Path
from strop.launch.backends import open_backend
from tests.fixtures.scripted_backend import FakeBackend
from strop.launch.job_dir import plan_to_json
from strop.launch.build_request import make_plan
from tests.fixtures.scripted_jobs import World

folder, site = Path(sys.argv[1]), sys.argv[2]
world = World(folder=folder, backend=FakeBackend(folder / "scheduler"), environ={"HOME": "/"})
known = site if site != "fake" else "desk"
MODEL = "model.uri=hf://org/model"
requests = [world.request(MODEL, site=known), world.request(MODEL, site=known, sweep=("train.steps=2,3",))]
backend = world.backend if site == "fake" else open_backend(requests[0].site)
# Imports are no effects: the first plan brings what is imported late.
before = [plan_to_json(make_plan(one, backend)) for one in requests]

FORBIDDEN = ("open", "os.", "socket.", "subprocess.", "shutil.", "import")
def refuse(event, args):
    if event.startswith(FORBIDDEN):
        raise OSError(30, f"a plan does this: {event} {args}")
def no_luck(*args, **kwargs):
    raise OSError(30, "a plan asks the clock or for luck")
time.time = time.monotonic = time.perf_counter = random.random = os.urandom = os.getpid = no_luck
sys.addaudithook(refuse)
after = [plan_to_json(make_plan(one, backend)) for one in requests]
sys.stdout.write("equal" if before == after else "different")
"""


@pytest.mark.parametrize("site", ["fake", "desk", "lab", "box", "cloud"])
def test_lau_9_a_plan_touches_nothing_and_is_the_same_every_time(world: World, site: str) -> None:
    world.sites(SITES)
    done = subprocess.run(
        [sys.executable, "-c", SEALED, str(world.folder), site],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.stdout, done.returncode) == ("equal", 0), done.stderr[-2000:]


@pytest.mark.parametrize("escape", ["\\n", "\\t", "\\u001b", "\\u007f"])
def test_a_directory_with_a_control_character_is_refused(world: World, escape: str) -> None:
    world.sites(f'[sites.local]\nrun_root = "{world.runs}{escape}x"\n')
    with pytest.raises(ConfigError, match="control character") as caught:
        make_plan(world.request(has_snapshot=False), world.backend)
    assert str(caught.value).isprintable()
    # What is odd and printable is planned.
    world.sites("[sites.local]\noffline = true\n")
    odd = world.folder / 'it\'s $HOME "quoted" `x`; rm'
    plan = make_plan(world.request(f"output.root={odd}"), world.backend)
    assert plan.home == f"{odd}/run-20260921-141320"


# A job whose run has trackers: what they need is carried as secrets are, or the job is refused.


KEY = "planted" * 6
ON = ('trackers.use=["wandb", "mlflow"]',)


@pytest.fixture(autouse=True)
def no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def test_keys_and_addresses_travel_without_being_named(world: World, tmp_path: Path) -> None:
    world.environ |= {"WANDB_API_KEY": KEY, "WANDB_ENTITY": "team", "WANDB_MODE_OF": "not/used"}
    world.environ["MLFLOW_TRACKING_URI"] = f"https://me:{KEY}@mlflow.example.org"
    request = world.request(*ON)
    # An address with a password in it is a secret, too.
    assert request.environment.secrets == ("MLFLOW_TRACKING_URI", "WANDB_API_KEY")
    assert request.environment.variables["WANDB_ENTITY"] == "team"
    assert "WANDB_MODE_OF" not in request.environment.sources
    assert KEY not in plan_to_json(make_plan(request, world.backend))
    write_environment(tmp_path, request.environment, world.environ)
    assert KEY not in (tmp_path / "env.json").read_text()
    assert read_environment(tmp_path, "train")["WANDB_API_KEY"] == KEY
    # The project's own file comes before the shell.
    (world.project / ".env").write_text("WANDB_API_KEY=of the project\n")
    environment = world.request(*ON).environment
    write_environment(tmp_path, environment, world.environ, project_path=world.project)
    assert read_environment(tmp_path, "train")["WANDB_API_KEY"] == "of the project"


def test_a_job_without_a_key_is_refused_and_an_offline_one_is_not(world: World) -> None:
    with pytest.raises(ConfigError, match="export WANDB_API_KEY, or set"):
        world.request(*ON)
    assert world.request(*ON, "trackers.offline=true").environment.secrets == ()
    (world.project / ".env").write_text("STROP_OFFLINE=1\n")
    world.request(*ON)


def test_a_login_counts_where_jobs_see_this_home(world: World, tmp_path: Path) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {KEY}\n")
    netrc.chmod(0o600)
    assert world.request(*ON).environment.secrets == ()


def test_trackers_are_the_whole_jobs(world: World) -> None:
    world.environ["WANDB_API_KEY"] = KEY
    with pytest.raises(ConfigError, match=re.escape("--sweep varies trackers.project")):
        world.request(*ON, sweep=("trackers.project=a,b",))
    one, other = (make_plan(world.request(*words), world.backend) for words in ((), ON))
    assert one.plan_hash != other.plan_hash
