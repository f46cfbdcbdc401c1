"""The matrix, by the real client, against a real controller and a real node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.errors import ConfigError, StoreError
from strop.runtime.conformance import ConformanceOptions, parse_extra, run_conformance
from strop.runtime.openhands import OPENHANDS
from strop.store.python_environment import find_interpreter
from tests.conftest import require_system_part
from tests.fixtures.runtime_processes import Processes, service_of
from tests.fixtures.sandboxes import needs_bubblewrap, needs_podman
from tests.fixtures.small_root import imported, make_small_root, podman, remove_images

on_every_backend = pytest.mark.parametrize(
    "backend",
    [
        "process",
        pytest.param("bubblewrap", marks=needs_bubblewrap),
        pytest.param("podman", marks=needs_podman),
    ],
)
_NEEDS_IMAGES = (7, 10, 11, 22)
_ALL = tuple(number for number in range(1, 26) if number not in _NEEDS_IMAGES)
# What depends on who makes the sandbox; the protocol is the same for all.
_OF_BACKENDS = (1, 2, 4, 6, 9, 14, 15, 18, 23)
_FATAL = "#!/bin/sh\necho it cannot start >&2\nexit 7\n"
_HUNGRY = "#!/bin/sh\nexec tail /dev/zero\n"


@pytest.fixture(scope="module", autouse=True)
def environment() -> None:
    """OpenHands' environment, which `make openhands-deps` makes."""
    try:
        find_interpreter((3, 12))
    except StoreError as error:
        require_system_part(f"Python 3.12 ({error})", found=False)
    require_system_part("OpenHands' client (make openhands-deps)", OPENHANDS.is_ready())


def require_passed(service: Processes, cases: tuple[int, ...], **options: object) -> None:
    """Run cases, none of which may be left out."""
    chosen = ConformanceOptions(cases=cases, **options)  # type: ignore[arg-type]
    results = list(run_conformance(service.url, service.key, chosen, say=print))
    assert [one.number for one in results] == list(cases)
    bad = [f"{one.number}, {one.title}: {one.detail}" for one in results if one.status != "passed"]
    assert not bad, "\n".join([*bad, service.log("node"), service.log("controller")])


@pytest.mark.slow
@on_every_backend
def test_the_matrix_passes(backend: str, tmp_path: Path) -> None:
    with service_of(tmp_path, "--backend", backend) as service:
        if backend == "bubblewrap":
            extra = {"restart": service.restart_command}
            require_passed(service, _ALL, many=24, extra=extra)
        else:
            require_passed(service, _OF_BACKENDS)


@pytest.mark.slow
@on_every_backend
def test_a_real_agent_server_inside_serves_the_real_client(backend: str, tmp_path: Path) -> None:
    words = ("--backend", backend, "--data-plane", "inject")
    with service_of(tmp_path, *words, memory_mib=2048) as service:
        require_passed(service, (1,) if backend == "bubblewrap" else (23,))


@pytest.mark.slow
@needs_podman
def test_images_are_started_built_and_blamed(tmp_path: Path) -> None:
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
        extra = {"no_agent_image": fatal, "oom_image": hungry, "base_image": plain}
        try:
            with service_of(tmp_path, "--backend", "podman", cache=tmp_path / "cache") as service:
                require_passed(service, (10, 11, 22), image=plain, extra=extra)
        finally:
            built = podman("images", "--format", "{{.Repository}}:{{.Tag}}").split()
            remove_images(*(name for name in built if name.startswith("localhost/strop-conformance:")))
            results = (tmp_path / "cache").glob("runtime/builds/*.json")
            remove_images(*(json.loads(path.read_text()).get("image", "none") for path in results))


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="case 99"):
        list(run_conformance("http://127.0.0.1:9", "", ConformanceOptions(cases=(99,)), say=print))
    with pytest.raises(ConfigError, match="--with other"):
        parse_extra(["other=1"])
    results = list(run_conformance("http://127.0.0.1:9", "", ConformanceOptions(cases=(19, 22)), say=print))
    assert [one.status for one in results] == ["failed", "not run"]
