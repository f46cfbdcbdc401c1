"""The matrix, by the real client, against a real service."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from strop.errors import StoreError
from strop.runtime.agent_server import OPENHANDS
from strop.store.python_environment import find_interpreter
from tests.conftest import require_system_part
from tests.fixtures import stand_in
from tests.fixtures.conformance import CASES, REAL, real_client, require_passed
from tests.fixtures.docker_daemon import docker
from tests.fixtures.runtime_processes import ServiceProcess, assert_gone, find_traces, service_of
from tests.fixtures.sandboxes import needs_bubblewrap, needs_podman
from tests.fixtures.small_root import imported, make_small_root

_FATAL = "#!/bin/sh\necho it cannot start >&2\nexit 7\n"
_HUNGRY = "#!/bin/sh\nexec tail /dev/zero\n"
_PROGRAMS = {"plain": stand_in.AS_AGENT_SERVER, "fatal": _FATAL, "hungry": _HUNGRY}


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
@needs_bubblewrap
def test_the_real_server_is_injected_and_used(tmp_path: Path) -> None:
    with service_of(tmp_path, "--backend", "bubblewrap", memory_mib=2048) as service:
        require_passed(service, REAL)


@pytest.mark.slow
@needs_podman
def test_the_client_is_served_and_told_of_failures(tmp_path: Path) -> None:
    with ExitStack() as stack:
        plain, fatal, hungry = (
            stack.enter_context(imported(tree_of(tmp_path / name, program)))
            for name, program in _PROGRAMS.items()
        )
        with service_of(tmp_path, "--backend", "podman") as service:
            cases = [number for number in CASES if number not in (*REAL, 12)]
            extra = {"no_agent_image": fatal, "oom_image": hungry}
            require_passed(service, cases, image=plain, extra=extra)
            require_lost(service, plain)


def tree_of(folder: Path, program: str) -> Path:
    """Make the root of an image with a program in place of the agent server."""
    top = make_small_root(folder / "root")
    path = top / "usr" / "local" / "bin" / "openhands-agent-server"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(program)
    path.chmod(0o755)
    return top


def require_lost(service: ServiceProcess, image: str) -> None:
    """Run the case in which the service is killed: by a signal that this process sends, and waits for."""
    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill_on_demand, service)
        require_passed(service, (12,), image=image, extra={"wish": str(service.folder / "wish")})
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
@pytest.mark.docker
def test_docker_starts_images_of_its_own(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(tree_of(tmp_path, stand_in.AS_AGENT_SERVER), arcname=".")
    image = "localhost/strop-conformance-base:1"
    docker("import", "-", image, stdin=packed.getvalue())
    before = docker("ps", "--all", "--format", "{{.Names}}")
    with service_of(tmp_path, "--backend", "docker") as service:
        require_passed(service, (2, 3, 7, 13, 14), image=image)
    # Those that lent images too.
    assert not {*docker("ps", "--all", "--format", "{{.Names}}").split()} - {*before.split()}


def test_the_page_says_which_cases_are_run(request: pytest.FixtureRequest) -> None:
    page = (request.config.rootpath / "docs" / "runtime.md").read_text("utf-8")
    rows = ["| case | situation | server |", "|---|---|---|"]
    rows += [f"| {n} | {title} | {'real' if n in REAL else 'stand-in'} |" for n, title in CASES.items()]
    assert "\n".join(rows) in page
