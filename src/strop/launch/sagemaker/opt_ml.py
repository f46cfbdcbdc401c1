"""Files of a training container: the platform's below /opt/ml, the job's folder, the failure file.

The platform's files are read defensively: only the fields used here are required; the others are kept for the
start record. Source: the developer guide of SageMaker, and the readers of the vendor's training toolkit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.errors import EXIT_INTERRUPTED, EXIT_REFUSED, CheckRefused, StropError
from strop.io.redaction import redact
from strop.launch.attempts import describe_exit
from strop.launch.environment import ENVIRONMENT_NAME
from strop.launch.job_dir import CODE_NAME, JOB_FOLDER, PLAN_NAME, SPEC_NAME
from strop.launch.sagemaker import places
from strop.launch.sagemaker.places import NUM_FAILURE_CHARACTERS
from strop.launch.secrets import SECRETS_NAME, write_private

CPU_GROUP = "cpu"
TRIAL_SPEC = "member-spec.toml"
_KNOWN = frozenset(
    {"current_host", "hosts", "network_interface_name", "current_group_name", "instance_groups"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """All hosts of a job, in the same order on every host."""

    names: tuple[str, ...]
    """The main part before the CPU part, each sorted as text: algo-1, algo-10, algo-2."""
    current: str
    cpu: frozenset[str] = frozenset()
    """Hosts of the part without GPUs."""
    interface: str | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the file."""

    @property
    def node(self) -> int:
        """This host's index."""
        return self.names.index(self.current)

    @property
    def head(self) -> str:
        """The first host, which decides the exit code."""
        return self.names[0]

    @property
    def is_head(self) -> bool:
        """Whether this is the first host."""
        return self.current == self.head


@dataclass(frozen=True, kw_only=True, slots=True)
class OptMl:
    """The platform's tree below `root`."""

    root: Path

    @property
    def failure_path(self) -> Path:
        """The file whose first 1,024 characters become the job's FailureReason."""
        return self.root / places.FAILURE

    @property
    def checkpoint_path(self) -> Path:
        """The directory that the platform mirrors to S3."""
        content = _read_object(self.root / places.CHECKPOINTS) or {}
        local = str(content.get("LocalPath") or places.CHECKPOINT_PATH)
        inside = Path(local).relative_to(places.OPT_ML) if local.startswith(f"{places.OPT_ML}/") else None
        # A tree outside of /opt/ml has everything below its root.
        return Path(local) if inside is None else self.root / inside

    def channel_path(self, name: str) -> Path:
        """Return the folder of a channel's files."""
        return self.root / places.DATA / name

    def read_parameters(self) -> dict[str, str]:
        """Return the hyperparameters; {} without the file. Raises: CheckRefused if it is damaged."""
        content = _read_object(self.root / places.HYPERPARAMETERS) or {}
        return {str(name): str(value) for name, value in content.items()}

    def read_hosts(self) -> Hosts:
        """Return the hosts of the job. Raises: CheckRefused if the file lacks them."""
        path = self.root / places.RESOURCES
        content = _read_object(path)
        if content is None:
            raise _unusable(path, "is missing")
        hosts, current = content.get("hosts"), content.get("current_host")
        if not isinstance(hosts, list) or not hosts or current not in hosts:
            raise _unusable(path, f"says hosts={hosts!r} and current_host={current!r}")
        groups = content.get("instance_groups")
        cpu: set[str] = set()
        for group in groups if isinstance(groups, list) else ():
            if isinstance(group, dict) and group.get("instance_group_name") == CPU_GROUP:
                group_hosts = group.get("hosts")
                cpu.update(map(str, group_hosts if isinstance(group_hosts, list) else ()))
        names = (*sorted(set(map(str, hosts)) - cpu), *sorted(set(map(str, hosts)) & cpu))
        interface = content.get("network_interface_name")
        return Hosts(
            names=names,
            current=str(current),
            cpu=frozenset(cpu),
            interface=str(interface) if interface else None,
            others={key: value for key, value in content.items() if key not in _KNOWN},
        )


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
        f"{path} {why}",
        allowed="the file as SageMaker writes it",
        next_step="start the entry in a training job, or by `strop submit ... site.local=true`",
    )


def read_sent_plan(tree: OptMl) -> dict[str, Any]:
    """Return the plan in the channel `config`. Raises: CheckRefused if it is missing."""
    path = tree.channel_path(places.CONFIG_CHANNEL) / PLAN_NAME
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckRefused(
            f"{path} cannot be read ({error})",
            allowed="the channel `config` as strop sent it",
            next_step="submit again; the entry runs in jobs that strop submits",
        ) from error
    return content


