"""`strop plan --on SITE`: the site's hardware, its price, and one JSON document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.commands import Run
from tests.fixtures.descriptions import fetched

SITES = """[sites.cluster]
backend = "slurm"
gpu_type = "h100"
gpus_per_node = 4
time_limit = "12h"
usd_per_gpu_hour = 2.5

[sites.silent]
backend = "slurm"

[sites.odd]
backend = "slurm"
gpu_type = "1g.10gb"

[sites.named]
backend = "slurm"
gpu_type = "big"
accelerator = "l40s"

[sites.wrong]
backend = "slurm"
accelerator = "tpu"

[sites.cloud]
backend = "sagemaker"
region = "us-east-1"
role = "arn:aws:iam::123456789012:role/strop-execution"
bucket = "strop-test"
repository = "123456789012.dkr.ecr.us-east-1.amazonaws.com/strop"
instance_type = "ml.g6e.12xlarge"
max_runtime = "10h"
"""
KNOWN, SMALL = "model.uri=Qwen/Qwen2.5-7B", "model.uri=Qwen/Qwen3-0.6B"


@pytest.fixture(autouse=True)
def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the run file and of the sites."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    (folder / "strop-sites.toml").write_text(SITES)
    fetched("Qwen/Qwen2.5-7B", "qwen-7b")
    fetched("Qwen/Qwen3-0.6B", "qwen3-0.6b")
    return folder


def plan(run: Run, site: str, *words: str) -> dict[str, Any]:
    ended = run("plan", "run.toml", "--on", site, *words, "--json")
    assert ended.code == 0, ended.err
    # One document, or this raises.
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_json_is_one_document_with_plan_and_job(run: Run) -> None:
    found = plan(run, "cluster", "job.gpus=1")
    assert found["schedule"]["steps"] == 2
    assert found["job"]["site"] == "cluster"
    assert "--gres=gpu:h100:1" in found["job"]["files"]["job.sh"]
    assert plan(run, "local")["job"]["backend"] == "local"


def test_a_word_of_the_site_counts_in_plan_and_job(run: Run) -> None:
    found = plan(run, "cluster", "job.gpus=1", "site.gpu_type=l40s", "site.qos=high", "site.comment=007")
    script = found["job"]["files"]["job.sh"]
    assert "--gres=gpu:l40s:1" in script
    assert "#SBATCH --qos=high" in script
    assert " 007'" in script
    assert found["hardware"] != plan(run, "cluster", "job.gpus=1")["hardware"]
    assert (found["job"]["profile"]["qos"], found["job"]["profile"]["gpu_type"]) == ("high", "l40s")
    assert plan(run, "cloud", KNOWN)["job"]["backend"] == "sagemaker"


def test_plan_on_a_site_is_for_the_sites_gpus(run: Run) -> None:
    found = plan(run, "cluster", "job.gpus=1", KNOWN)
    assert found["hardware"] == "h100"
    assert {role["available_bytes"] for role in found["roles"]} == {80 * 10**9}
    # What this machine has is not compared with.
    assert found["memory"] is None
    shown = " ".join(run("plan", "run.toml", "--on", "cluster", "job.gpus=1", "--all").out.split())
    assert "role on h100" in shown
    assert "peak by NVIDIA H100 data sheet" in shown
    assert "--- job.sh" in shown


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ("silent", "site silent does not say, and a plan needs the GPU of its nodes; set `accelerator`"),
        ("odd", "site odd names 1g.10gb, which strop knows no numbers of"),
    ],
)
def test_a_site_that_names_no_gpu_is_not_planned_as_this_machine(site: str, said: str, run: Run) -> None:
    found = plan(run, site, "job.gpus=1", KNOWN)
    assert (found["memory"], found["roles"], found["time"], found["price"]) == (None, [], None, None)
    assert any(said in line for line in found["unknown"])
    assert found["hardware"] == f"GPU of {site}"
    assert found["disk"] is not None
    # The user's own word holds.
    assert plan(run, site, "job.gpus=1", "--hardware", "l4")["hardware"] == "l4"


def test_the_profiles_accelerator_outranks_the_schedulers_word(run: Run) -> None:
    assert plan(run, "named", "job.gpus=1")["hardware"] == "l40s"
    ended = run("plan", "run.toml", "--on", "wrong", "job.gpus=1")
    assert ended.code == 2
    assert "site wrong: accelerator tpu is no accelerator that strop knows" in ended.err


def test_a_job_without_gpus_has_the_cores_and_memory_that_it_asks_for(run: Run) -> None:
    found = plan(run, "cluster", "job.cpus=6", "job.memory=2G")
    assert found["hardware"] == "6 cores of cluster"
    assert found["memory"]["available_bytes"] == 2 << 30
    assert found["time"]["speeds"]["source"].startswith("assumed: ")
    assert found["price"] is None
    small = plan(run, "cluster", "job.cpus=6", "job.memory=2G", KNOWN)
    assert any(line.startswith("memory: ") for line in small["warnings"])


def test_an_instance_type_says_what_its_nodes_have(run: Run) -> None:
    found = plan(run, "cloud", "job.gpus=4", KNOWN)
    assert found["hardware"] == "l40s"
    assert {role["available_bytes"] for role in found["roles"]} == {48 * 10**9}
    # The volume of the instance, not a disk of this machine.
    assert found["disk"]["available_bytes"] == 100 * 10**9
    # Nobody said a price, and none is made up.
    assert found["price"] is None
    assert "price: set `usd_per_gpu_hour` in the profile of site cloud" in found["unknown"]
    assert found["job"]["cost_usd"] is None
    # Four GPUs for ten hours, whatever the run uses of them.
    assert found["job"]["gpu_hours"] == 40.0


def test_the_price_stands_in_text_json_and_dry_run(run: Run) -> None:
    words = ("job.gpus=2", "placement.kind=ray", "placement.learners=2", KNOWN)
    found = plan(run, "cluster", *words)
    price, time = found["price"], found["time"]
    assert (price["num_gpus"], price["usd_per_gpu_hour"]) == (2, 2.5)
    assert price["step_usd"] == pytest.approx(5.0 * time["step_s"] / 3600)
    assert price["run_usd"] == pytest.approx(5.0 * time["total_s"] / 3600)
    # Twelve hours of two GPUs.
    assert price["limit_usd"] == pytest.approx(60.0)
    assert found["job"]["cost_usd"] == pytest.approx(60.0)
    planned = run("plan", "run.toml", "--on", "cluster", "--all", *words)
    shown = " ".join(planned.out.split())
    assert "price of 2 GPUs at 2.5 USD an hour each" in shown
    assert "at most, by the job's time limit 60.00 USD" in shown
    dry = run("submit", "run.toml", "--on", "cluster", "--dry-run", *words)
    assert dry.code == 0
    assert "at most 24.0 GPU hours, 60.00 USD" in dry.err


def test_limits_are_those_of_the_sites_nodes(run: Run) -> None:
    limits = {one["name"]: one for one in plan(run, "cloud", "job.gpus=4", SMALL)["limits"]}
    assert limits["placement.threads"]["origin"] in {"run.toml:17", "cores of a node of cloud"}
    positions = limits["train.micro_batch_tokens"]
    assert positions["origin"] == "memory of one l40s"
    assert positions["value"] > 1280
    given = plan(run, "cloud", "job.gpus=4", SMALL, "train.micro_batch_tokens=2000")["limits"]
    (own,) = (one for one in given if one["name"] == "train.micro_batch_tokens")
    assert (own["value"], own["origin"]) == (2000, "override")


def test_a_runs_report_says_what_it_cost(place: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # As the launcher sets it for a job.
    monkeypatch.setenv("STROP_USD_PER_HOUR", "360")
    assert run("train", "run.toml", "output.dir=runs/priced", "eval.num_examples=1").code == 0
    predicted = json.loads((place / "runs" / "priced" / "plan.json").read_text())
    assert predicted["usd_per_hour"] == 360.0
    assert predicted["total_s"] > 0
    page = (place / "runs" / "priced" / "report.html").read_text()
    assert "at 360.00 USD an hour; planned " in page
