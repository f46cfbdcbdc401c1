"""Variables and secrets of a job: from where they are taken, and who gets them.

Layers, the later over the earlier: the site profile's `env`, the project's `.env`, variables that the
submitter names, flags (`--env-file`, `--hf-cache-dir`, `--hf-hub-offline`), the launcher's own. A variable
that the launcher owns is refused where the user wrote it for this purpose, and reported where it merely
stands in a file.

A secret is a name here; its value is read when the job's home is filled (`env_files`), and is in no argument,
script, plan or log. Variables that look like credentials are treated as secrets wherever they are found.

Covered: site profile, `.env`, `--env-file`, named variables, the hub's local login. Not covered: secret
services of a cloud, which the backend of that cloud asks itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strop.errors import ConfigError, explain_refusal
from strop.launch.contract import JobEnvironment, VariableSource
from strop.launch.dotenv import is_variable_name, parse_dotenv
from strop.launch.owned import is_owned
from strop.launch.secrets import REDACTED, is_secret, read_hub_login
from strop.spec.site import Site, SiteSection

HUB_TOKEN = "HF_TOKEN"
HUB_LOGIN = "login of the model hub on this machine"
"""Source of a hub token that no variable holds."""

_LAUNCHER_VALUES = {"PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
# Backends on whose machines a model cache of this machine may exist.
_NEAR_BACKENDS = ("local", "container", "slurm")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentFlags:
    """What flags of the command line say about a job's variables."""

    hf_cache_dir: str | None = None
    """HF_HOME. None = the site's, else the submitter's own."""
    hf_hub_offline: bool | None = None
    auto_auth: bool = False
    """Take the token of the local hub login along, unless HF_TOKEN is set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """Variables of one place, and how a message names it."""

    source: str
    name: str
    variables: Mapping[str, str]


@dataclass(slots=True)
class _Merge:
    """What the layers below gave so far."""

    variables: dict[str, str] = field(default_factory=dict)
    layers: dict[str, _Layer] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)


def gather_environment(
    site: Site,
    project_path: Path | None,
    names: Sequence[str] = (),
    env_file: Path | None = None,
    flags: EnvironmentFlags | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[JobEnvironment, tuple[str, ...]]:
    """Read `.env` and `env_file`, and return the job's environment with all conflicts as sentences.

    `names` are variables of the submitter that the job gets; of secrets only the names are kept.

    Raises: ConfigError for a file that cannot be read or parsed, a variable that is not set, and one that
        the launcher owns.
    """
    submitter = os.environ if environ is None else environ
    flags = EnvironmentFlags() if flags is None else flags
    dotenv = read_dotenv(project_path)
    from_file = read_env_file(env_file)
    has_login = flags.auto_auth and not submitter.get(HUB_TOKEN) and read_hub_login(submitter) is not None
    return merge_environment(
        site,
        dotenv=dotenv,
        names=names,
        from_file=from_file,
        flags=flags,
        environ=submitter,
        has_login=has_login,
    )


def merge_environment(
    site: Site,
    *,
    dotenv: Mapping[str, str],
    names: Sequence[str],
    from_file: Mapping[str, str],
    flags: EnvironmentFlags,
    environ: Mapping[str, str],
    has_login: bool,
) -> tuple[JobEnvironment, tuple[str, ...]]:
    """Lay all layers over each other. Pure; `gather_environment` says what it returns and raises."""
    profile = site.profile
    secret_roles = dict(_split_roles(entry) for entry in profile.secrets)
    _refuse_owned(profile.env, f"env of site {site.name!r}")
    _refuse_owned(names, "the variables named for the job")
    _refuse_owned(secret_roles, f"secrets of site {site.name!r}")
    _refuse_pasted(profile.env, site.name)
    merge = _Merge()
    named = [name for name in names if name not in secret_roles]
    for layer in (
        _Layer(source=VariableSource.SITE, name=f"site {site.name}", variables=_site_variables(profile)),
        _Layer(source=VariableSource.DOTENV, name=".env", variables=dotenv),
        _Layer(
            source=VariableSource.SUBMITTER,
            name="your environment",
            variables=_take_named(named, environ, profile, dotenv),
        ),
        _Layer(source=VariableSource.FLAG, name="--env-file", variables=from_file),
        _Layer(source=VariableSource.FLAG, name="a flag", variables=_flag_variables(flags)),
        _Layer(source=VariableSource.LAUNCHER, name="the launcher", variables=_LAUNCHER_VALUES),
    ):
        _lay_over(merge, layer)
    sources = {name: str(layer.source) for name, layer in merge.layers.items()}
    if flags.auto_auth:
        secret_roles.setdefault(HUB_TOKEN, ())
    secrets: dict[str, tuple[str, ...]] = {
        **{name: () for name, value in merge.variables.items() if value and is_secret(name, value)},
        **secret_roles,
    }
    for name in secrets:
        environ_of_named = environ if name in secret_roles else {}
        sources[name] = _secret_source(name, merge, environ_of_named, has_login=has_login)
    environment = JobEnvironment(
        variables={name: merge.variables[name] for name in sorted(merge.variables) if name not in secrets},
        sources=dict(sorted(sources.items())),
        secrets=tuple(sorted(secrets)),
        secret_roles={name: secrets[name] for name in sorted(secrets) if secrets[name]},
    )
    return environment, tuple(merge.conflicts)


def read_dotenv(project_path: Path | None) -> dict[str, str]:
    """Return the variables of a project's `.env`; none without that file. Raises: ConfigError."""
    if project_path is None or not (project_path / ".env").is_file():
        return {}
    return parse_dotenv(_read_text(project_path / ".env"), source=".env")


