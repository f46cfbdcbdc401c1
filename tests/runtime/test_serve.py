"""`strop runtime serve` on this machine: nothing is left at the end; options and prebuilt images."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.cli import main
from strop.errors import SandboxRefused
from strop.runtime.images import Images, kind_of
from tests.fixtures.commands import Run, run


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
        ("received unexpected HTTP status: 503 Service Unavailable", "registry"),
        ("invalid status code from registry 429 (Too Many Requests)", "registry"),
        ("dial tcp: lookup registry.invalid: no such host", "registry"),
        ("dial tcp 10.0.0.1:443: connect: connection refused", "registry"),
        # Numbers of a name, a port and a digest are no status.
        ("reading manifest latest in h:45029/django-15032: manifest unknown, sha256:429a50342", "image"),
        ("unauthorized: authentication required", "image"),
        ("write /var/tmp/storage1: no space left on device", "no_space"),
    ],
)
def test_what_a_registry_may_say_otherwise_later(output: str, expected: str) -> None:
    assert kind_of(output) == expected


class ScriptedImages(Images):
    """Fetches what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.missing = {"c:1"}

    async def fetch(self, image: str, policy: str) -> str:
        self.asked.append(image)
        if image in self.missing:
            raise SandboxRefused(f"image {image} is not there", kind="image")
        return f"id of {image}"


def test_images_are_fetched_by_a_command_that_tells_failures(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ScriptedImages()
    monkeypatch.setattr("strop.runtime.images.Images", lambda engine: store)
    listed = tmp_path / "images"
    names = ["a:1", "b:1", "c:1"]
    listed.write_text("\n".join([*names, "a:1", ""]))
    ended = run("runtime", "prebuild", listed)
    assert (ended.code, sorted(store.asked)) == (1, names)
    assert "c:1: image: " in ended.err
    store.missing.clear()
    assert run("runtime", "prebuild", listed).code == 0
