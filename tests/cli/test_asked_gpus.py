"""GPUs that are asked for are GPUs that are used: the commands that were accepted and did something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.hardware import Gpu
from tests.fixtures.commands import Run
from tests.fixtures.nvml import install_fake_nvml, use_nvml

RUN = 'name = "x"\nmodel.uri = "Qwen/Qwen2.5-0.5B"\ntask.name = "arithmetic"\n'
SFT = 'train.terms = "sft"\nsft.source = "rows.jsonl"\n'
SITES = """
[sites.cluster]
backend = "slurm"
accelerator = "h100"
[sites.cloud]
backend = "sagemaker"
region = "eu-west-1"
role = "arn:aws:iam::123456789012:role/train"
bucket = "bucket"
repository = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/train"
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "sft.toml").write_text(RUN + SFT)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "reply": "b"}\n')
    (tmp_path / "strop-sites.toml").write_text(SITES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def dry_run(run: Run, *words: str) -> dict[str, Any]:
    ended = run(*words, "--dry-run", "--json")
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def planned(run: Run, file: str, *words: str) -> dict[str, int]:
    ended = run("plan", file, "--json", *words)
    assert ended.code == 0, ended.err
    return {role["role"]: role["count"] for role in json.loads(ended.out)["roles"]}


ON_SLURM, ON_CLUSTER = "submit run.toml --on slurm", "submit run.toml --on cluster"
REPAIR = "environment.name=repo-repair environment.source=rows.jsonl"


@pytest.mark.parametrize(
    ("words", "gpus", "said"),
    [
        # One of four trained, because the placement was inline.
        ("submit sft.toml --on slurm job.gpus=4", {"train": 4}, "ray: 4 learners, 1 engine"),
        (
            f"{ON_SLURM} job.train_gpus=2 job.infer_gpus=2",
            *({"infer": 2, "train": 2}, "ray: 2 learners, 2 engines"),
        ),
        # With Ray one engine had both, of which vLLM used one.
        (
            f"{ON_SLURM} job.infer_gpus=2 placement.kind=ray engine.kind=vllm",
            *({"infer": 2, "train": 1}, "ray: 1 learner, 2 engines"),
        ),
        (
            f"{ON_CLUSTER} job.train_gpus=5 job.infer_gpus=1 job.env_gpus=1 environment.name=guess-number",
            *({"infer": 1, "train": 5, "env": 1}, "ray: 5 learners, 1 engine, 1 worker"),
        ),
        (
            f"{ON_CLUSTER} {REPAIR} job.train_gpus=4 job.infer_gpus=2 job.env_gpus=2",
            *({"infer": 2, "train": 4, "env": 2}, "ray: 4 learners, 2 engines, 2 workers"),
        ),
        # It had none of its eight.
        ("submit run.toml --on cloud", {"train": 8}, "ray: 8 learners, 8 engines"),
    ],
)
def test_what_is_asked_for_is_given_to_roles(run: Run, words: str, gpus: dict[str, int], said: str) -> None:
    plan = dry_run(run, *words.split())
    assert plan["roles"][0]["gpus"] == gpus
    assert plan["resources"]["gpus_per_node"] == sum(gpus.values())
    ended = run(*words.split(), "--dry-run")
    assert f"placement {said}" in ended.out + ended.err


def test_plan_counts_what_the_run_starts_on_two_nodes(run: Run, tiny_model_dir: Path) -> None:
    """It counted 4 learners where the run starts 8."""
    words = ("job.nodes=2", "job.train_gpus=4", "job.infer_gpus=4")
    assert planned(run, "run.toml", "--on", "cluster", f"model.uri={tiny_model_dir}", *words) == {
        "learner": 8,
        "engine": 8,
    }
    plan = dry_run(run, "submit", "run.toml", "--on", "cluster", *words)
    assert [(role["name"], role["nodes"], role["gpus"]) for role in plan["roles"]] == [
        ("train", "first", {"infer": 4, "train": 4}),
        ("ray", "others", {"infer": 4, "train": 4}),
    ]


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "run.toml"),
        ("submit", "run.toml", "--check"),
        ("submit", "run.toml", "--dry-run"),
        ("train", "run.toml"),
    ],
)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("job.infer_gpus=3", "placement.engines=2"), "GPUs would be idle: 1 of the 3 for job.infer_gpus"),
        (("job.gpus=4", "placement.kind=inline"), "only Ray starts other processes"),
        (("job.train_gpus=2", "placement.learners=1"), "placement.learners is 1 and the nodes have 2"),
    ],
)
def test_an_impossible_layout_passes_no_command(
    run: Run, command: tuple[str, ...], words: tuple[str, ...], said: str
) -> None:
    """It passed plan, dry run and check, and the run refused itself on the node."""
    ended = run(*command, *words)
    assert ended.code == 2
    assert said in ended.err


@pytest.mark.parametrize("command", [("submit", "run.toml", "--check"), ("submit", "run.toml")])
def test_gpus_that_this_machine_lacks_are_refused_before_submission(
    run: Run, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check found nothing that would stop the job, and the run refused itself."""
    use_nvml(tmp_path / "bin", monkeypatch)
    gpu = Gpu(index="0", uuid="GPU-0", name="FAKE", memory_bytes=80 << 30, free_memory_bytes=79 << 30)
    install_fake_nvml(tmp_path / "bin", [gpu])
    ended = run(*command, "--on", "local", "job.gpus=2")
    assert ended.code == 76
    assert "gpus: 2 GPUs are asked for and this machine has 1 GPUs" in ended.err
