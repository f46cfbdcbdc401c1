"""The matrix, by the real client, against a real service."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.runtime.server_plane import OPENHANDS
from strop.store.python_environment import find_interpreter
from tests.conftest import require_system_part
from tests.fixtures.conformance import CASES, real_client, require_passed
from tests.fixtures.docker_daemon import docker
from tests.fixtures.runtime_processes import ServiceProcess, assert_gone, find_traces, service_of
from tests.fixtures.sandboxes import needs_bubblewrap, needs_podman, on_every_backend
from tests.fixtures.small_root import imported, make_small_root

# A slow start, no agent server, no memory: by images, or by what the node puts in their place.
_PREPARED = (7, 10, 11)
_OF_THE_SERVICE = (3, 4, 5, 6, 7, 8, 12, 13, 16)
"""They do not depend on the backend."""
RUN = {
    # For one's own programs alone.
    "process": (1, 2, 9, 10, 14, 15),
    "bubblewrap": tuple(number for number in CASES if number != 10),
    "podman": tuple(number for number in CASES if number not in _OF_THE_SERVICE),
    # Where its containers, its images and their ends come in.
    "docker": (1, 2, 9, 14, 15, 17, 18),
}
"""The cases that tests here run, by backend."""
_FATAL = "#!/bin/sh\necho it cannot start >&2\nexit 7\n"
_HUNGRY = "#!/bin/sh\nexec tail /dev/zero\n"


@pytest.fixture(scope="module", autouse=True)
def client() -> Iterator[None]:
    """OpenHands' client, from the environment which `make openhands-deps` makes."""
    try:
        find_interpreter((3, 12))
    except StoreError as error:
        require_system_part(f"Python 3.12 ({error})", found=False)
    require_system_part("OpenHands' client (make openhands-deps)", OPENHANDS.is_ready())
    with real_client():
        yield


@pytest.mark.slow
@on_every_backend
def test_the_matrix_passes(backend: str, tmp_path: Path) -> None:
    cases = tuple(number for number in RUN[backend] if number not in _PREPARED)
    with service_of(tmp_path, "--backend", backend) as service:
        require_passed(service, [number for number in cases if number != 16])
        if 16 in cases:
            require_lost(service)


def require_lost(service: ServiceProcess) -> None:
    """Run the case in which the service is killed: by a signal that this process sends, and waits for."""
    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill_on_demand, service)
        require_passed(service, (16,), extra={"wish": str(service.folder / "wish")})
        killing.result()


def kill_on_demand(service: ServiceProcess) -> None:
    """Kill the service and start it again, once a client wishes it."""
    wish = service.folder / "wish"
    while not wish.exists():
        time.sleep(0.05)
    assert service.child is not None
    pids, places = find_traces(service.child.pid)
    service.kill()
    assert_gone(pids, places)
    service.start()
    wish.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "case", "given", "plane", "memory_mib"),
    [
        pytest.param("bubblewrap", 7, "slow_image", "inject", 2048, marks=needs_bubblewrap),
        ("process", 10, "no_agent_image", "image", 256),
        pytest.param("bubblewrap", 11, "oom_image", "inject", 16, marks=needs_bubblewrap),
    ],
)
def test_without_images_a_real_server_is_slow_missing_or_dies(
    backend: str, case: int, given: str, plane: str, memory_mib: int, tmp_path: Path
) -> None:
    """Python and its packages take seconds to begin, and do not fit into 80 MiB, 64 of them for files."""
    words = ("--backend", backend, "--data-plane", plane)
    with service_of(tmp_path, *words, memory_mib=memory_mib) as service:
        require_passed(service, (case,), extra={given: "host"})


@pytest.mark.slow
@needs_podman
def test_images_are_started_and_blamed(tmp_path: Path) -> None:
    trees = {}
    for name, script in (("plain", ""), ("fatal", _FATAL), ("hungry", _HUNGRY)):
        trees[name] = make_small_root(tmp_path / name / "root")
        if script:
            program = trees[name] / "usr" / "local" / "bin" / "openhands-agent-server"
            program.parent.mkdir(parents=True)
            program.write_text(script)
            program.chmod(0o755)
    with (
        imported(trees["plain"]) as plain,
        imported(trees["fatal"]) as fatal,
        imported(trees["hungry"]) as hungry,
    ):
        extra = {"no_agent_image": fatal, "oom_image": hungry}
        with service_of(tmp_path, "--backend", "podman") as service:
            require_passed(service, (10, 11), image=plain, extra=extra)


@pytest.mark.slow
@pytest.mark.docker
def test_docker_starts_images_of_its_own(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(make_small_root(tmp_path / "root"), arcname=".")
    image = "localhost/strop-conformance-base:1"
    docker("import", "-", image, stdin=packed.getvalue())
    before = docker("ps", "--all", "--format", "{{.Names}}")
    with service_of(tmp_path, "--backend", "docker") as service:
        require_passed(service, RUN["docker"], image=image)
    # Those that lent images too.
    assert not {*docker("ps", "--all", "--format", "{{.Names}}").split()} - {*before.split()}


def test_the_page_says_which_cases_are_run(request: pytest.FixtureRequest) -> None:
    page = (request.config.rootpath / "docs" / "runtime.md").read_text("utf-8")
    rows = ["| case | situation | process | bubblewrap | podman | docker |", "|---|---|---|---|---|---|"]
    for number, title in CASES.items():
        marks = ("passed" if number in cases else "not run" for cases in RUN.values())
        rows.append(f"| {number} | {title} | {' | '.join(marks)} |")
    assert "\n".join(rows) in page
