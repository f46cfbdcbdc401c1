"""Real clients against moto's server: what arrives, what `check` asks, and what refusals say."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from strop.errors import CheckRefused, ConfigError, RemoteDenied, RemoteMissing, RemoteUnreachable
from strop.hardware.findings import Severity
from strop.launch.contract import JobPlan
from strop.launch.sagemaker.backend import SageMakerBackend
from strop.launch.sagemaker.client import AwsClients, action_of
from strop.launch.sagemaker.ecr import (
    compare_images,
    ensure_repository,
    find_digest,
    log_in_for_base,
    parse_reference,
    push_image,
    require_repository_name,
)
from strop.launch.sagemaker.engine import Engine
from strop.launch.sagemaker.options import SageMakerSite
from strop.launch.sagemaker.places import LOG_GROUP
from strop.launch.sagemaker.status import CloudWatchLogs
from tests.fixtures.sagemaker import write_log_lines
from tests.launch.sagemaker.aws import HASTY, Site, prepare_account
from tests.launch.sagemaker.building import NOON, PROFILE

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
    found = site.backend.probe(ecr_plan(site, "tag-good"))
    assert [finding for finding in found if finding.severity is Severity.ERROR] == []
    assert seen
    assert [name for name in seen if not name.startswith(READS)] == []
    assert site.fake.calls == []


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


def test_the_image_goes_by_digest(site: Site) -> None:
    prepare_account(site.clients, tag="tag-digest")
    site.backend.submit(ecr_plan(site, "tag-digest"))
    image = site.fake.sent("create_training_job")[0]["AlgorithmSpecification"]["TrainingImage"]
    assert image.startswith("123456789012.dkr.ecr.us-east-1.amazonaws.com/strop@sha256:")


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"profile": {"role": "arn:aws:iam::123456789012:role/nobody-here"}}, "role", "is not there"),
        ({"profile": {"bucket": "no-such-bucket-here"}}, "bucket", "s3://no-such-bucket-here is not there"),
        ({"profile": {"repository": "123456789012.dkr.ecr.us-east-1.amazonaws.com/none"}}, "image", "none"),
        ({"resources_count": 3}, "quota", "is 2. Allowed: as many instances as the quota"),
    ],
)
def test_what_is_missing_is_named(
    site: Site, changes: dict[str, Any], code: str, words: str, store_address: str
) -> None:
    prepare_account(site.clients, tag="tag-missing")
    profile = SageMakerSite(
        **{**PROFILE, "prefix": site.prefix, "endpoint_url": store_address, **changes.get("profile", {})}
    )
    site.profile = profile
    site.clients.profile = profile
    site.backend = SageMakerBackend(profile, clients=site.clients, objects=site.objects)
    record(site)
    count = changes.get("resources_count")
    found = errors(site, ecr_plan(site, "tag-missing", instance_count=count))
    assert list(found) == [code]
    assert words in found[code]


def test_expired_credentials_are_the_only_finding(site: Site) -> None:
    record(site, get_caller_identity=refusal("ExpiredToken"))
    found = site.backend.probe(ecr_plan(site, "x"))
    assert [finding.code for finding in found] == ["credentials"]
    assert "the credentials have expired" in found[0].given
    assert "log in again" in found[0].next_step


def test_a_right_that_is_missing_is_named_with_the_identity(site: Site) -> None:
    prepare_account(site.clients, tag="tag-rights")
    denied = {"EvalActionName": "sagemaker:CreateTrainingJob", "EvalDecision": "implicitDeny"}
    record(site, simulate_principal_policy={"EvaluationResults": [denied]})
    found = errors(site, ecr_plan(site, "tag-rights"))
    assert "may not sagemaker:CreateTrainingJob" in found["rights"]
    assert "arn:aws:" in found["rights"]


def test_a_question_that_may_not_be_asked_is_unknown(site: Site) -> None:
    prepare_account(site.clients, tag="tag-unknown")
    record(
        site, simulate_principal_policy=refusal("AccessDenied"), list_service_quotas=refusal("AccessDenied")
    )
    found = site.backend.probe(ecr_plan(site, "tag-unknown"))
    unknown = [finding for finding in found if finding.severity is Severity.UNKNOWN]
    assert {finding.code for finding in unknown} == {"rights", "quota"}
    assert "servicequotas:ListServiceQuotas" in next(str(one) for one in unknown if one.code == "quota")


def test_a_role_that_trusts_nobody(site: Site) -> None:
    prepare_account(site.clients, tag="tag-trust")
    record(site, get_role={"Role": {"AssumeRolePolicyDocument": {"Statement": []}}})
    assert "does not trust sagemaker.amazonaws.com" in errors(site, ecr_plan(site, "tag-trust"))["role"]


def test_several_instances_without_a_vpc_are_warned_of(site: Site) -> None:
    prepare_account(site.clients, tag="tag-vpc")
    record(site)
    found = site.backend.probe(ecr_plan(site, "tag-vpc", instance_count=2))
    assert [str(one.severity) for one in found if one.code == "vpc"] == ["warning"]


def test_lau_8_what_was_not_staged_is_named(site: Site) -> None:
    """LAU-8: a model that the store lacks is an error where the job may ask no hub."""
    prepare_account(site.clients, tag="tag-assets")
    record(site)
    plan = ecr_plan(site, "tag-assets", overrides=("model.uri=Org/Name",), profile={"offline": True})
    assert "model.uri=Org/Name" in errors(site, plan)["asset"]
    site.objects.write(f"s3://strop-test/{site.prefix}/models/Org/Name/COMPLETE", b"{}")
    assert errors(site, plan) == {}


def test_a_local_path_is_refused_with_the_command_to_run(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"model.uri=/data/m: a path of this machine.*strop stage"):
        site.plan(overrides=("model.uri=/data/m",))


def test_refused_credentials_name_action_resource_and_identity(site: Site) -> None:
    site.fake.fail_next("create_training_job", "AccessDeniedException", "not authorized")
    with pytest.raises(RemoteDenied) as caught:
        site.backend.submit(site.plan())
    text = str(caught.value)
    assert (
        "sagemaker:CreateTrainingJob on training job job-20261121-120000 is not allowed for arn:aws:" in text
    )
    assert "strop policy" in text


def test_expired_tokens_say_to_log_in(site: Site) -> None:
    site.clients.profile = SageMakerSite(**{**PROFILE, "aws_profile": "mine"})
    site.fake.fail_next("create_training_job", "ExpiredTokenException")
    with pytest.raises(RemoteDenied, match=r"have expired.*aws sso login --profile mine"):
        site.backend.submit(site.plan())


def test_no_credentials_at_all(store_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    clients = AwsClients(profile=SageMakerSite(**{**PROFILE, "endpoint_url": store_address}), retries=HASTY)
    with pytest.raises(RemoteDenied, match="no usable credentials"):
        clients.call("sts", "get_caller_identity")
    assert clients.identity() == "the credentials of this environment"


def test_an_unknown_aws_profile_is_a_mistake_in_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    clients = AwsClients(profile=SageMakerSite(**{**PROFILE, "aws_profile": "nobody"}))
    with pytest.raises(ConfigError, match="the client for sts cannot be made"):
        clients.client("sts")


def test_a_service_that_is_not_there(site: Site) -> None:
    profile = SageMakerSite(**{**PROFILE, "endpoint_url": "http://127.0.0.1:9"})
    clients = AwsClients(profile=profile, retries=HASTY)
    with pytest.raises(RemoteUnreachable, match="sts:GetCallerIdentity failed in 3 attempts"):
        clients.call("sts", "get_caller_identity")


def test_actions_are_written_as_iam_writes_them() -> None:
    assert action_of("sagemaker", "create_training_job") == "sagemaker:CreateTrainingJob"
    assert action_of("s3", "head_bucket") == "s3:ListBucket"
    assert action_of("service-quotas", "list_service_quotas") == "servicequotas:ListServiceQuotas"


def test_without_boto3_the_message_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['boto3'] = None\n"
        "from strop.launch.sagemaker.client import AwsClients\n"
        "from strop.launch.sagemaker.options import SageMakerSite\n"
        "try: AwsClients(profile=SageMakerSite()).client('sts')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("ConfigError SageMaker needs the package boto3")


def test_the_request_arrives_at_a_real_server(site: Site) -> None:
    """Moto accepts nearly anything and echoes most of it: that our request is well-formed on the wire."""
    del site.clients.by_service["sagemaker"]
    plan = site.plan(job_name=f"wire-{site.prefix[-20:].replace('/', '-').strip('-')}")
    ref = site.backend.submit(plan)
    described = site.clients.client("sagemaker").describe_training_job(TrainingJobName=ref.job_id)
    request = plan.details["jobs"][0]["request"]
    for key in ("HyperParameters", "InputDataConfig", "ResourceConfig", "CheckpointConfig"):
        assert described[key] == request[key]
    assert described["AlgorithmSpecification"]["ContainerEntrypoint"] == [
        "python3",
        "-m",
        "strop.launch.sagemaker.node",
    ]


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
    assert LOG_GROUP == "/aws/sagemaker/TrainingJobs"


# Images.


@pytest.mark.parametrize(
    ("text", "name", "tag", "region"),
    [
        ("123456789012.dkr.ecr.eu-west-1.amazonaws.com/a/b:t.1", "a/b", "t.1", "eu-west-1"),
        ("strop", "strop", None, None),
    ],
)
def test_the_name_of_an_image(text: str, name: str, tag: str | None, region: str | None) -> None:
    image = parse_reference(text)
    assert image is not None
    assert (image.name, image.tag, image.region) == (name, tag, region)


@pytest.mark.parametrize("name", ["A", "a", "UPPER", "a..b", "/a", "a/", "a" * 257])
def test_names_that_are_no_repository(name: str) -> None:
    with pytest.raises(ConfigError, match="is no name for a repository"):
        require_repository_name(name)


def test_a_repository_is_made_once(site: Site) -> None:
    name = "made-" + site.prefix[-12:].strip("-/").lower().replace("/", "-")
    uri = ensure_repository(site.clients, name)
    assert uri == ensure_repository(site.clients, name)
    assert uri.endswith(f"/{name}")
    with pytest.raises(RemoteMissing):
        find_digest(site.clients, parse_reference(f"{name}:none") or pytest.fail("no reference"))


def test_no_right_to_make_a_repository_is_said(site: Site) -> None:
    seen: list[str] = []
    site.clients.by_service["ecr"] = Recorder(
        site.clients.client("ecr"), seen, {"create_repository": refusal("AccessDeniedException")}
    )
    with pytest.raises(RemoteDenied, match="ecr:CreateRepository on never-made is not allowed"):
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
    assert image.startswith("123456789012.dkr.ecr.us-east-1.amazonaws.com/strop@sha256:")
    words = (tmp_path / "words").read_text()
    password = (tmp_path / "stdin").read_text()
    assert password
    assert password not in words
    assert [line.split()[0] for line in words.splitlines()] == ["login", "tag", "push"]
    assert "--password-stdin" in words


def test_an_image_that_was_built_and_not_pushed_is_compared_with_the_repositorys(site: Site) -> None:
    prepare_account(site.clients, tag="tag-compare")
    there = parse_reference("123456789012.dkr.ecr.us-east-1.amazonaws.com/strop:tag-compare")
    assert there is not None
    # The id that `prepare_account` gives an image: its tag as hexadecimal digits.
    image_id = f"sha256:{b'tag-compare'.hex():0>64}"
    assert compare_images(site.clients, there, image_id) == ""
    told = compare_images(site.clients, there, "sha256:" + "0" * 64)
    assert told.startswith("strop:tag-compare in the repository is another image")
    absent = replace(there, tag="never-pushed")
    assert compare_images(site.clients, absent, image_id).startswith(
        "the repository has no strop:never-pushed"
    )
    answers = {"batch_get_image": refusal("AccessDeniedException")}
    site.clients.by_service["ecr"] = Recorder(site.clients.client("ecr"), [], answers)
    assert "ecr:BatchGetImage on strop:tag-compare is not allowed" in compare_images(
        site.clients, there, image_id
    )


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


@pytest.mark.parametrize("base_image", [None, "python:3.11-slim", "ghcr.io/some/image:1"])
def test_other_registries_get_no_login(site: Site, tmp_path: Path, base_image: str | None) -> None:
    profile = site.profile.model_copy(update={"base_image": base_image})
    assert log_in_for_base(profile, make_engine(tmp_path)) is None
    assert not (tmp_path / "words").exists()


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
