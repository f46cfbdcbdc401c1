"""What one job asks of SageMaker: site profile and options, GPUs of each role, models and data it names.

A job gets whole instances, so lists of GPU indices (as other launchers take them) say only how many GPUs each
role has, and that no two roles share one: they become numbers, and the agent on the node hands GPUs out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from strop import __version__
from strop.errors import ConfigError
from strop.hardware.findings import Finding, Severity
from strop.launch.contract import JobRequest
from strop.launch.dotenv import is_variable_name
from strop.launch.sagemaker.client import JobObjects
from strop.spec import RunSpec
from strop.spec.display import dotted, show_value, walk_values
from strop.spec.eval_file import EvalFile
from strop.spec.job import MAX_SPLIT_GPUS, parse_duration_s
from strop.spec.site import SageMakerSite
from strop.spec.task import role_judges
from strop.store.models import HUB_PATTERN
from strop.store.uris import parse_s3

OPTIONS = frozenset(
    {
        *("image", "image_tag", "instance_type", "instance_count", "job_name", "name_prefix", "description"),
        *("spot", "max_wait", "max_runtime", "volume_gb", "keep_alive_s", "network_isolation", "subnets"),
        *("security_groups", "entrypoint", "config", "run_key", "parent", "assets", "container_image"),
        "is_local",
    }
)
"""Keys of `JobRequest.options` for this backend: the names of its flags."""
_WAIT_FACTOR = 2
_LIST = re.compile(r"\d{1,2}(-\d{1,2})?(,\d{1,2}(-\d{1,2})?)*")
_TRAIN, _EVAL = "--train-gpus", "--eval-gpus"
_MODEL_KEYS = ("uri",)
_FROZEN_KEYS = (("reference", "model"), ("teacher", "model"))
_DATA_KEYS = ("source", "dataset", "order_file", "data", "calibration")
_LOCAL_STARTS = ("/", "~", "./", "../")


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
        """Return the value of a flag, else of the profile."""
        value = self.options.get(name)
        return getattr(self.profile, name, None) if value is None else value


def read_settings(request: JobRequest) -> SageMakerSettings:
    """Merge the options of a submission with the site profile. Pure.

    Raises: ConfigError for an unknown option, and for what the profile lacks.
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
    num_nodes = request.resources.num_nodes
    count = options.get("instance_count")
    if count is None:
        count = num_nodes if num_nodes > 1 else profile.instance_count
    secrets, roles = _split_roles(profile.secret_arns)
    return SageMakerSettings(
        profile=profile,
        options=options,
        instance_type=str(option("instance_type")),
        instance_count=int(count),
        num_cpu_nodes=request.resources.num_cpu_nodes,
        max_runtime_s=runtime_s,
        max_wait_s=wait_s if option("spot") else None,
        has_isolation=bool(option("network_isolation")),
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
    """Split keys of the form `NAME:role,role` into ARNs by variable, and roles by variable."""
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
        if found := tuple(role.strip() for role in names.split(",") if role.strip()):
            roles[name] = found
    return secrets, roles


def _check_options(options: Mapping[str, Any]) -> None:
    unknown = sorted(name for name, value in options.items() if value is not None and name not in OPTIONS)
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)} is no option of SageMaker",
            allowed=", ".join(sorted(OPTIONS)),
            next_step="leave it out, or send the job to another site",
        )


def _lacks(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"the site profile has no {name}: {why}",
        allowed="a profile with region, role, bucket, and repository or image",
        next_step=f"set {name.split(' ', maxsplit=1)[0]} in strop-sites.toml",
    )


def read_gpu_shares(train: str | None, evaluation: str | None, *, has_split: bool) -> dict[str, int]:
    """Return the settings `gpus` or `train_gpus`, and `eval_gpus`, that two flags ask for.

    A list has a comma or a hyphen; beside a list, a single number is an index too. `has_split`: generation
    has GPUs of its own, so that a list for training is the learner's; else it is the whole training's.
    Raises: ConfigError for what is neither a number nor a list, an index that is named twice, by one role or
        by both, or that no instance has.
    """
    given = {flag: text for flag, text in ((_TRAIN, train), (_EVAL, evaluation)) if text is not None}
    for flag, text in given.items():
        if _LIST.fullmatch(text) is None:
            raise _wrong(f"{flag} {show_value(text)}", "it is neither a number of GPUs nor a list of indices")
    if not any(mark in text for text in given.values() for mark in ",-"):
        numbers = {flag: int(text) for flag, text in given.items()}
        return _name(numbers, "train_gpus")
    lists = {flag: _read_list(flag, text) for flag, text in given.items()}
    shared = sorted(set(lists.get(_TRAIN, ())) & set(lists.get(_EVAL, ())))
    if shared:
        raise _wrong(
            f"{_TRAIN} {train} and {_EVAL} {evaluation}",
            f"both name GPU {', '.join(map(str, shared))}, and two roles cannot share one",
        )
    counts = {flag: len(indices) for flag, indices in lists.items()}
    return _name(counts, "train_gpus" if has_split else "gpus")


