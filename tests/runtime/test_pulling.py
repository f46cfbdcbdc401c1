"""Images from a registry on this host: policies, put off, offline, one pull for many, architectures."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from strop.runtime.contract import FailureKind
from strop.runtime.planes import SandboxFailed
from strop.runtime.pulling import Images, PullSettings
from tests.conftest import require_system_part
from tests.fixtures.sandboxes import needs_podman
from tests.fixtures.small_root import (
    TLS_HANDSHAKE,
    imported,
    make_small_root,
    podman,
    pump,
    registry,
    remove_images,
)

pytestmark = [needs_podman, pytest.mark.slow]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_root(tmp_path_factory.mktemp("pulled") / "root")


@pytest.fixture(scope="module")
def pushed(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image that a registry has and this host does not."""
    require_system_part("docker-registry", shutil.which("docker-registry") is not None)
    with registry(tmp_path_factory.mktemp("registry")) as address, imported(tree) as name:
        target = f"{address}/strop/small:1"
        podman("push", "--quiet", "--tls-verify=false", name, f"docker://{target}")
        yield target
        remove_images(target)


def fetch(images: Images, image: str, policy: str = "IfNotPresent", said: list[str] | None = None) -> str:
    lines: list[str] = [] if said is None else said
    return asyncio.run(images.fetch(image, policy, lines.append))


def images_of(image: str, **changes: object) -> Images:
    host = image.partition("/")[0]
    return Images(PullSettings(insecure=(host,), first_pause_s=0.05, **changes))  # type: ignore[arg-type]


def test_an_image_is_pulled_once_as_its_policy_says(pushed: str) -> None:
    remove_images(pushed)
    images = images_of(pushed)
    for settings, policy, message in (
        (images, "Never", "its policy is Never"),
        (images_of(pushed, is_offline=True), "Always", "offline mode forbids to pull it"),
    ):
        with pytest.raises(SandboxFailed, match=message) as caught:
            fetch(settings, pushed, policy)
        assert caught.value.kind is FailureKind.IMAGE_ERROR
    assert images.num_pulls == 0

    notes: list[str] = []

    async def many() -> list[str]:
        return await asyncio.gather(*(images.fetch(pushed, "IfNotPresent", notes.append) for _ in range(8)))

    ids = asyncio.run(many())
    assert (len(set(ids)), images.num_pulls) == (1, 1)
    assert fetch(images, pushed, "Never") == ids[0]
    assert images.num_pulls == 1
    assert fetch(images, pushed, "Always") == ids[0]
    assert images.num_pulls == 2
    # Offline, what is here is used as it is.
    said: list[str] = []
    assert fetch(images_of(pushed, is_offline=True), pushed, "Always", said) == ids[0]
    assert said == [f"offline: {pushed} is used as it is here"]


def test_what_a_registry_does_not_have_is_asked_for_once(pushed: str) -> None:
    images = images_of(pushed)
    missing = pushed.replace("small", "none")
    for _ in range(3):
        with pytest.raises(SandboxFailed, match=r"none:1 (cannot be pulled|was refused lately)") as caught:
            fetch(images, missing)
    assert "was refused lately" in caught.value.cause
    assert images.num_pulls == 1
    # Nobody listens there: put off, and told in the end.
    nobody = images_of("127.0.0.1:9/x", max_tries=1)
    with pytest.raises(SandboxFailed, match="cannot be pulled, 1 times"):
        fetch(nobody, "127.0.0.1:9/x/y:1")


def test_a_registry_that_has_too_many_requests_is_asked_again(pushed: str) -> None:
    remove_images(pushed)
    host, _, rest = pushed.partition("/")
    real = int(host.rpartition(":")[2])

    async def main() -> tuple[str, list[str]]:
        left = 8
        said: list[str] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal left
            first = await reader.read(1)
            if first == TLS_HANDSHAKE:
                pass
            elif left > 0:
                left -= 1
                await reader.readuntil(b"\r\n\r\n")
                body = b'{"errors": [{"code": "TOOMANYREQUESTS", "message": "slow down"}]}'
                head = (
                    "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\n"
                    # podman's own pauses, of which the first is two seconds, follow what it is told.
                    "retry-after: 0\r\nconnection: close"
                )
                writer.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            else:
                inner, outer = await asyncio.open_connection("127.0.0.1", real)
                outer.write(first)
                with suppress(ConnectionError):
                    await asyncio.gather(pump(reader, outer), pump(inner, writer))
                outer.close()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        image = f"127.0.0.1:{server.sockets[0].getsockname()[1]}/{rest}"
        images = images_of(image, max_tries=12)
        try:
            return await images.fetch(image, "IfNotPresent", said.append), said
        finally:
            server.close()
            remove_images(image)

    image_id, said = asyncio.run(main())
    assert image_id
    assert any("the registry puts" in line for line in said)


def test_an_image_for_another_processor_is_refused(tree: Path) -> None:
    with imported(tree, "--arch", "s390x") as name, pytest.raises(SandboxFailed, match="is made for s390x"):
        fetch(Images(PullSettings()), name, "Never")
