"""Where weights go is decided by where the roles are; what does not arrive whole changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from strop.cluster.local import LocalLearner
from strop.cluster.publishers import FilePublisher, choose_publisher, has_memory_room
from strop.engine.loading import can_swap_adapters
from strop.engine.native import NativeEngine
from strop.errors import StoreError, WeightMismatch
from strop.policy.device_wires import device_digest
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner
from strop.policy.publication import tensors_digest
from strop.policy.weights import weights_digest
from strop.spec.layout import settle_layout
from strop.spec.model import LoraSpec
from strop.spec.run import RunSpec
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


async def test_gpus_of_the_job_send_weights_from_device_to_device(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    learner = make_learner(tiny_model_dir)
    local, sender = Sending(learner), Sender()
    local.facts = replace(local.facts, device="cuda")
    learner.sender = sender  # type: ignore[assignment]

    def build(**sections: Any) -> Any:
        spec: RunSpec = settle_layout(tiny_spec(**sections))
        return choose_publisher(spec, local, tmp_path, host="127.0.0.1")  # type: ignore[arg-type]

    apart, shared = build(job={"train_gpus": 1, "infer_gpus": 2}), build(job={"gpus": 2})
    update = await apart()
    assert update.transport == "broadcast"
    assert update.path.startswith("nccl://there/v000000-")
    assert update.digest == device_digest(learner.compute_copies())
    again = await shared()
    names = [one.path.rpartition("/")[2] for one in (update, again)]
    assert sender.order == [("nccl", names[0], 2), ("ipc", names[1], 2)]
    for sections in ({"job": {"gpus": 2}, "lora": {"rank": 4}}, {"placement": {"kind": "ray"}}):
        assert isinstance(build(**sections).__self__, FilePublisher)


class Sending(LocalLearner):
    """A learner that does at once what it begins."""

    def begin(self, method: Any, *args: Any) -> None:
        method(self.local, *args)


class Sender:
    """Notes what it is to send."""

    def __init__(self) -> None:
        self.order: list[object] = []

    def address(self, wire: str, name: str) -> str:
        return f"{wire}://there/{name}"

    def send(self, wire: str, name: str, tensors: object, num_receivers: int) -> None:
        self.order.append((wire, name, num_receivers))


def test_memory_is_used_where_it_has_room(tiny_model_dir: Path) -> None:
    assert has_memory_room(tiny_model_dir)
    assert not has_memory_room(tiny_model_dir, reserved_bytes=1 << 60)


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
    publisher = FilePublisher(LocalLearner(learner), tmp_path / "w")
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


def test_a_publication_names_version_digest_and_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny_model_dir)
    learner.version = 12
    publisher = FilePublisher(LocalLearner(learner), tmp_path / "w")
    update = asyncio.run(publisher.publish())
    # Publishing twice is publishing once.
    assert asyncio.run(publisher.publish()) == update
    assert update.path == str(tmp_path / "w" / "v000012.safetensors")
    assert (update.version, update.digest) == (12, weights_digest(learner.model))
    assert tensors_digest(load_file(update.path).items()) == update.digest
    assert names(tmp_path / "w") == ["v000012.safetensors"]


def test_the_newest_two_files_are_kept(tiny_model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny_model_dir)
    publisher = FilePublisher(LocalLearner(learner), tmp_path / "w")
    seen = []
    for version in (0, 1, 1, 2, 3):
        learner.version = version
        asyncio.run(publisher.publish())
        seen.append([int(name[1:7]) for name in names(tmp_path / "w")])
    assert seen == [[0], [0, 1], [1], [1, 2], [2, 3]]


def test_a_full_disk_is_told_and_leaves_no_partial_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny_model_dir)
    with tiny_disk(tmp_path / "disk") as disk:
        (disk / "ballast").write_bytes(b"x" * 1_000_000)
        with pytest.raises(StoreError, match=r"the weights could not be written to .*v000000"):
            asyncio.run(FilePublisher(LocalLearner(learner), disk / "w").publish())
        assert names(disk / "w") == []


def test_engines_that_swap_adapters_get_nothing_else_after_the_base(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = LanguageModel.load(tiny_model_dir, dtype=torch.float32)
    base = weights_digest(model)
    model.adapt(LoraSpec(rank=2), seed=1)
    learner = Learner(model, tiny_spec().optimizer)
    publisher = FilePublisher(LocalLearner(learner), tmp_path, sends_adapters=True)
    first = asyncio.run(publisher.publish())
    assert (first.is_adapter, first.digest) == (False, base)
    for version in (1, 2):
        learner.version = version
        update = asyncio.run(publisher.publish())
        assert (update.is_adapter, update.path) == (True, str(tmp_path / f"v{version:06d}"))
        stored = load_file(f"{update.path}/adapter_model.safetensors")
        assert tensors_digest(stored.items()) == update.digest
        assert all("lora_" in name for name in stored)
    # The base is gone.
    assert names(tmp_path) == ["v000001", "v000002"]


@pytest.mark.parametrize(
    ("rank", "kind", "expected"),
    [(None, "vllm", False), (4, "native", False), (4, "vllm", True), (600, "vllm", False)],
)
def test_only_engines_that_can_are_sent_adapters(rank: int | None, kind: str, expected: bool) -> None:
    spec = tiny_spec(lora={"rank": rank}, engine={"kind": kind}, placement={"kind": "ray"})
    assert can_swap_adapters(spec) is expected
