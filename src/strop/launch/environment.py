"""Variables and secrets of a job: their sources, the roles that get them, and their files.

Layers, each overriding the ones before: the site profile's `env`, the project's `.env`, variables that the
submitter names, `--env-file`, the launcher's own. A variable that the launcher owns is refused if the user
set it for jobs, and reported if it merely stands in a file.

The plan has only the name of a secret. Its value is read when the job directory is written, and is in no
argument, script, plan or log. Variables from any source that look like credentials are treated as secrets.
`job/env.json` has the variables of all roles, `job/secrets.json` the values of secrets; both have mode 0600,
and are read on each node for each role.

Covered: site profile, `.env`, `--env-file`, named variables, the hub's local login. Not covered: secret
services of a cloud, which that cloud's backend queries.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strop.errors import CheckRefused, ConfigError, StoreError
from strop.hardware.leases import LEASE_VARIABLE
from strop.hardware.ports import ADDRESS_VARIABLE, NAMES_VARIABLE, NODE_VARIABLE, NUM_NODES_VARIABLE
from strop.io.logins import has_wandb_key
from strop.io.redaction import REDACTED, is_secret
from strop.launch.contract import JobEnvironment, VariableSource
from strop.launch.dotenv import is_variable_name, parse_dotenv
from strop.launch.secrets import (
    SECRETS_NAME,
    read_hub_login,
    read_json,
    read_secrets,
    write_private,
)
from strop.record.fence import ATTEMPT_VARIABLE, GRACE_VARIABLE, NUMBER_VARIABLE

if TYPE_CHECKING:
    from strop.launch.options import Site, SiteOptions
    from strop.spec import RunSpec

ENVIRONMENT_NAME = "env.json"
HUB_TOKEN = "HF_TOKEN"
HUB_LOGIN = "login of the model hub on this machine"
"""Source of a hub token that is in no variable."""

_LAUNCHER_VALUES = {"PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
_OF_RANKS = frozenset(
    {
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("NODE_RANK", "GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    }
)
_OF_AGENTS = frozenset(
    {
        *(ATTEMPT_VARIABLE, NUMBER_VARIABLE, GRACE_VARIABLE, LEASE_VARIABLE),
        *(NODE_VARIABLE, NUM_NODES_VARIABLE, ADDRESS_VARIABLE, NAMES_VARIABLE),
    }
)
_OF_PROCESSES = frozenset(
    {
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "PYTHONUNBUFFERED"),
    }
)
"""Set for each role, but also by the user: a local run divides the devices of the variable."""
_OTHER_JOBS = (
    *("SLURM_", "SLURMD_", "SRUN_", "SALLOC_", "PMI_", "PMIX_", "OMPI_", "MASTER_", "TORCHELASTIC_"),
    *("LOCAL_WORLD", "ROLE_", "GROUP_RANK", "GROUP_WORLD"),
)
"""Prefixes of variables inherited from a surrounding job, launcher or rank."""

_OF_SHELLS = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "PWD"),
        *("LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "CC", "CXX", "VIRTUAL_ENV", "DBUS_SESSION_BUS_ADDRESS"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "LOADEDMODULES"),
    }
)
_OF_LIBRARIES = (
    *("LC_", "XDG_", "PYTHON", "CONDA_", "MODULE", "LMOD_", "CUDA_", "NVIDIA_", "ROCR_", "HIP_", "NCCL_"),
    *("GLOO_", "UCX_", "FI_", "OMP_", "KMP_", "MKL_", "TORCH", "PYTORCH_", "TRITON_", "VLLM_", "RAY_", "HF_"),
    *("STROP_", "DOCKER_", "CONTAINER"),
)
"""Prefixes of variables by which programs and libraries find their files, devices and networks."""


def gather_environment(
    site: Site,
    project_path: Path | None,
    names: Sequence[str] = (),
    env_file: Path | None = None,
    auto_auth: bool = False,
    environ: Mapping[str, str] | None = None,
) -> tuple[JobEnvironment, tuple[str, ...]]:
    """Read `.env` and `env_file`, and return the job's environment with all conflicts as sentences.

    `names`: variables that the job gets from the submitter. `auto_auth`: pass on the token of the local hub
    login unless HF_TOKEN is set. Only the names of secrets are kept.

    Raises: ConfigError for a file that cannot be read or parsed, a variable without a value, and a variable
        that the launcher owns.
    """
    submitter = os.environ if environ is None else environ
    profile, dotenv = site.profile, read_dotenv(project_path)
    from_file = read_env_file(env_file)
    secret_roles = dict(_split_roles(entry) for entry in profile.secrets)
    _refuse_owned(profile.env, f"env of site {site.name!r}")
    _refuse_owned(names, "the variables named for the job")
    _refuse_owned(secret_roles, f"secrets of site {site.name!r}")
    _refuse_pasted(profile.env, site.name)
    plain_names = [name for name in names if name not in secret_roles]
    layers = _Layers()
    layers.add(VariableSource.SITE, f"site {site.name}", profile.variables())
    layers.add(VariableSource.DOTENV, ".env", dotenv)
    layers.add(
        VariableSource.SUBMITTER,
        "your environment",
        _select_variables(plain_names, submitter, profile, dotenv),
    )
    layers.add(VariableSource.FLAG, "--env-file", from_file)
    layers.add(VariableSource.LAUNCHER, "the launcher", _LAUNCHER_VALUES)
    if auto_auth:
        secret_roles.setdefault(HUB_TOKEN, ())
    has_login = auto_auth and not submitter.get(HUB_TOKEN) and read_hub_login(submitter) is not None
    variables = layers.variables
    credentials = {name: () for name, value in variables.items() if value and is_secret(name, value)}
    secrets: dict[str, tuple[str, ...]] = {**credentials, **secret_roles}
    sources = {name: str(source) for name, (source, _) in layers.places.items()}
    for name in secrets:
        environ_of_named = submitter if name in secret_roles else {}
        sources[name] = _secret_source(name, layers, environ_of_named, has_login=has_login)
    environment = JobEnvironment(
        variables={name: variables[name] for name in sorted(variables) if name not in secrets},
        sources=dict(sorted(sources.items())),
        secrets=tuple(sorted(secrets)),
        secret_roles={name: secrets[name] for name in sorted(secrets) if secrets[name]},
    )
    return environment, tuple(layers.conflicts)


def gather_for_run(
    spec: RunSpec,
    site: Site,
    project_path: Path,
    names: Sequence[str],
    env_file: Path | None,
    auto_auth: bool,
    environ: Mapping[str, str],
) -> tuple[JobEnvironment, tuple[str, ...]]:
    """Like `gather_environment`, with the submitter's variables that the run's own settings read.

    Raises: ConfigError as it does, and if W&B would find no key in the job.
    """
    # Imported here: nodes read their variables without it.
    from strop.store.policy import is_offline

    trackers = spec.trackers

    set_elsewhere = {*read_dotenv(project_path), *read_env_file(env_file), *site.profile.env, *names}
    declared = dict.fromkeys(_name_declared(spec, site.profile, environ))
    names = [*names, *(name for name in declared if environ.get(name) and name not in set_elsewhere)]
    environment, conflicts = gather_environment(site, project_path, names, env_file, auto_auth, environ)
    stays_here = trackers.offline or is_offline(environment.variables)
    if "wandb" in trackers.use and not stays_here:
        variables = {**dict.fromkeys(environment.secrets, REDACTED), **environment.variables}
        if not has_wandb_key(variables, sees_home=site.profile.has_shared_disk):
            raise ConfigError(
                f"trackers.use names wandb, and a job of site {site.name!r} would have no key for it",
                allowed="WANDB_API_KEY in your environment, .env, --env-file or the site's secrets;"
                " or trackers.offline = true",
                next_step="export WANDB_API_KEY, or set trackers.offline=true",
            )
    return environment, conflicts


class _Layers:
    """Variables from several places, each overriding the ones before."""

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.places: dict[str, tuple[VariableSource, str]] = {}
        self.conflicts: list[str] = []

    def add(self, source: VariableSource, place: str, variables: Mapping[str, str]) -> None:
        """Add the variables of a place, named `place` in conflicts."""
        for name, value in variables.items():
            if is_owned(name) and source is not VariableSource.LAUNCHER:
                self.conflicts.append(
                    f"conflict: {name}: the launcher sets it, ignoring the value from {place}"
                )
                continue
            old = self.variables.get(name, value)
            if source in {VariableSource.FLAG, VariableSource.LAUNCHER} and old != value:
                self.conflicts.append(
                    f"conflict: {name}: using {_shown(name, value)} ({place}),"
                    f" ignoring {_shown(name, old)} ({self.places[name][1]})"
                )
            self.variables[name] = value
            self.places[name] = source, place


def read_dotenv(project_path: Path | None) -> dict[str, str]:
    """Return the variables of a project's `.env`, empty without that file. Raises: ConfigError."""
    if project_path is None or not (project_path / ".env").is_file():
        return {}
    return parse_dotenv(_read_text(project_path / ".env"), source=".env")


