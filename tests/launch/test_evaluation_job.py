"""`strop submit EVAL.toml`: an evaluation is a job on every site, of several tasks, resumable and fetched."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from strop.cli import main
from strop.errors import ConfigError
from strop.evaluate import EvalResult, read_result, write_result
from strop.launch.backends import open_backend
from strop.launch.build_request import AUTO, SubmitOptions, make_plan, read_request
from strop.launch.contract import JobPlan, Need
from strop.launch.job_dir import write_preview
from strop.run.shares import require_readable
from strop.spec.eval_file import read_eval_file
from tests.evaluate.stored_results import make_result
from tests.fixtures.evaluation_jobs import (
    NUM_SHARDS,
    WHOLE_TABLE,
    alone,
    find_shards,
    results,
    table,
    write_evaluation,
)
from tests.fixtures.jobs import find_process, hold_until_told, wait_for

__all__ = ["alone"]
SITES = """[sites.cloud]
backend = "sagemaker"
region = "us-east-1"
role = "arn:aws:iam::123456789012:role/strop-execution"
bucket = "strop-test"
repository = "123456789012.dkr.ecr.us-east-1.amazonaws.com/strop"
[sites.local]
backend = "local"
gpus_per_node = 8
[sites.slurm]
backend = "slurm"
gpus_per_node = 8
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
    write_evaluation(work, Path("Org/Name"))
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


@pytest.mark.parametrize("site", ["local", "slurm", "cloud"])
@pytest.mark.parametrize("name", ["EVAL.toml", "lm-eval.toml"])
def test_an_evaluation_is_a_job_on_every_site(folder: Path, site: str, name: str) -> None:
    found = plan(folder, name, *(() if site == "cloud" else ("job.gpus=8",)), site=site)
    (role,) = found.roles
    assert (found.command, role.name, role.nodes, role.need) == ("eval", "eval", "all", Need.SUCCESS)
    assert role.gpus == {"eval": 8}
    words = ["strop.cli", "eval", "--config", "{job}/eval.toml", "--out", "{run}/eval", "--node", "{node}/1"]
    assert list(role.argv[2:]) == words


@pytest.mark.parametrize("site", ["local", "cloud"])
def test_baselines_travel_with_the_job(folder: Path, tmp_path: Path, site: str) -> None:
    (folder / "old").mkdir()
    write_result(make_result(step=10), folder / "old" / "arithmetic-step-000010.json")
    write_result(make_result(), folder / "old" / "arithmetic-step-000020.json")
    text = (folder / "EVAL.toml").read_text()
    (folder / "EVAL.toml").write_text('eval.baselines = ["base=old"]\n' + text)
    options = SubmitOptions(site=site, command=AUTO, project_path=folder, has_snapshot=False)
    request = read_request(str(folder / "EVAL.toml"), options, environ=os.environ, now=1.0e9)
    home = tmp_path / "home"
    write_preview(replace(make_plan(request, open_backend(request.site)), home=str(home)), request)
    # As the job reads it, on whatever machine: of the last step, and beside its file.
    (word,) = read_eval_file(home / "job" / "eval.toml").counts.baselines
    name, _, place = word.partition("=")
    assert (name, Path(place).parent) == ("base", home / "job")
    assert read_result(Path(place)) == make_result()
    (folder / "EVAL.toml").write_text('eval.baselines = ["base=nowhere"]\n' + text)
    with pytest.raises(ConfigError, match="the baseline 'nowhere' has no results"):
        read_request(str(folder / "EVAL.toml"), options, environ=os.environ, now=1.0e9)


def test_each_node_has_its_share(folder: Path) -> None:
    found = plan(folder, "EVAL.toml", "job.nodes=3", "job.gpus=4", site="slurm")
    assert found.roles[0].argv[-2:] == ("--node", "{node}/3")
    assert (found.resources.num_nodes, found.resources.gpus_per_node) == (3, 4)


@pytest.mark.parametrize("local", [(), ("site.local=true", "site.image=processes")])
def test_instances_do_not_share_an_evaluation(folder: Path, local: tuple[str, ...]) -> None:
    """Incident: on this machine two hosts ran, and both were told to ask everything."""
    with pytest.raises(ConfigError, match=r"job\.nodes=2 on cloud, whose hosts see no common disk"):
        plan(folder, "EVAL.toml", "job.nodes=2", *local, site="cloud")


def test_a_file_says_itself_whether_it_is_trained_or_evaluated(folder: Path) -> None:
    task = 'name = "one"\nmodel.uri = "Org/Name"\ntask.name = "arithmetic"\n'
    for text, command, said in (
        (task + "eval.num_examples = 5\n", "eval", "--command train"),
        (task, "train", "--command eval"),
        (task + "eval.num_examples = 5\ntrain.steps = 5\n", "train", ""),
    ):
        (folder / "one.toml").write_text(text)
        found = plan(folder, "one.toml")
        assert found.command == command
        assert said in " ".join(found.notices)


