"""Keys of a service and its folder: owners, modes, its address, and what cannot be used."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

from strop.errors import CheckRefused, ConfigError, CorruptRecord, StoreError
from strop.io.endpoints import Endpoint
from strop.runtime.journal import Journal
from strop.runtime.keys import KeyRing, open_keys, read_keys, require_keys_or_loopback
from strop.runtime.service_dir import ServiceDir, read_key

KEYS = [f"{letter * 20}" for letter in "abcd"]


def write_keys(path: Path, *lines: str, mode: int = 0o600) -> Path:
    path.write_text("\n".join(lines) + "\n")
    path.chmod(mode)
    return path


def test_a_missing_file_is_made_for_its_owner_alone_and_read_again_as_it_is(tmp_path: Path) -> None:
    ring = open_keys(tmp_path / "keys", "ada")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o600
    assert ring.owner_of(ring.newest) == "ada"
    assert open_keys(tmp_path / "keys", "bob").owner_of(ring.newest) == "ada"


def test_several_owners_and_two_keys_of_one_while_it_changes(tmp_path: Path) -> None:
    path = write_keys(tmp_path / "keys", "# two", f"ada {KEYS[0]}", f"ada {KEYS[1]}", f"bob {KEYS[2]}")
    ring = KeyRing(path)
    assert [ring.owner_of(key) for key in (*KEYS, "", "a", "\u00e9")] == [
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
        ([f"ada {KEYS[0]}", f"bob {KEYS[0]}"], 0o600, "one key twice"),
        ([f"ada {key}" for key in KEYS[:3]], 0o600, "3 keys of ada"),
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


def test_no_keys_only_on_loopback_unless_it_is_forced() -> None:
    for host in ("0.0.0.0", "10.0.0.7", "::", "head.cluster"):
        with pytest.raises(ConfigError, match=host):
            require_keys_or_loopback(host, is_forced=False)
        require_keys_or_loopback(host, is_forced=True)
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        require_keys_or_loopback(host, is_forced=False)


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


def write(path: Path, *names: str) -> None:
    async def main() -> None:
        journal = Journal.open(path)
        for name in names:
            await journal.put(name, {"name": name})
        await journal.close()

    asyncio.run(main())


def read(path: Path) -> list[str]:
    async def main() -> list[str]:
        journal = Journal.open(path)
        found = [line["name"] for line in journal.read()]
        await journal.close()
        return found

    return asyncio.run(main())


async def test_the_last_line_of_each_counts_in_the_order_of_the_first(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    for state in (1, 2):
        for name in ("a", "b"):
            await journal.put(name, {"name": name, "state": state})
    await journal.close()
    again = Journal.open(tmp_path / "journal")
    assert again.read() == [{"name": "a", "state": 2}, {"name": "b", "state": 2}]
    await again.close()
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o600


@pytest.mark.parametrize("torn", [b'{"id": "c", "con', b'{"id": "c"\n', b"\0\0\0", b"\xff\n"])
def test_a_torn_last_line_costs_nothing_but_itself(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal"
    write(path, "a", "b")
    with path.open("ab") as file:
        file.write(torn)
    assert read(path) == ["a", "b"]
    write(path, "d")
    assert read(path) == ["a", "b", "d"]


def test_any_cut_of_a_journal_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, "a", "b", "c")
    data = path.read_bytes()
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        assert read(path) == ["a", "b", "c"][: data[:size].count(b"\n")]


def test_another_broken_line_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, "a", "b")
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"{broken}\n" + second)
    with pytest.raises(CorruptRecord, match="line 2"):
        read(path)
    # The lock was given back.
    path.write_bytes(first)
    assert read(path) == ["a"]


async def test_a_second_controller_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    with pytest.raises(StoreError, match=f"process {os.getpid()}"):
        Journal.open(tmp_path / "journal")
    await journal.close()


async def test_changes_that_come_together_share_a_sync(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    await asyncio.gather(*(journal.put(f"s{index}", {"index": index}) for index in range(512)))
    assert journal.num_written == 512
    assert journal.num_syncs <= 3
    await journal.close()


async def test_a_journal_of_old_lines_is_written_anew_and_what_is_forgotten_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    journal = Journal.open(path)
    await journal.put("gone", {"index": 0})
    journal.forget("gone")
    for index in range(0, 3000, 10):
        await asyncio.gather(*(journal.put("a", {"index": index + more}) for more in range(10)))
    await journal.put("b", {"index": 1})
    await journal.close()
    assert len(path.read_bytes().splitlines()) < 1200
    again = Journal.open(path)
    assert again.read() == [{"index": 2999}, {"index": 1}]
    await again.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_full_disk_fails_the_change_and_leaves_a_whole_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"

    journal = Journal.open(path)
    await journal.put("a", {"name": "a"})
    real_write = os.write

    def write_half(descriptor: int, data: bytes) -> int:
        real_write(descriptor, data[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("strop.runtime.journal.os.write", write_half)
        with pytest.raises(StoreError, match="disk is full"):
            await journal.put("b", {"name": "b"})
    await journal.put("c", {"name": "c"})
    await journal.close()
    rows = [json.loads(row) for row in path.read_bytes().splitlines()]
    assert [row["id"] for row in rows] == ["a", "c"]
