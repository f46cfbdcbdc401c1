"""Sites: the settings of the places that jobs are sent to, which are in no run file.

`strop-sites.toml` in the project, and `strop/sites.toml` in the user's configuration folder (XDG_CONFIG_HOME,
else ~/.config), have one table per site; `backend` is its kind. For a site in both files, each setting of the
project overrides the user's. A backend's name is a site without a profile.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from strop.errors import ConfigError, format_error
from strop.launch.backends import BACKENDS
from strop.launch.options import Site, SiteOptions, unknown_key
from strop.spec.description import Explanation, describe_settings
from strop.spec.display import KeyPath, credential_form, dotted, show_text, show_value, walk_values
from strop.spec.schema import Setting
from strop.spec.tree import Tree, read_tree

PROJECT_FILE = "strop-sites.toml"
USER_FILE = "sites.toml"
SITES_TABLE = "sites"


def find_site(name: str, project_path: Path, environ: Mapping[str, str]) -> Site:
    """Return a site's profile.

    Raises: ConfigError if no file and no backend has this name, or a setting is not allowed.
    """
    trees = _read_trees(project_path, environ)
    tables = [tree.values[SITES_TABLE][name] for tree in trees if name in tree.values[SITES_TABLE]]
    if not tables and name not in BACKENDS:
        names = [*dict.fromkeys(site for tree in trees for site in tree.values[SITES_TABLE]), *BACKENDS]
        near = difflib.get_close_matches(name, names, n=1)
        looked = " and ".join(str(path) for path in site_files(project_path, environ))
        raise ConfigError(
            f"there is no site {show_value(name)}; looked in {looked}",
            allowed=", ".join(dict.fromkeys(names)),
            next_step=f"did you mean {near[0]}?"
            if near
            else f"write a table [{SITES_TABLE}.{name}] in one of them",
        )
    merged: dict[str, Any] = {}
    for table in tables:
        merged |= table
    merged.setdefault("backend", name if name in BACKENDS else None)
    origins = {
        path: tree.origin((SITES_TABLE, name, *path))
        for tree in trees
        if name in tree.values[SITES_TABLE]
        for path, _ in walk_values(tree.values[SITES_TABLE][name])
    }
    section = BACKENDS.get(str(merged["backend"]))
    if section is None:
        raise ConfigError(
            f"{SITES_TABLE}.{name}.backend={show_value(merged['backend'])} is no kind of site",
            allowed=", ".join(BACKENDS),
            next_step="set backend",
        )
    _refuse_entries(merged, name, section, origins)
    try:
        return Site(name=name, profile=section.model_validate(merged))
    except ValidationError as error:
        problems = [_explain(detail, name, section, origins) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from error


def list_site_names(project_path: Path, environ: Mapping[str, str]) -> list[str]:
    """Return the names of the sites in the files. Raises: ConfigError if a file cannot be read."""
    return sorted({name for tree in _read_trees(project_path, environ) for name in tree.values[SITES_TABLE]})


def list_run_roots(project_path: Path, environ: Mapping[str, str]) -> list[Path]:
    """Return the folders for runs that the profiles name. Raises: ConfigError as `find_site`."""
    sites = [find_site(name, project_path, environ) for name in list_site_names(project_path, environ)]
    roots = [Path(site.profile.run_root).expanduser() for site in sites if site.profile.run_root]
    return list(dict.fromkeys(roots))


def site_files(project_path: Path, environ: Mapping[str, str]) -> tuple[Path, Path]:
    """Return the paths of the user's and the project's profiles."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "/"), ".config")
    return Path(home) / "strop" / USER_FILE, project_path / PROJECT_FILE


