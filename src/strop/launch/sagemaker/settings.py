"""The settings of a job on SageMaker: profile with options, and the models and data that it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from strop import __version__
from strop.errors import ConfigError, RemoteMissing
from strop.hardware.findings import Finding, Severity
from strop.launch.contract import JobRequest
from strop.launch.dotenv import is_variable_name
from strop.launch.sagemaker.client import JobObjects
from strop.launch.sagemaker.options import SageMakerSite
from strop.spec import RunSpec
from strop.spec.display import dotted, walk_values
from strop.spec.eval_file import EvalFile
from strop.spec.job import parse_duration_s
from strop.spec.judge import role_judges
from strop.store.models import HUB_PATTERN
from strop.store.uris import parse_s3

_WAIT_FACTOR = 2
_MODEL_KEYS = ("uri",)
_FROZEN_KEYS = (("reference", "model"), ("teacher", "model"))
_DATA_KEYS = ("source", "dataset", "order_file", "data")
_LOCAL_STARTS = ("/", "~", "./", "../")


@dataclass(frozen=True, kw_only=True, slots=True)
class SageMakerSettings:
    """Everything that determines a request, apart from the job's plan."""

    profile: SageMakerSite
    """The site profile with the job's options."""
    instance_count: int
    num_cpu_nodes: int
    max_runtime_s: int
    max_wait_s: int | None
    """None without spot instances."""
    secrets: Mapping[str, str]
    """Environment variable to the ARN of its secret."""
    secret_roles: Mapping[str, tuple[str, ...]]
    """Secret to the roles that get it; a secret without an entry goes to every role."""

    @property
    def is_spot(self) -> bool:
        """Whether spot instances are used."""
        return self.max_wait_s is not None

    @property
    def root(self) -> str:
        """Root of everything that strop writes: s3://bucket/prefix."""
        return f"s3://{self.profile.bucket}/{self.profile.prefix}"

    @property
    def store(self) -> str:
        """Root of the store with the models and the run's mirror."""
        return self.profile.store or self.root

    @property
    def image(self) -> str:
        """The image's name in the request, before its digest is known."""
        if self.profile.image:
            return self.profile.image
        if self.profile.repository is None:
            raise _missing_setting("image or repository", "the image that the job runs in")
        return f"{self.profile.repository}:{self.profile.image_tag or f'v{__version__}'}"


def read_settings(request: JobRequest) -> SageMakerSettings:
    """Read the profile and the resources of a job. Pure.

    Raises: ConfigError for a setting that the profile lacks.
    """
    profile = request.site.profile
    assert isinstance(profile, SageMakerSite)  # The launcher chooses the backend by this very class.
    for name, why in (
        ("region", "where the job runs"),
        ("role", "the role that the job acts with"),
        ("bucket", "where code, state and results are kept"),
    ):
        if getattr(profile, name) is None:
            raise _missing_setting(name, why)
    parse_s3(f"s3://{profile.bucket}/{profile.prefix}")

    limit_s = request.resources.time_limit_s
    runtime_s = _seconds(profile.max_runtime, "max_runtime") if limit_s is None else int(limit_s)
    wait_s = _seconds(profile.max_wait, "max_wait") if profile.max_wait else runtime_s * _WAIT_FACTOR
    secrets, roles = _split_roles(profile.secret_arns)
    return SageMakerSettings(
        profile=profile,
        instance_count=request.resources.num_nodes,
        num_cpu_nodes=request.resources.num_cpu_nodes,
        max_runtime_s=runtime_s,
        max_wait_s=wait_s if profile.spot else None,
        secrets=secrets,
        secret_roles=roles,
    )


def _seconds(text: str, name: str) -> int:
    try:
        return int(parse_duration_s(text))
    except ValueError as error:
        raise ConfigError(
            f"{name}: {error}", allowed="such a length of time", next_step=f"correct {name}"
        ) from error


