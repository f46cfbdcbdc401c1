"""Small parts of the container's entry: platform files, failure file, state, network, record."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused
from strop.io.atomic import AtomicDirectory
from strop.launch.sagemaker.checkpoint_sync import (
    CheckpointSync,
    LogEcho,
    RecordUploader,
    copy_into,
    count_start,
    restore_state,
    send_to_store,
)
from strop.launch.sagemaker.entry import _repeat_early_stop, _set_network
from strop.launch.sagemaker.evaluation_files import restore_evaluation
from strop.launch.sagemaker.local_platform import FolderObjects, PlatformSync
from strop.launch.sagemaker.node import StopFlag
from strop.launch.sagemaker.opt_ml import Hosts, OptMl, describe_failure, write_failure
from strop.store.contract import StoredObject
from tests.fixtures.tiny_disk import tiny_disk
from tests.launch.sagemaker.test_emulator import wait_until

# What the platform says.


def write_config(root: Path, name: str, content: Any) -> OptMl:
    path = root / "input/config" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return OptMl(root=root)


def test_ten_hosts_are_sorted_as_text_on_every_host(tmp_path: Path) -> None:
    names = [f"algo-{i}" for i in range(1, 11)]
    order = ("algo-1", "algo-10", *(f"algo-{i}" for i in range(2, 10)))
    for node, current in enumerate(order):
        given_hosts = names[node:] + names[:node]
        tree = write_config(tmp_path, "resourceconfig.json", {"hosts": given_hosts, "current_host": current})
        hosts = tree.read_hosts()
        assert hosts.names == order
        assert (hosts.node, hosts.head, hosts.is_head) == (node, "algo-1", node == 0)


def test_hosts_without_gpus_come_last_and_unknown_words_are_kept(tmp_path: Path) -> None:
    content = {
        "hosts": ["algo-1", "algo-2", "algo-3"],
        "current_host": "algo-3",
        "network_interface_name": "eth0",
        "topology": {"algo-1": "unit-1"},
        "instance_groups": [
            {"instance_group_name": "cpu", "hosts": ["algo-1"]},
            {"instance_group_name": "main", "hosts": ["algo-2", "algo-3"]},
        ],
    }
    hosts = write_config(tmp_path, "resourceconfig.json", content).read_hosts()
    assert hosts.names == ("algo-2", "algo-3", "algo-1")
    assert (hosts.node, hosts.interface, hosts.cpu) == (1, "eth0", frozenset({"algo-1"}))
    assert hosts.others == {"topology": {"algo-1": "unit-1"}}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "is missing"),
        ("{", "cannot be read"),
        ([], "holds a list"),
        ({"hosts": []}, "says hosts="),
        ({"hosts": "algo-1", "current_host": "a"}, "says hosts="),
        ({"hosts": ["algo-1"], "current_host": "algo-2"}, "current_host='algo-2'"),
        ({"hosts": ["algo-1"]}, "current_host=None"),
    ],
)
def test_what_is_no_list_of_hosts(tmp_path: Path, content: Any, why: str) -> None:
    if content is not None:
        write_config(tmp_path, "resourceconfig.json", content)
    with pytest.raises(CheckRefused, match=why):
        OptMl(root=tmp_path).read_hosts()


def test_the_checkpoint_directory_is_where_the_platform_says(tmp_path: Path) -> None:
    assert OptMl(root=tmp_path).checkpoint_path == tmp_path / "checkpoints"
    tree = write_config(tmp_path, "checkpointconfig.json", {"LocalPath": "/opt/ml/other/place"})
    assert tree.checkpoint_path == tmp_path / "other/place"
    tree = write_config(tmp_path, "checkpointconfig.json", {"LocalPath": "/mnt/state"})
    assert tree.checkpoint_path == Path("/mnt/state")
    assert OptMl(root=Path("/opt/ml")).checkpoint_path in {Path("/opt/ml/checkpoints")}


def test_the_platform_copies_half_files_and_deletions(tmp_path: Path) -> None:
    folder, objects = tmp_path / "checkpoints", FolderObjects(tmp_path / "s3")
    folder.mkdir()
    (folder / "old").write_text("old")
    sync = PlatformSync(folder, "s3://strop-test/state", objects, every_s=60.0)
    sync.start()
    (folder / "a").write_text("half")
    sync.copy_changes()
    assert objects.read("s3://strop-test/state/a") == b"half"
    (folder / "a").unlink()
    (folder / "b").write_text("last")
    sync.stop(is_last=True)
    assert [stored.uri for stored in objects.list("s3://strop-test/state")] == ["s3://strop-test/state/b"]


# The failure file.

TAIL = """role train ended with exit code 1: failed; its last lines:
Prompt: What is the secret sample text?
Traceback (most recent call last):
  File "/code/src/loop.py", line 10, in run
    step()
  File "/code/src/loop.py", line 77, in step
