"""A job's whole life with exactly the printed rights: an S3 that asks for them on every call."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

from strop.errors import CheckRefused, NoCredentials
from strop.launch.contract import RolePlan
from strop.launch.sagemaker.client import SiteObjects
from strop.launch.sagemaker.options import SageMakerSite
from strop.launch.sagemaker.probe import execution_policy, submitter_policy
from strop.run.mirroring import probe_store
from strop.store import open_store
from tests.fixtures.object_store import ask_store, object_store, store_environment, use_store
from tests.fixtures.own_code import own_settings, remove_own_code, write_own_code
from tests.launch.sagemaker.building import PROFILE
from tests.launch.sagemaker.rehearsal import Rehearsal
from tests.launch.sagemaker.test_emulator import HOST, wait_for_nobody, wait_for_state, wait_until
from tests.store.test_models import weights

LIMIT_S = 900.0
"""For a training and its mirror."""
TRAIN = RolePlan(
    name="train", argv=("python3", "-m", "strop.cli", "train", "{run}/job/spec.toml", "output.dir={run}")
)
NUM_STEPS = 12
SETTINGS = (
    *("model.dtype=float32", f"train.steps={NUM_STEPS}", "train.prompts_per_step=2", "train.group_size=2"),
    *("train.checkpoint_every=2", "train.keep_checkpoints=1", "store.keep_last=1", "placement.threads=1"),
    *("eval.num_examples=4", "eval.num_samples=none"),
)


@dataclass
class Account:
    """A store with authorisation, and one user for each printed policy."""

    address: str
    site: SageMakerSite
    users: Mapping[str, tuple[str, str]]

    def environment_of(self, user: str) -> dict[str, str]:
        key, secret = self.users[user]
        return {
            **store_environment(self.address),
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
        }

    def become(self, monkeypatch: pytest.MonkeyPatch, user: str) -> None:
        for name, value in self.environment_of(user).items():
            monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with object_store(tmp_path_factory.mktemp("moto") / "log") as found:
        yield found


@pytest.fixture
def account(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    use_store(monkeypatch, address)
    site = SageMakerSite(**{**PROFILE, "endpoint_url": address})
    policies = {"submitter": submitter_policy(site), "role": execution_policy(site)}
    role = policies["role"]
    store = {action for one in role["Statement"] for action in one["Action"] if action.startswith("s3:")}
    policies |= {action: without(role, action) for action in store}
    iam: Any = boto3.client("iam", endpoint_url=address, region_name="us-east-1")
    boto3.client("s3", endpoint_url=address, region_name="us-east-1").create_bucket(Bucket=site.bucket)
    users = {}
    for policy_name, policy in policies.items():
        name = policy_name.replace(":", "-")
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName="printed", PolicyDocument=json.dumps(policy))
        made = iam.create_access_key(UserName=name)["AccessKey"]
        users[policy_name] = (made["AccessKeyId"], made["SecretAccessKey"])
    assert ask_store(address, "POST", "/moto-api/reset-auth", b"0")[0] == 200
    yield Account(address, site, users)
    ask_store(address, "POST", "/moto-api/reset-auth", b"Infinity")
    ask_store(address, "POST", "/moto-api/reset")


def without(policy: dict[str, Any], action: str) -> dict[str, Any]:
    statements = [
        {**one, "Action": [each for each in one["Action"] if each != action]} for one in policy["Statement"]
    ]
    return {**policy, "Statement": statements}


def root_of(account: Account) -> str:
    return f"s3://{account.site.bucket}/{account.site.prefix}"


@pytest.mark.parametrize(
    "action",
    [
        *("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"),
        *("s3:ListBucketMultipartUploads", "s3:AbortMultipartUpload"),
    ],
)
def test_the_gate_tries_every_right_that_a_mirror_needs(
    account: Account, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """The gate passed without the right to list uploads, and then no checkpoint was mirrored."""
    account.become(monkeypatch, action)
    with pytest.raises(CheckRefused) as caught:
        probe_store(root_of(account))
    assert action in str(caught.value)


def test_without_credentials_no_right_is_asked_for(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job without credentials was told to have `s3:PutObject` granted."""
    account.become(monkeypatch, "role")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(NoCredentials):
        probe_store(root_of(account))


