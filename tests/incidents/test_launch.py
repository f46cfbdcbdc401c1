"""Incidents that a plan has to prevent, and those of starting a run."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.plan.planning import make_plan
from strop.spec import OptimizerSpec, load_spec
from strop.tasks import build_task
from tests.fixtures.recipes import RECIPES, tiny_overrides

SOURCE = Path(__file__).parents[2] / "src"
# Every write and every socket is refused, as on a read-only disk without a network.
SEALED = """
import os, sys
sys.dont_write_bytecode = True
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
def refuse(event, args):
    if event == "open" and args[2] & WRITES and args[0] != os.devnull:
        raise OSError(30, "Read-only file system", args[0])
    if event in {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"}:
        raise OSError(30, "Read-only file system", str(args[0]))
    if event.startswith("socket.") and event != "socket.gethostname":
        raise OSError(101, f"Network is unreachable: {event}")
sys.addaudithook(refuse)
PROBE
from strop.cli import main
sys.exit(main())
"""


def plan_sealed(folder: Path, *words: str, probe: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SEALED.replace("PROBE", probe), "plan", *words],
        cwd=folder,
        env={"PATH": "", "HOME": str(folder), "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def write_run(folder: Path, model_dir: Path) -> None:
    (folder / "run.toml").write_text(
        f'name = "x"\n[model]\nuri = "{model_dir}"\n[task]\nname = "arithmetic"\nmax_reply_tokens = 16\n'
    )


def test_lau_9_a_plan_touches_no_disk_and_no_network(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Incident: dry runs uploaded code, made buckets, queried schedulers or deleted their own folder."""
    write_run(tmp_path, tiny_model_dir)
    before = sorted([*tmp_path.rglob("*"), *tiny_model_dir.rglob("*")])
    ended = plan_sealed(tmp_path, "run.toml", "--json")
    assert ended.returncode == 0, ended.stderr
    planned = json.loads(ended.stdout)
    assert planned["unknown"] == []
    assert planned["prompt"]["text"].startswith("<|start|>user\nWhat is ")
    assert planned["time"]["total_s"] > 0
    # A model and data on a hub are named as unknown, not fetched.
    for words in (["model.uri=org/absent"], ["task.name=gsm8k"]):
        ended = plan_sealed(tmp_path, "run.toml", "--json", *words)
        assert ended.returncode == 0, ended.stderr
        assert len(json.loads(ended.stdout)["unknown"]) == 1
    assert sorted([*tmp_path.rglob("*"), *tiny_model_dir.rglob("*")]) == before


@pytest.mark.parametrize(
    "probe", ["open('x', 'w')", "os.mkdir('x')", "import socket; socket.create_connection(('localhost', 9))"]
)
def test_lau_9_the_seal_holds(probe: str, tmp_path: Path, tiny_model_dir: Path) -> None:
    write_run(tmp_path, tiny_model_dir)
    ended = plan_sealed(tmp_path, "run.toml", probe=probe)
    assert ended.returncode == 1
    assert "Read-only file system" in ended.stderr or "Network is unreachable" in ended.stderr


def test_lau_9_a_rejected_config_leaves_no_path(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Incident: rejected configs left directories behind."""
    write_run(tmp_path, tiny_model_dir)
    before = sorted(tmp_path.rglob("*"))
    ended = plan_sealed(tmp_path, "run.toml", "train.step=3")
    assert ended.returncode == 2
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_cfg_4_every_shipped_recipe_is_planned(path: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Incident: 57 of 141 configs ran only on a loop marked legacy; launchers named deleted scripts."""
    words = [*tiny_overrides(path, tiny_model_dir, tmp_path), "eval.num_examples=none"]
    resolved = load_spec(path, words)
    planned = make_plan(resolved, cache_dir=tmp_path / "cache")
    assert planned.unknown == ()
    assert planned.prompt is not None
    assert planned.time is not None
    assert (planned.schedule.num_epochs or planned.schedule.num_given_epochs) is not None


def test_smp_2_one_effective_limit_with_its_origin(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Incident: loader constants overrode token budgets in 19 configs, and nobody saw it."""
    write_run(tmp_path, tiny_model_dir)

    def limit(*overrides: str) -> tuple[object, str]:
        planned = make_plan(load_spec(tmp_path / "run.toml", overrides), cache_dir=tmp_path)
        (value,) = (value for value in planned.limits if value.name == "task.max_reply_tokens")
        return value.value, value.origin

    assert limit() == (16, f"{tmp_path}/run.toml:6")
    assert limit("task.max_reply_tokens=4") == (4, "override")
    own = build_task(load_spec(tmp_path / "run.toml", ["task.max_reply_tokens=none"]).spec.task).limits
    assert limit("task.max_reply_tokens=none") == (own.max_reply_tokens, "the limit of task arithmetic")
    # A clamp would be silent; both numbers are named instead.
    with pytest.raises(ConfigError, match="9000") as refusal:
        limit("task.max_reply_tokens=9000")
    assert str(own.max_reply_tokens) in str(refusal.value)


def test_opt_3_a_plan_shows_the_normalizer_and_every_optimizer_value(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Incident: an unseen constant weakened gradients five times; 141 configs inherited values unseen."""
    write_run(tmp_path, tiny_model_dir)
    planned = make_plan(load_spec(tmp_path / "run.toml", ["optimizer.lr=3e-6"]), cache_dir=tmp_path)
    values = {value.name: value for value in planned.optimizer}
    of_spec = {f"optimizer.{name}" for name in OptimizerSpec.model_fields}
    assert set(values) == {*of_spec, "lr of the last optimizer step"}
    assert (values["optimizer.lr"].value, values["optimizer.lr"].origin) == (3e-6, "override")
    assert values["optimizer.beta2"].origin == "default"
    algorithm = {value.name: value for value in planned.algorithm}
    assert algorithm["weight of a token"].value == "1 / (64 rollouts x scored tokens of the rollout)"
    assert (algorithm["algorithm.clip_high"].value, algorithm["algorithm.clip_high"].origin) == (
        0.2,
        "grpo's own",
    )


def test_opt_3_a_changed_default_changes_the_plan(tmp_path: Path, tiny_model_dir: Path) -> None:
    """A default that an edit of the source moves; no run file says a word of it."""
    write_run(tmp_path, tiny_model_dir)
    before = make_plan(load_spec(tmp_path / "run.toml"), cache_dir=tmp_path).optimizer
    edited = tmp_path / "edited"
    shutil.copytree(SOURCE, edited, ignore=shutil.ignore_patterns("__pycache__"))
    path = edited / "strop" / "spec" / "train.py"
    default = "default=0.999,"
    assert path.read_text().count(default) == 1
    path.write_text(path.read_text().replace(default, "default=0.95,"))
    ended = plan_sealed(tmp_path, "run.toml", "--json", probe=f"sys.path.insert(0, {str(edited)!r})")
    assert ended.returncode == 0, ended.stderr
    after = [(one["name"], one["value"], one["origin"]) for one in json.loads(ended.stdout)["optimizer"]]
    assert after == [
        (one.name, 0.95 if one.name == "optimizer.beta2" else one.value, one.origin) for one in before
    ]
    assert ("optimizer.beta2", 0.95, "default") in after


PROGRAM = re.compile(r"""-m["',\s]+(strop(?:\.\w+)+)""")


def find_absent_programs(source: Path) -> set[str]:
    """Return the programs that anything below a folder starts by `python -m`, and that are not there."""
    named = {
        name
        for path in source.rglob("*")
        if path.suffix in (".py", ".j2", ".toml")
        for name in PROGRAM.findall(path.read_text())
    }
    assert len(named) > 10
    return {name for name in named if not is_program(source / name.replace(".", "/"))}


def is_program(place: Path) -> bool:
    script = place.with_suffix(".py")
    return (place / "__main__.py").is_file() or (script.is_file() and '"__main__"' in script.read_text())


@pytest.mark.parametrize("deleted", ["", "launch/local/supervisor.py", "launch/node/__main__.py"])
def test_cfg_4_no_launcher_starts_a_program_that_is_gone(tmp_path: Path, deleted: str) -> None:
    """Incident: launchers named deleted scripts; tests stayed green, as the launcher was mocked."""
    shutil.copytree(SOURCE / "strop", tmp_path / "strop", ignore=shutil.ignore_patterns("__pycache__"))
    if deleted:
        (tmp_path / "strop" / deleted).unlink()
    gone = {"strop." + deleted.removesuffix(".py").removesuffix("/__main__").replace("/", ".")}
    assert find_absent_programs(tmp_path) == (gone if deleted else set())


def test_cfg_4_the_command_that_is_installed_is_there() -> None:
    for script in importlib.metadata.entry_points(group="console_scripts"):
        if script.module.partition(".")[0] == "strop":
            assert callable(script.load())
            return
    pytest.fail("the project installs no command")
