"""`strop sagemaker`: requests and rights are printed, contradictions refused, and a job runs here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from strop.cli.output import Output
from strop.cli.sagemaker import sagemaker_commands
from strop.errors import CheckRefused, ConfigError

SITES = """[sites.cloud]
backend = "sagemaker"
region = "us-east-1"
role = "arn:aws:iam::123456789012:role/strop-execution"
bucket = "strop-test"
repository = "123456789012.dkr.ecr.us-east-1.amazonaws.com/strop"
"""
RUN = 'name = "small"\n[model]\nuri = "Org/Name"\n[task]\nname = "arithmetic"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "strop-sites.toml").write_text(SITES)
    (work / "qwen3-1.7B.toml").write_text(RUN)
    return work


def run(*words: str) -> int:
    command = typer.main.get_command(sagemaker_commands)
    try:
        command(args=list(words), prog_name="strop sagemaker", obj=Output(), standalone_mode=False)
    except (click.exceptions.Exit, typer.Exit) as end:
        return int(end.exit_code)
    return 0


def submit(*words: str) -> int:
    return run("submit", "qwen3-1.7B.toml", "--on", "cloud", *words)


def test_a_dry_run_prints_the_exact_request_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    assert submit("--dry-run", "--instance-type", "ml.g6e.48xlarge", "--max-runtime", "24h", "--no-vpc") == 0
    out = capsys.readouterr().out
    request: dict[str, Any] = json.loads(out.partition("\n")[2])
    assert request["ResourceConfig"]["InstanceType"] == "ml.g6e.48xlarge"
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 86400}
    assert "qwen3" not in json.dumps(request)
    assert sorted(folder.rglob("*")) == before


def test_the_rights_are_printed_as_documents(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("policy", "--on", "cloud") == 0
    documents = json.loads(capsys.readouterr().out)
    assert set(documents) == {"submitter", "execution_role", "execution_role_trust"}
    assert documents["submitter"]["Version"] == "2012-10-17"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--job-name", "a", "--name-prefix", "b"), "--job-name together with --name-prefix"),
        (("--local", "--push"), "--local together with --push"),
        (("--image", "a", "--image-tag", "b"), "--image together with --image-tag"),
        (("--gpus", "0,1"), "--gpus 0,1 without --local"),
        (("--job-name", "a.b", "--dry-run"), "job name='a.b'"),
        (
            ("--spot", "--max-runtime", "2h", "--max-wait", "1h", "--dry-run"),
            "at least MaxRuntimeInSeconds=7200",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(folder: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        submit(*words)


def test_a_site_of_another_backend_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--on local is a site of backend local"):
        run("submit", "qwen3-1.7B.toml", "--on", "local", "--dry-run")


def test_an_image_that_is_not_here_is_said_before_gpus_are_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CheckRefused, match="no container engine answers"):
        submit("--local", "--gpus", "0")


@pytest.mark.slow
def test_a_job_runs_here_as_the_platform_would_run_it(
    folder: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    settings = (
        f"model.uri={tiny_model_dir}",
        *("model.dtype=float32", "train.steps=1", "train.prompts_per_step=2", "train.rollouts_per_prompt=2"),
        *('train.accept="weights: a random model for a test"', "eval.num_examples=4", "eval.num_samples=2"),
        "placement.threads=1",
    )
    assert submit("--local", "--image", "none", *settings) == 0
    said = capsys.readouterr().err
    assert "local: plain processes on this machine, no container" in said
    assert "train| ended: done" in said
    assert "contract:" not in said
    assert not (folder / "docs").exists()