def test_a_large_file_is_staged_with_the_submitters_printed_rights(
    account: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To stage a model was refused: a file sent in parts first looks for uploads that were left."""
    account.become(monkeypatch, "submitter")
    model, copy = tmp_path / "model", tmp_path / "copy"
    model.mkdir()
    (model / "model.safetensors").write_bytes(weights(17 << 20))
    store, uri = open_store(root_of(account)), f"{root_of(account)}/models/large"
    store.put(model, uri)
    store.get(uri, copy)
    assert (copy / "model.safetensors").read_bytes() == weights(17 << 20)


@pytest.mark.slow
def test_lau_2_a_training_with_exactly_the_printed_rights_goes_on_after_a_kill_and_after_a_stop(
    account: Account,
    monkeypatch: pytest.MonkeyPatch,
    tiny_model_dir: Path,
    own_cache: Path,
    tmp_path: Path,
) -> None:
    """LAU-2, A6: what was saved is in S3 while the run goes on, and a new start continues at its step.

    Every upload of a job with the printed role failed, and only `latest.json` was in the store.
    The task is the user's own, and only what travelled with the job is still there.
    """
    account.become(monkeypatch, "submitter")
    objects = SiteObjects(account.site)
    with closing(Rehearsal(tmp_path, objects=objects)) as rehearsal:
        write_own_code(rehearsal.project, "submitted")
        request = rehearsal.submit(
            overrides=(f"model.uri={tiny_model_dir}", *SETTINGS, *own_settings(rehearsal.project)),
            profile={"endpoint_url": account.address},
            roles=(TRAIN,),
            local=True,
        )
        remove_own_code(rehearsal.project)
        environment = {
            **account.environment_of("role"),
            "STROP_STORE_URI": root_of(account),
            "HF_HUB_OFFLINE": "1",
            "STROP_CACHE": str(own_cache),
        }
        settings = {"environment": environment, "sync_every_s": 0.5}
        first = rehearsal.start(request, **settings)
        wait_for_state(rehearsal, request)
        first.kill()
        wait_for_nobody(first)
        second = rehearsal.start(request, **settings)
        root = f"{root_of(account)}/checkpoints/{request['TrainingJobName']}"

        def is_mirrored() -> bool:
            return any(found.uri.endswith("/COMPLETE") for found in objects.list(f"{root}/checkpoints"))

        wait_until(
            lambda: "train| step" in second.log_of(HOST) or second.poll() is not None, "it did not begin"
        )
        wait_until(
            lambda: is_mirrored() or second.poll() is not None, "nothing was mirrored", limit_s=LIMIT_S
        )
        code = second.stop()
        # On a fast machine it may have finished first.
        assert code in {75, 0}, second.log_of(HOST)
        if code == 75:
            # Whatever the platform had copied is gone: the run's own mirror is enough.
            for stored in list(objects.list(request["CheckpointConfig"]["S3Uri"].rstrip("/"))):
                if "/step-" in stored.uri:
                    objects.remove(stored.uri)
        third = rehearsal.start(request, **settings)
        assert third.wait(LIMIT_S) == 0, third.log_of(HOST)
        assert third.check_end() == []
        steps = [line["step"] for line in rehearsal.metrics(request, HOST)]
        assert steps == list(range(1, NUM_STEPS + 1))
        assert code == 0 or "has step" in third.log_of(HOST)
        assert "no state is there" not in second.log_of(HOST) + third.log_of(HOST)
    names = {stored.uri[len(root) + 1 :] for stored in objects.list(root)}
    # One checkpoint is kept: earlier ones were removed.
    complete = [name for name in names if name.startswith("checkpoints/") and name.endswith("/COMPLETE")]
    assert len(complete) == 1
    assert complete[0].startswith(f"checkpoints/step-{NUM_STEPS:06d}"), names
    verdict = objects.read(f"{root}/attempts/{request['TrainingJobName']}-2/verdict.json")
    assert json.loads(verdict)["exit_code"] == 0
    assert "upload_failed" not in objects.read(f"{root}/events.jsonl").decode()
