"""The job directory before the submission: everything in it, and who may read it."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from strop.errors import ConfigError, StoreError
from strop.launch.build_request import make_plan
from strop.launch.contract import JobPlan, JobRef, JobRequest
from strop.launch.index import find_job_dir, index_path, list_job_dirs, note_job
from strop.launch.job_dir import (
    job_path_of,
    name_job_dir,
    plan_to_json,
    read_plan,
    update_job_dir,
    write_job_dir,
    write_ref,
)
from strop.launch.secrets import has_secrets, remove_secrets
from strop.spec import load_spec
from tests.fixtures.scripted_jobs import NOW, World

CANARY = "canary-5f2c-value"


def fill(world: World, *overrides: str, **options: object) -> tuple[JobPlan, JobRequest]:
    request = world.request(*overrides, **options)  # type: ignore[arg-type]
    plan = make_plan(request, world.backend)
    write_job_dir(plan, request, world.environ)
    return plan, request


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def test_everything_that_a_job_needs_is_in_its_directory(world: World) -> None:
    (world.project / ".env").write_text(f"MY_TOKEN={CANARY}\nPLAIN=1\n")
    plan, request = fill(world)
    job_path = job_path_of(plan.home)
    assert {path.name for path in job_path.iterdir()} == {
        *("plan.json", "spec.toml", "resolved.json", "job.sh", "code.tar.zst", "code.diff"),
        *("env.json", "secrets.json"),
    }
    assert (Path(plan.home) / "attempts").is_dir()
    assert load_spec(job_path / "spec.toml").spec == request.resolved.spec
    # Secrets are for the owner, and scripts are programs.
    modes = [mode(job_path / name) for name in ("secrets.json", "env.json", "job.sh")]
    assert modes == ["0o600", "0o600", "0o755"]
    holders = [path.name for path in job_path.iterdir() if CANARY.encode() in path.read_bytes()]
    assert holders == ["secrets.json"]


def test_the_nodes_of_a_job_share_a_token_as_long_as_it_may_start_again(world: World) -> None:
    plan, _ = fill(world)
    plan = replace(plan, resources=replace(plan.resources, num_nodes=2))
    path = job_path_of(plan.home) / "ray.token"
    assert not path.exists()
    update_job_dir(plan)
    token = path.read_text()
    assert (len(token), mode(path)) == (64, "0o600")
    update_job_dir(plan)
    assert path.read_text() == token
    assert has_secrets(path.parent)
    remove_secrets(path.parent)
    assert not path.exists()


@pytest.mark.parametrize("place", [".env", "my.env"])
def test_a_secret_comes_from_the_file_that_the_plan_saw_it_in(world: World, place: str) -> None:
    # Both are read twice: for the plan the name, and for the home the value.
    (world.project / place).write_text(f"MY_TOKEN={CANARY}\n")
    env_file = None if place == ".env" else world.project / place
    plan, _ = fill(world, env_file=env_file)
    assert json.loads((job_path_of(plan.home) / "secrets.json").read_text())["values"] == {"MY_TOKEN": CANARY}


def test_cfg_2_the_resolved_settings_keep_null_and_say_where_each_is_from(world: World) -> None:
    plan, _ = fill(world, "eval.every=none", "train.steps=7")
    resolved = json.loads((job_path_of(plan.home) / "resolved.json").read_text())
    assert resolved["eval.every"] == {"value": None, "source": "override"}
    assert resolved["train.steps"] == {"value": 7, "source": "override"}
    assert resolved["job.time_limit"] == {"value": None, "source": "default"}
    assert resolved["name"]["source"].endswith("run.toml:1")


def test_a_plan_is_read_back_as_it_was_but_for_values_of_variables(world: World) -> None:
    world.sites('[sites.lab]\nbackend = "local"\nenv = { PLAIN = "private-value" }\n')
    plan, _ = fill(world, site="lab")
    kept = read_plan(job_path_of(plan.home))
    assert kept.environment.variables["PLAIN"] == "***"
    assert plan.environment.variables["PLAIN"] == "private-value"
    assert "private-value" not in plan_to_json(plan)
    assert plan_to_json(kept) == plan_to_json(plan)


def test_every_trial_of_a_sweep_has_its_own_spec(world: World) -> None:
    plan, _ = fill(world, sweep=("optimizer.lr=1e-5,2e-5", "train.steps=3,4"))
    found = [load_spec(job_path_of(trial.path) / "spec.toml").spec for trial in plan.trials]
    # The last setting varies fastest.
    rates = [(spec.optimizer.lr, spec.train.steps) for spec in found]
    assert rates == [(1e-5, 3), (1e-5, 4), (2e-5, 3), (2e-5, 4)]
    # And its own place in a store.
    home = Path(plan.home)
    assert [spec.store.mirror_as for spec in found] == [f"{home.name}/{index}" for index in range(4)]
    assert [trial.path for trial in plan.trials] == [f"{plan.home}/members/{index}" for index in range(4)]
    assert all((Path(trial.path) / "attempts").is_dir() for trial in plan.trials)


def test_a_disk_that_refuses_is_said(world: World) -> None:
    world.runs.write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="could not be written"):
        fill(world)


def test_a_secret_that_has_gone_since_the_plan_is_named(world: World) -> None:
    (world.project / ".env").write_text(f"MY_TOKEN={CANARY}\n")
    request = world.request()
    (world.project / ".env").unlink()
    with pytest.raises(ConfigError, match="MY_TOKEN") as caught:
        write_job_dir(make_plan(request, world.backend), request, world.environ)
    assert CANARY not in str(caught.value)


def test_directories_are_named_by_run_and_time_and_never_twice(tmp_path: Path) -> None:
    first = name_job_dir(tmp_path, "run", NOW)
    assert first.name == "run-20260921-141320"
    first.mkdir()
    second = name_job_dir(tmp_path, "run", NOW)
    second.mkdir()
    assert [second.name, name_job_dir(tmp_path, "run", NOW).name] == [f"{first.name}-2", f"{first.name}-3"]


# Finding jobs again: by folder, id, name or a prefix, from anywhere.


@pytest.fixture
def three(world: World) -> list[JobRef]:
    """Three jobs, oldest first: two of one name, and one of another."""
    refs = [
        world.launcher.submit(world.request(now=1_790_000_000.0 + second), is_new=True).ref
        for second in (0, 60)
    ]
    refs.append(world.launcher.submit(world.request("name=other")).ref)
    for age, ref in enumerate(reversed(refs)):
        at = 1_800_000_000 - age
        os.utime(job_path_of(ref.home) / "plan.json", (at, at))
    return refs


def found(world: World, reference: str, *roots: Path) -> str:
    return str(find_job_dir(reference, list(roots), world.environ))


def test_a_job_is_found_by_whatever_names_it(world: World, three: list[JobRef]) -> None:
    first, second, other = three
    assert found(world, first.home) == first.home
    assert found(world, first.job_id) == first.home
    assert found(world, Path(first.home).name) == first.home
    # A name is the newest job of that name; a beginning has to be of one job alone.
    assert found(world, "run") == second.home
    assert found(world, "oth") == other.home
    # In a folder that is named, there alone, and without the list.
    index_path(world.environ).unlink()
    assert found(world, f"{world.runs}/oth") == other.home
    with pytest.raises(ConfigError, match="/absent/oth' names no job"):
        found(world, f"{world.runs}/absent/oth")


def test_a_job_is_found_by_the_names_of_its_trials_and_by_those_it_had(world: World) -> None:
    old = world.submit()
    trials = [{"name": "job-20261121-120000-000"}, {"name": "job-20261121-120000-001"}]
    new = replace(old, job_id="job-20261121-120000-000", details={"jobs": trials})
    write_ref(new)
    note_job(new, world.environ)
    for reference in (old.job_id, "job-20261121-120000-001", "job-20261121", "fake"):
        assert found(world, reference) == old.home
    # A number is one job's, and no beginning: another job may have been cancelled by it.
    note_job(replace(new, job_id="1234", details={}), world.environ)
    assert found(world, "1234") == old.home
    with pytest.raises(ConfigError, match="'12' names no job"):
        found(world, "12")


def test_jobs_are_found_from_any_folder_and_without_the_list(
    world: World, three: list[JobRef], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert [str(path) for path in list_job_dirs([], world.environ)] == [ref.home for ref in reversed(three)]
    index_path(world.environ).unlink()
    assert list_job_dirs([], world.environ) == []
    assert len(list_job_dirs([world.runs], world.environ)) == 3


@pytest.mark.parametrize(
    ("reference", "words"), [("ru", "'ru' names 2 jobs"), ("nope", "no job"), ("", "no job")]
)
def test_what_names_none_or_several_is_refused_with_what_there_is(
    world: World, three: list[JobRef], reference: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        found(world, reference)
    assert words in str(caught.value)
    assert Path(three[1].home).name in str(caught.value)
    assert "`strop ls`" in str(caught.value)


def test_a_directory_that_has_gone_and_a_cut_line_are_passed_over(world: World, three: list[JobRef]) -> None:
    job_path = job_path_of(three[2].home)
    job_path.rename(job_path.with_name("moved"))
    with index_path(world.environ).open("ab") as file:
        file.write(b'{"name": "cut\n[1]\n\xff\xfe\n7\n{"home": 3}\n')
    assert {str(path) for path in list_job_dirs([], world.environ)} == {three[0].home, three[1].home}


@pytest.mark.parametrize("name", ["plan.json", "ref.json"])
def test_a_damaged_directory_hides_no_other_one(world: World, three: list[JobRef], name: str) -> None:
    (job_path_of(three[0].home) / name).write_text("{")
    assert found(world, three[1].job_id) == three[1].home
    # By its folder's name it is still found, and then says what is damaged.
    assert found(world, Path(three[0].home).name) == three[0].home


def test_a_list_that_cannot_be_read_or_written_is_said(world: World) -> None:
    assert index_path({"HOME": "/h"}) == Path("/h/.local/state/strop/jobs.jsonl")
    path = index_path(world.environ)
    path.mkdir(parents=True)
    with pytest.raises(StoreError, match=f"{path}.* cannot be read"):
        list_job_dirs([], world.environ)
    ref = JobRef(name="a", site="s", backend="b", home="/h", job_id="1", plan_hash="p", submitted_at=0.0)
    with pytest.raises(StoreError, match="could not be written"):
        note_job(ref, world.environ)
