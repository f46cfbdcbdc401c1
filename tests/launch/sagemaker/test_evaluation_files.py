"""What hosts send the first one of an evaluation: whole, in order, and nowhere else."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from strop.launch.sagemaker.evaluation_files import ShareSender, take_share
from tests.fixtures.sockets import free_port
from tests.launch.sagemaker.test_emulator import wait_until
from tests.launch.sagemaker.test_rendezvous import join_all

SHARD = "eval/two.arithmetic-step-000000/examples-000032-000063.parquet"


def write(root: Path, name: str, data: bytes = b"") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_new_files_cross_the_hosts_connection_and_the_mark_comes_last(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    write(there, "eval/old.parquet", b"from an earlier start: the first host has it too")
    head, other = join_all(free_port(), tmp_path, 2)
    names: list[str] = []

    def take(node: int, message: Mapping[str, Any]) -> None:
        take_share(here, "job-7", node, message)
        if message["is_last"]:
            names.append(message["name"])

    head._take_share = take
    sender = ShareSender(there, "job-6", other.send)
    # More than one message long.
    data = bytes(range(256)) * 3000
    write(there, "eval/.shares/job-6/1")
    write(there, "eval/lock-1-of-2")
    write(there, SHARD + ".partial-1-ab", b"half")
    write(there, SHARD, data)
    sender.stop()
    wait_until(lambda: len(names) == 2, "it did not come")
    assert names == [SHARD.removeprefix("eval/"), ".shares/1"]
    assert (here / SHARD).read_bytes() == data
    # Its attempt is the first host's: hosts count their own starts.
    assert {path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()} == {
        SHARD,
        "eval/.shares/job-7/1",
    }
    for rendezvous in (head, other):
        rendezvous.close()


@pytest.mark.parametrize("name", ["../job/plan.json", "/etc/passwd", ""])
def test_a_name_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    message = {"name": name, "start": 0, "data": "", "is_last": True}
    with pytest.raises(ValueError, match="no file of an evaluation"):
        take_share(tmp_path, "job-0", 1, message)


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