def read_env_file(env_file: Path | None) -> dict[str, str]:
    """Return the variables of the file that `--env-file` names. Raises: ConfigError."""
    return {} if env_file is None else parse_dotenv(_read_text(env_file), source=env_file.name)


def describe_travelling(environment: JobEnvironment) -> list[str]:
    """Return lines that name the variables which the job's processes get, and the hub's login among them."""
    names = [*environment.variables, *(f"{name} (secret)" for name in environment.secrets)]
    lines = [f"variables {', '.join(names)}; of your shell no others but what programs need to run"]
    if environment.sources.get(HUB_TOKEN) == HUB_LOGIN:
        lines.append(f"{HUB_TOKEN}: taken from the {HUB_LOGIN}, for this job only")
    return lines


def _name_declared(spec: RunSpec, profile: SiteOptions, environ: Mapping[str, str]) -> list[str]:
    """Return the variables that a run's own settings read: of trackers, judges' keys, an S3 store."""
    # Imported here: nodes read their variables without it.
    from strop.spec.judge import judge_sections
    from strop.store.policy import URI_VARIABLE

    names = [*(() if spec.trackers.offline else spec.trackers.variables())]
    names += [judge.judge_key_env for judge in judge_sections(spec.task) if judge.judge_key_env is not None]
    places = (spec.model_dump_json(), profile.store or "", environ.get(URI_VARIABLE, ""))
    if profile.has_shared_disk and any("s3://" in place for place in places):
        names += [name for name in environ if name.startswith("AWS_")]
    return names


