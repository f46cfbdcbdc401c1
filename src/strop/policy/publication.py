"""Published weights: sends them through process groups, reads them from any source, computes their digests.

Process groups need no disk between learner and engines. A publication is offered at a TCP store that the
sender keeps: `tcp://host:port/name`. Names, types and shapes of the tensors are there; each receiver draws a
number and receives the tensors, in order of name, in a gloo group with the sender alone. So a receiver that
dies or comes late does not affect the others, at the price of one copy through the sender's network for each
receiver. Received tensors are proven by their digest. Not here: transfers from GPU to GPU (`device_wires`),
and encryption.

Needs no package but torch and safetensors, so that the process of an engine with other pins can import it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors import SafetensorError
from safetensors.torch import load_file

from strop.errors import StoreError, WeightMismatch
from strop.policy.device_wires import DIGEST_PREFIX, SCHEMES, device_digest, receive_on_device

# Its stubs lack most of the functions used here.
distributed: Any = torch.distributed
_log = logging.getLogger("strop.policy.publication")
LIMIT_S = 300.0
"""Limit of the rendezvous of both sides, and of each tensor's arrival."""
CLOSE_LIMIT_S = 10.0
"""Threads of a closed sender end within it, except those whose receiver hangs."""
THREAD_NAME = "strop-send-weights"
_POLL_S = 0.01
_FAILURES = (RuntimeError, ValueError, OSError)
"""Errors of torch.distributed about lost peers and addresses."""


