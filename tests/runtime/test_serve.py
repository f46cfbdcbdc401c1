"""`strop runtime serve` on this machine: nothing is left at the end; options and prebuilt images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.cli import main
from strop.errors import ConfigError
from strop.runtime.contract import FailureKind
from strop.runtime.planes import SandboxFailed
from strop.runtime.pulling import Images, engine_of, is_transient, list_images, shard_of
from strop.runtime.service_dir import ServiceDir
from tests.conftest import require_system_part
from tests.fixtures.commands import Ended, Run, run
from tests.fixtures.runtime_client import RuntimeClient, processes_of, wait_for
from tests.fixtures.runtime_processes import assert_gone, find_traces


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[ServiceDir, subprocess.Popen[bytes]]]:
    require_system_part("bubblewrap", any(Path(path, "bwrap").exists() for path in os.get_exec_path()))
    folder = ServiceDir(tmp_path / "service")
    words = ["runtime", "serve", "--dir", str(folder.path), "--backend", "bubblewrap"]
    with (tmp_path / "output").open("wb") as output:
        child = subprocess.Popen([sys.executable, "-m", "strop.cli", *words], stdout=output, stderr=output)
    try:
        wait_for(folder.find, lambda found: found is not None or child.poll() is not None)
        yield folder, child
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_an_end_leaves_nothing(served: tuple[ServiceDir, subprocess.Popen[bytes]]) -> None:
    folder, child = served
    endpoint = folder.find()
    assert endpoint is not None
    with RuntimeClient(endpoint) as client:
        client.start("s")
        assert client.run(client.wait_ready("s"), "echo up") == (0, "up\n")
    # One process answers clients and holds the sandboxes.
    assert len(processes_of(folder.path)) == 1
    pids, places = find_traces(child.pid)
    assert pids
    child.terminate()
    assert child.wait(60) == 0
    assert folder.find() is None
    assert_gone(pids, places)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["job.nodes=2"], "job.nodes=2 without --on"),
        (["--dry-run"], "--dry-run without --on"),
        (["--node", "first"], "--node first is not understood"),
        (["--on", "slurm", "--port", "1"], "port with --on slurm"),
        (["--on", "slurm", "model.uri=x"], "model.uri in a job that serves sandboxes"),
        (["--on", "slurm", "job.gpus=1"], "GPUs or CPU nodes"),
        (["--on", "sagemaker"], "whose hosts see no common disk"),
    ],
)
def test_what_cannot_be_served_is_refused(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runtime", "serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_backend_that_there_is_not_is_refused_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "service"
    assert main(["runtime", "serve", "--dir", str(folder), "--backend", "nope"]) == 2
    assert not folder.exists()
    assert "sandbox backend 'nope'. Allowed: auto, bubblewrap" in capsys.readouterr().err


__all__ = ["run"]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("received unexpected HTTP status: 503 Service Unavailable", True),
        ("invalid status code from registry 429 (Too Many Requests)", True),
        ("dial tcp: lookup registry.invalid: no such host", True),
        ("dial tcp 10.0.0.1:443: connect: connection refused", True),
        # Numbers of a name, a port and a digest are no status.
        ("reading manifest latest in h:45029/django-15032: manifest unknown, sha256:429a50342", False),
        ("unauthorized: authentication required", False),
    ],
)
def test_what_a_registry_may_say_otherwise_later(output: str, expected: bool) -> None:
    assert is_transient(output) is expected


class ScriptedImages(Images):
    """Fetches what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.missing = {"c:1"}

    async def fetch(self, image: str, policy: str, say: object) -> str:
        self.asked.append(image)
        if image in self.missing:
            raise SandboxFailed(FailureKind.IMAGE_ERROR, f"image {image} is not there")
        return f"id of {image}"


def test_the_images_of_a_node_are_in_the_store_of_its_first_engine() -> None:
    for backends, engine in (
        (("bubblewrap", "podman", "docker"), "podman"),
        (("docker", "podman"), "docker"),
        (("process",), "podman"),
    ):
        assert engine_of(backends) == engine


def test_images_are_listed_once_and_shared_out(tmp_path: Path) -> None:
    rows = [{"image": f"{name}:1", "n": 1} for name in "abcab"]
    lines, table = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), table)
    names = ["a:1", "b:1", "c:1"]
    assert list_images(lines, "image") == list_images(table, "image") == names
    parts = [shard_of(names, f"{number}/3") for number in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == names
    for shard in ("0/3", "4/3", "1", "a/b"):
        with pytest.raises(ConfigError, match="shard"):
            shard_of(names, shard)
    for path, field, error in (
        (lines, "other", "no image in field 'other' of row 1"),
        (tmp_path / "none.jsonl", "image", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=error):
            list_images(path, field)


def test_what_is_done_is_left_alone_and_failures_are_tried_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command: in shards, with a failure, and gone on with."""
    store = ScriptedImages()
    monkeypatch.setattr("strop.runtime.pulling.Images", lambda engine: store)
    rows, results = tmp_path / "rows.jsonl", tmp_path / "results"
    names = ["a:1", "b:1", "c:1"]
    rows.write_text("".join(json.dumps({"image": name}) + "\n" for name in [*names, "a:1"]))

    def fetch(shard: str) -> Ended:
        return run("runtime", "prebuild", "--dataset", rows, "--results", results, "--shard", shard)

    parts = [shard_of(names, f"{number}/2") for number in (1, 2)]
    assert [fetch(f"{number}/2").code for number in (1, 2)] == [int("c:1" in part) for part in parts]
    found = {one["image"]: one for one in (json.loads(path.read_text()) for path in results.iterdir())}
    assert {name: one.get("image_id") for name, one in found.items()} == {
        "a:1": "id of a:1",
        "b:1": "id of b:1",
        "c:1": None,
    }
    assert found["c:1"]["failure_kind"] == "image_error"
    store.missing.clear()
    again = fetch("1/1")
    assert again.code == 0
    assert sorted(store.asked) == [*names, "c:1"]
    assert again.err.count("done before") == 2
