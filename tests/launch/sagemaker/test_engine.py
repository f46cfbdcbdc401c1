"""Images that `--build` makes, by a real podman and offline."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from strop.errors import CheckRefused
from strop.launch.sagemaker.engine import IMAGE, Engine, build_image, find_image
from tests.fixtures.small_root import copy_programs, imported


@pytest.mark.slow
def test_an_image_is_built_on_its_base_and_found(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    copy_programs(tmp_path / "root", ("sh", "cat"))
    containerfile = tmp_path / "Containerfile"
    containerfile.write_text("ARG BASE\nFROM ${BASE}\nCOPY file /file\nSTOPSIGNAL SIGTERM\n")
    (tmp_path / "file").write_text("brought along")
    with imported(tmp_path / "root") as base:
        name = build_image(engine, containerfile, base)
        image_id = find_image(engine, name)
        assert image_id is not None
        assert image_id == find_image(engine, IMAGE)
        assert name == f"{IMAGE}:{image_id.removeprefix('sha256:')[:16]}"
        assert build_image(engine, containerfile, base) == name
        words = engine.argv("run", "--rm", "--network=none", name, "cat", "/file")
        assert subprocess.run(words, capture_output=True, check=True).stdout == b"brought along"
        with pytest.raises(CheckRefused, match="no-such-base"):
            build_image(engine, containerfile, "localhost/no-such-base")
    assert find_image(engine, "localhost/never-made") is None


def test_gpus_are_passed_in_each_engines_own_way() -> None:
    visible = ["--env", "CUDA_VISIBLE_DEVICES=GPU-1,GPU-2"]
    podman, docker = (Engine(kind=kind, program=kind) for kind in ("podman", "docker"))
    assert podman.device_words(("GPU-1", "GPU-2")) == [
        *("--device", "nvidia.com/gpu=GPU-1", "--device", "nvidia.com/gpu=GPU-2"),
        *visible,
    ]
    assert docker.device_words(("GPU-1", "GPU-2")) == ["--gpus", '"device=GPU-1,GPU-2"', *visible]
    assert podman.device_words(()) == []
