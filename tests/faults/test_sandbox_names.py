"""What a tenant of the sandbox service named became the host's.

Its root directory was an image, its files too through podman's transports; pulls reached the node's loopback
address; the injected Python lay in root's home, where no user of an image may go.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from strop.errors import SandboxRefused
from strop.io.endpoints import Endpoint
from strop.runtime.agent_server import OPENHANDS
from strop.sandbox import SandboxSpec, make_backend
from tests.conftest import require_system_part
from tests.fixtures.commands import Run
from tests.fixtures.conformance import real_client, require_passed
from tests.fixtures.runtime_client import SERVER, RuntimeClient, wait_for
from tests.fixtures.runtime_processes import ServiceProcess, service_of
from tests.fixtures.sandboxes import needs_podman
from tests.fixtures.small_root import imported, make_small_root

SECRET = "a word of the operator's"


@contextmanager
def served(
    folder: Path, *words: str, memory_mib: int = 256
) -> Iterator[tuple[RuntimeClient, ServiceProcess]]:
    """Run a service with podman as root, and be a tenant of it."""
    folder.mkdir(exist_ok=True)
    with (
        service_of(folder, "--backend", "podman", *words, memory_mib=memory_mib) as service,
        RuntimeClient(Endpoint(url=service.url, key=service.key)) as tenant,
    ):
        yield tenant, service


def settled(tenant: RuntimeClient, image: str, **fields: object) -> dict[str, Any]:
    """Start a sandbox as the image's root; return its record once it runs or has failed."""
    name = f"s{time.monotonic_ns()}"
    body = {"image": image, "command": SERVER, "session_id": name, "run_as_user": 0, **fields}
    answer = tenant.http.post("/start", json=body)
    if answer.status_code == 422:
        return {"status": "error", "failure_kind": "image_error"}
    assert answer.status_code == 200, answer.text
    return dict(wait_for(lambda: tenant.session(name), lambda found: found["status"] in ("running", "error")))


@contextmanager
def listener() -> Iterator[tuple[str, socket.socket]]:
    """A server of the node's own, on its loopback address, which nobody may reach."""
    with socket.create_server(("127.0.0.1", 0)) as own:
        own.setblocking(False)
        yield f"127.0.0.1:{own.getsockname()[1]}", own
        with pytest.raises(BlockingIOError):
            own.accept()


@pytest.mark.slow
@needs_podman
def test_nothing_of_the_host_is_a_sandboxs_root_by_a_clients_word(tmp_path: Path) -> None:
    tree = make_small_root(tmp_path / "tree")
    (tree / "word").write_text(SECRET)
    (tree / "up").symlink_to(tmp_path)
    names = [
        *("/", "//", "/.", "/root", "/etc", "/proc/1/root", "/proc/self/cwd", f"/proc/{os.getpid()}/root"),
        *(str(tmp_path), str(tmp_path / "service"), str(tree), f"{tree}/../..", f"{tree}/up"),
        *("dir:/etc", "oci:/etc", "docker-archive:/etc/shadow", "oci-archive:/etc/shadow", "tarball:/etc"),
        *("containers-storage:/", "--help", "-v", "--root=/", "..", "../etc", "localhost/../../etc"),
        *("a b", "*", "sha256:", "a\nb"),
    ]
    with imported(tree) as image, served(tmp_path / "service") as (tenant, _):
        for name in names:
            record = settled(tenant, name)
            assert (name, record["status"], record["failure_kind"]) == (name, "error", "image_error")
        record = settled(tenant, image)
        told = tenant.run(record, "cat /word; id -u; cat /etc/shadow /up/service/keys")[1]
        assert told.startswith(f"{SECRET}0\n")
        assert str(tenant.http.headers["X-API-Key"]) not in told
        assert record["isolation"]["host_uid"] >= 65536


