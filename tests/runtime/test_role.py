"""The sandbox service of a run: handed to every worker, named when it dies, ended with the run."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from strop.cluster.servers import guard
from strop.errors import SandboxLost, SandboxRefused
from strop.io.endpoints import find_endpoint, list_endpoints
from strop.runtime import role as of_runtime
from strop.runtime.role import RuntimeRole
from strop.spec.sandboxing import RuntimeSpec
from tests.fixtures import runtime_service

# A service in small: it says where it is, as the real one does, and lives until it is ended.
SERVICE = """
import socket, sys, time
from pathlib import Path
from strop.io.endpoints import RUNTIME, Endpoint, write_endpoint

held = socket.create_server(("127.0.0.1", 0))
if sys.argv[2] == "bad":
    sys.exit("no backend isolates here")
url = f"http://127.0.0.1:{held.getsockname()[1]}"
write_endpoint(Path(sys.argv[1]), RUNTIME, Endpoint(url=url, key="run-key"))
time.sleep(60)
"""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> None:
    def argv(python: str, folder: str, *words: str) -> tuple[str, ...]:
        return (python, "-c", SERVICE, folder, "bad" if "podman" in words else "good")

    monkeypatch.setattr(of_runtime, "serve_argv", argv)
    monkeypatch.delenv("STROP_ENDPOINTS", raising=False)


async def test_a_service_that_is_there_is_handed_over_and_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STROP_ENDPOINTS", raising=False)

    def role_of(url: str, key: str) -> RuntimeRole:
        key_file = tmp_path / f"key-{len(list(tmp_path.iterdir()))}"
        key_file.write_text(f"lab {key}\n")
        key_file.chmod(0o600)
        spec = RuntimeSpec(url=url, key_file=str(key_file))
        return RuntimeRole(spec, tmp_path / "run", tmp_path / "servers")

    async with runtime_service.service(tmp_path / "service") as running:
        url, key = running.url, running.key
        for wrong in (role_of(url, "a-key-that-is-not-its-own"), role_of("http://127.0.0.1:9", key)):
            with pytest.raises(SandboxRefused) as caught:
                await wrong.start()
            assert caught.value.kind == "service"
            assert find_endpoint("runtime") is None
        role = role_of(url, key)
        await role.start()
        found = find_endpoint("runtime")
        assert found is not None
        assert (found.url, found.key) == (url, key)
        # What workers of other machines are sent.
        assert list_endpoints() == {"runtime": found}
        assert key not in " ".join(os.environ.values())
        await role.stop()
        assert find_endpoint("runtime") is None


@pytest.mark.usefixtures("service")
async def test_one_that_comes_with_the_run_lives_as_long_and_its_death_ends_the_run(tmp_path: Path) -> None:
    role = RuntimeRole(RuntimeSpec(serve="here"), tmp_path / "run", tmp_path / "servers")
    await role.start()
    found = find_endpoint("runtime")
    assert found is not None
    assert found.key == "run-key"
    assert await guard(asyncio.sleep(0, "done"), role.find_failure) == "done"
    child = role._child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    try:
        with pytest.raises(SandboxLost, match="the sandbox service ended with -9") as caught:
            await guard(asyncio.sleep(60), role.find_failure)
        assert caught.value.kind == "infra"
    finally:
        await role.stop()
        await role.stop()
    assert find_endpoint("runtime") is None


@pytest.mark.usefixtures("service")
def test_one_that_does_not_come_up_says_why(tmp_path: Path) -> None:
    role = RuntimeRole(RuntimeSpec(serve="here", backend="podman"), tmp_path / "run", tmp_path / "servers")
    with pytest.raises(SandboxLost, match="no backend isolates here"):
        asyncio.run(role.start())
    asyncio.run(role.stop())
