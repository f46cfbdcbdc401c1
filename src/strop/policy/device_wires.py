"""Weights from GPU to GPU without the CPU: NCCL between two GPUs, CUDA IPC on one.

A publication is offered at a TCP store: `nccl://host:port/name` or `ipc://...`. All
ranks of a learner gather one tensor after the other and the first sends it to every receiver before the next
one is gathered, so that no GPU holds more than one whole tensor beside its share. By IPC each rank sends to
the receivers on its GPU. Each receiver has a separate wire: one that dies is left out, and the others go on.

Received tensors are proven by `device_digest`, which is computed on their device. SHA-256 would need the CPU.

Sources: PyTorch, `torch.distributed.ProcessGroupNCCL` and `torch.multiprocessing.reductions.reduce_tensor`;
CUDA C++ Programming Guide, 'Interprocess Communication'. NCCL refuses two ranks on one GPU; a handle of CUDA
IPC opens where that GPU is visible.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from strop.errors import StoreError, WeightMismatch

distributed: Any = torch.distributed
_log = logging.getLogger("strop.policy.publication")
Wire = Literal["nccl", "ipc"]
SCHEMES = ("nccl://", "ipc://")
DIGEST_PREFIX = "sum64:"
LIMIT_S = 300.0
"""Limit of the rendezvous, and of each tensor's arrival."""
_POLL_S = 0.0005
_CHUNK = 1 << 24
"""Words that are summed at once: their products take 128 MB."""
# Odd numbers of Weyl's and Vigna's generators, as signed 64-bit words.
_STEP, _MIX = -7046029254386353131, -4658895280553007687
_FAILURES = (RuntimeError, ValueError, OSError)


