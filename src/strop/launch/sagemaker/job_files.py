"""The job's folder inside the container, made from the channels: what the agent expects on a disk."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strop.errors import CheckRefused, explain_refusal
from strop.launch.env_files import ENVIRONMENT_NAME
from strop.launch.home import CODE_NAME, JOB_FOLDER, PLAN_NAME, SPEC_NAME
from strop.launch.sagemaker import places
from strop.launch.sagemaker.opt_ml import OptMl
from strop.launch.secrets import SECRETS_NAME, write_private
from strop.store.policy import URI_VARIABLE

MEMBER_SPEC = "member-spec.toml"
SecretReader = Callable[[str], str]
"""From an ARN to the secret's text."""


def read_sent_plan(tree: OptMl) -> dict[str, Any]:
    """Return the plan of the channel `config`. Raises: CheckRefused if it is not there."""
    path = tree.channel_path(places.CONFIG_CHANNEL) / PLAN_NAME
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckRefused(
            explain_refusal(
                f"{path} cannot be read ({error})",
                allowed="the channel `config` as strop sent it",
                next_step="submit again; the entry runs in jobs that strop submits",
            )
        ) from error
    return content


def find_job(plan: Mapping[str, Any], parameters: Mapping[str, str]) -> Mapping[str, Any]:
    """Return which of the plan's jobs this is, by the run that the hyperparameters name.

    Raises: CheckRefused if they name another plan or none of its runs.
    """
    run, wanted = parameters.get(places.RUN_PARAMETER), parameters.get(places.PLAN_PARAMETER)
    jobs = plan["details"]["jobs"]
    found = next((job for job in jobs if job["run_key"] == run), None)
    if found is None or wanted != plan["plan_hash"]:
        raise CheckRefused(
            explain_refusal(
                f"the job is run {run} of plan {wanted}, and `config` holds plan {plan['plan_hash']}",
                allowed="the config that was sent with the job",
                next_step="submit again",
            )
        )
    result: Mapping[str, Any] = found
    return result


def make_job_folder(
    tree: OptMl, plan: dict[str, Any], home: Path, read_secret: SecretReader
) -> tuple[Path, tuple[str, ...]]:
    """Fill `<home>/job` and return it, with the values of secrets that must not be shown.

    Raises: CheckRefused naming a secret that cannot be fetched, or code that is not there; OSError.
    """
    job_path = home / JOB_FOLDER
    job_path.mkdir(parents=True, exist_ok=True)
    config_path = tree.channel_path(places.CONFIG_CHANNEL)
    for path in sorted(config_path.iterdir()):
        if path.is_file() and path.name not in {PLAN_NAME, MEMBER_SPEC, places.LINK_KEY}:
            shutil.copyfile(path, job_path / path.name)
    if (config_path / MEMBER_SPEC).is_file():
        shutil.copyfile(config_path / MEMBER_SPEC, job_path / SPEC_NAME)
    _write_inner_plan(plan, job_path)
    _bring_code(tree, plan, job_path)
    _link_assets(tree, plan, home)
    values = _fetch_secrets(plan["details"].get("secrets", {}), read_secret)
    _write_environment(plan, job_path, home, values)
    return job_path, tuple(values.values())


def fetch_secret(arn: str) -> str:
    """Return the text of a secret, with the job's role. Raises: CheckRefused naming the ARN."""
    from strop.errors import StropError
    from strop.launch.sagemaker.client import AwsClients
    from strop.spec.site import SageMakerSite

    region = arn.split(":")[3] if arn.count(":") > 3 else None
    try:
        clients = AwsClients(profile=SageMakerSite(region=region or os.environ.get("AWS_REGION")))
        answer = clients.call("secretsmanager", "get_secret_value", resource=arn, SecretId=arn)
    except StropError as error:
        raise CheckRefused(f"a secret of the job cannot be fetched: {error}") from error
    return str(answer["SecretString"])


def _fetch_secrets(arns: Mapping[str, str], read_secret: SecretReader) -> dict[str, str]:
    values = {}
    for name, arn in arns.items():
        text = read_secret(arn)
        try:
            fields = json.loads(text)
        except ValueError:
            fields = None
        # A secret of several fields keeps each under the variable's name.
        values[name] = str(fields[name]) if isinstance(fields, dict) and name in fields else text
    return values


def _write_inner_plan(plan: dict[str, Any], job_path: Path) -> None:
    """Write the plan as it is true in here: this interpreter, and no path of the submitting machine."""
    outside = plan["python"]
    roles = [
        {**role, "argv": [sys.executable if word == outside else word for word in role["argv"]]}
        for role in plan["roles"]
    ]
    details = {key: value for key, value in plan["details"].items() if key != "project_path"}
    inner = {**plan, "roles": roles, "python": sys.executable, "details": details}
    (job_path / PLAN_NAME).write_text(json.dumps(inner))


def _bring_code(tree: OptMl, plan: Mapping[str, Any], job_path: Path) -> None:
    if not plan["code_sha256"]:
        return
    source = tree.channel_path(places.CODE_CHANNEL) / CODE_NAME
    if not source.is_file():
        raise CheckRefused(
            explain_refusal(
                f"{source} is missing",
                allowed="the code that was sent with the job",
                next_step="submit again",
            )
        )
    target = job_path / CODE_NAME
    target.unlink(missing_ok=True)
    target.symlink_to(source)


def _link_assets(tree: OptMl, plan: Mapping[str, Any], home: Path) -> None:
    """Make a store of the channels: each where its name would be looked for."""
    for channel, place in plan["details"].get("assets", {}).items():
        link = home / "store" / place
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(tree.channel_path(channel))


def _write_environment(
    plan: Mapping[str, Any], job_path: Path, home: Path, values: Mapping[str, str]
) -> None:
    given = plan["environment"]
    # Their values are in the request, and so in this process; the plan has names alone.
    variables = {name: os.environ[name] for name in given["variables"] if name in os.environ}
    if variables.get(URI_VARIABLE) == places.ASSET_STORE:
        variables[URI_VARIABLE] = str(home / "store")
    roles = plan["details"].get("secret_roles", {})
    content = {
        "format": 1,
        "variables": variables,
        "sources": dict(given["sources"]),
        "secrets": {name: roles.get(name, []) for name in values},
    }
    if values:
        write_private(job_path / SECRETS_NAME, {"format": 1, "values": dict(values)})
    write_private(job_path / ENVIRONMENT_NAME, content)
