"""Find the runs of a place: a run's directory, a folder of runs, mirrors in a store, or a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

from strop.errors import ConfigError, StoreError
from strop.record.files import DirectoryRecord, RecordFiles, StoreRecord
from strop.record.run_dir import STATE_NAME
from strop.store.opening import open_objects
from strop.view.live import METRICS, LiveRun

OpenJob = Callable[[str], tuple[str, RecordFiles]]
"""Returns name and record of a job. Raises: ConfigError if there is no job of this name."""

USUAL_FOLDER = Path("runs")


class Runs:
    """The runs of a place, by name. Each listing searches again, because runs may begin meanwhile."""

    def __init__(self, search: Callable[[], Mapping[str, RecordFiles]]) -> None:
        self._search = search
        self._runs: dict[str, LiveRun] = {}

    def list(self) -> list[LiveRun]:
        """Return all runs. Raises: StoreError if the place does not answer."""
        # A run keeps its object, and with it the records read so far.
        self._runs = {
            key: self._runs.get(key) or LiveRun(key=key, record=record)
            for key, record in self._search().items()
        }
        return list(self._runs.values())

    def open(self, key: str) -> LiveRun:
        """Return the run of a name. Raises: ConfigError if there is none."""
        if key not in self._runs:
            self.list()
        if key not in self._runs:
            raise ConfigError(
                f"there is no run {key!r} here",
                allowed=", ".join(sorted(self._runs)[:20]) or "no run is here yet",
                next_step="choose one of the list",
            )
        return self._runs[key]


def find_runs(place: str, open_job: OpenJob) -> Runs:
    """Return the runs of a place: a directory, a folder, a URI, or the name of a job.

    Raises: StoreError if nothing is there; ConfigError if it is neither a place nor a job.
    """
    path = Path(place)
    if "://" in place:
        runs = Runs(lambda: _list_mirrors(place.rstrip("/")))
        runs.list()
        return runs
    if (path / STATE_NAME).is_file():
        return Runs(lambda: {path.resolve().name: DirectoryRecord(path)})
    # The usual folder may not exist yet: the page waits for its first run.
    if path.is_dir() or path == USUAL_FOLDER:
        return Runs(lambda: _list_folder(path))
    if path.exists() or "/" in place:
        raise StoreError(
            f"{place} holds no run",
            allowed="a run's directory, a folder of runs, a job, or mirrors of runs in a store",
            next_step="see `strop ls` for the runs that there are",
        )
    name, record = open_job(place)
    return Runs(lambda: {name: record})


def _list_folder(path: Path) -> dict[str, RecordFiles]:
    """Return the runs in a folder, or mirrors of runs, including trials of sweeps.

    Also runs of which the state file is lost, as damaged ones.
    """
    found = [path.glob(f"{runs}/{file}") for runs in ("*", "*/members/*") for file in (STATE_NAME, METRICS)]
    names = sorted({file.parent.relative_to(path).as_posix() for file in chain(*found)})
    return {name: DirectoryRecord(path / name) for name in names if ".partial-" not in name}


def _list_mirrors(uri: str) -> dict[str, RecordFiles]:
    """Return the mirrors at and below a URI."""
    objects, ending = open_objects(uri), f"/{STATE_NAME}"
    uris = [stored.uri for stored in objects.list(uri)]
    roots = [place.removesuffix(ending) for place in uris if place.endswith(ending)]
    if not roots:
        raise StoreError(
            f"{uri} holds no mirror of a run",
            allowed="a mirror, such as s3://bucket/prefix/checkpoints/NAME, or a prefix of several",
            next_step="see `strop explain store` for where a run is mirrored to",
        )
    # A run is named by its folder.
    return {root.rpartition("/")[2]: StoreRecord(objects, root) for root in roots}
