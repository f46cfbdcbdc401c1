"""The kernels are compiled once, and their absence costs speed only."""

from __future__ import annotations

import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strop.kernels.library import kernel_status
from tests.fixtures.kernels import needs_kernels


@pytest.fixture(autouse=True)
def _fresh_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Forget what this process knows, and use an empty cache."""
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))
    kernel_status.cache_clear()
    yield
    kernel_status.cache_clear()


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "fake-cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@needs_kernels
def test_the_second_call_finds_the_library_in_the_cache() -> None:
    first = kernel_status().path
    assert first is not None
    made_at = first.stat().st_mtime_ns
    kernel_status.cache_clear()
    assert kernel_status().path == first
    assert first.stat().st_mtime_ns == made_at
    assert [path.name for path in first.parent.iterdir()] == [first.name], "nothing temporary is left"


def test_no_compiler_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    status = kernel_status()
    assert status.path is None
    assert "no-such-compiler" in status.note


def test_a_failing_compiler_is_quoted_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = '[ "$1" = --version ] && echo "fake 1.0" && exit 0; echo "unknown flag" >&2; exit 1'
    monkeypatch.setenv("CC", fake_compiler(tmp_path, script))
    status = kernel_status()
    assert status.path is None
    assert "unknown flag" in status.note
    assert not list((tmp_path / "cache" / "kernels").iterdir())


def test_another_compiler_has_a_library_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache that machines share is keyed by all that decides the instructions."""
    version = '[ "$1" = --version ] && echo "fake {0}" && exit 0; for last; do :; done; '
    # The last argument but one is the output's path; write something there.
    build = 'while [ $# -gt 2 ]; do shift; done; echo "{0}" > "$1"'
    paths = []
    for name in ("1.0", "2.0"):
        monkeypatch.setenv("CC", fake_compiler(tmp_path, version.format(name) + build.format(name)))
        kernel_status.cache_clear()
        paths.append(kernel_status().path)
    assert None not in paths
    assert paths[0] != paths[1]


@needs_kernels
def test_the_library_has_the_instructions_that_pytorch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """One compiled for the machine would end an emulated process, or one that was told to use less."""
    here = kernel_status().path
    kernel_status.cache_clear()
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    without = kernel_status().path
    assert without is not None
    instructions = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(without)], capture_output=True, text=True, check=True
    ).stdout
    assert "%ymm" not in instructions
    assert "%zmm" not in instructions
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert without != here
