"""Publishers of the learner's weights for engines: by file, or by sending.

`engine.transport` chooses one, with `auto` by the machines of the roles (`choose_transport`). A file is in
shared memory where all roles are on one machine and it has room (`open_memory_dir`).
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file

from strop.cluster.contract import LearnerRole, Publisher
from strop.cluster.engine_process import can_swap_adapters
from strop.engine.contract import WeightTransport, WeightUpdate
from strop.hardware.leftovers import MEMORY_PREFIX, SHARED_MEMORY, own_dir
from strop.io.atomic import explain_write_failure
from strop.policy.device_wires import Wire
from strop.policy.footprint import read_model_size
from strop.policy.publication import WeightSender
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
                    _remove(path)
        version = self._learner.version
        is_adapter = self._sends_adapters and self.find_acknowledged() is not None
        path = _make_place(self._weights_dir, version, "" if is_adapter else _WEIGHTS_SUFFIX)
        write = self._learner.write_adapter if is_adapter else self._learner.write_weights
        return WeightUpdate(
            version=version,
            digest=await write(path),
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
        _remove(path)
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


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class BroadcastPublisher:
    """Publishes by sending: every engine receives the tensors from this process, and no file stays.

    Sending runs in the background, because engines fetch when the update reaches them.
    """

    def __init__(self, learner: LearnerRole, weights_dir: Path, *, host: str, num_receivers: int) -> None:
        """`weights_dir` holds the learner's tensors briefly; all receivers reach `host`.

        Fewer than `num_receivers` may come: a lost one does not block the others.

        Raises: StoreError if `host` is no address of this machine.
        """
        self._learner = learner
        self._weights_dir = weights_dir.absolute()
        self._num_receivers = num_receivers
        self._sender = WeightSender(host)
        self._num_sent = 0

    async def publish(self) -> WeightUpdate:
        """Send the learner's compute copies to the engines that get the update.

        Raises: StoreError if they cannot be written.
        """
        version = self._learner.version
        path = _make_place(self._weights_dir, version, _WEIGHTS_SUFFIX)
        digest = await self._learner.write_weights(path)
        tensors = await asyncio.to_thread(load_file, path)
        path.unlink()
        self._num_sent += 1
        name = f"v{version:06d}-{self._num_sent}"
        self._sender.offer(name, tensors, self._num_receivers)
        return WeightUpdate(
            version=version,
            digest=digest,
            transport=WeightTransport.BROADCAST,
            path=self._sender.address(name),
        )

    async def close(self) -> None:
        """End sending. To be called after the engines have ended: it does not wait for lost ones."""
        await asyncio.to_thread(self._sender.close)
        clear_publications(self._weights_dir)


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

    async def publish(self) -> WeightUpdate:
        """Offer the learner's compute copies. Raises: StoreError if the first ones cannot be written."""
        if not self._is_begun:
            self._is_begun = True
            return await self._first.publish()
        version = self._learner.version
        path, digest = await self._learner.offer_weights(self._wire, self._host, self._num_receivers)
        return WeightUpdate(version=version, digest=digest, transport=WeightTransport.BROADCAST, path=path)

    async def close(self) -> None:
        """Remove the first publication; sending ends with the learner."""
        await self._first.close()


def choose_transport(setting: str, *, is_apart: bool) -> str:
    """Return the transport of weights: 'file' or 'broadcast'.

    `setting` is `engine.transport`; `is_apart`: the roles are on several machines.
    """
    if setting != "auto":
        return setting
    return "broadcast" if is_apart else "file"


def open_publisher(
    spec: RunSpec,
    learner: LearnerRole,
    weights_dir: Path,
    find_acknowledged: Callable[[], int | None],
    *,
    host: str,
    is_apart: bool = False,
) -> Publisher:
    """Return the publisher of a run.

    All engines reach the learner's machine at `host`.
    Raises: StoreError if `host` is no address of this machine.
    """
    transport = choose_transport(spec.engine.transport, is_apart=is_apart)
    layout = spec.layout
    # Each of vLLM's workers is a receiver.
    num_receivers = layout.num_engines * layout.tensor_parallel
    files = FilePublisher(learner, weights_dir, find_acknowledged, sends_adapters=can_swap_adapters(spec))
    sent: Publisher = files
    if transport == "broadcast":
        sent = BroadcastPublisher(learner, weights_dir, host=host, num_receivers=num_receivers)
    # Not for adapters, which are small or merged on the CPU.
    is_whole = spec.lora.rank is None and spec.engine.transport in ("auto", "broadcast")
    if is_whole and layout.has_gpus and learner.device == "cuda":
        wire: Wire = "ipc" if layout.is_shared else "nccl"
        return DevicePublisher(learner, sent, wire, host=host, num_receivers=num_receivers)
    return sent


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