def _name(numbers: dict[str, int], train_name: str) -> dict[str, int]:
    names = {_TRAIN: train_name, _EVAL: "eval_gpus"}
    return {names[flag]: number for flag, number in numbers.items()}


def _read_list(flag: str, text: str) -> list[int]:
    indices: list[int] = []
    for part in text.split(","):
        first, hyphen, last = part.partition("-")
        found = range(int(first), int(last if hyphen else first) + 1)
        if not found:
            raise _wrong(f"{flag} {text}", f"{part} runs backwards")
        indices += found
    twice = sorted({index for index in indices if indices.count(index) > 1})
    if twice:
        raise _wrong(f"{flag} {text}", f"it names GPU {', '.join(map(str, twice))} twice")
    if max(indices) >= MAX_SPLIT_GPUS:
        raise _wrong(f"{flag} {text}", f"instances have GPUs 0 to {MAX_SPLIT_GPUS - 1}")
    return indices


def _wrong(given: str, why: str) -> ConfigError:
    return ConfigError(
        f"{given}: {why}",
        allowed=f"numbers ({_TRAIN} 4 {_EVAL} 2), or lists without a GPU in common ({_TRAIN} 0-5"
        f" {_EVAL} 6,7)",
        next_step="correct it",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedAsset:
    """One model or data source that a run file names."""

    key: str
    """Dotted setting."""
    value: str
    kind: str
    """`models` or `datasets`: its folder in the store."""

    @property
    def is_local(self) -> bool:
        """Whether it is a path of the submitting machine."""
        return self.value.startswith(_LOCAL_STARTS)

    @property
    def place(self) -> str | None:
        """Its place below the store's root; None if it is not a hub id."""
        match = HUB_PATTERN.fullmatch(self.value)
        if match is None:
            return None
        revision = f"@{match['revision'].replace('/', '--')}" if match["revision"] else ""
        return f"{self.kind}/{match['repo']}{revision}"


def list_assets(spec: RunSpec, evaluation: EvalFile | None = None) -> list[NamedAsset]:
    """Return every model and data source that a run file and its evaluation name, mixtures included."""
    leaves = (leaf for item in walk_values(spec.model_dump(mode="json")) for leaf in _inside(*item))
    found = [asset for leaf in leaves for asset in _assets_of(*leaf)]
    judges = [one.judge_model for one in role_judges(spec.task)]
    found += [NamedAsset(key="task.judge_model", value=name, kind="models") for name in judges]
    known = {(asset.value, asset.kind) for asset in found}
    for place, value in evaluation.values.items() if evaluation is not None else ():
        inner = [asset for section in _inside(place, value) for asset in _assets_of(*section)]
        found += [asset for asset in inner if (asset.value, asset.kind) not in known]
    return found


def refuse_local(assets: list[NamedAsset]) -> None:
    """Refuse paths of the submitting machine, which no job can reach. Raises: ConfigError naming all."""
    local = [f"{asset.key}={asset.value}" for asset in assets if asset.is_local]
    if local:
        raise ConfigError(
            f"{', '.join(local)}: a path of this machine, which no training job can reach",
            allowed="a hub id, s3://, or what the store has",
            next_step="set store.uri, run `strop stage RUN.toml`, and write what it advises",
        )


def find_unstaged(
    assets: list[Mapping[str, Any]], store: str, objects: JobObjects, *, offline: bool
) -> list[Finding]:
    """Return a finding for each asset that the store lacks: an error if the job may use no hub.

    Only names are checked: `strop stage RUN.toml` sends what is missing, and its `--check` compares bytes.

    `assets`: `key`, `value` and `place` of each. Raises: StoreError if the store does not answer.
    """
    findings = []
    for asset in assets:
        uri = asset["value"] if asset["value"].startswith("s3://") else None
        if uri is None and asset["place"] is not None:
            uri = f"{store}/{asset['place']}"
        if uri is None or objects.find(uri) or objects.find(f"{uri.rstrip('/')}/COMPLETE"):
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


def _inside(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a leaf, and the leaves of tables in lists, as in mixtures."""
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
