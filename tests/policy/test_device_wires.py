"""Weights from device to device: the protocol over a group of gloo and handles of this process's memory.

NCCL and CUDA IPC themselves are tried by `make gpu-check` where a GPU is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from strop.errors import WeightMismatch
from strop.policy import device_wires
from strop.policy.device_wires import (
    DeviceSender,
    Wire,
    device_digest,
    fingerprint,
    receive_on_device,
    send_copies,
)
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner
from strop.policy.publication import read_published
from strop.policy.weights import load_published
from tests.fixtures.tiny_run import tiny_spec

LOOPBACK = "127.0.0.1"
TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.randn(5, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    "scalar": torch.tensor(3.0),
}


@pytest.fixture(autouse=True)
def fake_wires(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """Gloo's group for NCCL's; for CUDA's handles, tensors of this process by number."""
    shared: dict[int, torch.Tensor] = {}

    def make_group(store: Any, rank: int, limit: timedelta) -> Any:
        return torch.distributed.ProcessGroupGloo(store, rank, 2, limit)

    def export(tensor: torch.Tensor) -> list[int]:
        shared[id(tensor)] = tensor
        return [id(tensor)]

    monkeypatch.setattr(device_wires, "make_group", make_group)
    monkeypatch.setattr(device_wires, "export_handle", export)
    monkeypatch.setattr(device_wires, "open_handle", lambda words, form: shared[words[0]])
    return shared


def receive_all(address: str, num: int) -> tuple[list[threading.Thread], list[dict[str, torch.Tensor]]]:
    found: list[dict[str, torch.Tensor]] = []
    threads = [
        threading.Thread(target=lambda: found.append(receive_on_device(address, limit_s=30.0)))
        for _ in range(num)
    ]
    for thread in threads:
        thread.start()
    return threads, found


@pytest.mark.parametrize("wire", ["nccl", "ipc"])
def test_every_receiver_gets_every_tensor_and_the_learner_may_go_on(wire: Wire) -> None:
    sender = DeviceSender(LOOPBACK, limit_s=30.0)
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    threads, found = receive_all(sender.address(wire, "v1"), 2)
    assert sender.send(wire, "v1", iter(tensors.items()), 2) == 2
    # What was sent is a copy: the next step moves the weights.
    for tensor in tensors.values():
        tensor.zero_()
    for thread in threads:
        thread.join()
    for one in found:
        assert one.keys() == TENSORS.keys()
        assert all(torch.equal(one[name], TENSORS[name]) for name in TENSORS)
        assert device_digest(one.items()) == device_digest(TENSORS.items())