def _select_variables(
    names: Sequence[str],
    environ: Mapping[str, str],
    profile: SiteOptions,
    dotenv: Mapping[str, str],
) -> dict[str, str]:
    """Return the submitter's values of the named variables, and of HF_HOME if no other place sets it."""
    for name in names:
        if not is_variable_name(name):
            # A value behind the = may be a secret, which the shell's history has now.
            raise ConfigError(
                f"{name.split('=')[0]!r} is not the name of a variable",
                allowed="names alone: letters, digits and _, values come from your environment",
                next_step="set the variable in your shell, and give its name",
            )
        if name not in environ:
            raise explain_unset(name, "named for the job")
    variables = {name: environ[name] for name in names}
    is_set = profile.hf_home is not None or "HF_HOME" in {*profile.env, *dotenv, *variables}
    if profile.has_shared_disk and not is_set and environ.get("HF_HOME"):
        variables["HF_HOME"] = environ["HF_HOME"]
    return variables


def _shown(name: str, value: str) -> str:
    return REDACTED if is_secret(name, value) else repr(value)


def _secret_source(name: str, layers: _Layers, environ: Mapping[str, str], *, has_login: bool) -> str:
    """Return the source that a secret's value is read from at submission."""
    source = layers.places[name][0] if name in layers.places else None
    if source in {VariableSource.FLAG, VariableSource.SUBMITTER}:
        return str(source)
    if environ.get(name):
        return str(VariableSource.SUBMITTER)
    if source is VariableSource.DOTENV and layers.variables[name]:
        return str(source)
    if name == HUB_TOKEN and has_login:
        return HUB_LOGIN
    raise explain_unset(name, "a secret of the job")


def explain_unset(name: str, why: str) -> ConfigError:
    """Return the error about a variable without a value. `why`: its use."""
    steps = f"export {name}, or put it into .env"
    if name == HUB_TOKEN:
        steps += ", or log in with 'hf auth login' and give --auto-auth"
    return ConfigError(
        f"{name} is {why}, and it is not set", allowed="a variable with a value", next_step=steps
    )


