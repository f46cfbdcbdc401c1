"""Every run file in recipes/ is read and planned; those that this machine can have are trained, tiny."""

from __future__ import annotations

import itertools
import json
import shutil
import string
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.environments.guess_number import GuessNumberSpec
from strop.errors import ConfigError
from strop.hardware.accelerators import find_accelerator
from strop.launch.sites import PROJECT_FILE
from strop.plan.plan import Plan
from strop.plan.planning import make_plan
from strop.record import RunDir
from strop.record.rollouts import read_rollouts
from strop.spec import RunSpec, load_spec, write_spec
from strop.store import get_model, open_store
from strop.tasks.rows.row_task import read_preset
from tests.fixtures.commands import Run, folder, run
from tests.fixtures.judge_server import judge_server, scored, shown_reply
from tests.fixtures.recipes import NAMES, RECIPES, ROOT, sections, tiny_overrides, tiny_steps, write_tiny_rows
from tests.fixtures.tiny_model import tiny_model

__all__ = ["folder", "run"]

by_name = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
# Trained by tests of their own below.
TRAINED = [path for path in RECIPES if path.stem not in ("curriculum", "judge")]
ON_SEVERAL_GPUS = ("split-6-2", "slurm-two-nodes")
ON_ONE_MACHINE = (
    *("engine.kind=native", "engine.max_model_tokens=none", "placement.kind=ray", "placement.engines=1"),
    *("job.nodes=1", "job.train_gpus=none", "job.infer_gpus=none"),
)
"""What is left of several engines of vLLM on Ray: one engine in a process of its own, a step ahead."""


def test_names_are_unique() -> None:
    assert len(NAMES) == len(RECIPES) > 10


@by_name
def test_a_recipe_loads_and_survives_writing(path: Path, tmp_path: Path) -> None:
    resolved = load_spec(path)
    assert resolved.spec.name == path.stem
    assert resolved.notices == ()
    written = tmp_path / "spec.toml"
    written.write_text(write_spec(resolved))
    assert load_spec(written).spec == resolved.spec


@by_name
def test_a_recipe_says_what_it_is_and_the_command(path: Path) -> None:
    text = path.read_text()
    header = list(itertools.takewhile(lambda line: line.startswith("# "), text.splitlines()))
    commands = [line for line in header if line.startswith("#   strop ")]
    assert any(str(path.relative_to(ROOT)) in line for line in commands)
    # No place of anybody's machine.
    assert '= "/' not in text
    assert '= "~' not in text


@by_name
def test_the_page_lists_the_recipe(path: Path) -> None:
    assert f"(../{path.relative_to(ROOT)})" in (ROOT / "docs" / "recipes.md").read_text()


@by_name
def test_a_recipe_is_planned_where_nothing_of_it_is(path: Path, tmp_path: Path, away_from_home: None) -> None:
    if path.stem == "then-rl":
        # It begins where another run ended, and says so.
        with pytest.raises(ConfigError, match="sft-first/checkpoints/step-000015/model does not exist"):
            make_plan(load_spec(path), cache_dir=tmp_path / "cache")
        return
    planned = make_plan(load_spec(path), cache_dir=tmp_path / "cache")
    assert any("is not on this machine" in text for text in planned.unknown)
    # Known by name alone, a model may be too large for the machine that plans.
    assert [text for text in planned.warnings if not text.startswith(("memory: ", "disk: "))] == []


def test_the_demo_asks_for_what_its_promise_is_measured_on() -> None:
    spec = load_spec(NAMES["arithmetic"]).spec
    assert (spec.train.prompts_per_step, spec.train.group_size) == (8, 8)
    assert spec.task.max_reply_tokens == 32
    # 20 * 20 = 400 pairs, 100 of them held out.
    assert spec.task.num_train == 300


def test_make_demo_agent_trains_by_a_recipe_of_several_turns() -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "demo-agent", "DEMO=train.steps=5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ".venv/bin/strop train recipes/demo-agent.toml train.steps=5" in shown.stdout
    task = load_spec(NAMES["demo-agent"]).spec.task
    assert isinstance(task, GuessNumberSpec)
    # Who halves what is left always finds it.
    assert task.max_turns is not None
    assert task.max_value == 2**task.max_turns - 1


def test_reading_a_recipe_takes_milliseconds() -> None:
    path = NAMES["arithmetic"]
    load_spec(path)
    seconds = []
    for _ in range(5):
        started_s = time.process_time()
        load_spec(path, ["train.steps=3"])
        seconds.append(time.process_time() - started_s)
    # Of processor time, and the best of five: a busy machine does not fail the test.
    assert min(seconds) < 0.05


def finished(run_path: Path) -> RunDir:
    record = RunDir.open(run_path)
    assert record.is_finished
    return record


