"""What of this machine's Python goes into an image: its interpreter, its packages, and strop itself.

Everything keeps its absolute path, so nothing has to be relocated, and `python -m ...` means the same inside
as outside. Bytecode comes along: it is valid by the time stamps that an archive keeps, and without it every
start would compile thousands of files again. Left behind: packages that strop does not need, test suites,
headers and static libraries of the interpreter, caches.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import strop
from strop.errors import CheckRefused, explain_refusal

AGENT_PACKAGES = ("pydantic", "jinja2", "pyyaml", "pyarrow", "numpy")
"""What a node's agent needs: enough for jobs whose roles are programs of their own."""
_FOR_DEVELOPERS = "dev"
"""The one optional part that no image has."""
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idlelib", "turtledemo", "ensurepip", "site-packages"})
_SKIPPED_SUFFIXES = (".a", ".pyo")
# Folders that every system has, with rights of their own.
_SYSTEM_FOLDERS = frozenset(map(Path, ("/", "/bin", "/home", "/lib", "/opt", "/srv", "/tmp", "/usr", "/var")))
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(?:\[(?P<extras>[^]]*)\])?[^;]*(?:;(?P<marker>.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"](?P<name>[^'\"]+)['\"]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Files of one layer of an image."""

    name: str
    files: tuple[tuple[Path, str], ...]
    """Where each is here, and its absolute path in the image."""
    key: str
    """Changes when the content does."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(source.lstat().st_size for source, _ in self.files)


def is_system_python() -> bool:
    """Whether the interpreter is the distribution's own, which an image has from a package."""
    return Path(sys.base_prefix) in _SYSTEM_FOLDERS


def python_of_environment() -> Path:
    """Return the interpreter that runs strop, by the path under which it finds its packages."""
    return Path(sys.prefix) / "bin" / "python"


def interpreter_layer() -> Layer:
    """Return the interpreter and its standard library; empty for the distribution's own."""
    base = Path(sys.base_prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found: list[Path] = []
    if not is_system_python():
        found += [path for path in base.glob("bin/python3*") if "config" not in path.name]
        found += [*base.glob("bin/python"), *base.glob("lib/libpython3*.so*")]
        found += [path for path in _walk(base / "lib" / version) if not _is_config(path)]
    return _layer("interpreter", found, key=f"{sys.version} {base}")


def packages_layer(roots: Sequence[str] | None = None) -> Layer:
    """Return a virtual environment with the named packages and all that they need.

    None: what strop itself requires, with its optional parts where they are installed.

    Raises: CheckRefused if a package is not installed here.
    """
    needed = required_packages(roots)
    site = Path(sysconfig.get_path("purelib"))
    found: list[Path] = []
    if sys.prefix != sys.base_prefix:
        prefix = Path(sys.prefix)
        found += [prefix / "pyvenv.cfg", *prefix.glob("bin/python*")]
        found += [prefix / "lib64"] if (prefix / "lib64").is_symlink() else []
    digest = hashlib.sha256(f"{sys.prefix} {site}".encode())
    for distribution in needed:
        digest.update((distribution.read_text("RECORD") or str(distribution.version)).encode())
        found += _files_of(distribution)
    return _layer("packages", found, key=digest.hexdigest())


def strop_layer() -> Layer:
    """Return strop as it is now, in the site-packages of the environment."""
    folder = Path(strop.__file__).parent
    target = Path(sysconfig.get_path("purelib")) / "strop"
    files = [path for path in _walk(folder) if "__pycache__" not in path.parts]
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    pairs = tuple((path, str(target / path.relative_to(folder))) for path in files)
    return Layer(name="strop", files=pairs, key=digest.hexdigest())


def required_packages(roots: Sequence[str] | None = None) -> list[importlib.metadata.Distribution]:
    """Return installed packages and everything that they need, sorted by name, without strop itself.

    Raises: CheckRefused if one of the roots is not installed.
    """
    waiting: list[tuple[str, frozenset[str]]]
    waiting = [*_own_needs()] if roots is None else [(name, frozenset()) for name in roots]
    named = {_normalize(name) for name in roots or ()}
    seen: set[tuple[str, frozenset[str]]] = set()
    found: dict[str, importlib.metadata.Distribution] = {}
    while waiting:
        name, extras = waiting.pop()
        name = _normalize(name)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if name in named:
                raise _not_installed(name) from None
            continue  # Optional, or for another platform.
        waiting += _read_needs(found[name].requires or (), extras)
    found.pop("strop", None)
    return [found[name] for name in sorted(found)]


def write_layer(layer: Layer, path: Path) -> None:
    """Write a layer as a tar archive: owned by root, readable for all, times kept."""
    seen: set[Path] = set()
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for source, target in layer.files:
            for folder in reversed(Path(target).parents):
                if folder not in seen and folder not in _SYSTEM_FOLDERS:
                    seen.add(folder)
                    archive.addfile(_folder_entry(folder))
            archive.add(source, target.lstrip("/"), recursive=False, filter=_readable)


def _folder_entry(folder: Path) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(str(folder).lstrip("/"))
    entry.type = tarfile.DIRTYPE
    # An environment may lie in the home of root, which others have to pass but not to read.
    entry.mode = 0o711 if folder == Path("/root") else 0o755
    return entry


def _readable(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mode = 0o755 if entry.mode & 0o100 else 0o644
    return entry


def _layer(name: str, paths: Iterable[Path], *, key: str) -> Layer:
    return Layer(name=name, files=tuple((path, str(path)) for path in sorted(set(paths))), key=key)


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files and links below a folder that an image needs, sorted."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        yield from (Path(parent) / name for name in sorted(names) if not name.endswith(_SKIPPED_SUFFIXES))


def _is_config(path: Path) -> bool:
    """Whether a file is for building the interpreter's extensions."""
    return any(part.startswith("config-") for part in path.parts)


def _files_of(distribution: importlib.metadata.Distribution) -> Iterator[Path]:
    prefix = Path(sysconfig.get_path("purelib"))
    for name in distribution.files or ():
        path = Path(os.path.normpath(str(distribution.locate_file(name))))
        inside = path.relative_to(prefix).parts if path.is_relative_to(prefix) else ()
        # Programs of packages stay behind: an image is for `python -m`.
        if inside and not _SKIPPED_FOLDERS & set(inside[1:-1]) and path.is_file():
            yield path


def _own_needs() -> Iterator[tuple[str, frozenset[str]]]:
    """Yield what strop requires, with every optional part for users.

    Of a checkout its own file says so: what was installed with it may be older.
    """
    project_path = Path(strop.__file__).absolute().parents[2] / "pyproject.toml"
    if project_path.is_file():
        project = tomllib.loads(project_path.read_text(encoding="utf-8"))["project"]
        optional: dict[str, list[str]] = project.get("optional-dependencies", {})
        texts = [
            *project["dependencies"],
            *(text for name in optional if name != _FOR_DEVELOPERS for text in optional[name]),
        ]
        yield from _read_needs(texts, frozenset())
        return
    distribution = importlib.metadata.distribution("strop")
    extras = frozenset(distribution.metadata.get_all("Provides-Extra") or ()) - {_FOR_DEVELOPERS}
    yield from _read_needs(distribution.requires or (), extras)


def _read_needs(texts: Iterable[str], extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield name and extras of every requirement that holds with these extras."""
    for text in texts:
        match = _REQUIREMENT.match(text)
        if match is None:
            continue
        extra = _EXTRA.search(match["marker"] or "")
        if extra is None or extra["name"] in extras:
            wanted = filter(None, (word.strip() for word in (match["extras"] or "").split(",")))
            yield match["name"], frozenset(wanted)


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _not_installed(name: str) -> CheckRefused:
    return CheckRefused(
        explain_refusal(
            f"package {name!r} is not installed in {sys.prefix}",
            allowed="packages of the environment that runs strop",
            next_step=f"install it: pip install {name}",
        )
    )