def find_job(plan: Mapping[str, Any], parameters: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the plan's job of this container, which the hyperparameters name.

    Raises: CheckRefused if they name another plan, or none of its runs.
    """
    run, plan_hash = parameters.get(places.RUN_PARAMETER), parameters.get(places.PLAN_PARAMETER)
    jobs = plan["details"]["jobs"]
    job_of_run = next((job for job in jobs if job["run_key"] == run), None)
    if job_of_run is None or plan_hash != plan["plan_hash"]:
        raise CheckRefused(
            f"the job is run {run} of plan {plan_hash}, but `config` holds {plan['plan_hash']}"
        )
    result: Mapping[str, Any] = job_of_run
    return result


def make_job_folder(tree: OptMl, plan: dict[str, Any], home: Path) -> tuple[Path, tuple[str, ...]]:
    """Fill the agent's `<home>/job` from the channels; return it and the values of its secrets.

    Raises: CheckRefused naming a secret that cannot be fetched, or missing code; OSError.
    """
    job_path = home / JOB_FOLDER
    job_path.mkdir(parents=True, exist_ok=True)
    config_path = tree.channel_path(places.CONFIG_CHANNEL)
    for path in sorted(config_path.iterdir()):
        if path.is_file() and path.name not in {PLAN_NAME, TRIAL_SPEC}:
            # The token of the job's Ray cluster is among them.
            shutil.copyfile(path, job_path / path.name)
            (job_path / path.name).chmod(0o600)
    if (config_path / TRIAL_SPEC).is_file():
        shutil.copyfile(config_path / TRIAL_SPEC, job_path / SPEC_NAME)
    # Adapt the plan: this container's interpreter, and no paths of the submitting machine.
    outside = plan["python"]
    roles = [
        {**role, "argv": [sys.executable if word == outside else word for word in role["argv"]]}
        for role in plan["roles"]
    ]
    details = {key: value for key, value in plan["details"].items() if key != "project_path"}
    inner = {**plan, "roles": roles, "python": sys.executable, "details": details}
    (job_path / PLAN_NAME).write_text(json.dumps(inner))
    if plan["code_sha256"]:
        source = tree.channel_path(places.CODE_CHANNEL) / CODE_NAME
        if not source.is_file():
            raise CheckRefused(f"{source}, the code that was sent with the job, is missing")
        target = job_path / CODE_NAME
        target.unlink(missing_ok=True)
        target.symlink_to(source)
    values = {}
    for name, arn in plan["details"].get("secrets", {}).items():
        text = fetch_secret(arn)
        try:
            fields = json.loads(text)
        except ValueError:
            fields = None
        # A secret with several fields has one named like the variable.
        values[name] = str(fields[name]) if isinstance(fields, dict) and name in fields else text
    _write_environment(plan, job_path, values)
    return job_path, tuple(values.values())


def fetch_secret(arn: str) -> str:
    """Fetch the text of a secret with the job's role. Raises: CheckRefused naming the ARN."""
    from strop.launch.sagemaker.client import AwsClients
    from strop.launch.sagemaker.options import SageMakerSite

    region = arn.split(":")[3] if arn.count(":") > 3 else None
    try:
        clients = AwsClients(profile=SageMakerSite(region=region or os.environ.get("AWS_REGION")))
        answer = clients.call("secretsmanager", "get_secret_value", resource=arn, SecretId=arn)
    except StropError as error:
        raise CheckRefused(f"a secret of the job cannot be fetched: {error}") from error
    return str(answer["SecretString"])


def _write_environment(plan: Mapping[str, Any], job_path: Path, values: Mapping[str, str]) -> None:
    planned = plan["environment"]
    # The values are in this process, from the request; the plan has only names.
    variables = {name: os.environ[name] for name in planned["variables"] if name in os.environ}
    roles = plan["details"].get("secret_roles", {})
    content = {
        "format": 1,
        "variables": variables,
        "sources": dict(planned["sources"]),
        "secrets": {name: roles.get(name, []) for name in values},
    }
    if values:
        write_private(job_path / SECRETS_NAME, {"format": 1, "values": dict(values)})
    write_private(job_path / ENVIRONMENT_NAME, content)


# The failure file: all that users who may describe a job see of its end. The platform shows the first 1,024
# characters, so the cause comes first: code, host, exception, last frame. Later causes are appended. The file
# holds no secrets, and of the logs only the line of the exception.
_PREFIXES = {EXIT_INTERRUPTED: "requeue:", EXIT_REFUSED: "preflight:"}
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)', re.MULTILINE)
_EXCEPTION = re.compile(r"^(?:strop: )?[\w.]*(?:Error|Exception|Refused|Interrupt|Record)\b.*$", re.MULTILINE)
_RANK = re.compile(r"\brank[ =:]*(\d+)\b", re.IGNORECASE)


def describe_failure(exit_code: int, *, host: str, cause: str, secrets: Iterable[str] = ()) -> str:
    """Return the text of the failure file for an exit code that is not 0."""
    head, _, tail = cause.partition("\n")
    parts = [_PREFIXES.get(exit_code, ""), f"{describe_exit(exit_code)} on {host}"]
    if rank := _RANK.search(tail):
        parts.append(f"rank {rank[1]}")
    exceptions = _EXCEPTION.findall(tail)
    if exceptions:
        parts.append(exceptions[-1].strip())
    frames = list(_FRAME.finditer(tail))
    if frames:
        last = frames[-1]
        parts.append(f"at {Path(last['file']).name}:{last['line']} in {last['name']}")
    if head:
        parts.append(head)
    text = parts[0] + (" " if parts[0] else "") + "; ".join(parts[1:])
    return redact(text, secrets)


def write_failure(path: Path, text: str) -> None:
    """Write the first cause, or append a later one. Errors of the disk are ignored."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_first = not path.exists() or path.stat().st_size == 0
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text[:NUM_FAILURE_CHARACTERS] if is_first else f"\n--- later\n{text}")
    except OSError:
        return
