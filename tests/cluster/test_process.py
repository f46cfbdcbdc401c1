"""The engine's process starts with the learner's weights, ends with its parent, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from strop.cluster import Roles
from strop.cluster.engine_process import can_swap_adapters
from strop.cluster.local import LocalLearner, ProcessPlacement
from strop.cluster.publishers import BroadcastPublisher, FilePublisher, clear_publications
from strop.engine import WeightTransport
from strop.engine.remote import RemoteEngine
from strop.engine.wire import HealthForm
from strop.errors import ConfigError, EngineError, StoreError
from strop.hardware.leftovers import SHARED_MEMORY, clear_shared_memory
from strop.policy.language_model import LanguageModel
from strop.policy.learner import Learner
from strop.policy.publication import read_published, tensors_digest
from strop.policy.weights import weights_digest
from strop.spec import RunSpec
from strop.spec.model import LoraSpec
from strop.store import ModelHandle
from tests.fixtures.ray_traces import holder_of, is_alive, wait_until
from tests.fixtures.tiny_disk import tiny_disk
from tests.fixtures.tiny_run import learner_of, tiny_spec

PARENT = """
import asyncio, sys, time
from pathlib import Path
from strop.store import ModelHandle
from strop.cluster.local import ProcessPlacement
from tests.fixtures.tiny_run import tiny_spec

async def act():
    source = ModelHandle(path=Path(sys.argv[1]), digest="unused")
    placement = ProcessPlacement(tiny_spec(), source, Path(sys.argv[2]))
    await placement.start()
    print(placement.engine_pid, flush=True)
    time.sleep(1200)

asyncio.run(act())
"""


def read_arguments(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def process_spec() -> RunSpec:
    return tiny_spec(
        placement={"kind": "process"}, engine={"max_num_seqs": 4}, output={"log_level": "engine=debug"}
    )


def make_placement(model_dir: Path, work_dir: Path) -> ProcessPlacement:
    return ProcessPlacement(process_spec(), ModelHandle(path=model_dir, digest="unused"), work_dir)


def make_learner(model_dir: Path) -> Learner:
    return Learner(LanguageModel.load(model_dir, dtype=torch.float32), tiny_spec().optimizer)


def weights_in_memory(owner_pid: int) -> list[Path]:
    """Return where a process keeps weights; other runs of this machine have theirs."""
    found = [path for path in SHARED_MEMORY.glob("strop-*") if list(path.glob("v*.safetensors"))]
    return [path for path in found if holder_of(path) == owner_pid]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


# ---------------------------------------------------------------- publisher


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


async def test_a_publication_can_be_sent_and_leaves_no_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(tiny_model_dir)
    publisher = BroadcastPublisher(LocalLearner(learner), tmp_path / "w", host="127.0.0.1", num_receivers=1)
    # The same version twice, as after a resume: each is met at an address of its own.
    paths = set()
    for _ in range(2):
        update = await publisher.publish()
        paths.add(update.path)
        assert update.transport is WeightTransport.BROADCAST
        assert update.path is not None
        tensors = await asyncio.to_thread(read_published, update.path, expected_digest=update.digest)
        assert tensors_digest(tensors.items()) == weights_digest(learner.model)
    assert len(paths) == 2
    assert names(tmp_path / "w") == []


# ---------------------------------------------------------------- placement


def test_stop_before_start_does_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    asyncio.run(make_placement(tiny_model_dir, tmp_path / "w").stop())
    assert not (tmp_path / "w").exists()


@pytest.mark.slow
def test_sec_4_a_started_engine_serves_the_learners_weights_and_leaves_only_its_log(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Incident: keys in files that every user of the machine could read."""
    work_dir = tmp_path / "a 'quoted' dir"
    placement = make_placement(tiny_model_dir, work_dir)
    # What a killed attempt left: its key, its address, its weights.
    (work_dir / "weights").mkdir(parents=True)
    for name in ("engine.key", "engine.ready", "weights/v000040.safetensors", "weights/v000041.partial"):
        (work_dir / name).write_text("stale")
    modes: list[int] = []
    keys: list[str] = []

    def read_key() -> str:
        with suppress(OSError):
            return (work_dir / "engine.key").read_text().removeprefix("stale")
        return ""

    def look() -> None:
        wait_until(lambda: read_key() != "", 60.0)
        modes.append(stat.S_IMODE((work_dir / "engine.key").stat().st_mode))
        keys.append(read_key())

    async def act() -> tuple[Roles, HealthForm, list[str], Path, list[str]]:
        thread = threading.Thread(target=look)
        thread.start()
        try:
            roles = await placement.start()
            thread.join()
            assert placement.engine_pid is not None
            assert keys[0] not in read_arguments(placement.engine_pid)
            assert isinstance(roles.engine, RemoteEngine)
            health = await roles.engine.health()
            learner_of(roles).version = 3
            update = await roles.publisher.publish()
            receipt = await roles.engine.update(update)
            assert (receipt.version, receipt.digest) == (3, update.digest)
            assert update.path is not None
            weights_dir = Path(update.path).parent
            return roles, health, names(work_dir), weights_dir, names(weights_dir)
        finally:
            await placement.stop()

    roles, health, files, weights_dir, weights = asyncio.run(act())
    assert health.digest == health.model_digest == weights_digest(learner_of(roles).model)
    assert health.version == 0
    assert modes == [0o600]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and keys[0] in path.read_text()]
    assert files == ["engine.log"]
    # In memory, and gone with the run.
    assert weights_dir.parent == SHARED_MEMORY
    assert not weights_dir.exists()
    # Version 0 was served when 3 was published, so it stays until the next publication.
    assert weights == ["v000000.safetensors", "v000003.safetensors"]
    assert not is_alive(health.pid)
    assert placement.engine_pid is None
    assert names(work_dir) == ["engine.log"]
    # From the level of its role on.
    log = (work_dir / "engine.log").read_text()
    assert "listening on" in log
    assert "DEBUG" in log
    asyncio.run(placement.stop())


