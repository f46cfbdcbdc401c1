"""The connection of a job's hosts: who is let in, who is lost, what is repeated, and one code for all."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused
from strop.launch.sagemaker.opt_ml import Hosts, OptMl
from strop.launch.sagemaker.rendezvous import Rendezvous, find_address, join_hosts, make_key, read_key
from tests.fixtures.sockets import free_port
from tests.launch.sagemaker.test_emulator import wait_until


def join(
    node: int,
    port: int,
    path: Path,
    *,
    key: str = "k",
    num_hosts: int = 3,
    limit_s: float = 120.0,
    **more: Any,
) -> Rendezvous:
    names = tuple(f"127.0.1.{i}" for i in range(1, num_hosts + 1))
    hosts = Hosts(names=names, current=names[node])
    return join_hosts(hosts, path / str(node), key=key, limit_s=limit_s, port=port, **more)


def join_all(
    port: int,
    path: Path,
    num_hosts: int = 3,
    *,
    has_shared_file: bool = False,
    may_be_lost: Collection[int] = (),
) -> list[Rendezvous]:
    with ThreadPoolExecutor(num_hosts) as pool:
        found = list(pool.map(lambda node: join(node, port, path, num_hosts=num_hosts), range(num_hosts)))
    for node, host in enumerate(found):
        (path / str(node)).mkdir(exist_ok=True)
        shared_path = path / str(node) / "roles/head.json" if has_shared_file else None
        host.start(shared_path=shared_path, may_be_lost=may_be_lost)
    return found


def wait_for_code(path: Path, code: int) -> None:
    """Wait for what the agent looks for on a shared file system; it is written after the code is known."""
    wait_until(lambda: path.exists() and path.read_text() == str(code), f"{path} does not say {code}")


def finish_all(hosts: list[Rendezvous], codes: list[int], causes: list[str]) -> list[int]:
    with ThreadPoolExecutor(len(hosts)) as pool:
        found = list(pool.map(lambda host, *said: host.finish(*said), hosts, codes, causes))
    for host in hosts:
        host.close()
    return found


@pytest.mark.parametrize(
    ("codes", "verdict"), [([0, 0, 0], 0), ([75, 75, 75], 75), ([0, 1, 0], 1), ([76, 75, 75], 76)]
)
def test_all_hosts_end_with_one_code(tmp_path: Path, codes: list[int], verdict: int) -> None:
    hosts = join_all(free_port(), tmp_path)
    causes = [f"cause {node}" if code else "" for node, code in enumerate(codes)]
    assert finish_all(hosts, codes, causes) == [verdict] * 3
    # What the agent looks for on a shared file system is there: the others' codes.
    wait_for_code(tmp_path / "0/exit/1", codes[1])


def test_a_host_that_is_lost_is_a_failure_for_all(tmp_path: Path) -> None:
    hosts = join_all(free_port(), tmp_path)
    hosts[2].close()
    assert finish_all(hosts[:2], [0, 0], ["", ""]) == [1, 1]
    assert any("host 127.0.1.3 was lost" in cause for _, cause in hosts[0].causes)
    wait_for_code(tmp_path / "0/exit/2", 1)


def test_a_host_that_may_be_lost_ends_nobody(tmp_path: Path) -> None:
    hosts = join_all(free_port(), tmp_path, may_be_lost={2})
    hosts[2].close()
    wait_until(lambda: 2 in hosts[0].codes, "the loss was not noticed")
    # No agent is told of it: whether the run can go on is the run's to say.
    assert not (tmp_path / "0/exit/2").exists()
    assert finish_all(hosts[:2], [0, 0], ["", ""]) == [0, 0]
    assert not (tmp_path / "1/exit/2").exists()


def test_a_failure_that_a_host_says_itself_counts_whether_or_not_it_may_be_lost(tmp_path: Path) -> None:
    hosts = join_all(free_port(), tmp_path, num_hosts=2, may_be_lost={1})
    assert finish_all(hosts, [0, 76], ["", "another release of Ray"]) == [76, 76]


def test_the_file_by_which_roles_meet_comes_and_goes_on_every_host(tmp_path: Path) -> None:
    hosts = join_all(free_port(), tmp_path, has_shared_file=True)
    paths = [tmp_path / str(node) / "roles/head.json" for node in range(3)]
    paths[0].parent.mkdir()
    paths[0].write_text('{"address": "a:1", "token": "secret"}')
    wait_until(lambda: all(path.exists() for path in paths), "it did not come")
    assert [json.loads(path.read_bytes())["token"] for path in paths] == ["secret"] * 3
    assert oct(paths[2].stat().st_mode & 0o777) == "0o600"
    paths[0].unlink()
    wait_until(lambda: not any(path.exists() for path in paths), "it did not go")
    assert finish_all(hosts, [0] * 3, [""] * 3) == [0] * 3


def test_a_listener_that_does_not_know_the_key_is_no_head(tmp_path: Path) -> None:
    """Whoever took the head's name would otherwise be told nothing but could order an end."""
    port = free_port()
    server = socket.create_server(("127.0.1.1", port))
    is_seen_through = threading.Event()

    def listen() -> None:
        link, _ = server.accept()
        server.close()
        with link:
            link.sendall(b'{"challenge": "c"}\n')
            said = json.loads(link.recv(4096))
            assert "k" not in said.values()
            link.sendall(b'{"kind": "start", "proof": "00"}\n')
            # The other side says no more, and has ended the connection.
            assert link.recv(1) == b""
        is_seen_through.set()

    listener = threading.Thread(target=listen)
    listener.start()
    with pytest.raises(CheckRefused, match=r"did not join .*(\[Errno|does not know the job's key)"):
        join(1, port, tmp_path, num_hosts=2, is_stopped=is_seen_through.is_set)
    listener.join()
    assert is_seen_through.is_set()


