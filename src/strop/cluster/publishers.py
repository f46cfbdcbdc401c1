"""Publishers of the learner's weights for engines: by file, or from GPU to GPU.

A file is in shared memory where that has room (`open_memory_dir`); an engine on another node is sent it.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from strop.cluster.contract import LearnerRole, Publisher
from strop.engine.contract import WeightTransport, WeightUpdate
from strop.engine.loading import can_swap_adapters
from strop.hardware.leftovers import MEMORY_PREFIX, SHARED_MEMORY, own_dir
from strop.io.atomic import explain_write_failure
from strop.policy.device_wires import DeviceSender, Wire, device_digest, send_copies
from strop.policy.footprint import read_model_size
from strop.policy.learner import Learner
from strop.spec.run import RunSpec

_WEIGHTS_SUFFIX = ".safetensors"
_MAX_COPIES = 3
"""Copies of the weights at the same time: the served ones, the new ones, and those being written."""


class FilePublisher:
    """Publishes by file, and keeps only the files that an engine may still read.

    Publishing a version again writes the same bytes again. `find_acknowledged` returns the version
    that the engine serves, or None: older files are removed, the served one stays until the next is served.

    `sends_adapters` is for engines that keep the base model and swap adapters (`can_swap_adapters`). The
    first publication is whole all the same: it proves that the engine loaded the learner's base, to
    which adapters that have not learned yet add nothing.
    """

    def __init__(
        self,
        learner: LearnerRole,
        weights_dir: Path,
        find_acknowledged: Callable[[], int | None],
        *,
        sends_adapters: bool = False,
    ) -> None:
        self._learner = learner
        self._sends_adapters = sends_adapters
        self._weights_dir = weights_dir.absolute()
        self.find_acknowledged = find_acknowledged

    async def publish(self) -> WeightUpdate:
        """Write the learner's compute copies to a new file, or its adapters to a new directory.

        Raises: StoreError if they cannot be written.
        """
        acknowledged = self.find_acknowledged()
        if acknowledged is not None:
            for path in _published(self._weights_dir):
                if int(path.stem[1:]) < acknowledged:
                    remove_publication(path)
        version = self._learner.version
        is_adapter = self._sends_adapters and self.find_acknowledged() is not None
        path = _make_place(self._weights_dir, version, "" if is_adapter else _WEIGHTS_SUFFIX)
        write = Learner.write_adapter if is_adapter else Learner.write_weights
        return WeightUpdate(
            version=version,
            digest=await self._learner.call(write, path),
            transport=WeightTransport.FILE,
            path=str(path),
            is_adapter=is_adapter,
        )

    async def close(self) -> None:
        """Remove every publication."""
        clear_publications(self._weights_dir)


def clear_publications(weights_dir: Path) -> None:
    """Remove every publication: they are only for transport."""
    for path in _published(weights_dir):
        remove_publication(path)
    if weights_dir.is_dir() and not any(weights_dir.iterdir()):
        weights_dir.rmdir()


def _make_place(weights_dir: Path, version: int, suffix: str) -> Path:
    """Return the path for a version. Raises: StoreError if the directory cannot be made."""
    path = weights_dir / f"v{version:06d}{suffix}"
    try:
        weights_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise explain_write_failure(error, path) from error
    return path


def _published(weights_dir: Path) -> list[Path]:
    names = (f"v[0-9]*{_WEIGHTS_SUFFIX}", "v[0-9]*.partial", "v" + 6 * "[0-9]")
    return [path for name in names for path in weights_dir.glob(name)]


def remove_publication(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class DevicePublisher:
    """Publishes from GPU to GPU, except for the first publication.

    That one has the digest of the stored files, which proves that an engine loaded the learner's base.
    """

    def __init__(
        self, learner: LearnerRole, first: Publisher, wire: Wire, *, host: str, num_receivers: int
    ) -> None:
        """All receivers reach `host`; `first` publishes the first time."""
        self._learner = learner
        self._first = first
        self._wire: Wire = wire
        self._host = host
        self._num_receivers = num_receivers
        self._is_begun = False
        self._num_offers = count()

    async def publish(self) -> WeightUpdate:
        """Offer the learner's compute copies. Raises: StoreError if the first ones cannot be written."""
        if not self._is_begun:
            self._is_begun = True
            return await self._first.publish()
        version = self._learner.version
        name = f"v{version:06d}-{next(self._num_offers)}"
        path, digest = await self._learner.call(offer_copies, self._wire, self._host, name)
        await self._learner.begin(send_offered, self._wire, name, self._num_receivers)
        return WeightUpdate(version=version, digest=digest, transport=WeightTransport.BROADCAST, path=path)

    async def close(self) -> None:
        """Remove the first publication; sending ends with the learner."""
        await self._first.close()


def offer_copies(learner: Learner, wire: Wire, host: str, name: str) -> tuple[str, str]:
    """Open the place where receivers find the compute copies, on every rank; return address and digest.

    Raises: StoreError if `host` is no address of this machine.
    """
    if learner.ranks.index == 0:
        learner.sender = learner.sender or DeviceSender(host)
    address: str = learner.ranks.gather(learner.sender.address(wire, name) if learner.sender else "")[0]
    if wire == "ipc" and learner.sender is None:
        # Each rank has receivers on its GPU.
        learner.sender = DeviceSender(host, int(address.rpartition("/")[0].rpartition(":")[2]))
    return address, device_digest(learner.compute_copies())


def send_offered(learner: Learner, wire: Wire, name: str, num_receivers: int) -> None:
    """Send the compute copies to the receivers that come to the place of `offer_copies`."""
    send_copies(learner.sender, wire, name, learner.compute_copies(), num_receivers)


def open_publisher(
    spec: RunSpec,
    learner: LearnerRole,
    weights_dir: Path,
    find_acknowledged: Callable[[], int | None],
    *,
    host: str,
) -> Publisher:
    """Return the publisher of a run. All engines reach the learner's machine at `host`."""
    layout = spec.layout
    files = FilePublisher(learner, weights_dir, find_acknowledged, sends_adapters=can_swap_adapters(spec))
    # Not for adapters, which are small or merged on the CPU.
    if spec.lora.rank is None and layout.has_gpus and learner.facts.device == "cuda":
        wire: Wire = "ipc" if layout.is_shared else "nccl"
        # Each of vLLM's workers is a receiver.
        num_receivers = layout.num_engines * layout.tensor_parallel
        return DevicePublisher(learner, files, wire, host=host, num_receivers=num_receivers)
    return files


def has_memory_room(model_dir: Path, *, reserved_bytes: int = 0) -> bool:
    """Whether the machine's shared memory has room for all copies of a model's weights."""
    need = reserved_bytes + _MAX_COPIES * 4 * read_model_size(model_dir).num_params
    return SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > need


@contextmanager
def open_memory_dir() -> Iterator[Path]:
    """Yield a private directory in shared memory, gone afterwards.

    After kill -9 of this process it is removed by the next process that calls this, or by the job's agent.
    Raises: StoreError if it cannot be made.
    """
    path = SHARED_MEMORY / f"{MEMORY_PREFIX}{secrets.token_hex(4)}"
    with own_dir(path):
        yield path