@pytest.mark.slow
@pytest.mark.usefixtures("few_attempts")
@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.stem)
def test_cfg_4_a_recipe_trains(
    path: Path, run: Run, folder: Path, roomy_model_dir: Path, request: Any
) -> None:
    """Incident: 57 of 141 configs ran only on a loop marked legacy; tests were green while it crashed."""
    if path.stem == "mbpp":
        request.getfixturevalue("bubblewrap")
    teacher_dir = tiny_model(folder / "teacher", num_hidden_layers=4, max_position_embeddings=4096)
    words = tiny_overrides(path, roomy_model_dir, folder, teacher_dir=teacher_dir)
    if path.stem in ON_SEVERAL_GPUS:
        words += ON_ONE_MACHINE
    ended = run("train", path, *words, *tiny_steps(path, folder))
    assert ended.code == 0, ended.err
    (line,) = finished(folder / "run").metrics.read()
    # Replies of a random model seldom differ in reward, and then there is nothing to learn; all are judged.
    assert line.get("failed_frac", 0.0) == 0.0
    # Demonstrations, and a teacher of other weights, always teach something.
    assert load_spec(path).spec.train.terms == "rl" or line["loss"] > 0.0


@pytest.mark.slow
def test_reinforcement_learning_begins_at_the_checkpoint_of_imitation(
    run: Run, folder: Path, roomy_model_dir: Path
) -> None:
    place = folder / "sft-then-rl"
    shutil.copytree(NAMES["sft-first"].parent, place, ignore=shutil.ignore_patterns("runs"))
    first, second = place / "sft-first.toml", place / "then-rl.toml"
    # All of its steps, and where its run file says: that is what the second one relies on.
    words = [word for word in tiny_steps(first, folder) if not word.startswith(("train.steps", "output."))]
    ended = run("train", first, f"model.uri={roomy_model_dir}", *words, "optimizer.lr=3e-3")
    assert ended.code == 0, ended.err
    losses = [line["loss"] for line in finished(place / "runs" / "sft-first").metrics.read()]
    assert losses[-1] < 0.7 * losses[0]
    ended = run("train", second, *tiny_steps(second, folder))
    assert ended.code == 0, ended.err
    begun_with = finished(folder / "run").state.facts["model_digest"]
    latest = finished(place / "runs" / "sft-first").latest_checkpoint()
    assert latest is not None
    assert begun_with == get_model(str(latest[1] / "model")).digest != get_model(str(roomy_model_dir)).digest


@pytest.mark.slow
def test_replies_are_graded_by_the_rubric(run: Run, folder: Path, roomy_model_dir: Path) -> None:
    path = NAMES["judge"]
    rows = [json.loads(line) for line in (path.parent / "questions.jsonl").read_text().splitlines()]
    good = {(row["prompt"], row["gold"]) for row in rows if "gold" in row}

    def grade(question: str) -> str:
        asked = question.partition("A child of ten asked:\n")[2].partition("\n")[0]
        return scored(float((asked, shown_reply(question).strip()) in good))

    words = tiny_overrides(path, roomy_model_dir, folder) + tiny_steps(path, folder)
    with judge_server(grade) as server:
        ended = run("train", path, *words, f"task.judge_url={server.url}")
    assert ended.code == 0, ended.err
    (line,) = finished(folder / "run").metrics.read()
    assert (line["judge_unparsable_frac"], line["failed_frac"]) == (0.0, 0.0)


HUB_FOLDERS = {
    name: [file.partition("/")[0] for file in read_preset(name).train] for name in ("gsm8k", "math")
}


def fill_bucket(uri: str, spec: RunSpec, model_dir: Path, folder: Path) -> None:
    """Put the model and the data of a recipe where a store keeps them, under their names of the hub."""
    store = open_store(uri)
    store.put(model_dir, f"{uri}/models/{spec.model.uri}")
    for _, section in sections(spec):
        rows_dir = write_tiny_rows(section["name"], folder / "rows")
        data_dir = folder / "data" / section["name"]
        for subfolder in HUB_FOLDERS[section["name"]]:
            (data_dir / subfolder).mkdir(parents=True)
            for stem in ("train", "test"):
                rows = [json.loads(line) for line in (rows_dir / f"{stem}.jsonl").read_text().splitlines()]
                name = f"{stem}-00000-of-00001.parquet"
                pq.write_table(pa.Table.from_pylist(rows), data_dir / subfolder / name)
        store.put(data_dir, f"{uri}/datasets/{section['source']}")