def read_env_file(env_file: Path | None) -> dict[str, str]:
    """Return the variables of the file that `--env-file` names. Raises: ConfigError."""
    return {} if env_file is None else parse_dotenv(_read_text(env_file), source=env_file.name)


def describe_auth(environment: JobEnvironment) -> str | None:
    """Return the line for standard error where a job takes the hub's local login along, else None."""
    if environment.sources.get(HUB_TOKEN) != HUB_LOGIN:
        return None
    return f"{HUB_TOKEN}: taken from the {HUB_LOGIN}, for this job only"


def _site_variables(profile: SiteSection) -> dict[str, str]:
    found: dict[str, str] = {}
    if profile.hf_home is not None:
        found["HF_HOME"] = profile.hf_home
    if profile.offline:
        found["HF_HUB_OFFLINE"] = "1"
    if profile.store is not None:
        found["STROP_STORE_URI"] = profile.store
    # Last: what the user wrote by name is more exact than what a setting implies.
    return {**found, **profile.env}


def _flag_variables(flags: EnvironmentFlags) -> dict[str, str]:
    found: dict[str, str] = {}
    if flags.hf_cache_dir is not None:
        found["HF_HOME"] = flags.hf_cache_dir
    if flags.hf_hub_offline is not None:
        found["HF_HUB_OFFLINE"] = "1" if flags.hf_hub_offline else "0"
    return found


def _take_named(
    names: Sequence[str],
    environ: Mapping[str, str],
    profile: SiteSection,
    dotenv: Mapping[str, str],
) -> dict[str, str]:
    """Return the submitter's values of the named variables, and HF_HOME where nobody else says it."""
    for name in names:
        if not is_variable_name(name):
            # The value behind a = may be a secret, and it is in the shell's history now.
            raise ConfigError(
                explain_refusal(
                    f"{name.split('=')[0]!r} is not the name of a variable",
                    allowed="names alone: letters, digits and _, values come from your environment",
                    next_step="set the variable in your shell, and give its name",
                )
            )
        if name not in environ:
            raise explain_unset(name, "named for the job")
    found = {name: environ[name] for name in names}
    is_near = getattr(profile, "backend", "") in _NEAR_BACKENDS
    is_said = profile.hf_home is not None or "HF_HOME" in {*profile.env, *dotenv, *found}
    if is_near and not is_said and environ.get("HF_HOME"):
        found["HF_HOME"] = environ["HF_HOME"]
    return found


