"""Which backend a host gets, and that it is never less than what was asked for."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError, SandboxRefused
from strop.sandbox import IsolationLevel, Mount, SandboxSpec, choose_backend, local, make_backend
from tests.fixtures.sandboxes import SOURCE_DIR, needs_bubblewrap, spec_of


@needs_bubblewrap
def test_auto_takes_the_best() -> None:
    assert asyncio.run(choose_backend()).name == "bubblewrap"
    assert asyncio.run(choose_backend("process", IsolationLevel.RLIMIT)).name == "process"


@pytest.mark.parametrize("level", [IsolationLevel.NAMESPACE, IsolationLevel.VM])
def test_a_level_that_is_not_reached_is_refused_and_says_what_was_reached(level: IsolationLevel) -> None:
    with pytest.raises(SandboxRefused, match=f"level {level.word} or better.*rlimit was reached") as caught:
        asyncio.run(choose_backend("process", level))
    assert caught.value.kind == "level"
    with pytest.raises(SandboxRefused, match="rlimit was reached"):
        asyncio.run(make_backend("process").create(SandboxSpec(min_level=level)))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'vm'. Allowed: auto, bubblewrap, podman, docker, process"):
        asyncio.run(choose_backend("vm"))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("mounts", {"mounts": (Mount(host_path="/usr", inside_path="/data"),)}),
        ("workspace", {"has_workspace": True}),
        ("network", {"network": "allow:packages.example.org:443"}),
    ],
)
def test_what_needs_a_file_system_or_network_of_ones_own_is_refused(
    kind: str, wanted: dict[str, Any]
) -> None:
    with pytest.raises(SandboxRefused) as caught:
        asyncio.run(make_backend("process").create(replace(spec_of(), **wanted)))
    assert caught.value.kind == kind


@needs_bubblewrap
def test_a_mount_that_is_not_there_is_told_in_the_words_of_bwrap() -> None:
    mounts = (Mount(host_path="/no/such/place", inside_path="/data"),)
    with pytest.raises(SandboxRefused, match="/no/such/place") as caught:
        asyncio.run(make_backend("bubblewrap").create(spec_of(mounts=mounts)))
    assert caught.value.kind == "bubblewrap"


async def test_a_host_without_a_python_for_programs_is_told_when_one_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(local._pythons, ("process", None), ())

    async with await make_backend("process").create(spec_of()) as sandbox:
        assert (await sandbox.exec(["/bin/true"], wall_limit_s=60)).exit_code == 0
        with pytest.raises(SandboxRefused, match="no Python can be started") as caught:
            _ = sandbox.python_argv
        assert caught.value.kind == "interpreter"


CHOOSE = """
import asyncio, sys
from strop.errors import SandboxRefused
from strop.sandbox import IsolationLevel, choose_backend
for level in (IsolationLevel.NAMESPACE, IsolationLevel.RLIMIT):
    try:
        print(asyncio.run(choose_backend("auto", level)).name)
    except SandboxRefused as refusal:
        print("refused", refusal.kind, refusal)
"""


@pytest.fixture
def shelf() -> Iterator[Path]:
    """A directory for programs that the user of a sandbox can enter too."""
    with tempfile.TemporaryDirectory(prefix="shelf ") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("", "program bwrap was not found"),
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "No permissions"),
    ],
)
def test_without_a_bwrap_that_works_nothing_less_is_taken_unless_it_is_enough(
    shelf: Path, program: str, cause: str
) -> None:
    if program:
        _make_program(shelf / "bwrap", program)
    refused, taken = _choose(shelf)
    assert cause in refused
    assert taken == "process"


@needs_bubblewrap
def test_what_counts_is_what_was_reached_not_what_was_asked(shelf: Path) -> None:
    """A bwrap that leaves out one word makes sandboxes whose programs see the host's processes."""
    _make_program(
        shelf / "bwrap",
        'for word; do shift; [ "$word" = --unshare-all ] && word=--unshare-net; set -- "$@" "$word"; done\n'
        f'exec {shutil.which("bwrap")} "$@"',
    )
    refused, _ = _choose(shelf)
    assert "pidns=False" in refused


def _make_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def _choose(shelf: Path) -> tuple[str, str]:
    """Return the answers for level namespace and rlimit of a process with only that shelf on its PATH."""
    env = {"PATH": str(shelf), "PYTHONPATH": SOURCE_DIR}
    ended = subprocess.run(
        [sys.executable, "-c", CHOOSE], env=env, capture_output=True, text=True, check=True
    )
    first, second = ended.stdout.splitlines()
    return first, second


STARVE = """
import asyncio, os, resource
from strop.errors import SandboxRefused
from strop.sandbox import SandboxSpec, local, make_backend
async def main():
    # Loaded before nothing can be opened any more.
    backend = make_backend("process")
    used = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
    try:
        await backend.create(SandboxSpec())
    except SandboxRefused as refusal:
        print(refusal.kind, refusal)
asyncio.run(main())
"""


def test_a_host_without_descriptors_is_told() -> None:
    env = {"PYTHONPATH": SOURCE_DIR}
    ended = subprocess.run(
        [sys.executable, "-c", STARVE], env=env, capture_output=True, text=True, check=True
    )
    assert ended.stdout.startswith("host the process that makes sandboxes does not start")
