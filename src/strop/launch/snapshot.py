"""The code of a job: the working tree on the disk, packed at submission and verified where it runs.

It includes tracked files with their uncommitted edits, and untracked ones that git does not ignore. A job
runs from its own unpacked copy, so that later edits and checkouts in the shared tree do not affect it.
Without git all files are included except hidden ones and caches.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from strop.errors import CheckRefused, ConfigError, StoreError
from strop.io.atomic import explain_write_failure
from strop.launch.contract import CodeSnapshot
from strop.spec.display import show_path

MAX_CODE_BYTES = 64 << 20
NUM_LARGEST_NAMED = 5
GIT_LIMIT_S = 60.0
DOTENV_NAME = ".env"
"""Never packed: its variables are sent in a file that other users cannot read."""
_NO_SECRETS = f":(exclude,top,glob)**/{DOTENV_NAME}"
_UNFINISHED = ("MERGE_HEAD", "rebase-merge", "rebase-apply", "CHERRY_PICK_HEAD", "REVERT_HEAD", "BISECT_LOG")
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "venv", "build", "dist"})


def take_snapshot(project_path: Path, *, excluded: Iterable[Path] = ()) -> CodeSnapshot:
    """List and hash the code of a working tree. Packs and writes nothing.

    `excluded`: folders in it without code, such as the one for runs.

    Raises: ConfigError naming the largest files if it is too large, if a link leads out of it, or if git is
        in the middle of a merge or rebase; StoreError if a file cannot be read.
    """
    root = project_path.resolve()
    is_git = _is_git(root)
    skipped = [path.resolve() for path in excluded]
    names = _list_git_files(root) if is_git else _list_all_files(root)
    files = tuple(sorted(name for name in names if _is_code(root, name, skipped)))
    size_bytes = _measure(root, files)
    commit, diffstat = None, "no git: every file is sent"
    if is_git:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "diff", "--stat=100", "HEAD", "--", ".", _NO_SECRETS) if commit else ""
        untracked_names = _git(root, "ls-files", "-z", "--others", "--exclude-standard", is_raw=True) or ""
        sent = set(files)
        untracked = [show_path(name) for name in untracked_names.split("\0") if name in sent]
        lines = [changed] if changed else []
        if untracked:
            more = f" and {len(untracked) - 20} more" if len(untracked) > 20 else ""
            lines.append(f"untracked: {', '.join(untracked[:20])}{more}")
        diffstat = "\n".join(lines) or "as committed"
    return CodeSnapshot(
        project_path=root,
        files=files,
        sha256=hash_code(root, files),
        size_bytes=size_bytes,
        commit=commit or None,
        diffstat=diffstat,
    )


def read_diff(snapshot: CodeSnapshot) -> str:
    """Return the difference from the commit as a patch, without untracked files."""
    if snapshot.commit is None:
        return ""
    return _git(snapshot.project_path, "diff", "--binary", "HEAD", "--", ".", _NO_SECRETS, is_raw=True) or ""


def pack_code(snapshot: CodeSnapshot, path: Path) -> None:
    """Write the snapshot as a tar archive compressed with zstd: equal trees give equal bytes.

    Raises: CheckRefused if the tree has changed since the snapshot; StoreError if the disk fails.
    """
    from pyarrow import CompressedOutputStream

    try:
        with (
            CompressedOutputStream(str(path), "zstd") as stream,
            tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            for name in snapshot.files:
                _add(archive, snapshot.project_path / name, name)
        is_same = hash_code(snapshot.project_path, snapshot.files) == snapshot.sha256
    except (_Changed, StoreError):
        is_same = False
    except OSError as error:
        raise explain_write_failure(error, path) from error
    if not is_same:
        path.unlink(missing_ok=True)
        raise CheckRefused(
            f"{snapshot.project_path} changed while it was packed",
            allowed="a working tree that stays as it is until the job is submitted",
            next_step="submit again",
        )


class _Changed(Exception):
    """A file changed while it was packed. Internal."""


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    """Add one file or link without owner and times, so that equal trees give equal archives."""
    trial = tarfile.TarInfo(name)
    try:
        if path.is_symlink():
            trial.type, trial.linkname = tarfile.SYMTYPE, os.readlink(path)
            archive.addfile(trial)
            return
        data = path.read_bytes()
        trial.mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
    except OSError as error:
        raise _Changed from error
    trial.size = len(data)
    archive.addfile(trial, io.BytesIO(data))


def unpack_code(archive_path: Path, target: Path, sha256: str) -> None:
    """Unpack a snapshot into a new folder and verify its hash.

    Raises: CheckRefused if the archive is missing, damaged or of other code.
    """
    from pyarrow import CompressedInputStream, OSFile

    target.mkdir(parents=True)
    try:
        with (
            OSFile(str(archive_path)) as file,
            CompressedInputStream(file, "zstd") as stream,
            tarfile.open(fileobj=stream, mode="r|") as archive,
        ):
            archive.extractall(target, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise _wrong_code(archive_path, f"cannot be unpacked ({error})") from error
    unpacked: list[str] = []
    for folder, folders, names in os.walk(target):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        unpacked += [(Path(folder) / name).relative_to(target).as_posix() for name in (*names, *links)]
    files = tuple(sorted(unpacked))
    unpacked_sha256 = hash_code(target, files)
    if unpacked_sha256 != sha256:
        raise _wrong_code(
            archive_path, f"has the hash {unpacked_sha256[:12]}, and {sha256[:12]} was submitted"
        )


def hash_code(root: Path, files: Iterable[str]) -> str:
    """Return one SHA-256 over names, executable bits, link targets and contents."""
    whole = hashlib.sha256()
    for name in files:
        path = root / name
        try:
            facts = path.lstat()
            if stat.S_ISLNK(facts.st_mode):
                kind, digest = "link", hashlib.sha256(os.fsencode(os.readlink(path))).hexdigest()
            else:
                kind = "program" if facts.st_mode & 0o100 else "file"
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise StoreError(
                f"{path} cannot be read ({error.strerror})",
                allowed="files that the submitting user can read",
                next_step="correct its rights, or let git ignore it",
            ) from error
        whole.update(f"{kind} {digest} {name}\0".encode(errors="surrogateescape"))
    return whole.hexdigest()


def _is_code(root: Path, name: str, skipped: list[Path]) -> bool:
    """Whether a name is an existing file outside the skipped folders, and no file of secrets."""
    # Strings, because path objects of thousands of files would be the slowest part of a plan.
    place = os.path.join(root, name)
    inside = f"{place}/"
    if os.path.basename(place) == DOTENV_NAME or any(
        inside.startswith(f"{folder}/") for folder in skipped if folder != root
    ):
        return False
    if os.path.islink(place):
        path = Path(place)
        if not path.resolve().is_relative_to(root) or os.path.isabs(os.readlink(path)):
            raise ConfigError(
                f"{path} is a link to {os.readlink(path)}, which leads out of the project",
                allowed="relative links inside of it: elsewhere the link would lead nowhere",
                next_step="let git ignore the link, or copy what it leads to",
            )
        return True
    return os.path.isfile(place)


def _list_git_files(root: Path) -> list[str]:
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", is_raw=True)
    if listed is None:
        raise _unlisted(root)
    names: dict[str, None] = {}
    for name in filter(None, listed.split("\0")):
        place = os.path.join(root, name)
        if os.path.isdir(place) and not os.path.islink(place):
            # A submodule, or a clone inside the tree: git stops there, and a job needs its files too.
            names |= dict.fromkeys(f"{name.rstrip('/')}/{inner}" for inner in _list_git_files(root / name))
        else:
            names[name] = None
    return list(names)


def _unlisted(root: Path) -> StoreError:
    return StoreError(
        f"git does not list the files of {root}",
        allowed="a working tree that `git status` understands",
        next_step="run `git status` there and mend what it says, or submit with --no-snapshot",
    )


def _list_all_files(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED_FOLDERS]
        for name in names:
            if not name.startswith("."):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _measure(root: Path, files: tuple[str, ...]) -> int:
    """Return the total size in bytes. Raises: ConfigError naming the largest files if it is too large."""
    try:
        sizes = {name: os.lstat(os.path.join(root, name)).st_size for name in files}
    except OSError as error:
        raise StoreError(
            f"{root} changes while it is looked at ({error.strerror}: {error.filename})",
            allowed="a working tree that stays as it is until the job is submitted",
            next_step="submit again",
        ) from error
    total = sum(sizes.values())
    if total > MAX_CODE_BYTES:
        largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:NUM_LARGEST_NAMED]
        shown = ", ".join(f"{name} ({sizes[name] / 1e6:.1f} MB)" for name in largest)
        raise ConfigError(
            f"the code in {root} has {total / 1e6:.1f} MB; the largest files are {shown}",
            allowed=f"{MAX_CODE_BYTES / 1e6:.1f} MB of files that git does not ignore",
            next_step="add data and models to .gitignore; `strop stage` brings them into a store",
        )
    return total


def _is_git(root: Path) -> bool:
    """Whether the tree belongs to a git repository that does not ignore it.

    Raises: StoreError if git cannot read the repository; ConfigError during a merge or rebase.
    """
    if _git(root, "rev-parse", "--is-inside-work-tree") != "true":
        if any((folder / ".git").exists() for folder in (root, *root.parents)):
            raise _unlisted(root)
        return False
    if _git(root, "check-ignore", "-q", ".") is not None:
        # A folder that the surrounding repository ignores is a separate project.
        return False
    folder = _git(root, "rev-parse", "--absolute-git-dir") or ""
    unfinished = [name for name in _UNFINISHED if folder and (Path(folder) / name).exists()]
    if unfinished:
        raise ConfigError(
            f"{root} is in the middle of a merge, rebase or bisection ({', '.join(unfinished)})",
            allowed="a tree whose commit says what the code is",
            next_step="finish or abort it with git, or submit with --no-snapshot",
        )
    return True


def _git(root: Path, *words: str, is_raw: bool = False) -> str | None:
    """Return the output of git; None if it fails or is missing."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-c", "core.quotePath=false", *words],
            cwd=root,
            env=variables | {"GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            timeout=GIT_LIMIT_S,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    text = os.fsdecode(done.stdout)
    return text if is_raw else text.rstrip("\n")


def _wrong_code(path: Path, why: str) -> CheckRefused:
    return CheckRefused(
        f"the code of the job, {path}, {why}",
        allowed="the very code that was submitted",
        next_step="submit again",
    )