def _lay_over(merge: _Merge, layer: _Layer) -> None:
    for name, value in layer.variables.items():
        if is_owned(name) and layer.source != VariableSource.LAUNCHER:
            merge.conflicts.append(
                f"conflict: {name}: the launcher sets it, ignoring the value from {layer.name}"
            )
            continue
        below = merge.layers.get(name)
        if below is not None and layer.source in {VariableSource.FLAG, VariableSource.LAUNCHER}:
            old = merge.variables[name]
            if old != value:
                merge.conflicts.append(
                    f"conflict: {name}: using {_shown(name, value)} ({layer.name}),"
                    f" ignoring {_shown(name, old)} ({below.name})"
                )
        merge.variables[name] = value
        merge.layers[name] = layer


def _shown(name: str, value: str) -> str:
    return REDACTED if is_secret(name, value) else repr(value)


def _secret_source(name: str, merge: _Merge, environ: Mapping[str, str], *, has_login: bool) -> str:
    """Return where a secret's value is read from when the job is handed over."""
    layer = merge.layers.get(name)
    if layer is not None and layer.source in {VariableSource.FLAG, VariableSource.SUBMITTER}:
        return str(layer.source)
    if environ.get(name):
        return str(VariableSource.SUBMITTER)
    if layer is not None and layer.source == VariableSource.DOTENV and merge.variables[name]:
        return str(VariableSource.DOTENV)
    if name == HUB_TOKEN and has_login:
        return HUB_LOGIN
    raise explain_unset(name, "a secret of the job")


def explain_unset(name: str, why: str) -> ConfigError:
    """Return the error about a variable without a value. `why`: what it is needed for."""
    steps = f"export {name}, or put it into .env"
    if name == HUB_TOKEN:
        steps += ", or log in with 'hf auth login' and give --auto-auth"
    return ConfigError(
        explain_refusal(
            f"{name} is {why}, and it is not set", allowed="a variable with a value", next_step=steps
        )
    )


def _split_roles(entry: str) -> tuple[str, tuple[str, ...]]:
    """Split `NAME:role,role` of a profile; without roles every role gets the secret."""
    name, _, roles = entry.partition(":")
    found = tuple(role.strip() for role in roles.split(",") if role.strip())
    if not is_variable_name(name) or (":" in entry and not found):
        raise ConfigError(
            explain_refusal(
                f"{name.split('=')[0]!r} in the site's secrets is not the name of a variable",
                allowed="NAME, or NAME:role,role for some roles alone; never a value",
                next_step="change secrets in the site profile",
            )
        )
    return name, found


def _refuse_owned(names: Iterable[str], place: str) -> None:
    owned = sorted(name for name in names if is_owned(name))
    if owned:
        raise ConfigError(
            explain_refusal(
                f"{place} set {', '.join(owned)}, which the launcher sets itself",
                allowed="any other variable",
                next_step="remove it, and ask for GPUs, nodes and caches by their own settings",
            )
        )


def _refuse_pasted(variables: Mapping[str, str], site: str) -> None:
    for name, value in variables.items():
        if is_variable_name(name) and not is_secret(name, value):
            continue
        if not is_variable_name(name):
            given, step = f"{name!r} in env of site {site!r} is not the name of a variable", "rename it"
        else:
            given = f"{name} in env of site {site!r} looks like a credential"
            step = f"remove it there, add {name!r} to the site's secrets, and export it where you submit"
        raise ConfigError(
            explain_refusal(
                given, allowed="names of variables, with values that anyone may read", next_step=step
            )
        )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            explain_refusal(
                f"{path} cannot be read: {why}",
                allowed="a text file of NAME=value lines that you may read",
                next_step="check the path and its rights",
            )
        ) from error
