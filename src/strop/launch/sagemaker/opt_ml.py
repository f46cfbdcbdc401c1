"""What the platform tells a container: the files below /opt/ml, read defensively.

Only what this needs is required; what nobody knows is kept for the start record.
Source: the developer guide of SageMaker, and the readers of the vendor's training toolkit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, explain_refusal
from strop.launch.sagemaker import places

CPU_GROUP = "cpu"
_KNOWN = frozenset(
    {"current_host", "hosts", "network_interface_name", "current_group_name", "instance_groups"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """All hosts of a job in one order that every host computes for itself."""

    names: tuple[str, ...]
    """The main part first, each part sorted as text: algo-1, algo-10, algo-2."""
    current: str
    cpu: frozenset[str] = frozenset()
    """Those of the part without GPUs."""
    interface: str | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    """What the platform says besides."""

    @property
    def node(self) -> int:
        """This host's place in the order."""
        return self.names.index(self.current)

    @property
    def head(self) -> str:
        """The host that decides."""
        return self.names[0]

    @property
    def is_head(self) -> bool:
        """Whether this host decides."""
        return self.current == self.head


@dataclass(frozen=True, kw_only=True, slots=True)
class OptMl:
    """The tree that the platform makes, at its root."""

    root: Path

    @property
    def failure_path(self) -> Path:
        """The file whose first 1,024 characters become the job's FailureReason."""
        return self.root / places.FAILURE

    @property
    def checkpoint_path(self) -> Path:
        """The directory that the platform keeps in step with S3."""
        content = _read_object(self.root / places.CHECKPOINTS) or {}
        local = str(content.get("LocalPath") or places.CHECKPOINT_PATH)
        inside = Path(local).relative_to(places.OPT_ML) if local.startswith(f"{places.OPT_ML}/") else None
        # A tree elsewhere than /opt/ml keeps everything below itself.
        return Path(local) if inside is None else self.root / inside

    def channel_path(self, name: str) -> Path:
        """Return where a channel's files are."""
        return self.root / places.DATA / name

    def read_parameters(self) -> dict[str, str]:
        """Return the hyperparameters; {} without the file. Raises: CheckRefused if it is damaged."""
        content = _read_object(self.root / places.HYPERPARAMETERS) or {}
        return {str(name): str(value) for name, value in content.items()}

    def read_hosts(self) -> Hosts:
        """Return the hosts of the job. Raises: CheckRefused if the file lacks what is needed."""
        path = self.root / places.RESOURCES
        content = _read_object(path)
        if content is None:
            raise _unusable(path, "is missing")
        hosts, current = content.get("hosts"), content.get("current_host")
        if not isinstance(hosts, list) or not hosts or current not in hosts:
            raise _unusable(path, f"says hosts={hosts!r} and current_host={current!r}")
        cpu = _cpu_hosts(content)
        names = (*sorted(set(map(str, hosts)) - cpu), *sorted(set(map(str, hosts)) & cpu))
        interface = content.get("network_interface_name")
        return Hosts(
            names=names,
            current=str(current),
            cpu=cpu,
            interface=str(interface) if interface else None,
            others={key: value for key, value in content.items() if key not in _KNOWN},
        )


def _cpu_hosts(content: Mapping[str, Any]) -> frozenset[str]:
    groups = content.get("instance_groups")
    found: set[str] = set()
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and group.get("instance_group_name") == CPU_GROUP:
            hosts = group.get("hosts")
            found.update(map(str, hosts if isinstance(hosts, list) else ()))
    return frozenset(found)


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _unusable(path, f"cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise _unusable(path, f"holds a {type(content).__name__}")
    return content


def _unusable(path: Path, why: str) -> CheckRefused:
    return CheckRefused(
        explain_refusal(
            f"{path} {why}",
            allowed="the file as SageMaker writes it",
            next_step="start the entry in a training job, or by `strop sagemaker submit RUN.toml --local`",
        )
    )
