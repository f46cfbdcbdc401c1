"""What follows for a job from the type and the number of its instances."""

from __future__ import annotations

from typing import Any

import pytest

from strop.errors import ConfigError
from strop.launch.sagemaker.options import SageMakerSite
from strop.spec.job import JobSpec


def implied(job: dict[str, Any], **options: Any) -> dict[str, Any]:
    site = SageMakerSite().with_options(options)
    return {flag.key: flag.value for flag in site.implied_settings(JobSpec(**job), options)}


def test_a_job_that_says_nothing_gets_all_gpus_of_its_instances() -> None:
    # It had none: CUDA_VISIBLE_DEVICES was empty on an instance with 8.
    assert implied({}) == {"job.gpus": 8}
    assert implied({}, instance_type="ml.m5.xlarge") == {}
    assert implied({"train_gpus": 4, "infer_gpus": 4}) == {}
    assert implied({}, instance_count=2) == {"job.nodes": 2, "job.gpus": 8}
    assert implied({"nodes": 4}) == {"job.gpus": 8}
    assert implied({"nodes": 4}, instance_count=2)["job.nodes"] == 2
    assert implied({}, instance_type="ml.trn1.2xlarge") == {}
    assert implied({}, local=True, devices="0,1") == {"job.gpus": 2}
    assert implied({}, local=True) == {}


@pytest.mark.parametrize(
    ("job", "options", "words"),
    [
        (
            {"single_gpu": True},
            {},
            "1 GPU is asked for in the job section, and ml.p4de.24xlarge gives 8: 7 would",
        ),
        ({"gpus": 0}, {}, "8 would be idle"),
        ({"gpus": 2}, {"instance_type": "ml.m5.xlarge"}, "2 GPUs are asked for"),
        ({"gpus": 1}, {"local": True, "devices": "0,1"}, "--gpus gives 2: 1 would be idle"),
    ],
)
def test_gpus_that_are_paid_for_and_idle_are_refused(
    job: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        implied(job, **options)
