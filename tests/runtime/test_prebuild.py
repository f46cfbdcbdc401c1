"""The images of a data set: listed, shared out, fetched once, failures tried again."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from strop.errors import ConfigError
from strop.runtime.contract import FailureKind
from strop.runtime.planes import SandboxFailed
from strop.runtime.pulling import Images, engine_of, is_transient, list_images, shard_of
from tests.fixtures.commands import Ended, Run, run

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