@pytest.mark.slow
def test_a_curriculum_is_measured_staged_and_trained_from_s3(
    run: Run, folder: Path, roomy_model_dir: Path, s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = folder / "curriculum.toml"
    recipe.write_text(NAMES["curriculum"].read_text().replace("s3://my-bucket/strop", s3_root))
    spec = load_spec(recipe).spec
    fill_bucket(s3_root, spec, roomy_model_dir, folder)
    monkeypatch.setenv("STROP_STORE_URI", s3_root)
    for prefix, section in sections(spec):
        # A random model ends no reply by itself, and an order is made of whole replies alone.
        words = (f"stop={json.dumps(list(string.ascii_lowercase))}", "model.dtype=float32")
        order = Path(section["order_file"])
        assert order.parent == folder
        options = ("--split", "train", "--samples", "2", "--write-order", order, "--out", folder / "evals")
        ended = run("eval", spec.model.uri, "--task", section["name"], *words, *options)
        assert ended.code == 0, (prefix, ended.err)
        assert len(order.read_text().splitlines()) > 1
    ended = run("stage", recipe, "--json")
    assert ended.code == 0, ended.err
    advice = " ".join(one["advice"] for one in json.loads(ended.out) if one["advice"] is not None)
    # All but the orders is there under its own name.
    assert advice.count(" = ") == advice.count("order_file") == 2
    ended = run("train", recipe, *tiny_steps(recipe, folder))
    assert ended.code == 0, ended.err
    (path,) = finished(folder / "run").rollouts_files()
    ordered = (folder / "gsm8k-order.jsonl").read_text() + (folder / "math-order.jsonl").read_text()
    assert all(rollout.example.example_id in ordered for rollout in read_rollouts(path))
    # And the run is kept there.
    assert open_store(s3_root).objects.find(f"{s3_root}/checkpoints/run/latest.json")


def plan_on(name: str, model_dir: Path, folder: Path) -> Plan:
    """Plan a recipe as it stands but for its model and data, on accelerators of 80 GB."""
    path = NAMES[name]
    words = [*tiny_overrides(path, model_dir, folder), "eval.num_examples=none"]
    resolved = load_spec(path, words)
    return make_plan(resolved, cache_dir=folder / "cache", accelerator=find_accelerator("h100"))


@pytest.mark.parametrize(("name", "counts"), [("split-6-2", (2, 6)), ("slurm-two-nodes", (8, 8))])
def test_gpus_of_nodes_are_shared_out(
    name: str, counts: tuple[int, int], roomy_model_dir: Path, tmp_path: Path
) -> None:
    planned = plan_on(name, roomy_model_dir, tmp_path)
    assert [(role.role, role.count) for role in planned.roles] == [
        ("learner", counts[0]),
        ("engine", counts[1]),
    ]
    spec = load_spec(NAMES[name]).spec
    shares = [(slot.kind.value, slot.node) for slot in spec.layout.slots]
    for node in range(spec.job.nodes):
        # Each GPU of each node has one role.
        assert shares.count(("learner", node)) + shares.count(("engine", node)) == 8


@pytest.fixture
def sites(folder: Path) -> None:
    """The example's profiles in the current project."""
    (folder / PROJECT_FILE).write_text((ROOT / "recipes" / PROJECT_FILE).read_text())


def test_two_slurm_nodes_are_asked_for(run: Run, folder: Path, sites: None) -> None:
    before = sorted(folder.rglob("*"))
    ended = run("submit", NAMES["slurm-two-nodes"], "--on", "cluster", "--dry-run", "--json")
    assert ended.code == 0, ended.err
    plan = json.loads(ended.out)
    for option in ("--nodes=2 --ntasks-per-node=1", "--gres=gpu:8", "--exclusive", "--signal=USR2@300"):
        assert f"#SBATCH {option}\n" in plan["files"]["job.sh"]
    assert [(role["name"], role["gpus"]) for role in plan["roles"]] == [
        ("train", {"infer": 4, "train": 4}),
        ("ray", {"infer": 4, "train": 4}),
    ]
    assert sorted(folder.rglob("*")) == before


def test_spot_is_asked_for(run: Run, folder: Path, sites: None) -> None:
    before = sorted(folder.rglob("*"))
    ended = run("submit", NAMES["sagemaker-spot"], "--on", "cloud", "--dry-run", "--json")
    assert ended.code == 0, ended.err
    plan = json.loads(ended.out)
    (job,) = plan["details"]["jobs"]
    assert job["request"]["EnableManagedSpotTraining"] is True
    stop = job["request"]["StoppingCondition"]
    assert stop["MaxWaitTimeInSeconds"] > stop["MaxRuntimeInSeconds"]
    assert plan["max_requeue"] == load_spec(NAMES["sagemaker-spot"]).spec.job.max_requeue
    assert sorted(folder.rglob("*")) == before
