"""A site whose S3, logs, ECR, IAM and STS are moto's server, and whose SageMaker is the fake or moto's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from strop.launch.contract import JobPlan
from strop.launch.job_dir import job_path_of, write_plan
from strop.launch.sagemaker.backend import SageMakerBackend
from strop.launch.sagemaker.client import AwsClients, SiteObjects
from strop.launch.sagemaker.options import SageMakerSite
from strop.launch.sagemaker.probe import trust_policy
from tests.fixtures.object_store import use_store
from tests.fixtures.sagemaker import FakeSageMaker
from tests.launch.sagemaker.building import NOON, PROFILE, make_plan, make_request

ROLE = "strop-execution"


@dataclass
class Site:
    """Everything that a test of the backend needs."""

    backend: SageMakerBackend
    clients: AwsClients
    objects: SiteObjects
    fake: FakeSageMaker
    profile: SageMakerSite
    project: Path
    prefix: str

    def plan(self, *, num_trials: int = 1, with_code: bool = True, **changes: Any) -> JobPlan:
        """Return a plan whose home is filled as `submit` fills it."""
        profile = {**changes.pop("profile", {}), **self.profile.model_dump(exclude_defaults=True)}
        # Of no registry of ECR: nobody is asked for its digest.
        changes.setdefault("image", "elsewhere.example/strop:1")
        request = make_request(project=self.project, profile=profile, **changes)
        plan = make_plan(request, num_trials=num_trials)
        job_path = job_path_of(plan.home)
        job_path.mkdir(parents=True, exist_ok=True)
        (job_path / "spec.toml").write_text("name = 'small-try'\n")
        (job_path / "secrets.json").write_text('{"values": {"TOKEN": "canary-secret"}}')
        (job_path / "env.json").write_text("{}")
        if with_code:
            (job_path / "code.tar.zst").write_bytes(b"code")
        write_plan(plan)
        return plan

    def list_keys(self) -> list[str]:
        """Return what is in the bucket below the site's prefix."""
        root = f"s3://strop-test/{self.prefix}"
        return sorted(stored.uri[len(root) + 1 :] for stored in self.objects.list(root))


@cache
def shared_clients(address: str) -> Mapping[str, Any]:
    """Clients of moto's server by service, made once: each takes a tenth of a second of processor time."""
    clients = AwsClients(profile=SageMakerSite(**{**PROFILE, "endpoint_url": address}))
    return {name: clients.client(name) for name in ("ecr", "iam", "logs", "s3", "service-quotas", "sts")}


@pytest.fixture
def site(store_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    use_store(monkeypatch, store_address)
    prefix = f"{tmp_path.parent.name}/{tmp_path.name}".replace("_", "-")
    profile = SageMakerSite(**{**PROFILE, "prefix": prefix, "endpoint_url": store_address})
    clients = AwsClients(profile=profile, by_service=dict(shared_clients(store_address)))
    fake = FakeSageMaker(now=NOON)
    clients.by_service["sagemaker"] = fake
    objects = SiteObjects(profile)
    project = tmp_path / "project"
    project.mkdir()
    return Site(
        backend=SageMakerBackend(profile, clients=clients, objects=objects),
        clients=clients,
        objects=objects,
        fake=fake,
        profile=profile,
        project=project,
        prefix=prefix,
    )


def prepare_account(clients: AwsClients, *, tag: str | None) -> None:
    """Make the role and the repository, with an image if a tag is given."""
    from botocore.exceptions import ClientError

    iam, ecr = clients.client("iam"), clients.client("ecr")
    try:
        iam.create_role(RoleName=ROLE, AssumeRolePolicyDocument=json.dumps(trust_policy()))
        ecr.create_repository(repositoryName="strop")
    except ClientError as error:
        assert error.response["Error"]["Code"] in {  # noqa: PT017
            "EntityAlreadyExists",
            "RepositoryAlreadyExistsException",
        }
    if tag is not None:
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        config = {"digest": f"sha256:{tag.encode().hex():0>64}", "size": 1, "mediaType": f"{kind}.config"}
        manifest = {"schemaVersion": 2, "mediaType": kind, "config": config, "layers": []}
        try:
            ecr.put_image(repositoryName="strop", imageManifest=json.dumps(manifest), imageTag=tag)
        except ClientError as error:
            assert error.response["Error"]["Code"] == "ImageAlreadyExistsException"  # noqa: PT017
