"""Incidents of cloud jobs: limits met late, assets missing at the start, secrets in requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from strop.errors import CheckRefused, ConfigError
from strop.hardware.findings import Severity
from strop.launch.contract import JobEnvironment
from strop.launch.launcher import Launcher
from strop.launch.sagemaker.limits import check_request
from tests.launch.sagemaker.aws import Site, prepare_account, site
from tests.launch.sagemaker.building import request_of
from tests.launch.sagemaker.test_verbs import launcher_of
from tests.launch.sagemaker.test_verbs import request_of as job_request

__all__ = ["site"]


@pytest.fixture
def launcher(site: Site, tmp_path: Any) -> Iterator[Launcher]:
    yield launcher_of(site, tmp_path)
    # Whatever a test refused: nothing was created, and nothing sent.
    assert site.fake.sent("create_training_job") == []
    assert site.list_keys() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"job_name": "qwen3-1.7B-gsm8k"}, "no dot, underscore or slash"),
        ({"job_name": "a" * 64}, r"\(64 characters\)"),
        ({"spot": True, "max_runtime": "2h", "max_wait": "1h"}, "at least MaxRuntimeInSeconds=7200"),
        ({"instance_type": "ml.invented.large"}, "ResourceConfig.InstanceType"),
        ({"environment": JobEnvironment(variables={"NAME": "v" * 600})}, "has 600 characters. Allowed: 512"),
    ],
)
def test_lau_7_limits_of_the_service_are_met_before_anything_is_sent(
    launcher: Launcher, site: Site, options: dict[str, Any], message: str
) -> None:
    """LAU-7: the client library checks neither patterns nor maxima; jobs failed after their upload."""
    with pytest.raises(ConfigError, match=message):
        launcher.submit(job_request(site, **options))


def test_lau_7_an_image_of_yesterday_is_no_image(launcher: Launcher, site: Site) -> None:
    """LAU-7: a tag with today's date pointed at nothing after midnight."""
    with pytest.raises(CheckRefused, match="strop:2026-11-20 is not there"):
        launcher.submit(job_request(site, image=None, image_tag="2026-11-20"))


def test_lau_7_a_hundred_and_one_hyperparameters(site: Site) -> None:
    """LAU-7: settings as hyperparameters exceed their number; the config is a channel, and two remain."""
    request = request_of(site.plan())
    assert set(request["HyperParameters"]) == {"strop_run", "strop_plan"}
    assert "config" in [channel["ChannelName"] for channel in request["InputDataConfig"]]
    request["HyperParameters"] = {f"k{index}": "v" for index in range(101)}
    (problem,) = check_request(request)
    assert str(problem).startswith("HyperParameters=<101> has 101 entries. Allowed: 100 entries or fewer.")


def test_lau_7_a_name_that_is_taken_is_no_job_of_ours(site: Site) -> None:
    """LAU-7: a common mock overwrites a job of the same name; the service, and the fake, refuse it."""
    plan = site.plan()
    site.fake.create_training_job(**{**request_of(plan), "Tags": []})
    assert site.backend.submit(plan).job_id != request_of(plan)["TrainingJobName"]


def test_lau_8_what_is_not_staged_is_named_and_what_is_staged_passes(launcher: Launcher, site: Site) -> None:
    """LAU-8: a job without a hub failed at its start, because only the policy's path had been looked at."""
    prepare_account(site.clients, tag=None)
    overrides = (
        *("model.uri=Org/Name", "task.name=gsm8k"),
        *("train.terms=distill", "teacher.source=model", "teacher.model=Org/Teacher"),
    )
    plan = site.plan(overrides=overrides, profile={"offline": True})
    named = {asset["value"]: asset["place"] for asset in plan.details["named_assets"]}
    assert named["Org/Name"] == "models/Org/Name"
    assert named["Org/Teacher"] == "models/Org/Teacher"
    assert any(place.startswith("datasets/") for place in named.values() if place)

    def missing() -> list[str]:
        found = site.backend.probe(plan)
        return [
            problem.given
            for problem in found
            if problem.code == "asset" and problem.severity is Severity.ERROR
        ]

    assert len(missing()) == len([place for place in named.values() if place])
    assert any(given.startswith("teacher.model=Org/Teacher: ") for given in missing())
    records = [f"s3://strop-test/{site.prefix}/{place}/COMPLETE" for place in named.values() if place]
    for uri in records:
        site.objects.write(uri, b"{}")
    assert missing() == []
    for uri in records:
        site.objects.remove(uri)


def test_sec_4_a_secret_by_value_is_refused_and_by_arn_is_in_no_request(
    launcher: Launcher, site: Site
) -> None:
    """SEC-4: whoever may describe a job reads its variables."""
    with pytest.raises(ConfigError, match="HF_TOKEN: secrets, and who may describe a job"):
        launcher.submit(job_request(site, environment=JobEnvironment(secrets=("HF_TOKEN",))))
    arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:canary"
    plan = site.plan(profile={"secret_arns": {"HF_TOKEN:train": arn}})
    assert "canary" not in json.dumps(request_of(plan))