strop.errors.LearnerError: rank 3: the loss is not finite
"""


def test_the_cause_comes_first_and_samples_do_not_come() -> None:
    text = describe_failure(1, host="algo-2", cause=TAIL)
    assert text.startswith(
        "exit code 1: failed on algo-2; rank 3; strop.errors.LearnerError: rank 3: the loss is not finite;"
        " at loop.py:77 in step; role train ended"
    )
    assert "sample text" not in text
    text = describe_failure(1, host="a", cause="the token hf_canary was refused", secrets=["hf_canary"])
    assert "hf_canary" not in text


def test_the_first_cause_stays_first(tmp_path: Path) -> None:
    path = tmp_path / "output/failure"
    write_failure(path, "a" * 2000)
    write_failure(path, "later words")
    text = path.read_text()
    assert text[:1024] == "a" * 1024
    assert text.endswith("--- later\nlater words")
    # A disk that takes nothing is no second failure.
    write_failure(path / "no/folder", "x")


# State.


def save(run: Path, step: int, text: str = "w") -> Path:
    path = run / "checkpoints" / f"step-{step:06d}"
    with AtomicDirectory(path) as partial:
        (partial / "weights.bin").write_text(text)
    return path


def keeper_of(tmp_path: Path, **changes: Any) -> CheckpointSync:
    (tmp_path / "run").mkdir(exist_ok=True)
    return CheckpointSync(tmp_path / "run", tmp_path / "ckpt", "algo-1", tmp_path / "staging", **changes)


def test_a_state_goes_there_and_comes_back(tmp_path: Path) -> None:
    keeper = keeper_of(tmp_path)
    run = tmp_path / "run"
    (run / "metrics.jsonl").write_text("1\n")
    (run / "attempts/x").mkdir(parents=True)
    (run / "attempts/x/log").write_text("not state")
    save(run, 1)
    (run / "metrics.jsonl").write_text("1\n2\n")
    save(run, 2, "two")
    keeper.start()
    assert keeper.stop() == 2
    found = restore_state(tmp_path / "ckpt", tmp_path / "again")
    assert (found.step, found.reason) == (2, "step-000002 is the newest whole one")
    assert (tmp_path / "again/checkpoints/step-000002/weights.bin").read_text() == "two"
    assert (tmp_path / "again/metrics.jsonl").read_text() == "1\n2\n"
    assert not (tmp_path / "again/attempts").exists()
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_state_without_its_marker_or_with_damage_is_passed_over(tmp_path: Path) -> None:
    assert restore_state(tmp_path / "ckpt", tmp_path / "again").step is None
    keeper = keeper_of(tmp_path)
    for step in (3, 4):
        save(tmp_path / "run", step)
    keeper.copy_new()
    root = tmp_path / "ckpt/algo-1"
    (root / "step-000004/weights.bin").write_bytes(b"half")
    (root / "step-000009").mkdir()
    (root / "step-000009/state.json").write_text("{}")
    found = restore_state(tmp_path / "ckpt", tmp_path / "again")
    assert found.step == 3
    assert "step-000009 has no COMPLETE" in found.reason


def test_states_are_pruned_only_once_newer_ones_are_safe(tmp_path: Path) -> None:
    safe: set[str] = set()
    keeper = keeper_of(tmp_path, is_safe=lambda name: name in safe)
    for step in (1, 2, 3):
        save(tmp_path / "run", step)
    keeper.copy_new()
    folder = tmp_path / "ckpt/algo-1"
    assert sorted(path.name for path in folder.glob("step-*")) == [
        "step-000001",
        "step-000002",
        "step-000003",
    ]
    safe.update({"step-000002", "step-000003"})
    keeper.copy_new()
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000002", "step-000003"]


def test_a_disk_that_is_full_leaves_the_older_state_whole(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", size_bytes=1 << 20) as disk:
        (tmp_path / "run").mkdir()
        keeper = CheckpointSync(tmp_path / "run", disk / "ckpt", "algo-1", disk / "staging")
        save(tmp_path / "run", 1)
        keeper.copy_new()
        save(tmp_path / "run", 2, "w" * (2 << 20))
        keeper.copy_new()
        assert "space" in keeper.last_error
        assert restore_state(disk / "ckpt", tmp_path / "again").step == 1


def test_starts_are_counted_per_job(tmp_path: Path) -> None:
    numbers = [count_start(tmp_path, "algo-1", job) for job in ("a", "a", "b", "a")]
    assert numbers == [0, 1, 0, 2]


# The network between hosts.


def test_lau_10_an_interface_that_is_not_there_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LAU-10: interfaces come from the platform and are looked for; EFA is set where its devices are."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "FI_PROVIDER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CheckRefused, match="network interface eth77 is not on a"):
        _set_network(Hosts(names=("a", "b"), current="a", interface="eth77"))
    _set_network(Hosts(names=("a",), current="a", interface="eth77"))
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    _set_network(Hosts(names=("a", "b"), current="a", interface="lo"))
    assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["GLOO_SOCKET_IFNAME"]) == ("lo", "lo")
    two = Hosts(names=("a", "b"), current="a", interface="lo")
    for name in ("FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA"):
        os.environ.pop(name, None)
    _set_network(two, tmp_path)
    assert "FI_PROVIDER" not in os.environ
    (tmp_path / "uverbs0").touch()
    _set_network(Hosts(names=("a",), current="a", interface="lo"), tmp_path)
    assert "FI_PROVIDER" not in os.environ
    _set_network(two, tmp_path)
    assert (os.environ["FI_PROVIDER"], os.environ["FI_EFA_USE_DEVICE_RDMA"]) == ("efa", "1")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA"):
        os.environ.pop(name, None)


# The record on its way out.


class FailingObjects(FolderObjects):
    """A store that refuses the first writes."""

    num_failures = 2

    def write(self, uri: str, data: bytes) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("the store is away")
        super().write(uri, data)

    def find(self, uri: str) -> StoredObject | None:
        raise AssertionError(uri)


def test_a_record_is_sent_when_it_changes_and_again_after_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = FailingObjects(tmp_path / "s3")
    run = tmp_path / "run"
    (run / "attempts/a-0/0").mkdir(parents=True)
    (run / "attempts/a-0/agent-0.json").write_text("{}")
    (run / "run.json").write_text("{}")
    sender = RecordUploader(
        partial(send_to_store, objects, "s3://strop-test/c/job"), run, "a-0", has_run=True
    )
    sender.send_changed()
    assert list(objects.list("s3://strop-test")) == []
    assert capsys.readouterr().err.count("the store is away") == 1
    sender.start()
    sender.stop()
    names = [stored.uri for stored in objects.list("s3://strop-test")]
    root = "s3://strop-test/c/job"
    assert names == [f"{root}/attempts/a-0/agent-0.json", f"{root}/run.json"]
    (run / "attempts/a-0/agent-0.json").write_text('{"a": 1}')
    sender.send_changed()
    assert objects.read(f"{root}/attempts/a-0/agent-0.json") == b'{"a": 1}'


def test_lines_of_roles_are_repeated_whole_and_without_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    echo = LogEcho(tmp_path, hide=("canary-value",))
    log = tmp_path / "train.log"
    (tmp_path / "agent.log").write_text("agent\n")
    log.write_text("one canary-value\ntw")
    echo.echo_new()
    assert capsys.readouterr().out == "train| one <redacted>\n"
    with log.open("a") as file:
        file.write("o\nlast")
    echo.start()
    echo.stop()
    assert capsys.readouterr().out == "train| two\ntrain| last\n"


# A stop that comes after the entry's handler and before the agent's.


def test_a_stop_before_the_agents_handlers_is_repeated_once_they_are_up_however_late() -> None:
    """On a busy machine they were later than the half second after which it was repeated, and it was lost."""
    before = signal.getsignal(signal.SIGTERM)
    stop, released, heard = StopFlag(), threading.Event(), list[int]()
    try:
        stop.install()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_asked
        repeater = threading.Thread(target=_repeat_early_stop, args=(stop, released))
        repeater.start()
        time.sleep(1.0)
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        repeater.join()
        wait_until(lambda: heard == [signal.SIGTERM], "the stop was lost")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_an_evaluation_has_written_is_sent_and_brought_back(tmp_path: Path) -> None:
    """A job that evaluates has no mirror: a later start goes on with the replies of this one."""
    home, kept = tmp_path / "home", tmp_path / "checkpoints" / "eval"
    folder = home / "eval" / "two.arithmetic-step-000000"
    folder.mkdir(parents=True)
    (folder / "examples-000000-000031.parquet").write_bytes(b"replies")
    (folder / "lock-0-of-2").write_bytes(b"")
    (home / "eval" / "two.arithmetic-step-000000.json").write_bytes(b"{}")
    (home / "eval" / "two.lm-eval-hats-step-000000.replies-1").mkdir()
    (home / "eval" / "two.lm-eval-hats-step-000000.replies-1" / "part-0_rank0.db").write_bytes(b"half")
    send = partial(copy_into, tmp_path / "record")
    RecordUploader(send, home, "a-0", has_run=False, evaluation_path=kept).send_changed()
    sent = ["two.arithmetic-step-000000.json", "two.arithmetic-step-000000/examples-000000-000031.parquet"]
    for place in (tmp_path / "record", kept):
        found = [path for path in (place / "eval").rglob("*") if path.is_file()]
        assert sorted(path.relative_to(place / "eval").as_posix() for path in found) == sent
    restore_evaluation(kept, tmp_path / "again")
    assert (tmp_path / "again" / "eval" / sent[1]).read_bytes() == b"replies"
