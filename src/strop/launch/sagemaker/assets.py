"""What a run names that a job must find: models and data, and whether the store has them.

Only names are looked at. `strop stage RUN.toml` sends what is missing; `strop stage --check` compares bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from strop.errors import ConfigError, explain_refusal
from strop.hardware.findings import Finding, Severity
from strop.launch.sagemaker.job_objects import JobObjects
from strop.spec import RunSpec
from strop.spec.display import dotted, walk_values
from strop.spec.eval_file import EvalFile
from strop.spec.task import role_judges
from strop.store.models import HUB_PATTERN

_MODEL_KEYS = ("uri",)
_FROZEN_KEYS = (("reference", "model"), ("teacher", "model"))
_DATA_KEYS = ("source", "dataset", "order_file", "data", "calibration")
_LOCAL_STARTS = ("/", "~", "./", "../")


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedAsset:
    """One thing that a run file names."""

    key: str
    """Dotted setting."""
    value: str
    kind: str
    """`models` or `datasets`: its folder in the store."""

    @property
    def is_local(self) -> bool:
        """Whether it is a path of the machine that submits."""
        return self.value.startswith(_LOCAL_STARTS)

    @property
    def place(self) -> str | None:
        """Return its place below the store's root; None for what is no hub id."""
        match = HUB_PATTERN.fullmatch(self.value)
        if match is None:
            return None
        revision = f"@{match['revision'].replace('/', '--')}" if match["revision"] else ""
        return f"{self.kind}/{match['repo']}{revision}"


def list_assets(spec: RunSpec, evaluation: EvalFile | None = None) -> list[NamedAsset]:
    """Return every model and data source that a run file and its evaluation name, mixtures included."""
    found = [asset for section in _sections(spec.model_dump(mode="json")) for asset in _assets_of(*section)]
    judges = [one.judge_model for one in role_judges(spec.task)]
    found += [NamedAsset(key="task.judge_model", value=name, kind="models") for name in judges]
    known = {(asset.value, asset.kind) for asset in found}
    for place, value in evaluation.values.items() if evaluation is not None else ():
        inner = [asset for section in _inside(place, value) for asset in _assets_of(*section)]
        found += [asset for asset in inner if (asset.value, asset.kind) not in known]
    return found


def refuse_local(assets: list[NamedAsset]) -> None:
    """Refuse paths of the machine that submits: no job can reach them. Raises: ConfigError naming all."""
    local = [f"{asset.key}={asset.value}" for asset in assets if asset.is_local]
    if local:
        raise ConfigError(
            explain_refusal(
                f"{', '.join(local)}: a path of this machine, which no training job can reach",
                allowed="a hub id, s3://, or what the store has",
                next_step="set store.uri, run `strop stage RUN.toml`, and write what it advises",
            )
        )


def find_unstaged(
    assets: list[Mapping[str, Any]], store: str, objects: JobObjects, *, offline: bool
) -> list[Finding]:
    """Say what the store lacks. An error where the job may ask nobody else.

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


def _sections(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for path, value in walk_values(values):
        yield from _inside(path, value)


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
