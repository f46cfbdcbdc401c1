"""Which runs a place holds: a run's directory, a folder of runs, mirrors in a store, or a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from strop.errors import ConfigError, StoreError
from strop.record.files import DirectoryRecord, RecordFiles, StoreRecord
from strop.record.mirror.layout import TRACES
from strop.record.run_dir import STATE_NAME
from strop.store.contract import Objects
from strop.store.local_objects import LocalObjects
from strop.store.opening import open_objects
from strop.view.live import LiveRun

OpenJob = Callable[[str], tuple[str, RecordFiles]]
"""Returns name and record of a job. Raises: ConfigError if there is none of this name."""

USUAL_FOLDER = Path("runs")


class Runs:
    """The runs of a place, by name. They are looked for anew where they are listed: runs begin meanwhile."""

    def __init__(self, look: Callable[[], Mapping[str, RecordFiles]]) -> None:
        self._look = look
        self._known: dict[str, LiveRun] = {}

    def list(self) -> list[LiveRun]:
        """Return all runs. Raises: StoreError if the place does not answer."""
        found = self._look()
        # One that is known keeps its object, and with it what was read of it.
        self._known = {
            key: self._known.get(key) or LiveRun(key=key, record=record) for key, record in found.items()
        }
        return list(self._known.values())

    def open(self, key: str) -> LiveRun:
        """Return the run of a name. Raises: ConfigError if there is none."""
        if key not in self._known:
            self.list()
        if key not in self._known:
            raise ConfigError(
                f"there is no run {key!r} here",
                allowed=", ".join(sorted(self._known)[:20]) or "no run is here yet",
                next_step="choose one of the list",
            )
        return self._known[key]


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
    # Where runs begin by themselves: the page waits for the first one.
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
    """Return the runs in a folder, trials of sweeps among them; where there is none, the mirrors in it."""
    found = [*path.glob(f"*/{STATE_NAME}"), *path.glob(f"*/members/*/{STATE_NAME}")]
    names = sorted(one.parent.relative_to(path).as_posix() for one in found)
    runs = {
        name: DirectoryRecord(path / name) for name in names if ".partial-" not in name and name != TRACES
    }
    mirrors = [*path.glob(f"{TRACES}/{STATE_NAME}"), *path.glob(f"*/{TRACES}/{STATE_NAME}")]
    return {**runs} or _open_mirrors(LocalObjects(), [str(one) for one in sorted(mirrors)])


def _list_mirrors(uri: str) -> dict[str, RecordFiles]:
    """Look for mirrors at and below a URI."""
    objects = open_objects(uri)
    mirrors = _open_mirrors(objects, [stored.uri for stored in objects.list(uri)])
    if not mirrors:
        raise StoreError(
            f"{uri} holds no mirror of a run",
            allowed="a mirror, such as s3://bucket/prefix/checkpoints/NAME, or a prefix of several",
            next_step="see `strop explain store` for where a run is mirrored to",
        )
    return mirrors


def _open_mirrors(objects: Objects, uris: Sequence[str]) -> dict[str, RecordFiles]:
    """Return the mirrors whose state is among some objects; a run's name is that of the folder around."""
    ending = f"/{TRACES}/{STATE_NAME}"
    roots = [uri.removesuffix(ending) for uri in uris if uri.endswith(ending)]
    names = {root: root.rpartition("/")[2] for root in roots}
    return {name: StoreRecord(objects, root, run=name) for root, name in names.items()}