def _read_trees(project_path: Path, environ: Mapping[str, str]) -> list[Tree]:
    """Read the existing files, the overriding one last."""
    trees = [read_tree(str(path)) for path in site_files(project_path, environ) if path.is_file()]
    for tree in trees:
        tables = tree.values.get(SITES_TABLE)
        strange = [key for key in tree.values if key != SITES_TABLE]
        if (
            strange
            or not isinstance(tables, dict)
            or not all(isinstance(table, dict) for table in tables.values())
        ):
            raise ConfigError(
                f"{tree.origin((strange[0],)) if strange else tree.shown} holds no table of sites",
                allowed=f"tables [{SITES_TABLE}.NAME], one for each site",
                next_step="correct the file",
            )
    return trees


def _refuse_entries(
    table: Mapping[str, Any], name: str, section: type[SiteOptions], origins: Mapping[Any, str]
) -> None:
    """Refuse credentials, and options of a single job. Raises: ConfigError."""
    for path, value in walk_values(table):
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        form = next(filter(None, map(credential_form, texts)), None)
        shown = f"{SITES_TABLE}.{name}.{dotted(path)} ({origins.get(path, '')})"
        if form is not None:
            raise ConfigError(
                f"{shown} looks like {form}",
                allowed="the name of an environment variable in `secrets`; no secret itself",
                next_step="put the value into your environment, and its name into `secrets`",
            )
        info = section.model_fields.get(path[0])
        if info is not None and info.exclude:
            raise ConfigError(
                f"{shown} is set per job, not in a profile",
                allowed="what holds for every job of the site",
                next_step=f"remove it, and give site.{path[0]}=VALUE to `strop submit`",
            )


def _explain(detail: Any, name: str, section: type[SiteOptions], origins: Mapping[Any, str]) -> str:
    path = tuple(str(part) for part in detail["loc"])
    shown = f"{SITES_TABLE}.{name}" + (f".{dotted(path)}" if path else "")
    where = origins.get(path) or next((text for key, text in origins.items() if key[:1] == path[:1]), "")
    where = f" ({where})" if where else ""
    if detail["type"] == "extra_forbidden":
        names = [key for key, info in section.model_fields.items() if not info.exclude]
        return str(unknown_key(f"unknown key {shown}{where}", path[-1], names))
    field = section.model_fields.get(path[0]) if path else None
    return format_error(
        f"{shown}={show_value(detail['input'])}{where} is not allowed: {detail['msg']}",
        allowed=(field.description if field and field.description else "what the profile's setting says"),
        next_step="correct it",
    )


def explain_site(path: KeyPath) -> Explanation:
    """Explain `sites`, `sites.BACKEND` or `sites.BACKEND.SETTING`: keys of profiles and options of a job.

    Raises: ConfigError with near matches if there is no such key.
    """
    settings = {
        (SITES_TABLE, backend, name): info
        for backend, section in BACKENDS.items()
        for name, info in section.model_fields.items()
        if name == "backend" or name in section.settable()
    }
    if path in settings:
        info, text = settings[path], settings[path].description or ""
        if path[2] != "backend":
            how = "Set per job, not in a profile" if info.exclude else "Override for one job"
            text += f" {how}: `strop submit site.{path[2]}=VALUE`."
        explanation = describe_settings((Setting(path=path, variant=None, info=info),))
        return replace(explanation, description=text)
    inside = [dotted(key) for key in settings if key[: len(path)] == path]
    if not inside:
        near = difflib.get_close_matches(dotted(path), map(dotted, settings), n=3)
        raise ConfigError(
            f"unknown key {show_text(dotted(path))}",
            allowed=f"{SITES_TABLE}.KIND.SETTING with a KIND of {', '.join(BACKENDS)}",
            next_step=f"did you mean {' or '.join(near)}?" if near else f"`strop explain {SITES_TABLE}`",
        )
    description = "Profiles of sites, in strop-sites.toml as [sites.NAME]; told apart by `backend`."
    if len(path) > 1:
        description = BACKENDS[path[1]].__doc__ or ""
    return Explanation(
        key=dotted(path),
        type="section",
        default="every setting its own",
        allowed="a table of settings",
        description=description,
        keys=tuple(inside),
    )