class WeightSender:
    """Keeps the TCP store that receivers connect to; one for each learner."""

    def __init__(self, host: str, *, limit_s: float = LIMIT_S) -> None:
        """Bind a free port of `host`, an address of this machine that the receivers reach.

        Raises: StoreError if it cannot be bound.
        """
        self._limit = timedelta(seconds=limit_s)
        try:
            self._server: Any = distributed.TCPStore(
                host, 0, is_master=True, wait_for_workers=False, timeout=self._limit
            )
        except _FAILURES as error:
            raise _failed(f"no place for receivers at {host}", error) from error
        self._host, self._port = host, int(self._server.port)
        self._connecting = threading.Lock()
        self._is_over = threading.Event()
        self._offers: list[threading.Thread] = []

    def address(self, name: str) -> str:
        """Return the path for the `WeightUpdate` of this publication."""
        return f"tcp://{self._host}:{self._port}/{name}"

    def offer(self, name: str, tensors: Mapping[str, torch.Tensor], num_receivers: int) -> None:
        """Begin to send, and return at once. Receivers of the previous offer that have not come are lost.

        Missing receivers are logged as a warning: an engine reports its failure in its answer.
        """
        self._is_over.set()
        self._is_over = is_over = threading.Event()

        def send() -> None:
            try:
                self.send(name, tensors, num_receivers, is_over=is_over)
            except StoreError as error:
                if self._server is not None:
                    _log.warning("%s", error)

        self._offers = [thread for thread in self._offers if thread.is_alive()]
        # A daemon: the end of the process does not wait for a receiver that hangs.
        self._offers.append(threading.Thread(target=send, name=THREAD_NAME, daemon=True))
        self._offers[-1].start()

    def send(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        num_receivers: int,
        *,
        is_over: threading.Event | None = None,
    ) -> None:
        """Send tensors to `num_receivers`, and return when all have them. Each name is used once.

        `is_over` is set when no more receivers will come.
        Raises: StoreError if one did not come or was lost; the others have their tensors.
        """
        ordered = {key: tensors[key].detach().cpu().contiguous() for key in sorted(tensors)}
        forms = [
            [key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for key, tensor in ordered.items()
        ]
        done: list[int] = []
        failures: list[BaseException] = []
        threads: list[threading.Thread] = []

        def give(number: int) -> None:
            try:
                # A separate connection: one that waits for a dead receiver would block the others.
                group = _join(self._connect(), f"{name}/{number}", rank=0, limit=self._limit)
                for tensor in ordered.values():
                    group.broadcast(_as_bytes(tensor), 0, self._limit).wait()
                group.barrier().wait()
                done.append(number)
            except _FAILURES as error:
                failures.append(error)

        deadline = time.monotonic() + self._limit.total_seconds()
        is_over = is_over or threading.Event()
        try:
            store = self._connect()
            store.set(f"{name}/forms", json.dumps(forms))
            while len(threads) < num_receivers + len(failures) and time.monotonic() < deadline:
                for number in range(len(threads), int(store.add(f"{name}/joined", 0))):
                    # Daemons, as in `offer`.
                    threads.append(
                        threading.Thread(target=give, args=(number,), name=THREAD_NAME, daemon=True)
                    )
                    threads[-1].start()
                if is_over.wait(_POLL_S):
                    break
        except _FAILURES as error:
            failures.append(error)
        for thread in threads:
            thread.join()
        if len(done) < num_receivers:
            cause = failures[0] if failures else TimeoutError(f"{len(done)} came")
            raise _failed(f"publication {name} did not reach {num_receivers} receivers", cause)

    def close(self) -> None:
        """End all sending. May be called twice; nothing is sent afterwards.

        A thread that is inside torch when the interpreter ends would abort the process, so they are joined. A
        thread that sends to a receiver that hangs cannot be ended, but it never returns, so it does no harm.
        """
        self._is_over.set()
        # Closing the server breaks the connections of threads that still wait for a receiver.
        with self._connecting:
            self._server = None
        deadline = time.monotonic() + CLOSE_LIMIT_S
        for thread in self._offers:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _connect(self) -> Any:
        """Return a connection to this sender's server. Raises: ConnectionError once it is closed."""
        with self._connecting:
            # torch would try to reach a closed server until its limit is over.
            if self._server is None:
                raise ConnectionError("the sender is closed")
            return distributed.TCPStore(self._host, self._port, is_master=False, timeout=self._limit)


def receive_tensors(address: str, *, limit_s: float = LIMIT_S) -> dict[str, torch.Tensor]:
    """Receive the tensors that a sender offers at an address.

    Raises: WeightMismatch if the sender is not there, or is lost before all tensors came.
    """
    place, _, name = address.removeprefix("tcp://").rpartition("/")
    host, _, port = place.rpartition(":")
    limit = timedelta(seconds=limit_s)
    try:
        store = distributed.TCPStore(host, int(port), is_master=False, timeout=limit)
        forms = json.loads(store.get(f"{name}/forms"))
        number = store.add(f"{name}/joined", 1) - 1
        group = _join(store, f"{name}/{number}", rank=1, limit=limit)
        tensors: dict[str, torch.Tensor] = {}
        for key, dtype, shape in forms:
            tensors[key] = torch.empty(shape, dtype=getattr(torch, dtype))
            group.broadcast(_as_bytes(tensors[key]), 0, limit).wait()
        group.barrier().wait()
    except _FAILURES as error:
        raise WeightMismatch(
            f"the weights at {address} did not come ({type(error).__name__}: {error})",
            allowed="a learner that sends them and lives until all have them",
            next_step="the engine keeps its old weights; start the run again to publish anew",
        ) from error
    return tensors


def _join(store: Any, name: str, *, rank: int, limit: timedelta) -> Any:
    """Join the group of both sides, sender 0 and receiver 1. Raises: RuntimeError after the limit."""
    return distributed.ProcessGroupGloo(distributed.PrefixStore(name, store), rank, 2, limit)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, sharing its memory: gloo supports fewer types than torch."""
    return tensor.view(-1).view(torch.uint8)


def _failed(problem: str, error: BaseException) -> StoreError:
    return StoreError(
        f"{problem} ({type(error).__name__}: {error})",
        allowed="an address of this machine, and as many engines as were promised",
        next_step="see that the engines run and reach this machine, then start the run again",
    )


_MAX_THREADS = 8
"""Threads that hash."""


def read_published(source: Path | str, *, expected_digest: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, or those that a sender offers at an address.

    Raises: WeightMismatch if they cannot be read, or have another digest.
    """
    if str(source).startswith(SCHEMES):
        tensors = receive_on_device(str(source))
    elif str(source).startswith("tcp://"):
        tensors = receive_tensors(str(source))
    else:
        try:
            tensors = load_file(source)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise _mismatch(f"published weights {source} cannot be read ({error})") from error
    is_on_device = expected_digest.startswith(DIGEST_PREFIX)
    actual = (device_digest if is_on_device else tensors_digest)(tensors.items())
    if actual != expected_digest:
        raise _mismatch(f"published weights {source} have digest {actual}, not {expected_digest}")
    return tensors


def unfit(source: Path | str, flaw: str) -> WeightMismatch:
    """Return the error for tensors that are not those of the model."""
    return _mismatch(f"published weights {source} do not fit the model: {flaw}")


def _mismatch(problem: str) -> WeightMismatch:
    return WeightMismatch(
        problem,
        allowed="exactly the tensors that the policy published",
        next_step="the engine keeps its old weights; start the run again to publish anew",
    )


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Hash name, type, shape and hashed bytes of each tensor, in order of name. Returns 64 hex digits.

    SHA-256 throughout. Tensors are hashed in parallel, since one core hashes 1 to 2 GB/s.
    """
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        ordered = sorted(tensors, key=lambda pair: pair[0])
        lines = threads.map(lambda pair: f"{pair[0]}/{tensor_digest(pair[1])}", ordered)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return type, shape and SHA-256 of one tensor, between slashes."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    content = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
    return f"{tensor.dtype}/{tuple(tensor.shape)}/{content}"


def digest_each(tensors: Iterable[tuple[str, torch.Tensor]], *, is_kept: bool = True) -> dict[str, str]:
    """Return the digest of each tensor by its name. Only a few tensors are held at once.

    Without `is_kept` the tensors are consumed and not hashed: of several ranks only one hashes.
    """
    num_threads, left = min(_MAX_THREADS, os.cpu_count() or 1), iter(tensors)
    digests: dict[str, str] = {}
    with ThreadPoolExecutor(num_threads) as threads:
        while batch := dict(islice(left, num_threads)):
            if is_kept:
                digests |= zip(batch, threads.map(tensor_digest, batch.values()), strict=True)
    return digests


def find_difference(own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str | None:
    """Describe the first tensor that is missing, unexpected, or of another type or shape."""
    for name in sorted(own.keys() | other.keys()):
        if name not in other:
            return f"{name} is missing"
        if name not in own:
            return f"{name} is unknown to the model"
        if own[name].shape != other[name].shape or own[name].dtype != other[name].dtype:
            return f"{name} is {other[name].dtype} {tuple(other[name].shape)}"
    return None