EVAL, HARNESS = "EVAL.toml", "lm-eval.toml"
CLOUD, CLUSTER = {"site": "cloud"}, {"site": "slurm"}


@pytest.mark.parametrize(
    ("name", "words", "given", "message"),
    [
        (EVAL, ["job.train_gpus=2", "job.infer_gpus=1"], {}, "job.train_gpus, job.infer_gpus"),
        (EVAL, [], {"sweep": ("seed=1,2",)}, "--sweep"),
        (EVAL, ["train.steps=3"], {"command": "eval"}, "train.steps"),
        (EVAL, ["task.max_value=3"], {}, "task.max_value"),
        (EVAL, ["task.parts.game.max_value=zero"], {}, "task.max_value='zero'"),
        (EVAL, ["harness.seed=3"], {}, "harness.seed"),
        (HARNESS, ["harness.num_few_shot=-1"], {}, "harness.num_few_shot=-1"),
        (HARNESS, ['harness.tasks=["mbpp"]'], {}, "--confirm-run-unsafe-code"),
        ("bare.toml", [], {"command": "eval"}, "names no model"),
        (HARNESS, ["eval.num_samples=4"], {}, "pass@k"),
        (HARNESS, ["sampling.temperature=0.5"], {}, "sampling.temperature"),
        (HARNESS, ["placement.kind=ray"], {}, "placement.kind"),
        (HARNESS, ["task.name=arithmetic"], {}, "task.name"),
        (HARNESS, ["job.nodes=2", "job.gpus=8"], CLUSTER, "job.nodes=2"),
        (HARNESS, ["harness.include=/tmp"], CLOUD, "harness.include=/tmp on cloud"),
    ],
)
def test_what_no_evaluation_can_be_is_refused_at_submission(
    folder: Path, name: str, words: list[str], given: dict[str, object], message: str
) -> None:
    (folder / "bare.toml").write_text('task.name = "arithmetic"\n')
    with pytest.raises(ConfigError, match=message):
        plan(folder, name, *words, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["EVAL.toml", "lm-eval.toml"])
def test_the_file_that_travels_is_one_that_the_job_takes(folder: Path, tmp_path: Path, name: str) -> None:
    """Incident: every job of lm-eval ended with 2 on its node: a default had become four wanted samples."""
    options = SubmitOptions(site="local", command=AUTO, project_path=folder, has_snapshot=False)
    sent = read_request(str(folder / name), options, environ=os.environ, now=1.0e9).evaluation
    assert sent is not None
    (tmp_path / "eval.toml").write_text(sent.to_text())
    found = read_eval_file(tmp_path / "eval.toml", is_job=True)
    require_readable(found, may_run_code=False)
    assert (found.tasks, found.counts) == (sent.tasks, sent.counts)
    # What is the job's own is said in its plan.
    assert found.values == {key: value for key, value in sent.values.items() if key[0] != "job"}


@pytest.mark.slow
def test_a_cancelled_job_is_resumed_and_ends_as_one_that_was_left_alone(
    folder: Path, tiny_model_dir: Path, alone: dict[str, EvalResult], capsys: pytest.CaptureFixture[str]
) -> None:
    write_evaluation(folder, tiny_model_dir)
    words = ["submit", "EVAL.toml", "--on", "local", "--no-snapshot", "job.gpus=0"]
    assert main(words) == 0, capsys.readouterr().err
    (home,) = (path for path in (folder / "runs").iterdir() if path.is_dir())
    wait_for(lambda: find_shards(home), limit_s=LIMIT_S)
    role = find_process("strop.cli eval", str(home))
    assert role is not None
    hold_until_told(role)
    assert main(["cancel", str(home)]) == 0
    kept = {path: path.stat().st_mtime_ns for path in find_shards(home)}
    assert len(kept) < NUM_SHARDS
    assert main([*words, "--resume", home.name, "--wait"]) == 0, capsys.readouterr().err
    # What was kept is not asked again.
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in find_shards(home)}.items()
    capsys.readouterr()
    assert main(["logs", str(home), "--role", "eval"]) == 0
    assert "are kept from before" in capsys.readouterr().out
    assert main(["fetch", str(home), "--to", str(folder / "fetched")]) == 0
    assert results(folder / "fetched") == alone
    assert table(folder / "fetched") == WHOLE_TABLE
    # Submitted once more, it is the same job; there is nothing to resume in one that succeeded.
    assert main(words) == 0
    assert [path for path in (folder / "runs").iterdir() if path.is_dir()] == [home]
    assert main([*words, "--resume", home.name]) != 0
    assert "succeeded" in capsys.readouterr().err
