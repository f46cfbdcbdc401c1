"""SageMaker by the command line: requests and rights are printed, a job runs here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from strop import __version__
from strop.cli import main
from strop.cli.output import Output
from strop.cli.program import app
from strop.errors import CheckRefused, ConfigError
from strop.launch.build_request import SubmitOptions, read_request
from strop.launch.sagemaker.client import AwsClients
from strop.launch.sagemaker.engine import Engine
from strop.launch.sagemaker.options import SageMakerSite
from strop.launch.sagemaker.prepare import push_for
from strop.rollout import Split
from strop.store import get_model
from strop.store.s3_objects import S3Objects
from strop.tasks import build_task
from tests.fixtures.object_store import use_store
from tests.launch.sagemaker.aws import prepare_account
from tests.launch.sagemaker.building import PROFILE, make_request
from tests.run.test_stage import write_data
from tests.store.test_models import write_model

SITES = """[sites.cloud]
backend = "sagemaker"
region = "us-east-1"
role = "arn:aws:iam::123456789012:role/strop-execution"
bucket = "strop-test"
repository = "123456789012.dkr.ecr.us-east-1.amazonaws.com/strop"
"""
RUN = 'name = "small"\n[model]\nuri = "Org/Name"\n[task]\nname = "arithmetic"\n'


@pytest.fixture
def folder(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "strop-sites.toml").write_text(SITES)
    (work / "qwen3-1.7B.toml").write_text(RUN)
    return work


def run(*words: str) -> int:
    command, output = typer.main.get_command(app), Output()
    try:
        with output.hear_notices():
            command(args=list(words), prog_name="strop", obj=output, standalone_mode=False)
    except (click.exceptions.Exit, typer.Exit) as end:
        return int(end.exit_code)
    return 0


def submit(*words: str) -> int:
    return run("submit", "qwen3-1.7B.toml", "--on", "cloud", *words)


def test_a_dry_run_prints_the_exact_request_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    words = ("site.max_runtime=24h",)
    assert submit("--dry-run", "site.instance_type=ml.g6e.48xlarge", *words) == 0
    out = capsys.readouterr().out
    # Beside the run file and the roles.
    request: dict[str, Any] = json.JSONDecoder().raw_decode(out, out.index("\n{") + 1)[0]
    assert request["ResourceConfig"]["InstanceType"] == "ml.g6e.48xlarge"
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 86400}
    assert "qwen3" not in json.dumps(request)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.usefixtures("away_from_home")
def test_after_stage_the_unedited_run_file_is_submitted(
    folder: Path, s3_root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = write_model(tmp_path / "model"), write_data(tmp_path / "data")
    run_file = folder / "qwen3-1.7B.toml"
    run_file.write_text(
        f'name = "small"\nmodel.uri = "{model}"\nstore.uri = "{s3_root}"\n[task]\nname = "mixture"\n'
        f'[task.parts.words]\nname = "gsm8k"\nsource = "{data}"\n[task.parts.sums]\nname = "arithmetic"\n'
    )
    with pytest.raises(ConfigError, match="a path of this machine, which no training job can reach"):
        submit("--dry-run")
    capsys.readouterr()
    assert main(["stage", str(run_file), "--json"]) == 0
    uris = [one["stands_for"] for one in json.loads(capsys.readouterr().out)]
    model_uri, data_uri = uris
    assert submit("--dry-run") == 0
    said = capsys.readouterr().err
    for key, uri, path in (("model.uri", model_uri, model), ("task.parts.words.source", data_uri, data)):
        assert f"{key}: {uri}, which `strop stage` sent, stands for {path}" in said
    request = read_request(
        str(run_file), SubmitOptions(site="cloud", has_snapshot=False), environ=os.environ, now=0.0
    )
    resolved = request.resolved
    assert resolved.spec.model.uri == model_uri
    assert get_model(resolved.spec.model.uri).digest == get_model(str(model)).digest
    assert [len(build_task(resolved.spec.task).examples(split)) > 0 for split in Split] == [True, True]
    assert resolved.origins["model.uri"] == f"staged copy of {model} ({run_file}:2)"
    # Where the paths are seen, they stay.
    local = SubmitOptions(site="local", has_snapshot=False)
    here = read_request(str(run_file), local, environ=os.environ, now=0.0)
    assert here.resolved.spec.model.uri == str(model)
    (data / "train.jsonl").write_text((data / "train.jsonl").read_text() + "\n")
    with pytest.raises(CheckRefused, match=r"train\.jsonl has changed since it was staged"):
        submit("--dry-run")


def test_the_rights_are_printed_as_documents(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("policy", "--on", "cloud") == 0
    documents = json.loads(capsys.readouterr().out)
    assert set(documents) == {"submitter", "execution_role", "execution_role_trust"}
    assert documents["submitter"]["Version"] == "2012-10-17"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--job-name", "a", "site.job_name=b"), "--job-name together with site.job_name="),
        (("site.local=true", "site.push=true"), "site.local together with site.push"),
        (("site.local=true", "--wait"), "site.local together with --wait"),
        (("site.image=a", "site.build=true"), "site.image together with site.build"),
        (("site.image=a", "site.image_tag=b"), "site.image together with site.image_tag"),
        (("site.devices=0,1",), "site.devices without site.local"),
        (("--job-name", "a.b", "--dry-run"), "job name='a.b'"),
        (
            ("site.spot=true", "site.max_runtime=2h", "site.max_wait=1h", "--dry-run"),
            "at least MaxRuntimeInSeconds=7200",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(folder: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        submit(*words)


def test_an_image_that_is_not_here_is_said_before_gpus_are_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(CheckRefused, match="no container engine answers"):
        submit("site.local=true", "site.devices=0")


def test_what_is_pushed_is_submitted_by_digest(
    folder: Path, store_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_store(monkeypatch, store_address)
    profile = SageMakerSite(**{**PROFILE, "endpoint_url": store_address})
    clients = AwsClients(profile=profile)
    for tag in ("0123456789abcdef", f"v{__version__}"):
        prepare_account(clients, tag=tag)
    program = tmp_path / "podman"
    program.write_text(f'#!/bin/sh\necho "$1 $2 $3" >> {tmp_path}/words\ncat > /dev/null\n')
    program.chmod(0o755)
    engine = Engine(kind="podman", program=str(program))
    request = make_request(image_tag="x")
    said: list[str] = []
    pushed = push_for(request, profile, engine, "localhost/strop:0123456789abcdef", said.append)
    sent = pushed.site.profile
    assert isinstance(sent, SageMakerSite)
    assert str(sent.image).startswith(f"{PROFILE['repository']}@sha256:")
    assert sent.image_tag is None
    words = (tmp_path / "words").read_text()
    # Under its own tag, and under this version's, which `strop submit` looks for.
    assert f"push {PROFILE['repository']}:0123456789abcdef" in words
    assert f"push {PROFILE['repository']}:v{__version__}" in words
    with pytest.raises(ConfigError, match=r"site\.push with image=None"):
        push_for(request, profile, engine, None, said.append)


def test_a_build_logs_in_for_its_base_and_says_which_image_the_job_uses(
    folder: Path,
    store_address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_store(monkeypatch, store_address)
    prepare_account(AwsClients(profile=SageMakerSite(**PROFILE, endpoint_url=store_address)), tag="other")
    base = "999999999999.dkr.ecr.us-west-2.amazonaws.com/bases/python:3.11"
    (folder / "strop-sites.toml").write_text(
        f'{SITES}endpoint_url = "{store_address}"\nbase_image = "{base}"\n'
    )
    (folder / "Containerfile").write_text("ARG BASE\nFROM ${BASE}\n")
    program = tmp_path / "podman"
    program.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = info ] || echo "$*" >> {tmp_path}/words\n'
        f'if [ "$1" = login ]; then cat > {tmp_path}/password; fi\n'
        'if [ "$1" = image ]; then echo \'[{"Id": "0123456789abcdef0123"}]\'; fi\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    # What `check` finds in this account is not this test's matter, and asking takes half a minute.
    monkeypatch.setattr("strop.launch.sagemaker.backend.probe_site", lambda *parts: [])
    words = ["submit", "qwen3-1.7B.toml", "--check", "--on", "cloud"]
    assert main([*words, "site.build=true", "site.image_tag=other"]) == 0
    login, build, *rest = (tmp_path / "words").read_text().splitlines()
    assert login == f"login --username AWS --password-stdin {base.partition('/')[0]}"
    assert build == (
        f"build --quiet --tag localhost/strop --file {folder}/Containerfile --build-arg BASE={base} {folder}"
    )
    assert "tag localhost/strop localhost/strop:0123456789abcdef" in rest
    assert (tmp_path / "password").read_text()
    told = capsys.readouterr().err
    assert "the job uses the repository's image" in told


def test_a_build_needs_a_containerfile(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "podman").write_text("#!/bin/sh\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no .*Containerfile"):
        submit("site.build=true", "--check")


@pytest.mark.slow
def test_a_job_runs_here_as_the_platform_would_run_it(
    folder: Path,
    tiny_model_dir: Path,
    s3_root: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the submitter's credentials, which stand in files that the job does not see."""
    credentials = folder / "credentials"
    credentials.write_text("[mine]\naws_access_key_id = test\naws_secret_access_key = test\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))
    settings = (
        f"model.uri={tiny_model_dir}",
        *("model.dtype=float32", "train.steps=1", "train.prompts_per_step=2", "train.group_size=2"),
        *('train.accept="weights: a random model for a test"', "eval.num_examples=4"),
        *("eval.num_samples=none", "placement.threads=1", f"store.uri={s3_root}"),
    )
    assert submit("site.local=true", "site.image=processes", *settings) == 0
    assert any("checkpoints/step-000001/COMPLETE" in stored.uri for stored in S3Objects().list(s3_root))
    said = capsys.readouterr().err
    assert "local: plain processes on this machine, no container" in said
    assert "train| ended: done" in said
    assert "contract:" not in said
    assert not (folder / "docs").exists()
