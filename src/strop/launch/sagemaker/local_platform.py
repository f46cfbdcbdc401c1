"""The platform's side of a container, emulated here: /opt/ml, checkpoint copying, S3 as folders.

Like the platform it uploads half-written files, deletes in S3 what is deleted here, and downloads nothing
after the start. Source: the developer guide on checkpoints in training jobs.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from strop.errors import RemoteMissing
from strop.io.atomic import walk_files
from strop.launch.sagemaker import places
from strop.launch.sagemaker.client import JobObjects
from strop.store.contract import StoredObject
from strop.store.local_objects import LocalObjects
from strop.store.uris import parse_s3


def build_tree(
    root: Path, request: Mapping[str, Any], objects: JobObjects, *, hosts: Sequence[str], host: str
) -> None:
    """Make the tree of one host with channels and earlier checkpoints. Raises: StoreError; OSError."""
    shutil.rmtree(root, ignore_errors=True)
    for folder in ("model", "output/data", "input/config", places.DATA):
        (root / folder).mkdir(parents=True)
    resources = request["ResourceConfig"]
    # All values are strings, whatever their type was.
    _write(root / places.HYPERPARAMETERS, {k: str(v) for k, v in request.get("HyperParameters", {}).items()})
    _write(root / places.RESOURCES, _describe_hosts(resources, hosts, host))
    channels = {}
    for channel in request.get("InputDataConfig", []):
        name, source = channel["ChannelName"], channel["DataSource"]["S3DataSource"]
        channels[name] = {
            "TrainingInputMode": channel.get("InputMode", "File"),
            "S3DistributionType": source.get("S3DataDistributionType", "FullyReplicated"),
            "RecordWrapperType": channel.get("RecordWrapperType", "None"),
            "ContentType": channel.get("ContentType", ""),
        }
        fetch_all(objects, source["S3Uri"], root / places.DATA / name)
    _write(root / places.CHANNELS, channels)
    if "CheckpointConfig" in request:
        local = request["CheckpointConfig"].get("LocalPath", places.CHECKPOINT_PATH)
        _write(root / places.CHECKPOINTS, {"LocalPath": local})
        fetch_all(objects, request["CheckpointConfig"]["S3Uri"], checkpoint_path(root, request))


def checkpoint_path(root: Path, request: Mapping[str, Any]) -> Path:
    """Return the checkpoint directory of a tree."""
    local = request["CheckpointConfig"].get("LocalPath", places.CHECKPOINT_PATH)
    return root / PurePosixPath(local).relative_to(places.OPT_ML)


def fetch_all(objects: JobObjects, uri: str, folder: Path) -> None:
    """Copy everything below a URI into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    root = uri.rstrip("/")
    for stored in objects.list(root):
        target = folder / stored.uri[len(root) + 1 :]
        target.parent.mkdir(parents=True, exist_ok=True)
        objects.download(stored, target, None)


class PlatformSync:
    """The platform's copying of one host's checkpoint directory."""

    def __init__(self, folder: Path, uri: str, objects: JobObjects, *, every_s: float) -> None:
        self._folder, self._uri, self._objects, self._every_s = folder, uri.rstrip("/"), objects, every_s
        self._seen: dict[str, tuple[int, int]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="checkpoint-sync", daemon=True)

    def start(self) -> None:
        """Begin; files that were copied in are not uploaded."""
        self._seen = self._list_versions()
        self._thread.start()

    def stop(self, *, is_last: bool) -> None:
        """End; `is_last` copies once more, as after an orderly stop but not after a reclaim."""
        self._stopped.set()
        self._thread.join()
        if is_last:
            self.copy_changes()

    def copy_changes(self) -> None:
        """Upload changed files as they are now, and delete missing ones."""
        versions = self._list_versions()
        for name in sorted(self._seen.keys() - versions.keys()):
            self._objects.remove(f"{self._uri}/{name}")
        for name, version in versions.items():
            if self._seen.get(name) != version:
                with suppress(OSError):
                    self._objects.write(f"{self._uri}/{name}", (self._folder / name).read_bytes())
        self._seen = versions

    def _list_versions(self) -> dict[str, tuple[int, int]]:
        return {
            path.relative_to(self._folder).as_posix(): (stat.st_mtime_ns, stat.st_size)
            for path, stat in walk_files(self._folder)
        }

    def _repeat(self) -> None:
        while not self._stopped.wait(self._every_s):
            self.copy_changes()


def _describe_hosts(resources: Mapping[str, Any], hosts: Sequence[str], host: str) -> dict[str, Any]:
    groups = resources.get("InstanceGroups") or [
        {
            "InstanceGroupName": "homogeneousCluster",
            "InstanceType": resources.get("InstanceType", ""),
            "InstanceCount": len(hosts),
        }
    ]
    described, left = [], list(hosts)
    for group in groups:
        group_hosts, left = left[: group["InstanceCount"]], left[group["InstanceCount"] :]
        described.append(
            {
                "instance_group_name": group["InstanceGroupName"],
                "instance_type": group["InstanceType"],
                "hosts": group_hosts,
            }
        )
    current = next(group for group in described if host in group["hosts"])
    return {
        "current_host": host,
        "current_instance_type": current["instance_type"],
        "current_group_name": current["instance_group_name"],
        "hosts": list(hosts),
        "instance_groups": described,
        "network_interface_name": "lo",
    }


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content))


class FolderObjects:
    """`JobObjects` with one folder per bucket below a root."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._inner = LocalObjects()

    def path_of(self, uri: str) -> Path:
        """Return the file of an object. Raises: ConfigError if `uri` is no URI of S3."""
        place = parse_s3(uri)
        return self._root / place.bucket / place.key

    def find(self, uri: str) -> StoredObject | None:
        """Return the facts about one object, or None."""
        stored = self._inner.find(str(self.path_of(uri)))
        return None if stored is None else self._with_uri(stored)

    def list(self, uri: str) -> Iterator[StoredObject]:
        """Yield all objects below a URI, by name."""
        for stored in self._inner.list(str(self.path_of(uri))):
            yield self._with_uri(stored)

    def read(self, uri: str) -> bytes:
        """Return a small object. Raises: RemoteMissing."""
        return self._inner.read(str(self.path_of(uri)))

    def write(self, uri: str, data: bytes) -> None:
        """Write a small object atomically."""
        self._inner.write(str(self.path_of(uri)), data)

    def upload(self, path: Path, uri: str, sha256: str) -> None:
        """Send a file."""
        self._inner.upload(path, str(self.path_of(uri)), sha256)

    def download(self, stored: StoredObject, path: Path, sha256: str | None) -> str:
        """Write an object to a new local file and return its digest."""
        return self._inner.download(replace(stored, uri=str(self.path_of(stored.uri))), path, sha256)

    def digest(self, uri: str) -> str | None:
        """Return the digest of an object, None if there is none."""
        try:
            return self._inner.digest(str(self.path_of(uri)))
        except RemoteMissing:
            return None

    def remove(self, uri: str) -> None:
        """Remove one object; a missing one is no error."""
        self._inner.remove(str(self.path_of(uri)))

    def _with_uri(self, stored: StoredObject) -> StoredObject:
        return replace(stored, uri=f"s3://{Path(stored.uri).relative_to(self._root).as_posix()}")
