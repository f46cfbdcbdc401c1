"""Builds: one for each content, found again, failures remembered, locks of the dead taken over."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from strop.hardware.identity import identify, read_boot_id
from strop.runtime.building import Builds, take_lock
from strop.runtime.contract import BuildStatus
from strop.runtime.pulling import engine_of
from tests.fixtures.sandboxes import needs_podman
from tests.fixtures.small_root import imported, make_small_root, podman, remove_images


def context_of(recipe: str, **files: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in {"Dockerfile": recipe, **files}.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return packed.getvalue()


async def finish(builds: Builds, build_id: str) -> BuildStatus:
    async with asyncio.timeout(120.0):
        while True:
            status = builds.find(build_id)
            if status is not None and status.status not in ("QUEUED", "WORKING"):
                return status
            await asyncio.sleep(0.02)


@pytest.mark.slow
@needs_podman
def test_one_content_is_built_once_and_found_by_another_node(tmp_path: Path) -> None:
    async def main(base: str) -> None:
        builds, other = Builds(tmp_path / "builds"), Builds(tmp_path / "builds")
        good = context_of(f"FROM {base}\nCOPY word /word\n", word=tmp_path.name)
        try:
            names = [f"{base.partition(':')[0]}:{number}" for number in range(2, 5)]
            first, second = builds.start(good, names[0], [names[1]]), other.start(good, names[2], [])
            done = await asyncio.gather(finish(builds, first), finish(other, second))
            assert [one.status for one in done] == ["SUCCESS"] * 2, done
            assert builds.num_built + other.num_built == 1
            ids = {podman("image", "inspect", "--format", "{{.Id}}", name) for name in names}
            assert len(ids) == 1
            # A node whose store does not have it takes it from the folder.
            podman("rmi", "--force", ids.pop().strip())
            again = other.start(good, names[2], [])
            assert (await finish(other, again)).image == names[2]
            assert builds.num_built + other.num_built == 1
            bad = context_of(f"FROM {base}\nRUN /no/such/program\n")
            for number in range(2):
                failed = await finish(builds, builds.start(bad, names[0], []))
                assert failed.status == "FAILURE"
                assert ("has failed lately" in failed.error) is (number == 1)
            broken = await finish(builds, builds.start(b"no archive", names[0], []))
            assert broken.status == "INTERNAL_ERROR"
        finally:
            await builds.close()
            await other.close()
            remove_images(*names, f"localhost/strop-build:{hashlib.sha256(good).hexdigest()[:32]}")

    with imported(make_small_root(tmp_path / "root")) as base:
        asyncio.run(main(base))


def test_docker_builds_nothing_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_OFFLINE", "1")

    async def main() -> BuildStatus:
        builds = Builds(tmp_path, "docker")
        return await finish(builds, builds.start(context_of("FROM scratch\n"), "localhost/any:1", []))

    failed = asyncio.run(main())
    assert (failed.status, failed.error) == (
        "FAILURE",
        "docker may ask a registry in a build, which offline mode forbids",
    )
    # The next one, online, is not refused for it.
    assert list((tmp_path / "docker").iterdir()) == []


def test_the_images_of_a_node_are_in_the_store_of_its_first_engine() -> None:
    for backends, engine in (
        (("bubblewrap", "podman", "docker"), "podman"),
        (("docker", "podman"), "docker"),
        (("process",), "podman"),
    ):
        assert engine_of(backends) == engine


def test_a_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert take_lock(path)
    assert not take_lock(path)
    mine = json.loads(path.read_text())
    assert mine["pid"] == os.getpid()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    dead = identify(child.pid)
    child.kill()
    child.wait()
    assert dead is not None
    fields = {name: getattr(dead, name) for name in ("pid", "start_ticks", "boot_id", "pid_namespace")}
    path.write_text(json.dumps({**mine, **fields}))
    assert take_lock(path)
    # Of another host only its silence tells.
    assert mine["boot_id"] == read_boot_id()
    for text in (json.dumps({**mine, "host": "elsewhere"}), "half-writ"):
        path.write_text(text)
        assert not take_lock(path)
        os.utime(path, (time.time() - 61.0,) * 2)
        assert take_lock(path)
    assert [one.name for one in tmp_path.iterdir()] == ["lock"]
