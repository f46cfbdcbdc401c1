"""Finding and reading the profile of a site.

`strop-sites.toml` of the project beats `strop/sites.toml` of the user's configuration folder, setting by
setting. Reads files; holds no site's name.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from strop.errors import ConfigError, explain_refusal
from strop.spec.credentials import credential_form
from strop.spec.display import dotted, show_value, walk_values
from strop.spec.site import Site, SiteProfile, SiteSection
from strop.spec.tree import Tree, read_tree

PROJECT_FILE = "strop-sites.toml"
USER_FILE = "sites.toml"
SITES_TABLE = "sites"
_PROFILE: TypeAdapter[SiteProfile] = TypeAdapter(SiteProfile)
SECTIONS: dict[str, type[SiteSection]] = {
    get_args(section.model_fields["backend"].annotation)[0]: section
    for section in get_args(get_args(SiteProfile)[0])
}
BACKENDS = tuple(SECTIONS)
"""Kinds of sites, each also the name of a site without a profile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownSite:
    """A site that a file names."""

    name: str
    backend: str
    files: tuple[str, ...]


def find_site(name: str, project_path: Path, environ: Mapping[str, str]) -> Site:
    """Return a site's profile.

    Raises: ConfigError if no file and no backend is called so, or a setting is not allowed.
    """
    trees = _read_trees(project_path, environ)
    tables = [tree.values[SITES_TABLE][name] for tree in trees if name in tree.values[SITES_TABLE]]
    if not tables and name not in BACKENDS:
        raise _unknown_site(name, trees, project_path, environ)
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
    _refuse_credentials(merged, name, origins)
    try:
        return Site(name=name, profile=_PROFILE.validate_python(merged))
    except ValidationError as error:
        problems = [_explain(detail, merged, name, origins) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(dict.fromkeys(problems))) from error


def list_sites(project_path: Path, environ: Mapping[str, str]) -> list[KnownSite]:
    """Return the sites that files name, by name. Raises: ConfigError if a file cannot be read."""
    trees = _read_trees(project_path, environ)
    names = sorted({name for tree in trees for name in tree.values[SITES_TABLE]})
    return [
        KnownSite(
            name=name,
            backend=next(
                (
                    str(tree.values[SITES_TABLE][name]["backend"])
                    for tree in reversed(trees)
                    if "backend" in tree.values[SITES_TABLE].get(name, {})
                ),
                name,
            ),
            files=tuple(tree.shown for tree in trees if name in tree.values[SITES_TABLE]),
        )
        for name in names
    ]


def site_files(project_path: Path, environ: Mapping[str, str]) -> tuple[Path, Path]:
    """Return where profiles may be: the user's file, then the project's."""
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "/"), ".config")
    return Path(home) / "strop" / USER_FILE, project_path / PROJECT_FILE


def _read_trees(project_path: Path, environ: Mapping[str, str]) -> list[Tree]:
    """Read the files that there are, the stronger last."""
    trees = [read_tree(str(path)) for path in site_files(project_path, environ) if path.is_file()]
    for tree in trees:
        tables = tree.values.get(SITES_TABLE)
        strange = [key for key in tree.values if key != SITES_TABLE]
        if (
            strange
            or not isinstance(tables, dict)
            or not all(isinstance(one, dict) for one in tables.values())
        ):
            raise ConfigError(
                explain_refusal(
                    f"{tree.origin((strange[0],)) if strange else tree.shown} holds no table of sites",
                    allowed=f"tables [{SITES_TABLE}.NAME], one for each site",
                    next_step="correct the file",
                )
            )
    return trees


def _unknown_site(
    name: str, trees: list[Tree], project_path: Path, environ: Mapping[str, str]
) -> ConfigError:
    known = [*dict.fromkeys(site for tree in trees for site in tree.values[SITES_TABLE]), *BACKENDS]
    near = difflib.get_close_matches(name, known, n=1)
    looked = " and ".join(str(path) for path in site_files(project_path, environ))
    return ConfigError(
        explain_refusal(
            f"there is no site {show_value(name)}; looked in {looked}",
            allowed=", ".join(dict.fromkeys(known)),
            next_step=f"did you mean {near[0]}?"
            if near
            else f"write a table [{SITES_TABLE}.{name}] in one of them",
        )
    )


def _refuse_credentials(table: Mapping[str, Any], name: str, origins: Mapping[Any, str]) -> None:
    for path, value in walk_values(table):
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        form = next(filter(None, map(credential_form, texts)), None)
        if form is not None:
            raise ConfigError(
                explain_refusal(
                    f"{SITES_TABLE}.{name}.{dotted(path)} ({origins.get(path, '')}) looks like {form}",
                    allowed="the name of an environment variable in `secrets`; no secret itself",
                    next_step="put the value into your environment, and its name into `secrets`",
                )
            )


def _explain(detail: Any, table: Mapping[str, Any], name: str, origins: Mapping[Any, str]) -> str:
    backend = table.get("backend")
    path = tuple(str(part) for part in detail["loc"] if str(part) != backend or len(detail["loc"]) == 1)
    section = SECTIONS.get(str(backend))
    shown = f"{SITES_TABLE}.{name}" + (f".{dotted(path)}" if path else "")
    where = origins.get(path) or next((text for key, text in origins.items() if key[:1] == path[:1]), "")
    where = f" ({where})" if where else ""
    if section is None:
        return explain_refusal(
            f"{SITES_TABLE}.{name}.backend={show_value(backend)} is no kind of site",
            allowed=", ".join(BACKENDS),
            next_step="set backend",
        )
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], section.model_fields, n=1)
        return explain_refusal(
            f"unknown key {shown}{where}",
            allowed=", ".join(section.model_fields),
            next_step=f"did you mean {near[0]}?" if near else "remove it",
        )
    field = section.model_fields.get(path[0]) if path else None
    return explain_refusal(
        f"{shown}={show_value(detail['input'])}{where} is not allowed: {detail['msg']}",
        allowed=(field.description if field and field.description else "what the profile's setting says"),
        next_step="correct it",
    )
