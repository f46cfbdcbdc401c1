"""Where weights go is decided by where the roles are; what does not arrive whole changes nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from strop.cluster.local import LocalLearner
from strop.cluster.publishers import (
    FilePublisher,
    clear_publications,
    has_memory_room,
    open_memory_dir,
    open_publisher,
)
from strop.engine.loading import can_swap_adapters
from strop.engine.native import NativeEngine
from strop.errors import StoreError, WeightMismatch
from strop.hardware.leftovers import clear_shared_memory
from strop.policy.device_wires import device_digest
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner
from strop.policy.publication import tensors_digest
from strop.policy.weights import weights_digest
from strop.spec.layout import settle_layout
from strop.spec.model import LoraSpec
from strop.tokenizer import Tokenizer
from tests.fixtures.tiny_disk import tiny_disk
from tests.fixtures.tiny_run import tiny_spec


def make_learner(model_dir: Path) -> Learner:
    return Learner(LanguageModel.load(model_dir, dtype=torch.float32), tiny_spec().optimizer)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def change(learner: Learner, version: int) -> None:
    """Make the weights those of another version."""
    with torch.no_grad():
        for _, parameter in learner.model.named_parameters():
            parameter.mul_(1.5)
    learner.version = version


def test_gpus_of_the_job_send_weights_from_device_to_device_after_the_first(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    local = LocalLearner(make_learner(tiny_model_dir))
    offered: list[tuple[str, str, int]] = []

    class OnGpu:
        """The learner, as on a GPU; what it offers is noted."""

        version, device = 0, "cuda"
        write_weights = local.write_weights

        async def offer_weights(self, wire: str, host: str, num_receivers: int) -> tuple[str, str]:
            offered.append((wire, host, num_receivers))
            return f"{wire}://{host}:1/v1", "sum64:1"

    def build(**sections: Any) -> Any:
        return open_publisher(
            settle_layout(tiny_spec(**sections)),
            OnGpu(),  # type: ignore[arg-type]
            tmp_path,
            lambda: None,
            host="127.0.0.1",
        )

    apart = build(job={"train_gpus": 1, "infer_gpus": 2})
    first, second = asyncio.run(apart.publish()), asyncio.run(apart.publish())
    assert (first.transport, first.digest) == ("file", weights_digest(local.local.model))
    assert (second.transport, second.path, second.digest) == ("broadcast", "nccl://127.0.0.1:1/v1", "sum64:1")
    asyncio.run(apart.close())
    shared = build(job={"gpus": 2})
    for _ in range(2):
        asyncio.run(shared.publish())
    assert offered == [("nccl", "127.0.0.1", 2), ("ipc", "127.0.0.1", 2)]
    assert isinstance(build(job={"gpus": 2}, lora={"rank": 4}), FilePublisher)
    assert isinstance(build(placement={"kind": "ray"}), FilePublisher)


async def test_a_step_waits_until_weights_are_sent(tiny_model_dir: Path) -> None:
    learner = LocalLearner(make_learner(tiny_model_dir))
    order: list[str] = []

    class Slow:
        """Sends, after a while."""

        def address(self, wire: str, name: str) -> str:
            return f"{wire}://there/{name}"

        def send(self, *arguments: object) -> int:
            time.sleep(0.3)
            order.append("sent")
            return 1

    learner._sender = Slow()  # type: ignore[assignment]
    offer = await learner.offer_weights("nccl", "127.0.0.1", 1)
    order.append("offered")
    await learner.digest_tensors()
    order.append("digested")
    address, digest = offer
    assert (address, digest) == ("nccl://there/v000000-0", device_digest(learner.local.compute_copies()))
    assert order == ["offered", "sent", "digested"]


def test_memory_is_used_where_it_has_room_and_given_back(tiny_model_dir: Path) -> None:
    assert has_memory_room(tiny_model_dir)
    assert not has_memory_room(tiny_model_dir, reserved_bytes=1 << 60)
    with open_memory_dir() as path:
        assert path.parent == Path("/dev/shm")
        assert oct(path.stat().st_mode & 0o777) == "0o700"
        # Whose owner lives stays, whoever clears.
        assert path not in clear_shared_memory()
        assert path.is_dir()
    assert not path.exists()
    assert not path.with_name(f"{path.name}.lock").exists()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("spoil", "promised", "message"),
    [
        (truncate, None, "cannot be read"),
        (flip, None, "have digest"),
        (Path.unlink, None, "cannot be read"),
        (lambda path: None, "0" * 64, "not 0000"),
    ],
)
async def test_a_file_that_is_not_what_was_published_leaves_the_old_weights(
    spoil: Callable[[Path], None], promised: str | None, message: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner(tiny_model_dir)
    publisher = FilePublisher(LocalLearner(learner), tmp_path / "w", lambda: None)
    model = LanguageModel.load(tiny_model_dir, dtype=torch.float32)
    engine, before = NativeEngine(model, Tokenizer.load(tiny_model_dir)), weights_digest(model)
    change(learner, 1)
    update = await publisher.publish()
    assert update.path is not None
    spoil(Path(update.path))
    with pytest.raises(WeightMismatch, match=message):
        await engine.update(replace(update, digest=promised or update.digest))
    await engine.close()
    assert weights_digest(model) == before


# The learner in the loop's process: where its work is done, and what the loop may do meanwhile.


class Recorder:
    """Stands for a learner: notes which thread calls it."""

    version = 0

    def __init__(self) -> None:
        self.threads: list[int] = []

    def step_terms(self, terms: Any, plan: Any) -> Any:
        self.threads.append(threading.get_ident())
        return SimpleNamespace()

    def save_state(self, target: Path) -> None:
        self.threads.append(threading.get_ident())


@pytest.mark.parametrize("is_async", [True, False])
async def test_all_work_is_done_in_one_thread(is_async: bool, tmp_path: Path) -> None:
    """Each further thread would keep an OpenMP team and the memory that it freed."""
    local = Recorder()
    learner = LocalLearner(local, is_async=is_async)  # type: ignore[arg-type]
    assert learner.is_async == is_async
    for _ in range(5):
        # Others use threads meanwhile, as publications do.
        others = [asyncio.to_thread(threading.Event().wait, 0.01) for _ in range(3)]
        await asyncio.gather(learner.step_terms([]), *others)
    await learner.save_state(tmp_path)
    assert len(local.threads) == 6
    assert len(set(local.threads)) == 1
    assert (local.threads[0] != threading.get_ident()) == is_async


def test_a_publication_names_version_digest_and_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny_model_dir)
    learner.version = 12
    publisher = FilePublisher(LocalLearner(learner), tmp_path / "w", lambda: None)
    update = asyncio.run(publisher.publish())
    # Publishing twice is publishing once.
    assert asyncio.run(publisher.publish()) == update
    assert update.path == str(tmp_path / "w" / "v000012.safetensors")
    assert (update.version, update.digest) == (12, weights_digest(learner.model))
    assert tensors_digest(load_file(update.path).items()) == update.digest
    assert names(tmp_path / "w") == ["v000012.safetensors"]


def test_files_older_than_the_served_version_are_removed(tiny_model_dir: Path, tmp_path: Path) -> None:
    learner, served = make_learner(tiny_model_dir), [0]
    publisher = FilePublisher(LocalLearner(learner), tmp_path, lambda: served[0])
    seen = []
    for version, acknowledged in ((0, 0), (1, 0), (2, 1), (3, 2)):
        learner.version, served[0] = version, acknowledged
        asyncio.run(publisher.publish())
        seen.append([int(name[1:7]) for name in names(tmp_path)])
    # What is served stays until the next version is; version 1 goes when 2 is served.
    assert seen == [[0], [0, 1], [1, 2], [2, 3]]
    clear_publications(tmp_path)
    assert not tmp_path.exists()


def test_a_full_disk_is_told_and_leaves_no_partial_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny_model_dir)
    with tiny_disk(tmp_path / "disk") as disk:
        (disk / "ballast").write_bytes(b"x" * 1_000_000)
        with pytest.raises(StoreError, match=r"the weights could not be written to .*v000000"):
            asyncio.run(FilePublisher(LocalLearner(learner), disk / "w", lambda: None).publish())
        assert names(disk / "w") == []


def test_engines_that_swap_adapters_get_nothing_else_after_the_base(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = LanguageModel.load(tiny_model_dir, dtype=torch.float32)
    base = weights_digest(model)
    model.adapt(LoraSpec(rank=2), seed=1)
    learner, served = Learner(model, tiny_spec().optimizer), [None, 0, 1]
    publisher = FilePublisher(LocalLearner(learner), tmp_path, lambda: served[0], sends_adapters=True)
    first = asyncio.run(publisher.publish())
    assert (first.is_adapter, first.digest) == (False, base)
    for version in (1, 2):
        del served[0]
        learner.version = version
        update = asyncio.run(publisher.publish())
        assert (update.is_adapter, update.path) == (True, str(tmp_path / f"v{version:06d}"))
        stored = load_file(f"{update.path}/adapter_model.safetensors")
        assert tensors_digest(stored.items()) == update.digest
        assert all("lora_" in name for name in stored)
    # The base, older than the served version 1, is gone.
    assert names(tmp_path) == ["v000001", "v000002"]
    clear_publications(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("rank", "kind", "expected"),
    [(None, "vllm", False), (4, "native", False), (4, "vllm", True), (600, "vllm", False)],
)
def test_only_engines_that_can_are_sent_adapters(rank: int | None, kind: str, expected: bool) -> None:
    spec = tiny_spec(lora={"rank": rank}, engine={"kind": kind}, placement={"kind": "ray"})
    assert can_swap_adapters(spec) is expected