@contextmanager
def killing(placement: ProcessPlacement) -> Iterator[list[int]]:
    """Kill the engine as soon as there is one, from another thread. Yields its process id."""
    killed: list[int] = []

    def kill() -> None:
        wait_until(lambda: placement.engine_pid is not None, 60.0)
        assert placement.engine_pid is not None
        killed.append(placement.engine_pid)
        os.kill(placement.engine_pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    yield killed
    thread.join()


def test_prc_5_an_engine_that_dies_at_its_start_is_told_with_its_log(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Incident: a role ended before anything was logged, and the others waited."""
    # What an attempt that was killed left must not be taken for this one's.
    (tmp_path / "engine.key").write_text("an old key")
    (tmp_path / "engine.ready").write_text("an old address")
    placement = make_placement(tiny_model_dir, tmp_path)
    with killing(placement) as killed, pytest.raises(EngineError, match="the engine did not start") as caught:
        asyncio.run(placement.start())
    assert f"its process {killed[0]} ended with signal 9\nIts last log lines:" in str(caught.value)
    assert placement.engine_pid is None
    assert names(tmp_path) == ["engine.log"]


def test_a_model_that_the_learner_refuses_leaves_no_process(tmp_path: Path) -> None:
    placement = make_placement(tmp_path / "absent", tmp_path / "w")
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        asyncio.run(placement.start())
    assert placement.engine_pid is None
    assert names(tmp_path / "w") == ["engine.log"]


def test_a_work_directory_that_cannot_be_written_is_told(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "w").write_text("a file")
    with pytest.raises(StoreError, match=r"Allowed: .*Next: "):
        asyncio.run(make_placement(tiny_model_dir, tmp_path / "w" / "roles").start())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_prc_4_the_engine_dies_with_a_run_that_is_killed(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Incident: orphaned engines held memory and GPUs after their run was killed."""
    args = [sys.executable, "-c", PARENT, str(tiny_model_dir), str(tmp_path)]
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["src", "."])}
    parent = subprocess.Popen(args, stdout=subprocess.PIPE, text=True, cwd=root, env=environment)
    assert parent.stdout is not None
    engine_pid = int(parent.stdout.readline())
    assert is_alive(engine_pid)
    weights = weights_in_memory(parent.pid)
    assert weights
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    wait_until(lambda: not is_alive(engine_pid), 60.0)
    # Its weights in memory go with the next who clears up here: a job's agent, or another run.
    clear_shared_memory()
    assert not any(path.exists() for path in weights)


# ---------------------------------------------------------------- adapters


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
    spec = tiny_spec(lora={"rank": rank}, engine={"kind": kind}, placement={"kind": "process"})
    assert can_swap_adapters(spec) is expected
