"""What one job asks of SageMaker: the site profile, with the options of one submission over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop import __version__
from strop.errors import ConfigError, explain_refusal
from strop.launch.contract import JobRequest
from strop.launch.dotenv import is_variable_name
from strop.spec.durations import parse_duration_s
from strop.spec.site import SageMakerSite
from strop.store.uris import parse_s3

OPTIONS = frozenset(
    {
        *("image", "image_tag", "instance_type", "instance_count", "job_name", "name_prefix", "description"),
        *("spot", "max_wait", "max_runtime", "volume_gb", "keep_alive_s", "network_isolation", "subnets"),
        *(
            "security_groups",
            "entrypoint",
            "config",
            "run_key",
            "parent",
            "assets",
            "container_image",
            "is_local",
        ),
    }
)
"""What `JobRequest.options` may say to this backend; the names of its flags."""
_WAIT_FACTOR = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SageMakerSettings:
    """Everything that decides a request besides the job's plan."""

    profile: SageMakerSite
    options: Mapping[str, Any]
    instance_type: str
    instance_count: int
    num_cpu_nodes: int
    max_runtime_s: int
    max_wait_s: int | None
    """None without spot instances."""
    has_isolation: bool
    secrets: Mapping[str, str]
    """Environment variable to the ARN of its secret."""
    secret_roles: Mapping[str, tuple[str, ...]]
    """Roles that get a secret; one that is not named here is for all."""

    @property
    def is_spot(self) -> bool:
        """Whether spot instances are used."""
        return self.max_wait_s is not None

    @property
    def root(self) -> str:
        """Where everything of ours lies: s3://bucket/prefix."""
        return f"s3://{self.profile.bucket}/{self.profile.prefix}"

    @property
    def store(self) -> str:
        """Root of the store that models come from and the run is mirrored to."""
        return self.profile.store or self.root

    @property
    def image(self) -> str:
        """The image as the request names it before its digest is known."""
        given = self.option("image") or self.option("container_image")
        if given:
            return str(given)
        if self.profile.repository is None:
            raise _lacks("image or repository", "the image that the job runs in")
        return f"{self.profile.repository}:{self.option('image_tag') or f'v{__version__}'}"

    def option(self, name: str) -> Any:
        """Return what a flag says, else what the profile says."""
        value = self.options.get(name)
        return getattr(self.profile, name, None) if value is None else value


def read_settings(request: JobRequest) -> SageMakerSettings:
    """Lay the options of a submission over the site profile. Pure.

    Raises: ConfigError for an option that nobody knows, and for what the profile lacks.
    """
    profile, options = request.site.profile, request.options
    assert isinstance(profile, SageMakerSite)  # The launcher chooses the backend by this very class.
    _check_options(options)
    for name, why in (
        ("region", "where the job runs"),
        ("role", "the role that the job acts with"),
        ("bucket", "where code, state and results are kept"),
    ):
        if getattr(profile, name) is None:
            raise _lacks(name, why)
    parse_s3(f"s3://{profile.bucket}/{profile.prefix}")

    def option(name: str) -> Any:
        return getattr(profile, name, None) if options.get(name) is None else options[name]

    limit_s = request.resources.time_limit_s
    runtime_s = _seconds(option("max_runtime"), "max_runtime")
    if limit_s is not None and options.get("max_runtime") is None:
        runtime_s = int(limit_s)
    max_wait = option("max_wait")
    wait_s = _seconds(max_wait, "max_wait") if max_wait else runtime_s * _WAIT_FACTOR
    secrets, roles = _split_roles(profile.secret_arns)
    return SageMakerSettings(
        profile=profile,
        options=options,
        instance_type=str(option("instance_type")),
        instance_count=_count(request, options),
        num_cpu_nodes=request.resources.num_cpu_nodes,
        max_runtime_s=runtime_s,
        max_wait_s=wait_s if option("spot") else None,
        has_isolation=bool(option("network_isolation")),
        secrets=secrets,
        secret_roles=roles,
    )


def _count(request: JobRequest, options: Mapping[str, Any]) -> int:
    if options.get("instance_count") is not None:
        return int(options["instance_count"])
    wanted = request.resources.num_nodes
    assert isinstance(request.site.profile, SageMakerSite)
    return wanted if wanted > 1 else request.site.profile.instance_count


def _seconds(text: str, name: str) -> int:
    try:
        return int(parse_duration_s(text))
    except ValueError as error:
        raise ConfigError(
            explain_refusal(f"{name}: {error}", allowed="such a length of time", next_step=f"correct {name}")
        ) from error


def _split_roles(arns: Mapping[str, str]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Take `NAME:role,role` apart."""
    secrets: dict[str, str] = {}
    roles: dict[str, tuple[str, ...]] = {}
    for key, arn in arns.items():
        name, _, names = key.partition(":")
        if not is_variable_name(name) or not arn.startswith("arn:"):
            raise ConfigError(
                explain_refusal(
                    f"secret_arns.{key.split('=')[0]} names no variable and no ARN",
                    allowed="NAME or NAME:role,role = 'arn:aws:secretsmanager:...'; never a value",
                    next_step="change secret_arns in the site profile",
                )
            )
        secrets[name] = arn
        if found := tuple(role.strip() for role in names.split(",") if role.strip()):
            roles[name] = found
    return secrets, roles


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = sorted(name for name, value in options.items() if value is not None and name not in OPTIONS)
    if unknown:
        raise ConfigError(
            explain_refusal(
                f"{', '.join(unknown)} says nothing to SageMaker",
                allowed=", ".join(sorted(OPTIONS)),
                next_step="leave it out, or send the job to another site",
            )
        )


def _lacks(name: str, why: str) -> ConfigError:
    return ConfigError(
        explain_refusal(
            f"the site profile has no {name}: {why}",
            allowed="a profile with region, role, bucket, and repository or image",
            next_step=f"set {name.split(' ', maxsplit=1)[0]} in strop-sites.toml",
        )
    )