@pytest.mark.parametrize("content", [None, "", "short"])
def test_a_job_of_several_hosts_without_its_key_is_refused(tmp_path: Path, content: str | None) -> None:
    tree = OptMl(root=tmp_path)
    folder = tree.channel_path("config")
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "hosts.key").write_text(content)
    with pytest.raises(CheckRefused, match=r"hosts\.key (cannot be read|holds)"):
        read_key(tree)
    (folder / "hosts.key").write_bytes(make_key())
    assert len(read_key(tree)) == 64
    assert make_key() != make_key()


def test_missing_hosts_are_named_within_the_limit(tmp_path: Path) -> None:
    with pytest.raises(CheckRefused, match=r"host 127\.0\.1\.2, 127\.0\.1\.3 did not join within 1 s"):
        join(0, free_port(), tmp_path, limit_s=1.0)
    with pytest.raises(CheckRefused, match=r"host 127\.0\.1\.1 did not join within 1 s"):
        join(1, free_port(), tmp_path, limit_s=1.0)


def test_a_stranger_is_not_let_in(tmp_path: Path) -> None:
    port = free_port()

    def try_to_join() -> None:
        with pytest.raises(CheckRefused):
            join(1, port, tmp_path, key="other", num_hosts=2, limit_s=2.0)

    stranger = threading.Thread(target=try_to_join)
    stranger.start()
    with pytest.raises(CheckRefused, match="did not join"):
        join(0, port, tmp_path, num_hosts=2, limit_s=2.0)
    stranger.join()


def test_a_name_that_does_not_resolve_is_said() -> None:
    with pytest.raises(CheckRefused, match=r"host no-such-host\.invalid did not join"):
        find_address("no-such-host.invalid", 0.3)
    assert find_address("127.0.0.1", 1.0) == "127.0.0.1"


def test_one_host_needs_nobody(tmp_path: Path) -> None:
    host = join(0, 1, tmp_path, num_hosts=1)
    host.start()
    assert host.finish(75, "told to stop") == 75


# What hosts send the first one of an evaluation: whole, in order, and nowhere else.


def test_a_host_that_is_done_waits_for_the_first_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Incident: of unequal shares the shorter one's host failed the job a minute after its success."""
    monkeypatch.setattr("strop.launch.sagemaker.rendezvous.END_LIMIT_S", 0.05)
    head, other = join_all(free_port(), tmp_path, 2)
    codes: list[int] = []
    waiting = threading.Thread(target=lambda: codes.append(other.finish(0, "")))
    waiting.start()
    time.sleep(0.5)
    assert codes == []
    assert head.finish(0, "") == 0
    waiting.join()
    assert codes == [0]
    for rendezvous in (head, other):
        rendezvous.close()
