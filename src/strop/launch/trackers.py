"""What the trackers of a run need where it is a job: the submitter's variables, carried as secrets are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from strop.errors import ConfigError
from strop.io.logins import has_wandb_key
from strop.io.redaction import REDACTED
from strop.launch.contract import JobEnvironment
from strop.launch.environment import EnvironmentFlags, gather_environment, read_dotenv, read_env_file
from strop.launch.options import Site
from strop.spec import TrackersSpec
from strop.store.policy import is_offline


def gather_for_trackers(
    spec: TrackersSpec,
    site: Site,
    project_path: Path,
    names: Sequence[str],
    env_file: Path | None,
    flags: EnvironmentFlags,
    environ: Mapping[str, str],
) -> tuple[JobEnvironment, tuple[str, ...]]:
    """Return what `gather_environment` does, with what the submitter has set for the run's trackers.

    Raises: ConfigError as it does, and where W&B would find no key in the job.
    """
    said = {*read_dotenv(project_path), *read_env_file(env_file), *site.profile.env, *names}
    wanted = () if spec.offline else spec.variables()
    names = [*names, *(name for name in wanted if environ.get(name) and name not in said)]
    environment, conflicts = gather_environment(site, project_path, names, env_file, flags, environ)
    stays_here = spec.offline or not site.profile.has_network or is_offline(environment.variables)
    if "wandb" in spec.use and not stays_here:
        variables = {**dict.fromkeys(environment.secrets, REDACTED), **environment.variables}
        if not has_wandb_key(variables, sees_home=site.profile.has_shared_disk):
            raise ConfigError(
                f"trackers.use names wandb, and a job of site {site.name!r} would have no key for it",
                allowed="WANDB_API_KEY in your environment, .env, --env-file or the site's secrets;"
                " or trackers.offline = true",
                next_step="export WANDB_API_KEY, or set trackers.offline=true",
            )
    return environment, conflicts
