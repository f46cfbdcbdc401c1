"""Keys of a service and its folder: owners, modes, its address, and what cannot be used."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError
from strop.io.endpoints import RUNTIME, Endpoint, read_endpoint, withdraw, write_endpoint
from strop.runtime.keys import find_owner, open_keys, read_keys
from strop.runtime.service_dir import wait_for_server

KEYS = [f"{letter * 20}" for letter in "abcd"]


def write_keys(path: Path, *lines: str, mode: int = 0o600) -> Path:
    path.write_text("\n".join(lines) + "\n")
    path.chmod(mode)
    return path


def test_a_missing_file_is_made_for_its_owner_alone_and_read_again_as_it_is(tmp_path: Path) -> None:
    keys = open_keys(tmp_path / "keys", "ada")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o600
    assert [*keys.values()] == ["ada"]
    assert open_keys(tmp_path / "keys", "bob") == keys


def test_several_owners_and_two_keys_of_one(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", "# two", f"ada {KEYS[0]}", f"ada {KEYS[1]}", f"bob {KEYS[2]}")
    keys = read_keys(path)
    assert [find_owner(keys, key) for key in (*KEYS, "", "a", "\u00e9")] == [
        *("ada", "ada", "bob"),
        *(None, None, None, None),
    ]


@pytest.mark.parametrize(
    ("lines", "mode", "what"),
    [
        ([f"ada {KEYS[0]}"], 0o640, "mode 0640"),
        (["ada short"], 0o600, "line 1"),
        ([KEYS[0]], 0o600, "line 1"),
        ([f"ada {KEYS[0]} more"], 0o600, "line 1"),
        (["# nothing"], 0o600, "has no key"),
    ],
)
def test_a_file_that_cannot_be_is_refused_without_showing_a_key(
    tmp_path: Path, lines: list[str], mode: int, what: str
) -> None:
    path = write_keys(tmp_path / "keys", *lines, mode=mode)
    with pytest.raises(ConfigError, match=what) as caught:
        read_keys(path)
    assert not any(key in str(caught.value) for key in KEYS)


def test_a_file_in_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be"):
        open_keys(tmp_path / "file" / "keys", "ada")


def serve_and(folder: Path, *, is_listening: bool) -> Endpoint:
    async def act() -> Endpoint:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        write_endpoint(folder, RUNTIME, Endpoint(url=f"http://127.0.0.1:{port}", key="k"))
        if not is_listening:
            server.close()
            await server.wait_closed()
        try:
            return await wait_for_server(folder, RUNTIME, limit_s=0.5)
        finally:
            server.close()

    return asyncio.run(act())


def test_clients_find_the_service_by_a_file_of_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    assert serve_and(folder, is_listening=True).key == "k"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {0o600}
    withdraw(folder, (RUNTIME,))
    withdraw(folder, (RUNTIME,))
    assert read_endpoint(folder, RUNTIME) is None


def test_an_address_that_a_killed_service_left_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(CheckRefused, match="no runtime of a sandbox service"):
        serve_and(tmp_path, is_listening=False)


def test_what_ended_meanwhile_is_told_at_once(tmp_path: Path) -> None:
    ended = CheckRefused("it ended")
    with pytest.raises(CheckRefused, match="it ended"):
        asyncio.run(wait_for_server(tmp_path, RUNTIME, limit_s=60.0, check=lambda: ended))
