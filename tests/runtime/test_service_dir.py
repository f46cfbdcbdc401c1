"""A service's folder: its address, the mode of its keys, and the error while there is no service."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError
from strop.io.endpoints import Endpoint
from strop.runtime.service_dir import ServiceDir, read_key


def serve_and(folder: ServiceDir, *, is_listening: bool) -> Endpoint:
    async def act() -> Endpoint:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        folder.announce(Endpoint(url=f"http://127.0.0.1:{port}", key="k"), node_key="n")
        if not is_listening:
            server.close()
            await server.wait_closed()
        try:
            return await folder.wait_for(folder.find, limit_s=0.5)
        finally:
            server.close()

    return asyncio.run(act())


def test_clients_and_nodes_find_the_service_by_keys_of_their_own(tmp_path: Path) -> None:
    folder = ServiceDir(tmp_path / "s")
    found = serve_and(folder, is_listening=True)
    for_nodes = folder.find_for_nodes()
    assert for_nodes is not None
    assert (found.url, found.key, for_nodes.key) == (for_nodes.url, "k", "n")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()}
    assert modes == {0o600}
    folder.retire()
    folder.retire()
    assert folder.find() is folder.find_for_nodes() is None


def test_an_address_that_a_killed_service_left_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(CheckRefused, match="no sandbox service has written its address in"):
        serve_and(ServiceDir(tmp_path), is_listening=False)


def test_what_ended_meanwhile_is_told_at_once(tmp_path: Path) -> None:
    folder = ServiceDir(tmp_path)

    def check() -> None:
        raise CheckRefused("it ended", allowed="a life", next_step="mend it")

    with pytest.raises(CheckRefused, match="it ended"):
        asyncio.run(folder.wait_for(folder.find, limit_s=60.0, check=check))


@pytest.mark.parametrize(("text", "key"), [("secret\n", "secret"), ("other x\nlab secret\n\n", "secret")])
def test_a_key_file_holds_a_key_or_a_line_with_its_owner(tmp_path: Path, text: str, key: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(0o600)
    assert read_key(path) == key


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [(None, 0, "cannot be read"), ("", 0o600, "has no key"), ("k", 0o644, "others can read it")],
)
def test_a_key_file_that_cannot_be_used_is_refused(
    tmp_path: Path, text: str | None, mode: int, words: str
) -> None:
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        read_key(path)
