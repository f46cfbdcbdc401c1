"""Publishers of the learner's weights for engines: by file, or from GPU to GPU.

A file is in shared memory where that has room (`has_memory_room`); an engine on another node is sent it.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cluster.contract import LearnerRole, keep_only
from strop.engine.contract import WeightTransport, WeightUpdate
from strop.engine.loading import can_swap_adapters
from strop.hardware.leftovers import SHARED_MEMORY
from strop.io.atomic import explain_write_failure
from strop.policy.device_wires import DeviceSender, Wire, device_digest, send_copies
from strop.policy.footprint import read_model_size
from strop.policy.learner import Learner
from strop.spec.run import RunSpec

if TYPE_CHECKING:
    from strop.cluster.ray.ranks import RayLearner

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
        self._last: Path | None = None

    async def publish(self) -> WeightUpdate:
        """Write the learner's compute copies to a new file, or its adapters to a new directory.

        Raises: StoreError if they cannot be written.
        """
        version = self._learner.version
        is_adapter = self._sends_adapters and self._last is not None
        path = self._weights_dir / f"v{version:06d}{'' if is_adapter else _WEIGHTS_SUFFIX}"
        try:
            self._weights_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise explain_write_failure(error, path) from error
        keep_only(self._weights_dir, *(old for old in (self._last, path) if old))
        self._last = path
        write = Learner.write_adapter if is_adapter else Learner.write_weights
        return WeightUpdate(
            version=version,
            digest=await self._learner.call(write, path),
            transport=WeightTransport.FILE,
            path=str(path),
            is_adapter=is_adapter,
        )


async def send_weights(learner: RayLearner, wire: Wire, host: str, num_receivers: int) -> WeightUpdate:
    """Offer the learner's compute copies from GPU to GPU. All receivers reach `host`."""
    version = learner.version
    name = f"v{version:06d}-{secrets.token_hex(4)}"
    path, digest = await learner.call(offer_copies, wire, host, name)
    learner.begin(send_offered, wire, name, num_receivers)
    return WeightUpdate(version=version, digest=digest, transport=WeightTransport.BROADCAST, path=path)


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


def choose_publisher(
    spec: RunSpec, learner: RayLearner, weights_dir: Path, *, host: str
) -> Callable[[], Awaitable[WeightUpdate]]:
    """Return what publishes a run's weights. All engines reach the learner's machine at `host`."""
    layout = spec.layout
    # Not for adapters, which are small or merged on the CPU.
    if spec.lora.rank is None and layout.has_gpus and learner.facts.device == "cuda":
        # Each of vLLM's workers is a receiver.
        num_receivers = layout.num_engines * layout.tensor_parallel
        return partial(send_weights, learner, "ipc" if layout.is_shared else "nccl", host, num_receivers)
    return FilePublisher(learner, weights_dir, sends_adapters=can_swap_adapters(spec)).publish


def has_memory_room(model_dir: Path, *, reserved_bytes: int = 0) -> bool:
    """Whether the machine's shared memory has room for all copies of a model's weights."""
    need = reserved_bytes + _MAX_COPIES * 4 * read_model_size(model_dir).num_params
    return SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > need
