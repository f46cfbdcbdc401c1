"""Real clients against moto's server: what arrives, what `check` asks, and what refusals say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from strop.errors import CheckRefused, ConfigError, RemoteDenied, RemoteMissing, RemoteUnreachable
from strop.hardware.findings import Severity
from strop.launch.contract import JobPlan
from strop.launch.sagemaker.backend import SageMakerBackend
from strop.launch.sagemaker.client import AwsClients
from strop.launch.sagemaker.ecr import (
    ensure_repository,
    find_digest,
    log_in_for_base,
    parse_reference,
    push_image,
    require_repository_name,
)
from strop.launch.sagemaker.engine import IMAGE, Engine, build_image, find_image
from strop.launch.sagemaker.options import SageMakerSite
from strop.launch.sagemaker.probe import actions_of, execution_policy, submitter_policy
from strop.launch.sagemaker.status import CloudWatchLogs
from tests.fixtures.object_store import use_store
from tests.fixtures.sagemaker import write_log_lines
from tests.fixtures.small_root import copy_programs, imported
from tests.launch.sagemaker.aws import Site, prepare_account
from tests.launch.sagemaker.building import NOON, PROFILE

AN_ACCOUNT = "123456789012.dkr.ecr.us-east-1.amazonaws.com"
READS = ("get_", "describe_", "list_", "head_", "simulate_")


class Recorder:
    """A client that notes every call, and may answer some itself."""

    def __init__(self, inner: Any, seen: list[str], answers: dict[str, Any] | None = None) -> None:
        self._inner, self._seen, self._answers = inner, seen, answers or {}

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            self._seen.append(name)
            answer = self._answers.get(name, None)
            if isinstance(answer, Exception):
                raise answer
            return answer if answer is not None else getattr(self._inner, name)(**arguments)

        return call


def refusal(code: str, status: int = 403) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": "scripted"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "X"
    )


def record(site: Site, **answers: Any) -> list[str]:
    """Put recorders before all clients; rights and quotas, which moto lacks, are answered here."""
    seen: list[str] = []
    site.clients.by_service["iam"] = Recorder(
        site.clients.client("iam"), seen, {"simulate_principal_policy": {"EvaluationResults": []}, **answers}
    )
    quotas = {"QuotaName": "ml.p4de.24xlarge for training job usage", "Value": 2.0}
    site.clients.by_service["service-quotas"] = Recorder(
        None, seen, {"list_service_quotas": {"Quotas": [quotas]}, **answers}
    )
    for service in ("sts", "ecr", "s3"):
        site.clients.by_service[service] = Recorder(site.clients.client(service), seen, answers)
    return seen


def ecr_plan(site: Site, tag: str, **changes: Any) -> JobPlan:
    return site.plan(image=None, image_tag=tag, **changes)


def errors(site: Site, plan: JobPlan) -> dict[str, str]:
    return {
        finding.code: str(finding)
        for finding in site.backend.probe(plan)
        if finding.severity is Severity.ERROR
    }


def test_a_good_site_has_no_finding_and_only_reading_calls_are_sent(site: Site) -> None:
    prepare_account(site.clients, tag="tag-good")
    seen = record(site)
    plan = ecr_plan(site, "tag-good")
    found = site.backend.probe(plan)
    assert [finding for finding in found if finding.severity is Severity.ERROR] == []
    assert seen
    assert [name for name in seen if not name.startswith(READS)] == []
    assert site.fake.calls == []
    site.backend.submit(plan)
    image = site.fake.sent("create_training_job")[0]["AlgorithmSpecification"]["TrainingImage"]
    assert image.startswith(f"{AN_ACCOUNT}/strop@sha256:")
    # Several instances without a VPC are warned of.
    found = site.backend.probe(ecr_plan(site, "tag-good", instance_count=2, job_name="other"))
    assert [str(one.severity) for one in found if one.code == "vpc"] == ["warning"]


def test_lau_7_an_image_that_was_never_pushed(site: Site) -> None:
    """LAU-7: a tag that points at nothing is found before anything is sent."""
    prepare_account(site.clients, tag=None)
    record(site)
    plan = ecr_plan(site, "tag-of-yesterday")
    assert "strop:tag-of-yesterday is not there" in errors(site, plan)["image"]
    with pytest.raises(RemoteMissing, match="tag-of-yesterday is not there"):
        site.backend.submit(plan)
    assert site.list_keys() == []
    assert site.fake.sent("create_training_job") == []


DENIED = {"EvalActionName": "sagemaker:CreateTrainingJob", "EvalDecision": "implicitDeny"}
ROLE_ARN = "arn:aws:iam::123456789012:role/nobody-here"


@pytest.mark.parametrize(
    ("profile", "count", "answers", "code", "words"),
    [
        ({"role": ROLE_ARN}, None, {}, "role", "is not there"),
        ({"bucket": "no-such-bucket-here"}, None, {}, "bucket", "s3://no-such-bucket-here is not there"),
        ({"repository": f"{AN_ACCOUNT}/none"}, None, {}, "image", "none"),
        ({}, 3, {}, "quota", "is 2"),
        (
            *({}, None, {"simulate_principal_policy": {"EvaluationResults": [DENIED]}}),
            *("rights", "arn:aws:.*sagemaker:CreateTrainingJob"),
        ),
        (
            *({}, None, {"get_role": {"Role": {"AssumeRolePolicyDocument": {"Statement": []}}}}),
            *("role", "does not trust sagemaker.amazonaws.com"),
        ),
    ],
)
def test_what_is_missing_is_named(
    site: Site,
    profile: dict[str, Any],
    count: int | None,
    answers: dict[str, Any],
    code: str,
    words: str,
) -> None:
    prepare_account(site.clients, tag="tag-missing")
    site.profile = site.clients.profile = SageMakerSite(
        **{**PROFILE, "prefix": site.prefix, "endpoint_url": site.profile.endpoint_url, **profile}
    )
    site.backend = SageMakerBackend(site.profile, clients=site.clients, objects=site.objects)
    record(site, **answers)
    found = errors(site, ecr_plan(site, "tag-missing", instance_count=count or 1))
    assert list(found) == [code]
    assert re.search(words, found[code])


def test_expired_credentials_are_the_only_finding(site: Site) -> None:
    record(site, get_caller_identity=refusal("ExpiredToken"))
    found = site.backend.probe(ecr_plan(site, "x"))
    assert [finding.code for finding in found] == ["credentials"]
    assert "expired" in found[0].given


def test_a_question_that_may_not_be_asked_is_unknown(site: Site) -> None:
    prepare_account(site.clients, tag="tag-unknown")
    record(
        site, simulate_principal_policy=refusal("AccessDenied"), list_service_quotas=refusal("AccessDenied")
    )
    found = site.backend.probe(ecr_plan(site, "tag-unknown"))
    unknown = [finding for finding in found if finding.severity is Severity.UNKNOWN]
    assert {finding.code for finding in unknown} == {"rights", "quota"}
    assert "servicequotas:ListServiceQuotas" in next(str(one) for one in unknown if one.code == "quota")


def test_lau_8_what_was_not_staged_is_named(site: Site) -> None:
    """LAU-8: what the store lacks is an error where no hub may be asked; the policy alone was looked at."""
    prepare_account(site.clients, tag="tag-assets")
    record(site)
    taught = ("train.terms=distill", "teacher.source=model", "teacher.model=Org/Teacher")
    overrides = ("model.uri=Org/Name", "task.name=gsm8k", *taught)
    plan = ecr_plan(site, "tag-assets", overrides=overrides, profile={"offline": True})
    found = [
        finding.given.partition(": ")[0] for finding in site.backend.probe(plan) if finding.code == "asset"
    ]
    assert {"model.uri=Org/Name", "teacher.model=Org/Teacher"} < set(found)
    places = [asset["place"] for asset in plan.details["named_assets"] if asset["place"]]
    assert len(places) == len(found) >= 3
    for place in places:
        site.objects.write(f"s3://strop-test/{site.prefix}/{place}/COMPLETE", b"{}")
    assert errors(site, plan) == {}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("AccessDeniedException", "sagemaker:CreateTrainingJob on .*job-20261121-120000 .* arn:aws:"),
        ("ExpiredTokenException", "aws sso login --profile mine"),
    ],
)
def test_refused_credentials_name_action_resource_and_identity_or_the_login(
    site: Site, code: str, words: str
) -> None:
    site.clients.profile = SageMakerSite(**{**PROFILE, "aws_profile": "mine"})
    site.fake.fail_next("create_training_job", code)
    with pytest.raises(RemoteDenied, match=words):
        site.backend.submit(site.plan())


def test_no_credentials_at_all(store_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    clients = AwsClients(profile=SageMakerSite(**{**PROFILE, "endpoint_url": store_address}), num_attempts=2)
    with pytest.raises(RemoteDenied, match="no usable credentials"):
        clients.call("sts", "get_caller_identity")
    assert clients.identity() == "the credentials of this environment"
    # And a service that is not there.
    use_store(monkeypatch, "http://127.0.0.1:9")
    profile = SageMakerSite(**{**PROFILE, "endpoint_url": "http://127.0.0.1:9"})
    with pytest.raises(RemoteUnreachable, match="sts:GetCallerIdentity failed in up to 2 attempts"):
        AwsClients(profile=profile, num_attempts=2).call("sts", "get_caller_identity")


def test_without_the_package_the_message_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['boto3'] = None\n"
        "from strop.launch.sagemaker.options import SageMakerSite\n"
        "from strop.launch.sagemaker.client import AwsClients\n"
        "try: AwsClients(profile=SageMakerSite()).client('sts')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("ConfigError ")
    assert "pip install 'strop[s3]'" in ended.stdout


def test_the_request_arrives_at_a_real_server(site: Site) -> None:
    """Moto accepts nearly anything and echoes most of it: that our request is well-formed on the wire."""
    del site.clients.by_service["sagemaker"]
    plan = site.plan(job_name=f"wire-{site.prefix[-20:].replace('/', '-').strip('-')}")
    ref = site.backend.submit(plan)
    described = site.clients.client("sagemaker").describe_training_job(TrainingJobName=ref.job_id)
    request = plan.details["jobs"][0]["request"]
    for key in ("HyperParameters", "InputDataConfig", "ResourceConfig", "CheckpointConfig"):
        assert described[key] == request[key]


# Logs.


def test_lines_of_all_hosts_are_merged_by_time(site: Site) -> None:
    logs = site.clients.client("logs")
    job = f"job-{abs(hash(site.prefix))}"
    reader = CloudWatchLogs(site.clients, job)
    assert reader.read_new() == []
    write_log_lines(logs, f"{job}/algo-1-100", ("train| a", "agent words"), NOON)
    write_log_lines(logs, f"{job}/algo-2-100", ("train| b",), NOON + 0.0005)
    write_log_lines(logs, f"{job}-other/algo-1-1", ("foreign",), NOON)
    lines = reader.read_new()
    assert [(line.node, line.role, line.text) for line in lines] == [
        ("algo-1", "train", "a"),
        ("algo-2", "train", "b"),
        ("algo-1", "", "agent words"),
    ]
    assert {line.attempt for line in lines} == {f"{job}-0"}
    assert reader.read_new() == []
    write_log_lines(logs, f"{job}/algo-1-200", ("train| again",), NOON + 5)
    # It came late, and is older than the newest line.
    write_log_lines(logs, f"{job}/algo-2-150", ("train| late",), NOON + 4)
    assert [(line.text, line.attempt) for line in reader.read_new()] == [
        ("late", f"{job}-1"),
        ("again", f"{job}-1"),
    ]


# Images.


def test_the_name_of_an_image() -> None:
    image = parse_reference("123456789012.dkr.ecr.eu-west-1.amazonaws.com/a/b:t.1")
    assert image is not None
    assert (image.name, image.tag, image.region) == ("a/b", "t.1", "eu-west-1")


@pytest.mark.parametrize("name", ["A", "a", "UPPER", "a..b", "/a", "a/", "a" * 257])
def test_names_that_are_no_repository(name: str) -> None:
    with pytest.raises(ConfigError, match="is no name"):
        require_repository_name(name)


def test_a_repository_is_made_once(site: Site) -> None:
    name = "made-" + site.prefix[-12:].strip("-/").lower().replace("/", "-")
    uri = ensure_repository(site.clients, name)
    assert uri == ensure_repository(site.clients, name)
    assert uri.endswith(f"/{name}")
    with pytest.raises(RemoteMissing):
        find_digest(site.clients, parse_reference(f"{name}:none") or pytest.fail("no reference"))
    answers = {"create_repository": refusal("AccessDeniedException")}
    site.clients.by_service["ecr"] = Recorder(site.clients.client("ecr"), [], answers)
    with pytest.raises(RemoteDenied, match="ecr:CreateRepository on never-made"):
        ensure_repository(site.clients, "never-made")


def make_engine(folder: Path, *, fails: str = "") -> Engine:
    """Write a program that notes its words and its standard input, and fails at one command."""
    program = folder / "engine"
    program.write_text(
        "#!/bin/sh\n"
        f'printf "%s\\n" "$*" >> {folder}/words\n'
        f'if [ "$1" = login ]; then cat > {folder}/stdin; fi\n'
        f'if [ "$1" = "{fails}" ]; then cat {folder}/stdin 1>&2; echo " no space left" 1>&2; exit 1; fi\n'
    )
    program.chmod(0o755)
    return Engine(kind="podman", program=str(program))


def test_a_push_logs_in_by_standard_input_and_gives_the_digest(site: Site, tmp_path: Path) -> None:
    prepare_account(site.clients, tag="tag-push")
    image = push_image(site.clients, make_engine(tmp_path), "localhost/strop:dev", "strop", "tag-push")
    assert image.startswith(f"{AN_ACCOUNT}/strop@sha256:")
    words = (tmp_path / "words").read_text()
    password = (tmp_path / "stdin").read_text()
    assert password
    assert password not in words
    assert [line.split()[0] for line in words.splitlines()] == ["login", "tag", "push"]


def test_a_push_that_fails_says_why_without_the_password(site: Site, tmp_path: Path) -> None:
    prepare_account(site.clients, tag="tag-push")
    with pytest.raises(CheckRefused, match="no space left"):
        push_image(site.clients, make_engine(tmp_path, fails="push"), "localhost/a", "strop", "tag-push")
    with pytest.raises(CheckRefused) as caught:
        push_image(site.clients, make_engine(tmp_path, fails="login"), "localhost/a", "strop", "tag-push")
    assert (tmp_path / "stdin").read_text() not in str(caught.value)


BASE = "999999999999.dkr.ecr.us-west-2.amazonaws.com/bases/python:3.11"


def test_the_registry_of_a_foreign_base_image_gets_a_login_of_its_own(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A profile of its own: with the credentials of everything else this would be another identity.
    (tmp_path / "config").write_text("[profile bases]\naws_access_key_id = b\naws_secret_access_key = b\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    profile = site.profile.model_copy(
        update={"base_image": BASE, "base_image_aws_profile": "bases", "region": None}
    )
    host = log_in_for_base(profile, make_engine(tmp_path))
    # The account and the region of the image, not those of the site.
    assert host == "999999999999.dkr.ecr.us-west-2.amazonaws.com"
    words, password = (tmp_path / "words").read_text(), (tmp_path / "stdin").read_text()
    assert words == f"login --username AWS --password-stdin {host}\n"
    assert password
    assert password not in words
    with pytest.raises(ConfigError, match="nobody"):
        log_in_for_base(
            profile.model_copy(update={"base_image_aws_profile": "nobody"}), make_engine(tmp_path)
        )
    # Other registries get none.
    for base_image in (None, "python:3.11-slim", "ghcr.io/some/image:1"):
        profile = site.profile.model_copy(update={"base_image": base_image})
        assert log_in_for_base(profile, make_engine(tmp_path)) is None
    assert (tmp_path / "words").read_text() == words


def test_a_foreign_registry_that_refuses_is_named(site: Site, tmp_path: Path) -> None:
    answers = {"get_authorization_token": refusal("AccessDeniedException")}
    site.clients.by_service["ecr"] = Recorder(site.clients.client("ecr"), [], answers)
    profile = site.profile.model_copy(update={"base_image": BASE})
    wanted = "ecr:GetAuthorizationToken on the registry of account 999999999999 is not allowed"
    with pytest.raises(RemoteDenied, match=wanted):
        log_in_for_base(profile, make_engine(tmp_path), site.clients)
    with pytest.raises(CheckRefused) as caught:
        log_in_for_base(profile, make_engine(tmp_path, fails="login"))
    assert (tmp_path / "stdin").read_text() not in str(caught.value)


# Images that `--build` makes, by a real podman and offline.


@pytest.mark.slow
def test_an_image_is_built_on_its_base_and_found(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    copy_programs(tmp_path / "root", ("sh", "cat"))
    containerfile = tmp_path / "Containerfile"
    containerfile.write_text("ARG BASE\nFROM ${BASE}\nCOPY file /file\nSTOPSIGNAL SIGTERM\n")
    (tmp_path / "file").write_text("brought along")
    with imported(tmp_path / "root") as base:
        name = build_image(engine, containerfile, base)
        image_id = find_image(engine, name)
        assert image_id is not None
        assert image_id == find_image(engine, IMAGE)
        assert name == f"{IMAGE}:{image_id.removeprefix('sha256:')[:16]}"
        assert build_image(engine, containerfile, base) == name
        words = engine.argv("run", "--rm", "--network=none", name, "cat", "/file")
        assert subprocess.run(words, capture_output=True, check=True).stdout == b"brought along"
        with pytest.raises(CheckRefused, match="no-such-base"):
            build_image(engine, containerfile, "localhost/no-such-base")
    assert find_image(engine, "localhost/never-made") is None


def test_gpus_are_passed_in_each_engines_own_way() -> None:
    visible = ["--env", "CUDA_VISIBLE_DEVICES=GPU-1,GPU-2"]
    podman, docker = (Engine(kind=kind, program=kind) for kind in ("podman", "docker"))
    assert podman.device_words(("GPU-1", "GPU-2")) == [
        *("--device", "nvidia.com/gpu=GPU-1", "--device", "nvidia.com/gpu=GPU-2"),
        *visible,
    ]
    assert docker.device_words(("GPU-1", "GPU-2")) == ["--gpus", '"device=GPU-1,GPU-2"', *visible]
    assert podman.device_words(()) == []


# The rights that are asked for: all that are needed, on our own resources, and no more.


SITE = SageMakerSite(**PROFILE)


def statement(policy: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in policy["Statement"] if one["Sid"] == name)


def test_the_submitter_has_the_rights_of_the_written_list() -> None:
    wanted = {
        "ecr:GetAuthorizationToken",
        *(f"ecr:{word}" for word in ("CreateRepository", "DescribeRepositories", "DescribeImages")),
        *(f"ecr:{word}" for word in ("BatchCheckLayerAvailability", "GetDownloadUrlForLayer")),
        *(f"ecr:{word}" for word in ("BatchGetImage", "InitiateLayerUpload", "UploadLayerPart")),
        *(f"ecr:{word}" for word in ("CompleteLayerUpload", "PutImage")),
        *(f"sagemaker:{word}TrainingJob" for word in ("Create", "Describe", "Stop")),
        *("sagemaker:ListTrainingJobs", "sagemaker:AddTags", "sagemaker:ListTags", "iam:PassRole"),
        *("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"),
        *("logs:DescribeLogStreams", "logs:FilterLogEvents", "logs:GetLogEvents"),
    }
    assert wanted <= set(actions_of(submitter_policy(SITE)))


def test_rights_are_on_our_own_resources() -> None:
    policy = submitter_policy(SITE)
    assert statement(policy, "PassRole")["Resource"] == PROFILE["role"]
    assert statement(policy, "PassRole")["Condition"] == {
        "StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}
    }
    assert statement(policy, "Objects")["Resource"] == "arn:aws:s3:::strop-test/strop/*"
    assert statement(policy, "EcrRepository")["Resource"] == (
        "arn:aws:ecr:us-east-1:123456789012:repository/strop"
    )
    assert statement(policy, "Jobs")["Resource"] == (
        "arn:aws:sagemaker:us-east-1:123456789012:training-job/job*"
    )
    everywhere = {one["Sid"] for one in policy["Statement"] if one["Resource"] == "*"}
    assert everywhere == {"EcrLogin", "ListJobs", "Optional"}


def test_the_role_has_the_rights_of_the_written_list_and_no_others() -> None:
    arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hub"
    wanted = {
        *(f"s3:{word}" for word in ("GetObject", "PutObject", "ListBucket", "DeleteObject")),
        *("s3:AbortMultipartUpload", "s3:ListBucketMultipartUploads"),
        *("ecr:GetAuthorizationToken", "ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer"),
        "ecr:BatchGetImage",
        *(f"logs:{word}" for word in ("CreateLogGroup", "CreateLogStream", "PutLogEvents")),
        *("logs:DescribeLogStreams", "cloudwatch:PutMetricData"),
    }
    assert set(actions_of(execution_policy(SITE))) == wanted
    wanted |= {"secretsmanager:GetSecretValue", "kms:Decrypt", "kms:GenerateDataKey", "kms:CreateGrant"}
    wanted |= {
        f"ec2:{word}"
        for word in (
            *("CreateNetworkInterface", "CreateNetworkInterfacePermission", "DeleteNetworkInterface"),
            *("DeleteNetworkInterfacePermission", "DescribeNetworkInterfaces", "DescribeVpcs"),
            *("DescribeDhcpOptions", "DescribeSubnets", "DescribeSecurityGroups"),
        )
    }
    full = SageMakerSite(
        **PROFILE, secret_arns={"HF_TOKEN": arn}, kms_key="alias/mine", subnets=("subnet-1",)
    )
    policy = execution_policy(full)
    assert set(actions_of(policy)) == wanted
    assert statement(policy, "Secrets")["Resource"] == [arn]
    assert statement(policy, "Key")["Resource"] == "arn:aws:kms:us-east-1:123456789012:alias/mine"


def test_a_base_image_of_another_account_may_be_pulled() -> None:
    base = "999999999999.dkr.ecr.us-west-2.amazonaws.com/bases/python:3.11"
    policy = submitter_policy(SageMakerSite(**PROFILE, base_image=base))
    assert statement(policy, "EcrBase")["Resource"] == (
        "arn:aws:ecr:us-west-2:999999999999:repository/bases/python"
    )
    assert "ecr:PutImage" not in statement(policy, "EcrBase")["Action"]
    # Other credentials for it: then this identity needs nothing there.
    other = SageMakerSite(**PROFILE, base_image=base, base_image_aws_profile="bases")
    for profile in (other, SageMakerSite(**PROFILE, base_image="python:3.11-slim")):
        assert "EcrBase" not in [one["Sid"] for one in submitter_policy(profile)["Statement"]]