def fingerprint(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's words times factors that depend on their places, modulo 2^64.

    Computed on the tensor's device, and equal on every device: integers wrap around. Two different tensors
    have the same fingerprint by chance once in 2^64 times; it is not secure against an attacker.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if rest := -len(flat) % 8:
        flat = torch.cat([flat, flat.new_zeros(rest)])
    words = flat.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for first in range(0, len(words), _CHUNK):
        part = words[first : first + _CHUNK]
        places = torch.arange(first + 1, first + 1 + len(part), dtype=torch.int64, device=flat.device)
        factors = places * _STEP
        factors = (factors ^ (factors >> 29)) * _MIX
        # Odd factors lose no bit of a word.
        total += ((factors ^ (factors >> 32) | 1) * part).sum()
    return int(total) & (2**64 - 1)


def device_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return `sum64:` and 64 hex digits over name, type, shape and fingerprint of each tensor."""
    lines = sorted(
        f"{name}/{tensor.dtype}/{tuple(tensor.shape)}/{fingerprint(tensor):016x}" for name, tensor in tensors
    )
    return DIGEST_PREFIX + hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Link(Protocol):
    """One wire between a sender and one receiver."""

    def send(self, number: int, tensor: torch.Tensor) -> None:
        """Send a tensor, and return when the receiver has it."""

    def receive(self, number: int, form: tuple[str, list[int]]) -> torch.Tensor:
        """Return the tensor with a number."""


class _GroupLink:
    """A process group of sender, rank 0, and receiver."""

    def __init__(self, store: Any, rank: int, limit: timedelta) -> None:
        self._group = make_group(store, rank, limit)
        self._limit = limit
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def send(self, number: int, tensor: torch.Tensor) -> None:
        """Broadcast it as bytes."""
        self._group.broadcast(tensor.view(-1).view(torch.uint8), 0, self._limit).wait()
        self._settle()

    def receive(self, number: int, form: tuple[str, list[int]]) -> torch.Tensor:
        """Take part in the broadcast."""
        tensor = torch.empty(form[1], dtype=getattr(torch, form[0]), device=self._device)
        self._group.broadcast(tensor.view(-1).view(torch.uint8), 0, self._limit).wait()
        self._settle()
        return tensor

    def _settle(self) -> None:
        # `wait` only orders the stream, and another process may use the memory next.
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def make_group(store: Any, rank: int, limit: timedelta) -> Any:
    """Return the NCCL group of two. Raises: RuntimeError if there is no NCCL, or the other does not come."""
    if not distributed.is_nccl_available():
        raise RuntimeError("this PyTorch has no NCCL")
    return distributed.ProcessGroupNCCL(store, rank, 2, limit)


class _HandleLink:
    """Handles of memory of the GPU that both sides use."""

    def __init__(self, store: Any, rank: int, limit: timedelta) -> None:
        self._store, self._limit = store, limit

    def send(self, number: int, tensor: torch.Tensor) -> None:
        """Publish the handle, and keep the memory until the receiver has copied it."""
        if tensor.is_cuda:
            torch.cuda.synchronize()
        self._store.set(f"handle/{number}", json.dumps(export_handle(tensor)))
        deadline = time.monotonic() + self._limit.total_seconds()
        while int(self._store.add("copied", 0)) <= number:
            if time.monotonic() > deadline:
                raise TimeoutError(f"tensor {number} was not copied")
            time.sleep(_POLL_S)

    def receive(self, number: int, form: tuple[str, list[int]]) -> torch.Tensor:
        """Open the handle, and copy."""
        copy = open_handle(json.loads(self._store.get(f"handle/{number}")), form).clone()
        if copy.is_cuda:
            torch.cuda.synchronize()
        self._store.add("copied", 1)
        return copy


def export_handle(tensor: torch.Tensor) -> list[Any]:
    """Return the handle by which another process opens a tensor on this GPU; bytes as hexadecimal digits.

    No pickle: anyone who reaches the store could make an engine run code.
    Raises: RuntimeError if the tensor is on no GPU.
    """
    if not tensor.is_cuda:
        raise RuntimeError("CUDA IPC is for tensors of a GPU")
    words = reduce_tensor(tensor)[1]  # type: ignore[no-untyped-call]
    # Offset in the storage, and the arguments of `_new_shared_cuda`; `form` has type, sizes and strides.
    kept = (words[3], *words[6:10], *words[11:])
    return [word.hex() if isinstance(word, bytes) else word for word in kept]


def open_handle(words: Sequence[Any], form: tuple[str, list[int]]) -> torch.Tensor:
    """Return the tensor of a handle of `export_handle`: memory of the process that exported it."""
    dtype, shape = getattr(torch, form[0]), form[1]
    place, device, handle, num_bytes, offset_bytes, counter, counter_offset, event, is_synced = words
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    opened: torch.Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
        torch.Tensor,
        torch.Size(shape),
        strides,
        place,
        torch.storage.TypedStorage,
        dtype,
        device,
        bytes.fromhex(handle),
        num_bytes,
        offset_bytes,
        False,
        bytes.fromhex(counter),
        counter_offset,
        bytes.fromhex(event),
        is_synced,
    )
    return opened


def _open(wire: str, store: Any, name: str, *, rank: int, limit: timedelta) -> _Link:
    placed = distributed.PrefixStore(name, store)
    return (_GroupLink if wire == "nccl" else _HandleLink)(placed, rank, limit)


def device_id() -> str:
    """Return the UUID of the GPU that this process computes on, the same in every process; '' on a CPU."""
    return str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else ""


class DeviceSender:
    """The sending side of one rank. The first rank's keeps the TCP store that all others connect to."""

    def __init__(self, host: str, port: int = 0, *, limit_s: float = LIMIT_S) -> None:
        """Bind a free port of `host`, an address of this machine that the receivers reach.

        `port`: where the first rank's store listens at `host`, for the ranks behind it.
        Raises: StoreError if it cannot be bound or reached.
        """
        self._limit = timedelta(seconds=limit_s)
        self._is_first = not port
        try:
            self._store: Any = distributed.TCPStore(
                host, port, is_master=self._is_first, wait_for_workers=False, timeout=self._limit
            )
        except _FAILURES as error:
            raise StoreError(
                f"no place for receivers at {host} ({type(error).__name__}: {error})",
                allowed="an address of this machine",
                next_step="see that the engines reach this machine, then start the run again",
            ) from error
        self._place = f"{host}:{int(self._store.port)}"

    def address(self, wire: Wire, name: str) -> str:
        """Return the path for the `WeightUpdate` of this publication."""
        return f"{wire}://{self._place}/{name}"

    def send(
        self, wire: Wire, name: str, tensors: Iterator[tuple[str, torch.Tensor]], num_receivers: int
    ) -> int:
        """Send tensors, each to every receiver before the next one; return how many receivers got all.

        `tensors` is always consumed to its end: on several ranks each tensor is a collective. Missing
        receivers are logged as a warning: an engine reports its failure in its answer.
        """
        links: dict[int, _Link] = {}
        number = -1
        for number, (key, tensor) in enumerate(tensors):
            if not number:
                links = self._await_receivers(wire, name, num_receivers)
            form = [key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            if self._is_first:
                self._store.set(f"{name}/form/{number}", json.dumps(form))
            whole = tensor.detach().contiguous()
            for index, link in list(links.items()):
                try:
                    link.send(number, whole)
                except _FAILURES as error:
                    del links[index]
                    _log.warning("receiver %d of %s is lost at %s: %s", index, name, key, error)
        if self._is_first:
            self._store.set(f"{name}/form/{number + 1}", json.dumps(None))
        return len(links)

    def _await_receivers(self, wire: Wire, name: str, num_receivers: int) -> dict[int, _Link]:
        deadline = time.monotonic() + self._limit.total_seconds()
        while int(self._store.add(f"{name}/joined", 0)) < num_receivers and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        links: dict[int, _Link] = {}
        num_joined = int(self._store.add(f"{name}/joined", 0))
        if num_joined < num_receivers and self._is_first:
            _log.warning("%d of %d receivers came for %s", num_joined, num_receivers, name)
        for index in range(num_joined):
            try:
                if wire == "ipc" and self._store.get(f"{name}/gpu/{index}").decode() != device_id():
                    continue
                links[index] = _open(wire, self._store, f"{name}/{index}", rank=0, limit=self._limit)
            except _FAILURES as error:
                _log.warning("receiver %d of %s did not come: %s", index, name, error)
        return links


def send_copies(
    sender: DeviceSender | None,
    wire: Wire,
    name: str,
    tensors: Iterator[tuple[str, torch.Tensor]],
    num_receivers: int,
) -> None:
    """Send tensors from a rank that has a sender; the others only take part in gathering each tensor."""
    if sender is not None:
        sender.send(wire, name, tensors, num_receivers)
    else:
        deque(tensors, maxlen=0)


def receive_on_device(address: str, *, limit_s: float = LIMIT_S) -> dict[str, torch.Tensor]:
    """Receive the tensors that a sender offers at an address, onto this process's device.

    Raises: WeightMismatch if the sender is not there, or is lost before all tensors came.
    """
    wire, _, rest = address.partition("://")
    place, _, name = rest.rpartition("/")
    host, _, port = place.rpartition(":")
    limit = timedelta(seconds=limit_s)
    tensors: dict[str, torch.Tensor] = {}
    try:
        store = distributed.TCPStore(host, int(port), is_master=False, timeout=limit)
        index = store.add(f"{name}/joined", 1) - 1
        store.set(f"{name}/gpu/{index}", device_id())
        link = _open(wire, store, f"{name}/{index}", rank=1, limit=limit)
        while (form := json.loads(store.get(f"{name}/form/{len(tensors)}"))) is not None:
            key, dtype, shape = form
            tensors[key] = link.receive(len(tensors), (dtype, shape))
    except _FAILURES as error:
        raise WeightMismatch(
            f"the weights at {address} did not come ({type(error).__name__}: {error})",
            allowed="a learner that sends them and lives until all have them",
            next_step="the engine keeps its old weights; start the run again to publish anew",
        ) from error
    return tensors