@pytest.mark.slow
@needs_podman
def test_a_clients_image_name_reaches_no_address_of_the_nodes_own(tmp_path: Path) -> None:
    with served(tmp_path) as (tenant, _), listener() as (address, _):
        for name in (f"{address}/x:1", f"localhost:{address[10:]}/x", f"localhost/strop-none-{os.getpid()}"):
            for policy in ("IfNotPresent", "Always"):
                began = time.monotonic()
                record = settled(tenant, name, image_pull_policy=policy)
                assert (name, record["failure_kind"]) == (name, "image_error")
                # A registry that does not answer is asked six times, for a minute.
                assert time.monotonic() - began < 20.0
        with imported(make_small_root(tmp_path / "root")) as own:
            # An image of the operator's stays usable, whatever the policy.
            assert settled(tenant, own, image_pull_policy="Always")["status"] == "running"


@pytest.mark.slow
@needs_podman
def test_device_files_of_an_image_open_nothing(tmp_path: Path) -> None:
    root = make_small_root(tmp_path / "root")
    try:
        # The disk of this host.
        os.mknod(root / "device", 0o060666, os.stat("/").st_dev)
    except PermissionError:
        pytest.skip("this machine makes no device files")
    (root / "device").chmod(0o666)
    with imported(root) as image, served(tmp_path / "service") as (tenant, _):
        for user in (0, None):
            record = settled(tenant, image, run_as_user=user)
            told = tenant.run(record, "head -c 1 /dev/null && ! head -c 1 /device && echo closed")
            assert told == (0, "closed\n")


@pytest.mark.slow
@needs_podman
def test_links_of_an_image_lead_nobody_into_the_host(tmp_path: Path) -> None:
    """The engine, who is the host's root, makes mount points, devices and links in an image's tree."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "ptmx").write_text(SECRET)
    trees = {}
    for name in ("dev", "proc", "sys", "run", "tmp", "workspace"):
        trees[name] = make_small_root(tmp_path / "images" / name)
        place = trees[name] / name
        shutil.rmtree(place, ignore_errors=True)
        place.symlink_to("../" * 20 + str(victim).lstrip("/"))
    with served(tmp_path / "service") as (tenant, _), ExitStack() as stack:
        for name, tree in trees.items():
            image = stack.enter_context(imported(tree))
            for user in (0, None):
                record = settled(tenant, image, run_as_user=user)
                if record["status"] != "running":
                    # The engine takes no link for these, and strop none for the first.
                    assert name in ("dev", "proc", "sys", "tmp"), (name, record["cause"])
                    continue
                tenant.run(record, f"echo x > /{name}/ptmx; rm /{name}/ptmx")
                tenant.stop(record)
            found = {path.name: path.read_text() for path in victim.iterdir()}
            assert (name, found) == (name, {"ptmx": SECRET})


@pytest.mark.slow
@needs_podman
def test_an_injected_server_starts_in_a_debian_image_for_the_real_client(tmp_path: Path) -> None:
    require_system_part("OpenHands' client (make openhands-deps)", OPENHANDS.is_ready())
    root = make_small_root(tmp_path / "root")
    (root / "root").mkdir(exist_ok=True)
    (root / "root").chmod(0o700)
    with (
        imported(root) as image,
        served(tmp_path / "service", memory_mib=2048) as (_, service),
        real_client(),
    ):
        require_passed(service, (1,), image=image)


def test_keys_lie_where_no_sandbox_sees_them(run: Run) -> None:
    import strop

    # Whatever a class of a run's may import is shown: strop's own source too.
    folder = Path(strop.__file__).parent
    ended = run("runtime", "serve", "--dir", folder, "--backend", "process")
    assert ended.code == 2
    assert str(folder.parent) in ended.err
    assert not (folder / "keys").exists()


def test_a_bubblewrap_that_is_too_old_is_told_in_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bwrap").write_text('#!/bin/sh\necho "bwrap: Unknown option --as-pid-1" >&2\nexit 1\n')
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SandboxRefused) as caught:
        asyncio.run(make_backend("bubblewrap").create(SandboxSpec()))
    assert caught.value.kind == "bubblewrap"
    assert "Unknown option" in str(caught.value)