def _split_roles(entry: str) -> tuple[str, tuple[str, ...]]:
    """Split `NAME:role,role` of a profile; without roles every role gets the secret."""
    name, _, roles = entry.partition(":")
    role_names = tuple(role.strip() for role in roles.split(",") if role.strip())
    if not is_variable_name(name) or (":" in entry and not role_names):
        raise ConfigError(
            f"{name.split('=')[0]!r} in the site's secrets is not the name of a variable",
            allowed="NAME, or NAME:role,role for some roles alone; never a value",
            next_step="change secrets in the site profile",
        )
    return name, role_names


def _refuse_owned(names: Iterable[str], place: str) -> None:
    owned = sorted(name for name in names if is_owned(name))
    if owned:
        raise ConfigError(
            f"{place} set {', '.join(owned)}, which the launcher sets itself",
            allowed="any other variable",
            next_step="remove it, and ask for GPUs, nodes and caches by their own settings",
        )


def _refuse_pasted(variables: Mapping[str, str], site: str) -> None:
    for name, value in variables.items():
        if is_variable_name(name) and not is_secret(name, value):
            continue
        if not is_variable_name(name):
            problem, step = f"{name!r} in env of site {site!r} is not the name of a variable", "rename it"
        else:
            problem = f"{name} in env of site {site!r} looks like a credential"
            step = f"remove it there, add {name!r} to the site's secrets, and export it where you submit"
        raise ConfigError(
            problem, allowed="names of variables, with values that anyone may read", next_step=step
        )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"{path} cannot be read: {why}",
            allowed="a text file of NAME=value lines that you may read",
            next_step="check the path and its rights",
        ) from error


def write_environment(
    job_path: Path,
    environment: JobEnvironment,
    environ: Mapping[str, str],
    *,
    project_path: Path | None = None,
    env_file: Path | None = None,
) -> None:
    """Write `env.json` and `secrets.json` (both 0600); the values of secrets are read now.

    `project_path` and `env_file`: as for `gather_environment`.

    Raises: ConfigError if a secret no longer has a value; StoreError if a file cannot be written.
    """
    dotenv, flagged = read_dotenv(project_path), read_env_file(env_file)
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
    content = {
        "format": 1,
        "variables": dict(environment.variables),
        "sources": dict(environment.sources),
        "secrets": {name: list(environment.secret_roles.get(name, ())) for name in environment.secrets},
    }
    # Secrets first, so that no environment names secrets that do not exist yet.
    if values:
        write_private(job_path / SECRETS_NAME, {"format": 1, "values": values})
    write_private(job_path / ENVIRONMENT_NAME, content)


def read_environment(job_path: Path, role: str) -> dict[str, str]:
    """Return the plain variables, and the secrets of one role. A secret without a list of roles is for all.

    Raises: CheckRefused if a secret of this role is missing; StoreError if a file cannot be read.
    """
    content = read_json(job_path / ENVIRONMENT_NAME)
    if content is None:
        raise StoreError(f"{job_path / ENVIRONMENT_NAME} is missing: submit the job again")
    allowed = [name for name, roles in content["secrets"].items() if not roles or role in roles]
    values = read_secrets(job_path)
    absent = [name for name in allowed if name not in values]
    if absent:
        raise CheckRefused(
            f"role {role!r} lacks {', '.join(absent)}: not in {job_path / SECRETS_NAME}",
            allowed="a value for every secret that the site profile names for this role",
            next_step="submit the job again from a shell where the variable is set",
        )
    return {**content["variables"], **{name: values[name] for name in allowed}}


def is_owned(name: str) -> bool:
    """Whether only the launcher or a node's agent sets a variable."""
    return name in _OF_RANKS | _OF_AGENTS | _OF_PROCESSES or name.startswith(_OTHER_JOBS)


def clean_inherited(environ: Mapping[str, str], *, secrets: Iterable[str] = ()) -> dict[str, str]:
    """Return of a shell's environment what programs need to run: no credential, and nothing of another job.

    For starting an agent, whose roles inherit it. A surrounding job's lease is dropped too: processes that
    carry it are ended with that job's leftovers.
    """
    dropped = _OF_RANKS | _OF_AGENTS | set(secrets)
    return {
        name: value
        for name, value in environ.items()
        if (name in _OF_SHELLS or name.startswith(_OF_LIBRARIES) or name.lower().endswith("_proxy"))
        and name not in dropped
        and not name.startswith(_OTHER_JOBS)
        and not is_secret(name, value)
    }
