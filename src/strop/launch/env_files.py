"""How the variables of a job travel: `job/env.json` for all roles, and `job/secrets.json` with values.

Both have mode 0600. They are written when the job's home is filled, and read on each node for each role.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from strop.errors import CheckRefused, StoreError, explain_refusal
from strop.launch.contract import JobEnvironment, VariableSource
from strop.launch.environment import HUB_LOGIN, explain_unset, read_dotenv, read_env_file
from strop.launch.secrets import SECRETS_NAME, read_hub_login, read_json, read_secrets, write_private

ENVIRONMENT_NAME = "env.json"


def write_environment(
    job_path: Path,
    environment: JobEnvironment,
    environ: Mapping[str, str],
    *,
    project_path: Path | None = None,
    env_file: Path | None = None,
) -> None:
    """Write `env.json` and `secrets.json` (both 0600); the values of secrets are read now.

    `project_path` and `env_file` are those that the environment was gathered with.

    Raises: ConfigError if a secret has no value any more; StoreError if a file cannot be written.
    """
    values = _read_secrets(environment, environ, project_path, env_file)
    content = {
        "format": 1,
        "variables": dict(environment.variables),
        "sources": dict(environment.sources),
        "secrets": {name: list(environment.secret_roles.get(name, ())) for name in environment.secrets},
    }
    # Secrets first: an environment that names them is never there without them.
    if values:
        write_private(job_path / SECRETS_NAME, {"format": 1, "values": values})
    write_private(job_path / ENVIRONMENT_NAME, content)


def read_environment(job_path: Path, role: str) -> dict[str, str]:
    """Return what one role's process gets: every variable, and the secrets that it is allowed.

    A secret without a list of roles is for all of them.

    Raises: CheckRefused if a secret of this role is not there; StoreError if a file cannot be read.
    """
    content = read_json(job_path / ENVIRONMENT_NAME)
    if content is None:
        raise StoreError(
            explain_refusal(
                f"{job_path / ENVIRONMENT_NAME} is missing",
                allowed="a job directory that was filled by strop submit",
                next_step="submit the job again",
            )
        )
    allowed = [name for name, roles in content["secrets"].items() if not roles or role in roles]
    values = read_secrets(job_path)
    absent = [name for name in allowed if name not in values]
    if absent:
        raise CheckRefused(
            explain_refusal(
                f"role {role!r} lacks {', '.join(absent)}: not in {job_path / SECRETS_NAME}",
                allowed="a value for every secret that the site profile names for this role",
                next_step="submit the job again from a shell where the variable is set",
            )
        )
    return {**content["variables"], **{name: values[name] for name in allowed}}


def _read_secrets(
    environment: JobEnvironment,
    environ: Mapping[str, str],
    project_path: Path | None,
    env_file: Path | None,
) -> dict[str, str]:
    dotenv = read_dotenv(project_path)
    flagged = read_env_file(env_file)
    values: dict[str, str] = {}
    for name in environment.secrets:
        source = environment.sources.get(name)
        if source == VariableSource.DOTENV:
            value = dotenv.get(name)
        elif source == VariableSource.FLAG:
            value = flagged.get(name)
        elif source == HUB_LOGIN:
            value = read_hub_login(environ)
        else:
            value = environ.get(name)
        if not value:
            raise explain_unset(name, f"a secret of the job (from: {source})")
        values[name] = value
    return values
