"""Publishers of the learner's weights for engines: by file, or from GPU to GPU.

A file is in shared memory where that has room (`has_memory_room`); an engine on another node is sent it.
"""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path

from strop.cluster.contract import LearnerRole, Publisher
from strop.engine.contract import WeightTransport, WeightUpdate
from strop.engine.loading import can_swap_adapters
from strop.hardware.leftovers import SHARED_MEMORY
from strop.io.atomic import explain_write_failure
from strop.policy.device_wires import DeviceSender, Wire, device_digest, send_copies
from strop.policy.footprint import read_model_size
from strop.policy.learner import Learner
from strop.spec.run import RunSpec

_WEIGHTS_SUFFIX = ".safetensors"
_MAX_COPIES = 3
"""Copies of the weights at the same time: the served ones, the new ones, and those being written."""


class FilePublisher:
    """Publishes by file, and keeps the newest two: engines load a file whole, and adapters once more.

    Publishing a version again writes the same bytes again. `sends_adapters` is for engines that keep the base
    model and swap adapters (`can_swap_adapters`). The first publication is whole all the same: engines then
    surely have the learner's base.
    """

    def __init__(self, learner: LearnerRole, weights_dir: Path, *, sends_adapters: bool = False) -> None:
        self._learner = learner
        self._sends_adapters = sends_adapters
        self._weights_dir = weights_dir.absolute()
        self._paths: list[Path] = []

    async def publish(self) -> WeightUpdate:
        """Write the learner's compute copies to a new file, or its adapters to a new directory.

        Raises: StoreError if they cannot be written.
        """
        version = self._learner.version
        is_adapter = self._sends_adapters and bool(self._paths)
        path = self._weights_dir / f"v{version:06d}{'' if is_adapter else _WEIGHTS_SUFFIX}"
        try:
            self._weights_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_write_failure(error, path) from error
        for old in self._paths[:-1]:
            remove_publication(old)
        self._paths = [*(old for old in self._paths[-1:] if old != path), path]
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
        shutil.rmtree(self._weights_dir, ignore_errors=True)


def remove_publication(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class DevicePublisher:
    """Publishes from GPU to GPU."""

    def __init__(self, learner: LearnerRole, wire: Wire, *, host: str, num_receivers: int) -> None:
        """All receivers reach `host`."""
        self._learner = learner
        self._wire: Wire = wire
        self._host = host
        self._num_receivers = num_receivers
        self._num_offers = count()

    async def publish(self) -> WeightUpdate:
        """Offer the learner's compute copies."""
        version = self._learner.version
        name = f"v{version:06d}-{next(self._num_offers)}"
        path, digest = await self._learner.call(offer_copies, self._wire, self._host, name)
        await self._learner.begin(send_offered, self._wire, name, self._num_receivers)
        return WeightUpdate(version=version, digest=digest, transport=WeightTransport.BROADCAST, path=path)

    async def close(self) -> None:
        """Do nothing: sending ends with the learner."""


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


def open_publisher(spec: RunSpec, learner: LearnerRole, weights_dir: Path, *, host: str) -> Publisher:
    """Return the publisher of a run. All engines reach the learner's machine at `host`."""
    layout = spec.layout
    # Not for adapters, which are small or merged on the CPU.
    if spec.lora.rank is None and layout.has_gpus and learner.facts.device == "cuda":
        wire: Wire = "ipc" if layout.is_shared else "nccl"
        # Each of vLLM's workers is a receiver.
        num_receivers = layout.num_engines * layout.tensor_parallel
        return DevicePublisher(learner, wire, host=host, num_receivers=num_receivers)
    return FilePublisher(learner, weights_dir, sends_adapters=can_swap_adapters(spec))


def has_memory_room(model_dir: Path, *, reserved_bytes: int = 0) -> bool:
    """Whether the machine's shared memory has room for all copies of a model's weights."""
    need = reserved_bytes + _MAX_COPIES * 4 * read_model_size(model_dir).num_params
    return SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > need
