"""Look up images in ECR, and push them with podman or docker.

The registry's password goes through the program's standard input, never through its arguments, which every
user of the machine can read.
"""

from __future__ import annotations

import base64
import re
import subprocess
from dataclasses import dataclass
from typing import Any

from strop.errors import CheckRefused, ConfigError, RemoteMissing
from strop.launch.sagemaker.client import AwsClients
from strop.launch.sagemaker.engine import Engine
from strop.launch.sagemaker.options import SageMakerSite

LOGIN_LIMIT_S = 60.0
PUSH_LIMIT_S = 3600.0
_REFERENCE = re.compile(
    r"(?:(?P<registry>(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?)/)?"
    r"(?P<name>[a-z0-9]+(?:[._/-][a-z0-9]+)*)(?::(?P<tag>[\w][\w.-]{0,299}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_NAME = re.compile(r"(?:[a-z0-9]+(?:[._-][a-z0-9]+)*/)*[a-z0-9]+(?:[._-][a-z0-9]+)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageReference:
    """The parts of an image's name."""

    name: str
    registry: str | None = None
    """None: the name has no registry of ECR."""
    account: str | None = None
    region: str | None = None
    tag: str | None = None
    digest: str | None = None


def parse_reference(text: str) -> ImageReference | None:
    """Parse the name of an image in ECR; None for another registry or an invalid name."""
    match = _REFERENCE.fullmatch(text)
    return None if match is None else ImageReference(**match.groupdict())


def require_repository_name(name: str) -> None:
    """Refuse an invalid name of an ECR repository. Raises: ConfigError."""
    if 2 <= len(name) <= 256 and _NAME.fullmatch(name):
        return
    raise ConfigError(
        f"repository={name!r} ({len(name)} characters) is no name for a repository",
        allowed="2 to 256 lower-case letters and digits, with . _ - / between them",
        next_step="change repository in the site profile",
    )


def ensure_repository(clients: AwsClients, name: str) -> str:
    """Return the URI of a repository, and create it if it is missing.

    Raises: RemoteDenied naming the denied action.
    """
    require_repository_name(name)
    try:
        return find_repository(clients, name)
    except RemoteMissing:
        pass
    try:
        created = clients.call("ecr", "create_repository", resource=name, repositoryName=name)
    except CheckRefused as error:
        # Another process created it meanwhile.
        if "RepositoryAlreadyExistsException" not in str(error):
            raise
        return find_repository(clients, name)
    return str(created["repository"]["repositoryUri"])


def find_repository(clients: AwsClients, name: str) -> str:
    """Return the URI of a repository. Raises: RemoteMissing; RemoteDenied."""
    reply = clients.call("ecr", "describe_repositories", resource=name, repositoryNames=[name])
    return str(reply["repositories"][0]["repositoryUri"])


def find_digest(clients: AwsClients, image: ImageReference) -> str:
    """Return the digest of an image. Raises: RemoteMissing naming the image; RemoteDenied."""
    image_id = {"imageDigest": image.digest} if image.digest else {"imageTag": image.tag or "latest"}
    place: dict[str, Any] = {"repositoryName": image.name}
    if image.account:
        place["registryId"] = image.account
    shown = f"{image.name}{'@' + image.digest if image.digest else ':' + (image.tag or 'latest')}"
    reply = clients.call("ecr", "describe_images", resource=shown, imageIds=[image_id], **place)
    return str(reply["imageDetails"][0]["imageDigest"])


def log_in(clients: AwsClients, engine: Engine, account: str | None = None) -> str:
    """Log an engine in to the registry of an account (None: the site's); return the registry's host.

    Raises: RemoteDenied; CheckRefused with the program's message.
    """
    registry_ids = {} if account is None else {"registryIds": [account]}
    shown = "" if account is None else f"the registry of account {account}"
    answer = clients.call("ecr", "get_authorization_token", resource=shown, **registry_ids)[
        "authorizationData"
    ][0]
    user, _, password = base64.b64decode(answer["authorizationToken"]).decode().partition(":")
    host = str(answer["proxyEndpoint"]).partition("://")[2].rstrip("/")
    _run(engine.argv("login", "--username", user, "--password-stdin", host), LOGIN_LIMIT_S, password)
    return host


def log_in_for_base(profile: SageMakerSite, engine: Engine, clients: AwsClients | None = None) -> str | None:
    """Log an engine in to the registry of `base_image`; return None if that is not in ECR.

    This login is separate because base images often need another account, region or credentials. Tests pass
    `clients`. Raises: as `log_in`.
    """
    image = parse_reference(profile.base_image or "")
    if image is None or image.registry is None:
        return None
    base_profile = profile.model_copy(
        update={
            "region": image.region,
            "aws_profile": profile.base_image_aws_profile or profile.aws_profile,
        }
    )
    return log_in(clients or AwsClients(profile=base_profile), engine, image.account)


def push_image(clients: AwsClients, engine: Engine, local_image: str, name: str, tag: str) -> str:
    """Push an image under a tag; return its name by digest: `repositoryUri@sha256:...`.

    Raises: RemoteDenied naming the missing right; CheckRefused with the program's message.
    """
    uri = ensure_repository(clients, name)
    log_in(clients, engine)
    _run(engine.argv("tag", local_image, f"{uri}:{tag}"), LOGIN_LIMIT_S)
    _run(engine.argv("push", f"{uri}:{tag}"), PUSH_LIMIT_S)
    # Use the digest in the registry, which may differ from the local program's.
    return f"{uri}@{find_digest(clients, ImageReference(name=name, tag=tag))}"


def _run(argv: list[str], limit_s: float, password: str | None = None) -> str:
    try:
        ended = subprocess.run(
            argv, input=password, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(argv, str(error)) from error
    if ended.returncode != 0:
        words = " ".join((ended.stderr or ended.stdout).split())[-500:]
        raise _failed(argv, words.replace(password, "***") if password else words)
    return ended.stdout


def _failed(argv: list[str], words: str) -> CheckRefused:
    return CheckRefused(
        f"`{' '.join(argv[:2])}` failed: {words}",
        allowed="an engine that works and a registry that accepts",
        next_step="run `strop doctor`, or the same command by hand",
    )
