"""Layers of an image: this machine's interpreter and packages, strop itself, and a Debian base below them.

Files keep their absolute paths, so nothing has to be relocated, and `python -m ...` works the same inside and
outside. Bytecode is included: the archive's time stamps keep it valid, and without it every start would
compile thousands of files. Left out: packages that strop does not need, test suites, headers and static
libraries of the interpreter, caches.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import strop
from strop.errors import CheckRefused
from strop.io import FileLock

AGENT_PACKAGES = ("pydantic", "jinja2", "psutil", "pyarrow", "numpy")
"""The needs of a node's agent: enough for jobs whose roles bring their own programs."""
BUILD_LIMIT_S = 900.0
_DEFAULT_SUITE = "bookworm"
_FOLDERS = ("doc", "info", "locale", "man")
_LEFT_OUT = (
    *(f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in _FOLDERS),
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
)
_LIBRARIES = ("ca-certificates", "libbz2-1.0", "libffi8", "libgcc-s1", "libgomp1", "liblzma5", "libncursesw6")
LIBRARIES = (*_LIBRARIES, "libreadline8", "libsqlite3-0", "libssl3", "libstdc++6", "zlib1g")
"""Libraries that an interpreter built from source and the usual wheels link to."""
FULL_PACKAGES = ("bubblewrap", "gcc", "libc6-dev")
"""In addition: the sandbox for model-written code, and the compiler of the CPU kernels."""
_FOR_DEVELOPERS = "dev"
"""The extra that no image has."""
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idlelib", "turtledemo", "ensurepip", "site-packages"})
_SKIPPED_SUFFIXES = (".a", ".pyo")
# Folders that every system has, whose rights must not change.
_SYSTEM_FOLDERS = frozenset(map(Path, ("/", "/bin", "/home", "/lib", "/opt", "/srv", "/tmp", "/usr", "/var")))
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(?:\[(?P<extras>[^]]*)\])?[^;]*(?:;(?P<marker>.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"](?P<name>[^'\"]+)['\"]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Files of one layer of an image."""

    name: str
    files: tuple[tuple[Path, str], ...]
    """The path of each file here, and its absolute path in the image."""
    key: str
    """Changes with the content."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(source.lstat().st_size for source, _ in self.files)


def is_system_python() -> bool:
    """Whether the interpreter is the distribution's, which an image gets from a package."""
    return Path(sys.base_prefix) in _SYSTEM_FOLDERS


def python_of_environment() -> Path:
    """Return the interpreter that runs strop, by the path with which it finds its packages."""
    return Path(sys.prefix) / "bin" / "python"


def interpreter_layer() -> Layer:
    """Return the interpreter and its standard library; empty for the distribution's."""
    base = Path(sys.base_prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths: list[Path] = []
    if not is_system_python():
        paths += [path for path in base.glob("bin/python3*") if "config" not in path.name]
        paths += [*base.glob("bin/python"), *base.glob("lib/libpython3*.so*")]
        library = _walk(base / "lib" / version)
        # `config-*` serves only for building extensions.
        paths += [path for path in library if not any(part.startswith("config-") for part in path.parts)]
    return _layer("interpreter", paths, key=f"{sys.version} {base}")


def packages_layer(roots: Sequence[str] | None) -> Layer:
    """Return a virtual environment with the packages of `roots` and their dependencies.

    None: strop's dependencies, with its extras as far as they are installed.

    Raises: CheckRefused if a package is not installed here.
    """
    needed = required_packages(roots)
    site = Path(sysconfig.get_path("purelib"))
    paths: list[Path] = []
    if sys.prefix != sys.base_prefix:
        prefix = Path(sys.prefix)
        paths += [prefix / "pyvenv.cfg", *prefix.glob("bin/python*")]
        paths += [prefix / "lib64"] if (prefix / "lib64").is_symlink() else []
    digest = hashlib.sha256(f"{sys.prefix} {site}".encode())
    for distribution in needed:
        digest.update((distribution.read_text("RECORD") or str(distribution.version)).encode())
        paths += _files_of(distribution)
    return _layer("packages", paths, key=digest.hexdigest())


def strop_layer() -> Layer:
    """Return strop's current source, in the site-packages of the environment."""
    folder = Path(strop.__file__).parent
    target = Path(sysconfig.get_path("purelib")) / "strop"
    files = [path for path in _walk(folder) if "__pycache__" not in path.parts]
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    pairs = tuple((path, str(target / path.relative_to(folder))) for path in files)
    return Layer(name="strop", files=pairs, key=digest.hexdigest())


def required_packages(roots: Sequence[str] | None = None) -> list[importlib.metadata.Distribution]:
    """Return installed packages with their dependencies, sorted by name, without strop itself.

    Raises: CheckRefused if one of the roots is not installed.
    """
    waiting: list[tuple[str, frozenset[str]]]
    waiting = [*_own_needs()] if roots is None else [(name, frozenset()) for name in roots]
    required = {_normalize(name) for name in roots or ()}
    seen: set[tuple[str, frozenset[str]]] = set()
    packages: dict[str, importlib.metadata.Distribution] = {}
    while waiting:
        name, extras = waiting.pop()
        name = _normalize(name)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            packages[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if name in required:
                raise CheckRefused(
                    f"package {name!r} is not installed in {sys.prefix}",
                    allowed="packages of the environment that runs strop",
                    next_step=f"install it: pip install {name}",
                ) from None
            continue  # An extra, or for another platform.
        waiting += _read_needs(packages[name].requires or (), extras)
    packages.pop("strop", None)
    return [packages[name] for name in sorted(packages)]


def write_layer(layer: Layer, path: Path) -> None:
    """Write a layer as a tar archive: owned by root, readable by all, with the files' times."""
    seen: set[Path] = set()
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for source, target in layer.files:
            for folder in reversed(Path(target).parents):
                if folder not in seen and folder not in _SYSTEM_FOLDERS:
                    seen.add(folder)
                    entry = tarfile.TarInfo(str(folder).lstrip("/"))
                    entry.type = tarfile.DIRTYPE
                    # Other users must be able to enter root's home, but not to list it.
                    entry.mode = 0o711 if folder == Path("/root") else 0o755
                    archive.addfile(entry)
            archive.add(source, target.lstrip("/"), recursive=False, filter=_readable)


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


def _files_of(distribution: importlib.metadata.Distribution) -> Iterator[Path]:
    prefix = Path(sysconfig.get_path("purelib"))
    for name in distribution.files or ():
        path = Path(os.path.normpath(str(distribution.locate_file(name))))
        inside = path.relative_to(prefix).parts if path.is_relative_to(prefix) else ()
        # Scripts of packages are left out: images use `python -m`.
        if inside and not _SKIPPED_FOLDERS & set(inside[1:-1]) and path.is_file():
            yield path


def _own_needs() -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the dependencies of strop with all extras for users.

    A checkout is read from pyproject.toml, because the installed metadata may be older.
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
    """Yield name and extras of every requirement that applies with these extras."""
    for text in texts:
        match = _REQUIREMENT.match(text)
        if match is None:
            continue
        extra = _EXTRA.search(match["marker"] or "")
        if extra is None or extra["name"] in extras:
            names = filter(None, (word.strip() for word in (match["extras"] or "").split(",")))
            yield match["name"], frozenset(names)


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# mmdebstrap builds the Debian base from this machine's package mirror, once per set of packages; the user's
# cache keeps it. It is for machines that reach no registry. Tried with Debian 12 (bookworm): 20 s, 140 MB.


def read_suite(release_path: Path = Path("/etc/os-release")) -> str:
    """Return the Debian release of this machine, or bookworm on another system."""
    try:
        lines = release_path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return _DEFAULT_SUITE
    facts = dict(line.split("=", 1) for line in lines if "=" in line)
    if facts.get("ID", "").strip('"') != "debian":
        return _DEFAULT_SUITE
    return facts.get("VERSION_CODENAME", "").strip('"') or _DEFAULT_SUITE


def make_base(folder: Path, suite: str, packages: Sequence[str], *, is_fresh: bool = False) -> Path:
    """Return the archive of a root directory with the packages, built unless `folder` has it.

    `is_fresh`: always build it.

    Raises: CheckRefused if mmdebstrap is missing or fails.
    """
    names = ",".join(sorted(packages))
    path = folder / f"{suite}-{hashlib.sha256(names.encode()).hexdigest()[:12]}.tar"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if path.is_file() and not is_fresh:
            return path
        partial_path = path.with_suffix(".partial.tar")
        try:
            program = shutil.which("mmdebstrap")
            if program is None:
                raise _refuse("mmdebstrap is not installed")
            argv = [
                program,
                "--quiet",
                "--variant=minbase",
                f"--include={names}",
                *_LEFT_OUT,
                suite,
                str(partial_path),
            ]
            # A fixed time makes equal packages give equal bytes, so that the layer is cached.
            environ = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
            try:
                done = subprocess.run(
                    argv,
                    check=False,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    env=environ,
                    timeout=BUILD_LIMIT_S,
                )
            except subprocess.TimeoutExpired:
                raise _refuse(f"mmdebstrap did not end in {BUILD_LIMIT_S:g} s") from None
            if done.returncode != 0:
                words = " ".join(done.stderr.split())[-2000:]
                raise _refuse(f"mmdebstrap made no {suite} ({words})")
            os.replace(partial_path, path)
        finally:
            partial_path.unlink(missing_ok=True)
    return path


def _refuse(problem: str) -> CheckRefused:
    return CheckRefused(
        problem,
        allowed="a Debian mirror that answers, and mmdebstrap",
        next_step="install it (make system-deps as root), or set base_image in the site profile to an"
        " image that a registry has",
    )