def _split_roles(arns: Mapping[str, str]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Split keys of the form `NAME:role,role` into ARNs and roles by variable."""
    secrets: dict[str, str] = {}
    roles: dict[str, tuple[str, ...]] = {}
    for key, arn in arns.items():
        name, _, names = key.partition(":")
        if not is_variable_name(name) or not arn.startswith("arn:"):
            raise ConfigError(
                f"secret_arns.{key.split('=')[0]} names no variable and no ARN",
                allowed="NAME or NAME:role,role = 'arn:aws:secretsmanager:...'; never a value",
                next_step="change secret_arns in the site profile",
            )
        secrets[name] = arn
        if role_names := tuple(role.strip() for role in names.split(",") if role.strip()):
            roles[name] = role_names
    return secrets, roles


def _missing_setting(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"the site profile has no {name}: {why}",
        allowed="a profile with region, role, bucket, and repository or image",
        next_step=f"set {name.split(' ', maxsplit=1)[0]} in strop-sites.toml",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedAsset:
    """A model or data source in a run file."""

    key: str
    """The setting, dotted."""
    value: str
    kind: str
    """`models` or `datasets`: its folder in the store."""

    @property
    def is_local(self) -> bool:
        """Whether the value is a path of the submitting machine."""
        return self.value.startswith(_LOCAL_STARTS)

    @property
    def place(self) -> str | None:
        """The place below the store's root; None if the value is no hub id."""
        match = HUB_PATTERN.fullmatch(self.value)
        if match is None:
            return None
        revision = f"@{match['revision'].replace('/', '--')}" if match["revision"] else ""
        return f"{self.kind}/{match['repo']}{revision}"


def list_assets(spec: RunSpec, evaluation: EvalFile | None) -> list[NamedAsset]:
    """Return every model and data source in a run file and its evaluation, including mixtures."""
    leaves = (leaf for item in walk_values(spec.model_dump(mode="json")) for leaf in _inside(*item))
    assets = [asset for leaf in leaves for asset in _assets_of(*leaf)]
    judges = [judge.judge_model for judge in role_judges(spec.task)]
    assets += [NamedAsset(key="task.judge_model", value=name, kind="models") for name in judges]
    named = {(asset.value, asset.kind) for asset in assets}
    for place, value in evaluation.values.items() if evaluation is not None else ():
        inner = [asset for section in _inside(place, value) for asset in _assets_of(*section)]
        assets += [asset for asset in inner if (asset.value, asset.kind) not in named]
    return assets


def refuse_local(assets: list[NamedAsset]) -> None:
    """Refuse paths of the submitting machine, which no job can reach. Raises: ConfigError naming all."""
    local = [f"{asset.key}={asset.value}" for asset in assets if asset.is_local]
    if local:
        raise ConfigError(
            f"{', '.join(local)}: a path of this machine, which no training job can reach",
            allowed="a hub id, s3://, or what the store has",
            next_step="set store.uri to a place in S3, run `strop stage RUN.toml`, and submit it as it is",
        )


def find_unstaged(
    assets: list[Mapping[str, Any]], store: str, objects: JobObjects, *, offline: bool
) -> list[Finding]:
    """Return a finding for each asset that the store lacks, an error if the job cannot use a hub.

    Only names are checked: `strop stage RUN.toml` sends missing assets, and its `--check` compares bytes.

    `assets`: `key`, `value` and `place` of each. Raises: StoreError if the store does not answer.
    """
    findings = []
    for asset in assets:
        uri = asset["value"] if asset["value"].startswith("s3://") else None
        if uri is None and asset["place"] is not None:
            uri = f"{store}/{asset['place']}"
        if uri is None or objects.find(uri) or objects.find(f"{uri.rstrip('/')}/COMPLETE"):
            continue
        # Assets that another tool sent have no digests of strop: the job verifies them.
        places = [uri.rstrip("/")]
        if asset["place"] is not None and "@" not in asset["place"]:
            kind, name = asset["place"].partition("/")[0], uri.rpartition("/")[2]
            places.append(f"{store}/{kind}/{name}" + ("" if kind == "models" else "_train"))
        if any(_is_of_another_tool(objects, place) for place in places):
            continue
        is_error = offline or asset["value"].startswith("s3://")
        findings.append(
            Finding(
                code="asset",
                given=f"{asset['key']}={asset['value']}: {uri} is not in the store",
                allowed="a complete record there" + ("" if is_error else ", or a hub that the job can reach"),
                next_step="run `strop stage RUN.toml`",
                severity=Severity.ERROR if is_error else Severity.WARNING,
            )
        )
    return findings


def _is_of_another_tool(objects: JobObjects, place: str) -> bool:
    try:
        first = next(iter(objects.list(place)), None)
    except RemoteMissing:
        return False  # The bucket is missing, which has its own finding.
    return first is not None and objects.digest(first.uri) is None


def _inside(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a leaf, or the leaves of tables in a list, as in mixtures."""
    if isinstance(value, list):
        for index, inner in enumerate(value):
            if isinstance(inner, Mapping):
                for tail, leaf in walk_values(inner):
                    yield from _inside((*path, str(index), *tail), leaf)
    else:
        yield path, value


def _assets_of(path: tuple[str, ...], value: Any) -> Iterator[NamedAsset]:
    if not isinstance(value, str) or not value or path[0] in {"output", "store"}:
        return
    is_model = path in _FROZEN_KEYS or path[-1] in _MODEL_KEYS or path[-1].endswith("_model_uri")
    if is_model or path[-1] in _DATA_KEYS:
        yield NamedAsset(key=dotted(path), value=value, kind="models" if is_model else "datasets")
