"""A job whose run has trackers: what they need is carried as secrets are, or the job is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.launch.build_request import make_plan
from strop.launch.environment import read_environment, write_environment
from strop.launch.job_dir import plan_to_json
from tests.fixtures.scripted_jobs import World

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


def test_the_projects_own_file_comes_before_the_shell(world: World, tmp_path: Path) -> None:
    world.environ["WANDB_API_KEY"] = "of the shell, 1234"
    (world.project / ".env").write_text(f"WANDB_API_KEY={KEY}\n")
    request = world.request(*ON)
    write_environment(tmp_path, request.environment, world.environ, project_path=world.project)
    assert read_environment(tmp_path, "train")["WANDB_API_KEY"] == KEY


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
