"""Tasks passed their own tests and ended in a traceback when a run file or the command line named them."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from strop.agents.verifiers import environment_of
from strop.environments.guests import guest as guests
from strop.environments.harbor import digest_tree
from strop.errors import EXIT_USAGE
from strop.spec.built_in import built_in_tasks
from strop.spec.display import format_value
from tests.agents.test_verifiers import TASKSET
from tests.conftest import require_system_part
from tests.environments.test_harbor import BUILT, base
from tests.environments.test_openenv import serving
from tests.environments.test_repair import ROW, repository
from tests.fixtures.commands import Run
from tests.fixtures.every_task import table_of
from tests.fixtures.harbor_tasks import write_task
from tests.fixtures.real_agents import OPENENV

__all__ = ["base", "repository"]

RUN = """name = "tiny"
[model]
uri = "{model}"
dtype = "float32"
[task]
{task}
[train]
steps = 1
prompts_per_step = {prompts}
group_size = 2
accept = "weights: random; audit: tried beside it; overlap: few rows; parity: few tokens"
[eval]
num_examples = 1
num_samples = "none"
[placement]
threads = 1
"""
FOR_EVALUATION = {"aime", "humaneval", "ifbench", "ifeval", "math500"}
OTHERS: dict[str, dict[str, Any]] = {
    "verifiers": {"taskset": "guess", "num_held_out": 1},
    "openenv": {"num_train": 4, "num_held_out": 1},
}
"""Those of packages that are in environments of their own."""
MADE_DIRS = (environment_of(()).path.parent, OPENENV.path.parent)
"""Where they are in the cache of whoever runs the tests."""
ROOMS = {"harbor", "mlgym", "repo-repair"}
"""Attempts of these are in sandboxes of their own, of which `rooms_of` writes what is inside."""


def rooms_of(name: str, place: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Write what stands in a task's sandboxes, and return what its table says of them."""
    if name == "repo-repair":
        row = {**ROW, "repository": str(request.getfixturevalue("repository"))}
        for stem, number in {"train": 1, "test": 3}.items():
            row["instance_id"] = f"adder__adder-{number}"
            (place / f"{stem}.jsonl").write_text(json.dumps(row) + "\n")
        return {"sandbox": "bubblewrap", "memory_gib": 0.25, "disk_gib": 0.0625}
    if name == "harbor":
        for one in ("first", "second"):
            made = write_task(place / one, request.getfixturevalue("base"))
            BUILT.add(f"localhost/strop-harbor:{digest_tree(made / 'environment')[:24]}")
        return {"sandbox": "podman", "num_held_out": 1}
    return {"sandbox": "bubblewrap", "memory_gib": 0.5, "disk_gib": 0.25, "num_train": 1}


@pytest.fixture
def table(request: pytest.FixtureRequest, folder: Path) -> Iterator[dict[str, Any]]:
    """The table of a task in a run file, whose data is there and whose servers run."""
    name = request.param
    if name in OTHERS:
        for made in MADE_DIRS:
            (folder.parent / "cache" / made.name).symlink_to(made)
        one = {"verifiers": environment_of(()), "openenv": OPENENV}[name]
        require_system_part("the environment of a package (make guest-deps agents-deps)", one.is_ready())
    place = folder / "data"
    place.mkdir()
    table = {"name": name, **OTHERS[name]} if name in OTHERS else table_of(name, place)
    if name == "verifiers":
        (place / "guess.py").write_text(TASKSET)
        table["folder"] = str(place)
    if name != "mixture":
        table["max_reply_tokens"] = 8
    if name in ROOMS:
        engine = {"harbor": "podman"}.get(name, "bwrap")
        require_system_part(engine, shutil.which(engine) is not None)
        table |= rooms_of(name, place, request)
    with serving() if name == "openenv" else nullcontext() as url:
        yield table | ({"url": url} if url else {})
    for guest in guests.running.values():
        guest.end()


@pytest.mark.slow
@pytest.mark.usefixtures("few_attempts")
@pytest.mark.parametrize("table", built_in_tasks(), indirect=True)
def test_a_task_is_planned_audited_trained_evaluated_and_played(
    table: dict[str, Any], run: Run, folder: Path, roomy_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = table["name"]
    settings = {key: format_value(value) for key, value in table.items()}
    text = "\n".join(f"{key} = {value}" for key, value in settings.items())
    # Of what takes long there is one prompt.
    num_prompts = 1 if name in ROOMS | {"if-multi", "math"} else 2
    (folder / "run.toml").write_text(RUN.format(model=roomy_model_dir, task=text, prompts=num_prompts))
    words = [f"{key}={value}" for key, value in settings.items() if key != "name"]
    trained = 2 if name in FOR_EVALUATION else 0
    planned = run("plan", "run.toml", "--json")
    assert planned.code == trained, planned.err
    audited = run("audit", name, *words, "num=1", "--json")
    # Some are red by nature, or with so few rows: that is a finding, and no failure.
    assert audited.code in (0, 76), audited.err
    errors = [one for one in json.loads(audited.out)["probes"] if one["status"] == "error"]
    assert errors == []
    if name in FOR_EVALUATION:
        # The others are checked as they are trained.
        checked = run("tasks", "check", "run.toml", "num=1", "--json")
        assert checked.code in (0, 76), checked.err
        assert json.loads(checked.out)["task"].startswith(name)
    ended = run("train", "run.toml")
    assert ended.code == trained, ended.err
    lines = [path.read_text() for path in (folder / "runs").glob("*/metrics.jsonl")]
    assert [json.loads(line)["failed_frac"] for line in lines if line] == ([] if trained else [0.0])
    options = ("--task", name, "--split", "held_out", "--limit", "1", "--out", "evals")
    measured = run("eval", roomy_model_dir, *options, "model.dtype=float32", *words)
    # Replies that are cut are measured, and the result is marked as invalid.
    assert measured.code in (0, 76), measured.err
    (result,) = (json.loads(path.read_text()) for path in (folder / "evals").glob("*.json"))
    assert result["greedy"]["num_unscored"] == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("7\n"))
    played = run("envs", "run", "run.toml")
    if name == "verifiers":  # A program conducts its attempts: nobody can play them.
        assert (played.code, "verifiers" in played.err) == (EXIT_USAGE, True), played.err
        return
    assert played.code == 0, played.err
    assert re.search(r"^score: -?[0-9]", played.out, re.MULTILINE) is not None
