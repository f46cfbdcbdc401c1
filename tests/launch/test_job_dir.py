"""The job directory before the submission: everything in it, and who may read it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError, StoreError
from strop.launch.build_request import make_plan
from strop.launch.contract import JobPlan, JobRequest
from strop.launch.job_dir import (
    find_job_dirs_of,
    job_path_of,
    name_job_dir,
    plan_to_json,
    read_plan,
    refuse_foreign_job_dir,
    write_job_dir,
    write_preview,
)
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


def test_secrets_are_for_the_owner_and_scripts_are_programs(world: World) -> None:
    (world.project / ".env").write_text(f"MY_TOKEN={CANARY}\n")
    plan, _ = fill(world)
    job_path = job_path_of(plan.home)
    assert {name: mode(job_path / name) for name in ("secrets.json", "env.json", "job.sh")} == {
        "secrets.json": "0o600",
        "env.json": "0o600",
        "job.sh": "0o755",
    }
    holders = [path.name for path in job_path.iterdir() if CANARY.encode() in path.read_bytes()]
    assert holders == ["secrets.json"]


@pytest.mark.parametrize("place", [".env", "my.env"])
def test_a_secret_comes_from_the_file_that_the_plan_saw_it_in(world: World, place: str) -> None:
    # Both are read twice: for the plan the name, and for the home the value.
    (world.project / place).write_text(f"MY_TOKEN={CANARY}\n")
    env_file = None if place == ".env" else world.project / place
    plan, _ = fill(world, env_file=env_file)
    assert json.loads((job_path_of(plan.home) / "secrets.json").read_text())["values"] == {"MY_TOKEN": CANARY}


def test_the_resolved_settings_keep_null_and_say_where_each_is_from(world: World) -> None:
    plan, _ = fill(world, "eval.every=none", "train.steps=7", flags={"job.max_requeue": 5})
    resolved = json.loads((job_path_of(plan.home) / "resolved.json").read_text())
    assert resolved["eval.every"] == {"value": None, "source": "override"}
    assert resolved["train.steps"] == {"value": 7, "source": "override"}
    assert resolved["job.max_requeue"] == {"value": 5, "source": "--max_requeue"}
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


def test_without_a_snapshot_no_code_travels(world: World) -> None:
    plan, _ = fill(world, has_snapshot=False)
    assert plan.code_sha256 is None
    assert not (job_path_of(plan.home) / "code.tar.zst").exists()


def test_every_trial_of_a_sweep_has_its_own_spec(world: World) -> None:
    plan, _ = fill(world, sweep=("optimizer.lr=1e-5,2e-5", "train.steps=3,4"))
    found = [load_spec(job_path_of(trial.path) / "spec.toml").spec for trial in plan.trials]
    # The last setting varies fastest.
    assert [(spec.optimizer.lr, spec.train.steps) for spec in found] == [
        (1e-5, 3),
        (1e-5, 4),
        (2e-5, 3),
        (2e-5, 4),
    ]
    assert [trial.path for trial in plan.trials] == [f"{plan.home}/members/{index}" for index in range(4)]
    assert all((Path(trial.path) / "attempts").is_dir() for trial in plan.trials)


def test_a_disk_that_refuses_is_said(world: World) -> None:
    world.runs.write_text("a file where the folder should be")
    with pytest.raises(StoreError) as caught:
        fill(world)
    assert "could not be written" in str(caught.value)


def test_a_secret_that_has_gone_since_the_plan_is_named(world: World) -> None:
    (world.project / ".env").write_text(f"MY_TOKEN={CANARY}\n")
    request = world.request()
    (world.project / ".env").unlink()
    with pytest.raises(ConfigError) as caught:
        write_job_dir(make_plan(request, world.backend), request, world.environ)
    assert "MY_TOKEN" in str(caught.value)
    assert CANARY not in str(caught.value)


def test_the_directory_of_another_job_is_not_written_to(world: World) -> None:
    output = f"output.dir={world.runs / 'mine'}"
    fill(world, output)
    other = make_plan(world.request(output, "train.steps=9"), world.backend)
    with pytest.raises(CheckRefused) as caught:
        refuse_foreign_job_dir(other)
    assert "is the directory of another job" in str(caught.value)


def test_a_preview_makes_no_directory_and_changes_none(world: World) -> None:
    request = world.request(f"output.dir={world.runs / 'mine'}")
    plan = make_plan(request, world.backend)
    write_preview(plan, request)
    job_path = job_path_of(plan.home)
    assert {path.name for path in job_path.iterdir()} == {"spec.toml", "resolved.json", "job.sh"}
    assert find_job_dirs_of(world.runs, "run") == []
    write_job_dir(plan, request, world.environ)
    before = (job_path / "spec.toml").read_bytes()
    changed = world.request(f"output.dir={world.runs / 'mine'}", "train.steps=9")
    with pytest.raises(CheckRefused) as caught:
        write_preview(make_plan(changed, world.backend), changed)
    assert "what a job was made of stays as it was" in str(caught.value)
    assert (job_path / "spec.toml").read_bytes() == before


def test_directories_are_named_by_run_and_time_and_never_twice(tmp_path: Path) -> None:
    first = name_job_dir(tmp_path, "run", NOW)
    assert first.name == "run-20260921-141320"
    first.mkdir()
    second = name_job_dir(tmp_path, "run", NOW)
    second.mkdir()
    assert [second.name, name_job_dir(tmp_path, "run", NOW).name] == [f"{first.name}-2", f"{first.name}-3"]


def test_trials_of_a_sweep_have_places_of_their_own_in_a_store(world: World) -> None:
    plan, _ = fill(world, sweep=("optimizer.lr=1e-5,2e-5",))
    specs = [load_spec(Path(trial.path) / "job" / "spec.toml").spec for trial in plan.trials]
    home = Path(plan.home).name
    assert [spec.store.mirror_as for spec in specs] == [f"{home}/0", f"{home}/1"]
    assert [spec.optimizer.lr for spec in specs] == [1e-5, 2e-5]
