"""Images from a registry on this host: policies, put off, offline, one pull for many."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strop.errors import SandboxRefused
from strop.runtime.images import Images
from tests.conftest import require_system_part
from tests.fixtures.containers import own_storage
from tests.fixtures.sandboxes import needs_podman
from tests.fixtures.small_root import (
    imported,
    make_small_root,
    podman,
    registries_file,
    registry,
    relay_of,
    remove_images,
)
from tests.fixtures.tiny_disk import tiny_disk

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


@pytest.fixture
def ask_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have podman ask the registries of some images without TLS."""

    def write(*images: str) -> None:
        path = registries_file(tmp_path, *(image.partition("/")[0] for image in images))
        monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(path))

    return write


class Counted(Images):
    """Counts the pulls."""

    num_pulls = 0

    async def _run(self, limit_s: float, *words: str) -> tuple[int, str]:
        self.num_pulls += words[0] == "pull"
        return await super()._run(limit_s, *words)


def fetch(images: Images, image: str, policy: str = "IfNotPresent") -> str:
    return asyncio.run(images.fetch(image, policy))


def test_an_image_is_pulled_once_as_its_policy_says(
    pushed: str, ask_plainly: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_images(pushed)
    ask_plainly(pushed)
    images = Counted()
    for policy, offline, message in (
        ("Never", "0", "its policy is Never"),
        ("Always", "1", "offline mode forbids to pull it"),
    ):
        monkeypatch.setenv("STROP_OFFLINE", offline)
        with pytest.raises(SandboxRefused, match=message) as caught:
            fetch(images, pushed, policy)
        assert caught.value.kind == "image"
    assert images.num_pulls == 0
    monkeypatch.delenv("STROP_OFFLINE")

    async def many() -> list[str]:
        return await asyncio.gather(*(images.fetch(pushed, "IfNotPresent") for _ in range(8)))

    ids = asyncio.run(many())
    assert (len(set(ids)), images.num_pulls) == (1, 1)
    assert fetch(images, pushed, "Never") == ids[0]
    assert images.num_pulls == 1
    assert fetch(images, pushed, "Always") == ids[0]
    assert images.num_pulls == 2
    # Offline, what is here is used as it is.
    monkeypatch.setenv("STROP_OFFLINE", "1")
    assert fetch(images, pushed, "Always") == ids[0]
    assert images.num_pulls == 2


def test_what_a_registry_does_not_have_is_not_asked_for_again(
    pushed: str, ask_plainly: Callable[..., None]
) -> None:
    ask_plainly(pushed)
    images = Counted()
    with pytest.raises(SandboxRefused) as caught:
        fetch(images, pushed.replace("small", "none"))
    assert (caught.value.kind, images.num_pulls) == ("image", 1)


@pytest.mark.parametrize("registry_name", ["127.0.0.1:9", "registry.invalid"])
def test_a_registry_that_is_not_reached_is_nobodys_image_error(registry_name: str) -> None:
    nobody = Images()
    with pytest.raises(SandboxRefused) as caught:
        fetch(nobody, f"{registry_name}/x/y:1")
    assert caught.value.kind == "registry"


def test_a_full_disk_of_the_node_is_not_the_images_error(
    pushed: str, ask_plainly: Callable[..., None]
) -> None:
    ask_plainly(pushed)
    with own_storage() as folder, tiny_disk(folder / "graph", size_bytes=2 << 20):
        images = Counted()
        try:
            for num_pulls in (1, 2):
                with pytest.raises(SandboxRefused, match="no space left on device") as caught:
                    fetch(images, pushed)
                assert caught.value.kind == "no_space"
                # Asked again: space may have come.
                assert images.num_pulls == num_pulls
        finally:
            subprocess.run(["umount", "--lazy", f"{folder}/graph/overlay"], capture_output=True, check=False)


def test_a_registry_that_has_too_many_requests_is_asked_again(
    pushed: str, ask_plainly: Callable[..., None]
) -> None:
    host, _, rest = pushed.partition("/")
    with relay_of(host, num_put_off=2) as busy:
        image = f"{busy.address}/{rest}"
        ask_plainly(image)
        try:
            assert fetch(Images(), image)
        finally:
            remove_images(image)
