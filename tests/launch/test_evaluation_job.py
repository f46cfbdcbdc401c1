"""`strop submit EVAL.toml`: an evaluation is a job on every site, of several tasks, resumable and fetched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strop.cli import main
from strop.errors import ConfigError
from strop.evaluate import read_result
from strop.launch.backends import open_backend
from strop.launch.build_request import AUTO, SubmitOptions, make_plan, read_request
from strop.launch.contract import JobPlan
from strop.record.files import list_shards
from strop.spec.reader import Flag
from tests.fixtures.jobs import wait_for

SITES = """[sites.cloud]
backend = "sagemaker"
region = "us-east-1"
role = "arn:aws:iam::123456789012:role/strop-execution"
bucket = "strop-test"
repository = "123456789012.dkr.ecr.us-east-1.amazonaws.com/strop"
[sites.local]
backend = "local"
gpus_per_node = 8
[sites.container]
backend = "container"
gpus_per_node = 8
image = "strop:1"
[sites.slurm]
backend = "slurm"
gpus_per_node = 8
"""
EVAL_TEXT = """name = "two"
model.uri = "{model}"
model.dtype = "float32"
eval.num_examples = {examples}
eval.num_samples = "none"
placement.threads = 1
[task.parts.arithmetic]
[task.parts.text]
name = "reverse-text"
"""
HARNESS_TEXT = 'model.uri = "Org/Name"\nharness.tasks = ["hellaswag", "gsm8k"]\nharness.num_few_shot = 3\n'
LIMIT_S = 300.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "strop-sites.toml").write_text(SITES)
    (work / "EVAL.toml").write_text(EVAL_TEXT.format(model="Org/Name", examples=64))
    (work / "lm-eval.toml").write_text(HARNESS_TEXT)
    return work


def plan(folder: Path, name: str, *overrides: str, site: str = "local", **given: object) -> JobPlan:
    options = SubmitOptions(
        site=site,
        command=str(given.pop("command", AUTO)),
        overrides=overrides,
        project_path=folder,
        has_snapshot=False,
        **given,  # type: ignore[arg-type]
    )
    request = read_request(str(folder / name), options, environ=os.environ, now=1.0e9)
    return make_plan(request, open_backend(request.site))


@pytest.mark.parametrize("site", ["local", "container", "slurm", "cloud"])
@pytest.mark.parametrize("name", ["EVAL.toml", "lm-eval.toml"])
def test_an_evaluation_is_a_job_on_every_site(folder: Path, site: str, name: str) -> None:
    found = plan(folder, name, site=site, flags=() if site == "cloud" else (gpus(8),))
    (role,) = found.roles
    assert (found.command, role.name, role.nodes, role.must_succeed) == ("eval", "eval", "all", True)
    assert role.gpus == {"eval": 8}
    words = ["strop.cli", "eval", "--config", "{job}/eval.toml", "--out", "{run}/eval", "--node", "{node}/1"]
    assert list(role.argv[2:]) == words


def gpus(number: int) -> Flag:
    return Flag(key="job.gpus", value=number, name="--gpus")


def test_each_node_has_its_share(folder: Path) -> None:
    found = plan(folder, "EVAL.toml", "job.nodes=3", site="slurm", flags=(gpus(4),))
    assert found.roles[0].argv[-2:] == ("--node", "{node}/3")
    assert (found.resources.num_nodes, found.resources.gpus_per_node) == (3, 4)


def test_another_task_or_model_is_another_plan(folder: Path) -> None:
    first = plan(folder, "EVAL.toml")
    assert first.plan_hash == plan(folder, "EVAL.toml").plan_hash
    for word in ("task.parts.arithmetic.max_value=50", "eval.num_examples=3", "model.uri=Org/Other"):
        assert plan(folder, "EVAL.toml", word).plan_hash != first.plan_hash


def test_a_file_says_itself_whether_it_is_trained_or_evaluated(folder: Path) -> None:
    task = 'name = "one"\nmodel.uri = "Org/Name"\ntask.name = "arithmetic"\n'
    for text, command, said in (
        (task + "eval.num_examples = 5\n", "eval", "says nothing of training, and is an evaluation"),
        (task, "train", "is trained with the defaults: it says nothing of it; --command eval evaluates"),
        (task + "eval.num_examples = 5\ntrain.steps = 5\n", "train", ""),
    ):
        (folder / "one.toml").write_text(text)
        found = plan(folder, "one.toml")
        assert found.command == command
        assert said in " ".join(found.notices)
        assert plan(folder, "one.toml", command="eval" if "steps" not in text else "train").command


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("EVAL.toml", {"site": "cloud", "overrides": ("job.nodes=2",)}, "whose hosts see no common disk"),
        (
            "EVAL.toml",
            {"overrides": ("job.train_gpus=2", "job.infer_gpus=1")},
            "job.train_gpus, job.infer_gpus in",
        ),
        ("EVAL.toml", {"sweep": ("seed=1,2",)}, "--sweep in a job that evaluates"),
        (
            "EVAL.toml",
            {"overrides": ("train.steps=3",), "command": "eval"},
            "train.steps (override): no part of",
        ),
        ("EVAL.toml", {"overrides": ("task.max_value=3",)}, "task.max_value in"),
        ("EVAL.toml", {"overrides": ("task.parts.text.max_words=zero",)}, "task.max_words='zero'"),
        ("EVAL.toml", {"overrides": ("harness.seed=3",)}, "harness.seed (override) without harness.tasks"),
        ("lm-eval.toml", {"overrides": ("harness.num_few_shot=-1",)}, "harness.num_few_shot=-1"),
        ("lm-eval.toml", {"overrides": ('harness.tasks=["mbpp"]',)}, "--confirm-run-unsafe-code"),
        ("bare.toml", {"command": "eval"}, "names no model"),
    ],
)
def test_what_no_evaluation_can_be_is_refused_at_submission(
    folder: Path, name: str, given: dict[str, object], message: str
) -> None:
    (folder / "bare.toml").write_text('task.name = "arithmetic"\n')
    overrides = given.pop("overrides", ())
    assert isinstance(overrides, tuple)
    with pytest.raises(ConfigError) as caught:
        plan(folder, name, *overrides, **given)  # type: ignore[arg-type]
    assert message in str(caught.value)


def homes(folder: Path) -> list[Path]:
    return [path for path in (folder / "runs").iterdir() if path.is_dir()]


def tables(home: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(
        (home / "eval" / "tables" / "two-step-000000.json").read_text()
    )
    return found


@pytest.mark.slow
def test_a_job_of_two_tasks_runs_and_its_results_are_fetched(
    folder: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "EVAL.toml").write_text(EVAL_TEXT.format(model=tiny_model_dir, examples=40))
    words = ("submit", "EVAL.toml", "--on", "local", "--no-snapshot", "--wait", "--gpus", "0")
    assert main([*words]) == 0, capsys.readouterr().err
    (home,) = homes(folder)
    assert [(row["task"], row["num_examples"]) for row in tables(home)] == [
        ("arithmetic", 40),
        ("reverse-text", 40),
    ]
    assert read_result(home / "eval" / "two.arithmetic-step-000000.json").num_examples == 40
    capsys.readouterr()
    assert main(["logs", str(home), "--role", "eval"]) == 0
    assert "two-step-000000.csv" in capsys.readouterr().out
    assert main(["fetch", str(home), "--to", str(folder / "fetched")]) == 0
    assert (folder / "fetched" / "eval" / "tables" / "two-step-000000.csv").is_file()
    # Submitted once more, it is the same job.
    assert main([*words]) == 0
    assert homes(folder) == [home]


@pytest.mark.slow
def test_two_nodes_share_the_examples_and_a_killed_share_goes_on(folder: Path, tiny_model_dir: Path) -> None:
    """As on two machines of a cluster: each node's process sees the folder, and nothing else of the other."""
    (folder / "EVAL.toml").write_text(EVAL_TEXT.format(model=tiny_model_dir, examples=100))
    out = folder / "out"
    words = [sys.executable, "-m", "strop.cli", "eval", "--config", "EVAL.toml", "--out", str(out)]
    environ = {**os.environ, "STROP_ATTEMPT": "0-test"}
    nodes = [
        subprocess.Popen([*words, "--node", f"{node}/2"], env=environ, stderr=subprocess.DEVNULL)
        for node in range(2)
    ]
    wait_for(lambda: any(list_shards(path) for path in out.glob("two.*")), limit_s=LIMIT_S)
    nodes[1].send_signal(signal.SIGKILL)
    nodes[1].wait()
    time.sleep(1.0)
    # Without the other node's share there is no result.
    assert nodes[0].poll() is None
    assert not list(out.glob("*.json"))
    again = subprocess.run([*words, "--node", "1/2"], env=environ, capture_output=True, check=False)
    assert again.returncode == 0, again.stderr[-2000:]
    assert nodes[0].wait(timeout=LIMIT_S) == 0
    result = read_result(out / "two.arithmetic-step-000000.json")
    assert result.num_examples == 100
    alone = subprocess.run([*words[:-1], str(folder / "alone")], capture_output=True, check=False)
    assert alone.returncode == 0, alone.stderr[-2000:]
    assert read_result(folder / "alone" / "two.arithmetic-step-000000.json").scores == result.scores