def test_each_rank_sends_to_the_receivers_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle opens where its GPU is visible: of another one an engine sees nothing."""
    monkeypatch.setattr(device_wires, "device_id", lambda: threading.current_thread().name)
    first = DeviceSender(LOOPBACK, limit_s=30.0)
    address = first.address("ipc", "v1")
    second = DeviceSender(LOOPBACK, int(address.rpartition("/")[0].rpartition(":")[2]), limit_s=30.0)
    found: dict[str, dict[str, torch.Tensor]] = {}
    sent: dict[str, int] = {}

    def receive() -> None:
        found[threading.current_thread().name] = receive_on_device(address, limit_s=30.0)

    def send(sender: DeviceSender, sign: float) -> None:
        tensors = ((name, sign * tensor) for name, tensor in TENSORS.items())
        sent[threading.current_thread().name] = sender.send("ipc", "v1", tensors, 2)

    threads = [threading.Thread(target=receive, name=name) for name in ("gpu-0", "gpu-1")]
    threads.append(threading.Thread(target=send, args=(first, 1.0), name="gpu-0"))
    threads.append(threading.Thread(target=send, args=(second, -1.0), name="gpu-1"))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sent == {"gpu-0": 1, "gpu-1": 1}
    # Signs tell which rank's copy it was.
    assert torch.equal(found["gpu-0"]["a"], TENSORS["a"])
    assert torch.equal(found["gpu-1"]["a"], -TENSORS["a"])


@pytest.mark.parametrize("wire", ["nccl", "ipc"])
def test_a_receiver_that_dies_is_left_out_and_the_others_go_on(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = DeviceSender(LOOPBACK, limit_s=3.0)
    address = sender.address(wire, "v1")
    threads, found = receive_all(address, 1)
    place, name = address.removeprefix(f"{wire}://").rsplit("/", 1)
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK, int(place.rpartition(":")[2]), is_master=False
    )
    while int(store.add(f"{name}/joined", 0)) < 1:
        pass
    # One that joins and is gone.
    store.add(f"{name}/joined", 1)
    store.set(f"{name}/gpu/1", "")
    taken: list[str] = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in TENSORS.items():
            taken.append(key)
            yield key, tensor

    assert sender.send(wire, "v1", gather(), 2) == 1
    threads[0].join()
    assert taken == list(TENSORS)
    assert device_digest(found[0].items()) == device_digest(TENSORS.items())


def test_a_learners_weights_arrive_in_an_engine_and_other_ones_are_refused(tiny_model_dir: Path) -> None:
    def load() -> LanguageModel:
        return LanguageModel.load(tiny_model_dir, dtype=torch.float32)

    learner, model = Learner(load(), tiny_spec().optimizer), load()
    with torch.no_grad():
        for _, parameter in learner.model.named_parameters():
            parameter.mul_(1.5)
    sender, digest = DeviceSender(LOOPBACK, limit_s=30.0), device_digest(learner.compute_copies())

    def publish(name: str, expected: str) -> None:
        thread = threading.Thread(
            target=send_copies, args=(sender, "nccl", name, learner.compute_copies(), 1)
        )
        thread.start()
        try:
            load_published(model, sender.address("nccl", name), expected_digest=expected)
        finally:
            thread.join()

    with pytest.raises(WeightMismatch, match="have digest sum64:"):
        publish("v1", digest[:-1] + ("0" if digest[-1] != "0" else "1"))
    assert device_digest(model.named_parameters()) != digest
    publish("v2", digest)
    assert device_digest(model.named_parameters()) == digest
    # Ranks without a sender take part in gathering, and send nothing.
    send_copies(None, "nccl", "v3", learner.compute_copies(), 1)


def test_a_sender_that_is_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    waits_briefly = partial(receive_on_device, limit_s=1.0)
    monkeypatch.setattr("strop.policy.publication.receive_on_device", waits_briefly)
    with pytest.raises(WeightMismatch, match="did not come"):
        read_published(f"nccl://{LOOPBACK}:1/v1", expected_digest="sum64:0")


def test_one_changed_bit_or_two_swapped_words_change_a_fingerprint() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = fingerprint(tensor)
    words = tensor.view(torch.int32)
    for place in (0, 1, 499, 998, 999):
        for bit in (0, 1, 15, 30, 31):
            changed = words.clone()
            changed[place] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
            assert fingerprint(changed.view(torch.float32)) != whole
    swapped = tensor.clone()
    swapped[[2, 4]] = tensor[[4, 2]]
    assert fingerprint(swapped) != whole
    assert fingerprint(tensor[:999]) != whole
    assert fingerprint(torch.zeros(8)) == fingerprint(torch.zeros(16)) == 0
    # By hand, two words of ones: the sum of their factors.
    assert fingerprint(torch.ones(2, dtype=torch.int64)) == sum(map(factor, (1, 2))) % 2**64


def factor(place: int) -> int:
    """Return the factor of a place, in Python's integers."""

    def signed(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    step, mix = -7046029254386353131, -4658895280553007687
    value = signed(place * step)
    value = signed((value ^ (value >> 29)) * mix)
    return (value ^ (value >> 32)) | 1


def test_sums_do_not_depend_on_where_a_tensor_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(777, generator=torch.Generator().manual_seed(0))
    whole = fingerprint(tensor)
    monkeypatch.setattr(device_wires, "_CHUNK", 10)
    assert fingerprint(tensor) == whole
    # Zeros of another shape differ by their shape.
    one, other = {"x": torch.zeros(8)}, {"x": torch.zeros(16)}
    assert device_digest(one.items()) != device_digest(other.items())
