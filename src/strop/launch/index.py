"""The list of this user's jobs, so that commands find them from any folder: one line per submission.

The list only points to job directories, which hold everything else. Missing directories are skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from strop.errors import ConfigError, StoreError
from strop.io import FileLock
from strop.io.atomic import explain_write_failure
from strop.launch.contract import JobRef
from strop.launch.job_dir import PLAN_NAME, has_plan, has_ref, job_path_of, read_plan, read_ref


def index_path(environ: Mapping[str, str]) -> Path:
    """Return the list's path in XDG_STATE_HOME, else in ~/.local/state."""
    state = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME", "/"), ".local", "state")
    return Path(state) / "strop" / "jobs.jsonl"


def note_job(ref: JobRef, environ: Mapping[str, str]) -> None:
    """Add a job to the list. Raises: StoreError if it cannot be written."""
    path = index_path(environ)
    names = {"job_id": ref.job_id, "jobs": sorted(names_of_jobs(ref))}
    line = json.dumps({"name": ref.name, "home": ref.home, "site": ref.site, **names})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")), path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise explain_write_failure(error, path) from error


def names_of_jobs(ref: JobRef) -> set[str]:
    """Return a scheduler's names of a job: its id, and its trials' names if each trial is a job."""
    return {ref.job_id, *(str(job["name"]) for job in ref.details.get("jobs", ()) if "name" in job)}


def list_job_names(roots: list[Path], environ: Mapping[str, str]) -> set[str]:
    """Return the schedulers' names of all jobs, including earlier ones, whose directories still exist.

    Raises: StoreError if a folder or the list cannot be read.
    """
    listed = _read_index(index_path(environ))
    names_listed = {name for home, names in listed if has_plan(home) for name in names}
    return names_listed.union(*(_present_names(home) for home in list_job_dirs(roots, environ)))


def list_job_dirs(roots: list[Path], environ: Mapping[str, str]) -> list[Path]:
    """Return the job directories below some folders and in the list, newest first."""
    homes = {path.resolve() for path, _ in _read_index(index_path(environ)) if has_plan(path)}
    for root in roots:
        try:
            homes |= {path.resolve() for path in root.iterdir() if has_plan(path)}
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise StoreError(
                f"{root} cannot be listed ({error.strerror})",
                allowed="a folder that you may read",
                next_step="check its rights, or name a job by its directory",
            ) from error
    dated: dict[Path, float] = {}
    for path in homes:
        # A directory may have been removed meanwhile.
        with suppress(OSError):
            dated[path] = (job_path_of(path) / PLAN_NAME).stat().st_mtime
    return sorted(dated, key=lambda path: dated[path], reverse=True)


def find_job_dir(reference: str, roots: list[Path], environ: Mapping[str, str]) -> Path:
    """Return the job directory that a reference names: a path, a job's id, a run's name or a unique prefix.

    A bare name means the newest job of that name. FOLDER/NAME looks in that folder only.
    Raises: ConfigError if there is none, or a prefix fits several; StoreError if the list cannot be read.
    """
    if reference and has_plan(Path(reference)):
        return Path(reference).resolve()
    folder, slash, name = reference.rpartition("/")
    if slash:
        place = Path(folder).resolve()
        homes = [home for home in list_job_dirs([place], environ) if home.parent == place]
    else:
        homes = list_job_dirs(roots, environ)
    jobs = {home: _present_names(home) for home in homes}
    for path, names in _read_index(index_path(environ)):
        jobs.get(path.resolve(), set()).update(names)
    exact = [home for home in homes if name in {home.name, _run_of(home), *jobs[home]}]
    if exact:
        return exact[0]
    # A number is a job id, never the prefix of another id.
    names_of = {home: {home.name, *(() if name.isdigit() else jobs[home])} for home in homes}
    matches = [home for home in homes if name and any(n.startswith(name) for n in names_of[home])]
    if len(matches) == 1:
        return matches[0]
    shown = ", ".join(home.name for home in (matches or homes)[:8]) or "there is none yet"
    raise ConfigError(
        f"{reference!r} names {f'{len(matches)} jobs' if matches else 'no job'}",
        allowed=f"a run directory, a job id, a run's name or a unique beginning: {shown}",
        next_step="`strop ls` lists runs and jobs",
    )


def _run_of(home: Path) -> str:
    """Return the run's name; for a damaged job directory its folder's name, so that it hides no other."""
    try:
        return read_plan(job_path_of(home)).name
    except StoreError:
        return home.name


def _present_names(home: Path) -> set[str]:
    try:
        return names_of_jobs(read_ref(job_path_of(home))) if has_ref(home) else set()
    except StoreError:
        return set()


def _read_index(path: Path) -> Iterator[tuple[Path, set[str]]]:
    """Yield the job directories in the list, and the schedulers' names of their jobs."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(
            f"{path}, the list of your jobs, cannot be read ({error.strerror})",
            allowed="a file of your own",
            next_step="remove it; jobs are still found by their directories",
        ) from error
    for line in lines:
        try:
            record = json.loads(line)
            names = {record["job_id"], *record.get("jobs", ())}
            yield Path(record["home"]), {name for name in names if isinstance(name, str)}
        except (ValueError, KeyError, TypeError):
            # A full disk cut this line short; the others are complete.
            continue
