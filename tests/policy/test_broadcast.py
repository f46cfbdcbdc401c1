"""Tensors that were sent through a process group arrive bit for bit, and who is lost is told."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from strop.errors import StoreError, WeightMismatch
from strop.policy.publication import (
    CLOSE_LIMIT_S,
    THREAD_NAME,
    WeightSender,
    distributed,
    receive_tensors,
    tensors_digest,
)
from tests.fixtures.jobs import wait_for

HERE = "127.0.0.1"


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b": torch.randn(3, 5, generator=generator).bfloat16(),
        "a": torch.randn(7, generator=generator),
        "scalar": torch.tensor(2.5),
        "transposed": torch.randn(4, 2, generator=generator).T,
    }


@pytest.mark.parametrize("num_receivers", [1, 2])
def test_all_receivers_get_the_published_bits(num_receivers: int) -> None:
    sender, tensors = WeightSender(HERE), some_tensors()
    with ThreadPoolExecutor(3) as members:
        # Receivers may come before the sender.
        found = [members.submit(receive_tensors, sender.address("v1")) for _ in range(num_receivers)]
        members.submit(sender.send, "v1", tensors, num_receivers).result()
        again = [members.submit(receive_tensors, sender.address("v2")) for _ in range(num_receivers)]
        sender.send("v2", {"a": torch.zeros(2)}, num_receivers)
    for received in found:
        assert tensors_digest(received.result().items()) == tensors_digest(tensors.items())
    assert [received.result()["a"].tolist() for received in again] == [[0.0, 0.0]] * num_receivers


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda sender: receive_tensors(sender.address("never"), limit_s=0.2), "did not come"),
        (lambda _: receive_tensors("tcp://127.0.0.1:9/v1", limit_s=0.2), r"127\.0\.0\.1:9/v1 did not come"),
        (lambda _: receive_tensors("no address"), "no address did not come"),
    ],
)
def test_a_sender_that_is_not_there_is_told(act: Callable[[WeightSender], object], message: str) -> None:
    with pytest.raises(WeightMismatch, match=message):
        act(WeightSender(HERE))


def test_a_receiver_that_does_not_come_is_told() -> None:
    with pytest.raises(StoreError, match="publication v1 did not reach 1 receivers"):
        # Its own place has to be there within the limit too.
        WeightSender(HERE, limit_s=1.5).send("v1", some_tensors(), 1)


DYING = """
import os, sys, threading, time
from strop.policy import publication
# The last sign of life comes in the middle: it has met the sender, and some tensors are still to come.
meet = publication._join
def die(*given, **named):
    meet(*given, **named)
    os.kill(os.getpid(), 9)
publication._join = die
publication.receive_tensors(sys.argv[1])
"""


def test_a_receiver_that_dies_in_the_middle_costs_the_others_nothing() -> None:
    sender, tensors = WeightSender(HERE), {f"{n}": torch.full((1 << 20,), float(n)) for n in range(4)}
    dying = subprocess.Popen([sys.executable, "-c", DYING, sender.address("v1")])
    with ThreadPoolExecutor(2) as members:
        is_over = threading.Event()
        sending = members.submit(sender.send, "v1", tensors, 2, is_over=is_over)
        assert dying.wait(300) == -9
        died_at = time.monotonic()
        found = receive_tensors(sender.address("v1"))
        is_over.set()
        with pytest.raises(StoreError, match="publication v1 did not reach 2 receivers"):
            sending.result()
    assert tensors_digest(found.items()) == tensors_digest(tensors.items())
    assert time.monotonic() - died_at < 60


def sending_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def test_a_closed_sender_leaves_no_thread() -> None:
    """Inside torch at the interpreter's end, a thread would abort the process, and its exit code be lost."""
    sender = WeightSender(HERE)
    sender.offer("v1", some_tensors(), 2)
    receive_tensors(sender.address("v1"))
    wait_for(lambda: len(sending_threads()) == 1)
    # One has come, and another says that it comes and does not: this is what a thread waits for.
    port = int(sender.address("").rpartition(":")[2].strip("/"))
    distributed.TCPStore(HERE, port, is_master=False).add("v1/joined", 1)
    wait_for(lambda: len(sending_threads()) == 2)
    sender.offer("v2", some_tensors(), 1)
    wait_for(lambda: len(sending_threads()) == 3)  # two offers, and one that waits to meet
    started_at = time.monotonic()
    for _ in range(2):
        sender.close()
    assert sending_threads() == []
    assert time.monotonic() - started_at < CLOSE_LIMIT_S
    with pytest.raises(StoreError, match="publication v3 did not reach 1 receivers"):
        sender.send("v3", some_tensors(), 1)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StoreError, match=r"no place for receivers at 192\.0\.2\.1"):
        WeightSender("192.0.2.1", limit_s=1.0)
