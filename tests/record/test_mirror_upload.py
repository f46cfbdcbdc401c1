"""What an uploader sends, in which order, and what it does when a store or a trainer does not play along.

Stores are directories here: what differs between places is tested with the places.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple, cast

import pytest

from strop.errors import (
    CheckRefused,
    MirrorFenced,
    RemoteUnreachable,
)
from strop.io import remove_directory, verify_directory
from strop.record import RunDir
from strop.record.mirror.claim import RunIdentity, claim_mirror, point_to, read_latest
from strop.record.mirror.layout import MirrorOrder, RecordName, flush_path, mirror_uri
from strop.record.mirror.restore import find_remote_run, restore_run
from strop.record.mirror.uploader import EXIT_ORPHAN, MAX_PAUSE_S
from strop.store.local_objects import LocalObjects
from strop.store.record_store import Objects, RecordStore
from tests.fixtures.mirrored import Clock, PlayedRun, WatchedObjects, list_files, model_bytes


def mirror_of(played: PlayedRun, root: str) -> Path:
    return Path(mirror_uri(root, played.run.path.name))


def latest_step(played: PlayedRun, root: str) -> int | None:
    found = read_latest(RecordStore(LocalObjects()), str(mirror_of(played, root)))
    assert found is not None
    return found[0].step


def watched(before: object) -> Objects:
    return cast(Objects, WatchedObjects(before))  # type: ignore[arg-type]


def test_one_look_sends_all_and_the_next_one_nothing(played: PlayedRun, root: str) -> None:
    played.train(1, 2, 3)
    discarded = played.run.discarded_path(2)
    discarded.parent.mkdir()
    discarded.write_bytes(b"rollouts that were replaced")
    changed: list[str] = []
    objects = watched(lambda method, uri: changed.append(uri) if method in {"write", "upload"} else None)
    uploader = played.uploader(root, objects)
    assert uploader.look(is_flush=False)
    mirror = mirror_of(played, root)
    verify_directory(mirror / "tiny_step2")
    assert (mirror / "tiny_step2" / "model" / "model.safetensors").read_bytes() == model_bytes(2)
    assert json.loads((mirror / "latest.json").read_text())["step"] == 2
    # The record has the curve up to its own step, the traces what came after it as well.
    for name in ("metrics", "timeline"):
        assert (mirror / "tiny_step2" / "run" / f"{name}.jsonl").read_text().count("\n") == 2
    assert (mirror / "traces" / "metrics.jsonl").read_text().count("\n") == 3
    assert set(list_files(mirror / "traces")) == {
        *("run.json", "spec.toml", "env.txt", "metrics.jsonl", "events.jsonl", "timeline.jsonl"),
        *(f"rollouts/step-00000{step}.parquet" for step in (1, 2, 3)),
        "discarded/step-000002.parquet",
        "attempts/1/attempt.json",
    }
    changed.clear()
    assert uploader.look(is_flush=False)
    # Another process that knows nothing of the first one.
    assert played.uploader(root, objects).look(is_flush=False)
    logs = {*(f"traces/{name}.jsonl" for name in ("events", "metrics", "timeline")), "traces/env.txt"}
    assert {uri.removeprefix(f"{mirror}/") for uri in changed} <= logs


def test_rollouts_arrive_before_the_metrics_that_mention_them(played: PlayedRun, root: str) -> None:
    played.train(1)
    mirror = mirror_of(played, root)
    seen: list[tuple[int, int]] = []

    def before(method: str, uri: str) -> None:
        if uri.endswith("step-000001.parquet"):
            played.train(3)  # While its rollouts are listed and sent: neither must outrun the other.
        metrics = mirror / "traces" / "metrics.jsonl"
        num_lines = metrics.read_text().count("\n") if metrics.exists() else 0
        seen.append((num_lines, len(list((mirror / "traces" / "rollouts").glob("*.parquet")))))

    uploader = played.uploader(root, watched(before))
    uploader.look(is_flush=False)
    assert (mirror / "traces" / "metrics.jsonl").read_text().count("\n") == 1
    uploader.look(is_flush=False)
    assert (mirror / "traces" / "metrics.jsonl").read_text().count("\n") == 2
    assert all(num_lines <= num_rollouts for num_lines, num_rollouts in seen)


@pytest.mark.parametrize(("num_steps", "is_checkpoint_first"), [(2, False), (100, True)])
def test_rollouts_before_a_checkpoint_arrive_before_it_unless_there_is_much_to_compare(
    num_steps: int, is_checkpoint_first: bool, played: PlayedRun, root: str
) -> None:
    """A kill right after a checkpoint has arrived loses no rollout; and no checkpoint waits for thousands."""
    played.train(*range(1, num_steps + 1), checkpoint_every=num_steps)
    sent: list[str] = []
    objects = watched(lambda method, uri: sent.append(uri) if method in {"write", "upload"} else None)
    played.uploader(root, objects).look(is_flush=False)
    mirror = mirror_of(played, root)
    complete = sent.index(f"{mirror}/tiny_step{num_steps}/COMPLETE")
    rollouts = [index for index, uri in enumerate(sent) if "/traces/rollouts/" in uri]
    assert len(rollouts) == num_steps
    assert all((complete < index) is is_checkpoint_first for index in rollouts)


def test_a_checkpoint_that_is_written_during_a_look_waits_for_its_rollouts(
    played: PlayedRun, root: str
) -> None:
    """A kill right after it has arrived lost the rollouts of its step, now and then."""
    played.train(1)
    sent: list[str] = []

    def before(method: str, uri: str) -> None:
        if uri.endswith("traces/metrics.jsonl") and not played.run.checkpoint_steps():
            played.train(2)
        if method in {"write", "upload"}:
            sent.append(uri)

    uploader = played.uploader(root, watched(before))
    while latest_step(played, root) is None if sent else True:
        uploader.look(is_flush=False)
    mirror = mirror_of(played, root)
    assert sent.index(f"{mirror}/traces/rollouts/step-000002.parquet") < sent.index(
        f"{mirror}/tiny_step2/COMPLETE"
    )


def test_a_line_that_is_being_written_is_not_sent(played: PlayedRun, root: str) -> None:
    played.train(1)
    log_path = played.run.path / "attempts" / "1" / "train.log"
    for path in (played.run.path / "metrics.jsonl", log_path):
        with path.open("ab") as file:
            file.write(b'{"step": 2}\n{"ste')
    played.uploader(root).look(is_flush=False)
    traces = mirror_of(played, root) / "traces"
    assert (traces / "metrics.jsonl").read_bytes().endswith(b'\n{"step": 2}\n')
    assert (traces / "attempts" / "1" / "train.log").read_bytes() == b'{"step": 2}\n'


def test_a_large_log_is_sent_again_only_when_it_has_grown_much(played: PlayedRun, root: str) -> None:
    log_path = played.run.path / "attempts" / "1" / "train.log"
    remote = mirror_of(played, root) / "traces" / "attempts" / "1" / "train.log"
    line = b"x" * 1023 + b"\n"
    log_path.write_bytes(line * 2048)  # 2 MiB; 5 % of it are 102.4 lines.
    uploader = played.uploader(root)
    sizes = []
    for num_added in (0, 100, 10):
        with log_path.open("ab") as file:
            file.write(line * num_added)
        uploader.look(is_flush=False)
        sizes.append(remote.stat().st_size // 1024)
    assert sizes == [2048, 2048, 2158]
    with log_path.open("ab") as file:
        file.write(line)
    uploader.look(is_flush=True)
    assert remote.stat().st_size // 1024 == 2159


def test_the_newest_checkpoint_goes_first_and_older_ones_are_skipped_with_a_word(
    played: PlayedRun, root: str
) -> None:
    played.train(1, 2)
    uploader = played.uploader(root)
    uploader.look(is_flush=False)
    played.train(3, 4, 5, 6, 7, 8)
    uploader.look(is_flush=False)
    folders = {path.name for path in mirror_of(played, root).iterdir() if path.is_dir()}
    assert folders == {"tiny_step2", "tiny_step8", "traces"}
    (note,) = played.notes()
    assert note["cause"] == "upload_skipped"
    assert note["detail"] == "checkpoints not sent, as step 8 was newer: 4, 6"
    assert not note["is_alarm"]


def test_the_trainer_may_prune_a_checkpoint_while_it_is_sent(played: PlayedRun, root: str) -> None:
    played.train(1, 2)
    pruned: list[int] = []

    def before(method: str, uri: str) -> None:
        if method == "upload" and not pruned:
            remove_directory(played.run.checkpoint_path(2))
            pruned.append(2)

    played.uploader(root, watched(before)).look(is_flush=False)
    assert pruned == [2]
    verify_directory(mirror_of(played, root) / "tiny_step2")
    assert latest_step(played, root) == 2
    # Nothing of it is held any longer than it takes.
    assert not (played.run.path / ".mirror" / "pinned").exists()


def test_without_hard_links_a_pruned_checkpoint_is_left_for_the_newer_one(
    played: PlayedRun, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    played.train(1, 2)
    pruned: list[int] = []

    def before(method: str, uri: str) -> None:
        if method == "upload" and not pruned:
            played.train(3, 4)
            remove_directory(played.run.checkpoint_path(2))
            pruned.append(2)

    clock = Clock()
    uploader = played.uploader(root, watched(before), clock=clock)
    assert not uploader.look(is_flush=False)
    assert latest_step(played, root) is None
    clock.sleep(5.0)
    assert uploader.look(is_flush=False)
    assert latest_step(played, root) == 4
    verify_directory(mirror_of(played, root) / "tiny_step4")


def test_on_a_tight_disk_nothing_is_held_back_from_being_pruned(
    played: PlayedRun, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    played.train(1, 2)
    num_held = []

    def before(method: str, uri: str) -> None:
        if method == "upload":
            pinned = played.run.path / ".mirror" / "pinned"
            num_held.append(len(list(pinned.rglob("*.safetensors"))))

    # Two files of 20,000 bytes and one of 2 make a checkpoint; 2.5 times as much is 100,005.
    for free_bytes in (100_004, 100_005):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free_bytes: Usage(0, 0, free))
        played.uploader(root, watched(before)).look(is_flush=False)
        shutil.rmtree(root)
    assert set(num_held[: len(num_held) // 2]) == {0}
    assert set(num_held[len(num_held) // 2 :]) == {2}


class Usage(NamedTuple):
    """As `shutil.disk_usage` tells it."""

    total: int
    used: int
    free: int


def test_a_damaged_checkpoint_is_never_sent(played: PlayedRun, root: str) -> None:
    played.train(1, 2, 3, 4)
    path = played.run.checkpoint_path(4) / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    uploader = played.uploader(root)
    assert not uploader.look(is_flush=False)
    (note,) = played.notes()
    assert note["cause"] == "upload_failed"
    assert note["is_alarm"]
    assert "checkpoints/step-000004/model/model.safetensors has SHA-256" in note["detail"]
    assert latest_step(played, root) is None
    # All else goes on.
    assert (mirror_of(played, root) / "traces" / "metrics.jsonl").read_text().count("\n") == 4


def test_older_checkpoints_go(played: PlayedRun, root: str) -> None:
    uploader = played.uploader(root, keep_last=2)
    mirror = mirror_of(played, root)
    # What this run did not write, whatever it is called.
    for name in ("other_step2/COMPLETE", "tiny_step2.old/x", "notes/x", "tiny_stepX/x"):
        (mirror / name).parent.mkdir(parents=True)
        (mirror / name).write_text("{}")
    for step in range(2, 17, 2):
        played.train(step - 1, step)
        uploader.look(is_flush=False)
    found = {path.name for path in mirror.iterdir() if path.is_dir()}
    kept = {"tiny_step14", "tiny_step16"}
    assert found == kept | {"other_step2", "tiny_step2.old", "notes", "tiny_stepX", "traces"}


def test_nothing_is_removed_before_the_newer_checkpoint_is_seen(played: PlayedRun, root: str) -> None:
    played.train(1, 2)
    played.uploader(root, keep_last=1).look(is_flush=False)
    mirror = mirror_of(played, root)

    class Forgetful(LocalObjects):
        """Accepts a manifest and does not show it."""

        def write(self, uri: str, data: bytes) -> None:
            if not uri.endswith("tiny_step4/COMPLETE"):
                super().write(uri, data)

    played.train(3, 4)
    uploader = played.uploader(root, Forgetful(), keep_last=1)
    assert not uploader.look(is_flush=False)
    assert latest_step(played, root) == 2
    verify_directory(mirror / "tiny_step2")
    assert "the store does not show it" in played.notes()[0]["detail"]


class Outage:
    """Fails all calls while it lasts."""

    def __init__(self, error: Exception) -> None:
        self.error: Exception | None = error

    def __call__(self, method: str, uri: str) -> None:
        if self.error is not None:
            raise self.error


def test_ckp_6_a_store_that_fails_for_hours_costs_nothing_but_the_mirror(
    played: PlayedRun, root: str
) -> None:
    outage, clock = Outage(RemoteUnreachable("no answer")), Clock()
    uploader = played.uploader(root, watched(outage), clock=clock)
    played.train(1, 2)
    began = clock.now
    while clock.now - began < 4 * 3600:
        assert not uploader.look(is_flush=False)
        clock.sleep(0.5)
    notes = played.notes()
    assert {note["cause"] for note in notes} == {"upload_failed"}
    assert all(note["is_alarm"] for note in notes)
    # Pauses of 1, 2, 4 ... 60 s: some 245 failures, of which the 1st, 2nd, 4th ... 128th are told.
    assert len(notes) == 8
    assert "could not be mirrored to" in notes[0]["detail"]
    assert "training goes on" in notes[0]["detail"]
    outage.error = None
    clock.sleep(MAX_PAUSE_S)
    assert uploader.look(is_flush=False)
    assert latest_step(played, root) == 2
    assert [note["cause"] for note in played.notes()[8:]] == ["upload_recovered"]


def test_an_uploader_that_is_started_again_does_not_take_the_mirror_back(
    played: PlayedRun, root: str
) -> None:
    """The trainer claims once. Its second uploader finds a newer attempt's claim, and must leave it."""
    store, uri = RecordStore(LocalObjects()), str(mirror_of(played, root))
    claim_mirror(store, uri, RunIdentity.of(played.run.state), owner="old", attempt=1)
    played.train(1, 2)
    assert played.uploader(root, owner="old", may_claim=False).look(is_flush=False)
    claim_mirror(store, uri, RunIdentity.of(played.run.state), owner="new", attempt=2)
    for may_claim in (False, True):
        with pytest.raises(MirrorFenced):
            played.uploader(root, owner="old", may_claim=may_claim).look(is_flush=False)
    latest = read_latest(store, uri)
    assert latest is not None
    assert latest[0].owner == "new"


def test_a_claim_while_a_checkpoint_is_sent_leaves_no_record_of_the_older_attempt(
    played: PlayedRun, root: str
) -> None:
    played.train(1, 2)
    store, uri = RecordStore(LocalObjects()), str(mirror_of(played, root))

    def before(method: str, uploaded: str) -> None:
        if method == "upload" and "tiny_step2/state/" in uploaded:
            claim_mirror(store, uri, RunIdentity.of(played.run.state), owner="newer", attempt=2)

    with pytest.raises(MirrorFenced):
        played.uploader(root, watched(before)).look(is_flush=False)
    assert store.find_manifest(f"{uri}/tiny_step2") is None
    assert latest_step(played, root) is None


def test_two_machines_with_the_same_attempt_number_do_not_mix(
    tmp_path: Path, played: PlayedRun, root: str
) -> None:
    """One restored the run while the other was taken for dead: both count their attempt as the 2nd."""
    played.train(1, 2)
    played.uploader(root).look(is_flush=False)
    other_path = restore_run(str(mirror_of(played, root)), tmp_path / "elsewhere")
    other_run = RunDir.open(other_path)
    other_run.acquire()
    other = PlayedRun(other_run, salt="rounds differently")
    for one in (played, other):
        one.run.begin_attempt()
        assert one.run.state.num_attempts == 2
    here = played.uploader(root, owner="here")
    played.train(3, 4)
    assert here.look(is_flush=False)
    other.train(3, 4)
    uri = str(mirror_of(played, root))
    identity = RunIdentity.of(other_run.state)
    # An uploader alone takes no mirror from an attempt of the same number. A trainer that starts does.
    with pytest.raises(MirrorFenced, match="belongs to attempt 2, fence 2"):
        other.uploader(root, owner="there").look(is_flush=False)
    claim_mirror(RecordStore(LocalObjects()), uri, identity, owner="there", attempt=2)
    assert other.uploader(root, owner="there", may_claim=False).look(is_flush=False)
    latest = read_latest(RecordStore(LocalObjects()), str(mirror_of(played, root)))
    assert latest is not None
    # Fences 1 (attempt 1), 2, 3. What was complete stays; the later attempt's has a name of its own.
    assert (latest[0].fence, latest[0].owner, latest[0].step) == (3, "there", 4)
    assert latest[0].uri is not None
    assert latest[0].uri.endswith("tiny_step4-3")
    weights = Path(latest[0].uri) / "model" / "model.safetensors"
    assert weights.read_bytes() == model_bytes(4, "rounds differently")
    verify_directory(mirror_of(played, root) / "tiny_step4")
    with pytest.raises(MirrorFenced):
        here.look(is_flush=True)


def test_a_claim_in_the_moment_of_pointing_is_not_written_over(played: PlayedRun, root: str) -> None:
    """An attempt that was taken for dead has sent all of a checkpoint when the next one begins."""
    store, uri = RecordStore(LocalObjects()), str(mirror_of(played, root))
    identity = RunIdentity.of(played.run.state)
    claim_mirror(store, uri, identity, owner="old", attempt=1)

    def before(method: str, written: str) -> None:
        if method in {"write", "write_if"}:
            claim_mirror(store, uri, identity, owner="new", attempt=2)

    with pytest.raises(MirrorFenced, match="belongs to attempt 2, fence 2"):
        point_to(RecordStore(watched(before)), uri, "old", step=2, record_uri="r", digest="d")
    latest = read_latest(store, uri)
    assert latest is not None
    assert (latest[0].owner, latest[0].step) == ("new", None)


def test_a_fence_is_never_below_the_number_of_its_attempt(played: PlayedRun, root: str) -> None:
    """Attempts whose store did not answer have claimed nothing, and count all the same."""
    store, uri = RecordStore(LocalObjects()), str(mirror_of(played, root))
    claims = [
        claim_mirror(store, uri, RunIdentity.of(played.run.state), owner=owner, attempt=attempt)
        for owner, attempt in (("a", 1), ("b", 5), ("c", 5))
    ]
    assert [latest.fence for latest in claims] == [1, 5, 6]


def test_a_record_that_an_attempt_left_behind_is_neither_named_nor_removed(
    tmp_path: Path, played: PlayedRun, root: str
) -> None:
    """It died between its last checkpoint and the pointer to it; the next one goes on from before that."""
    played.train(1, 2)
    played.uploader(root).look(is_flush=False)
    uri = str(mirror_of(played, root))
    other_path = restore_run(uri, tmp_path / "elsewhere")

    def before(method: str, written: str) -> None:
        if method == "write_if":
            raise RemoteUnreachable("the machine is gone")

    played.train(3, 4, 5, 6)
    played.uploader(root, watched(before)).look(is_flush=False)
    verify_directory(mirror_of(played, root) / "tiny_step6")
    assert latest_step(played, root) == 2
    # Whoever goes on, goes on from what was named.
    found = find_remote_run(uri)
    assert found is not None
    assert [name.step for name in found.records] == [2, 6]
    other = PlayedRun(RunDir.open(other_path))
    other.run.acquire()
    other.run.begin_attempt()
    other.train(3, 4)
    assert other.uploader(root, owner="other", keep_last=1).look(is_flush=False)
    folders = {path.name for path in mirror_of(played, root).iterdir() if path.is_dir()}
    assert (latest_step(played, root), folders) == (4, {"tiny_step4", "tiny_step6", "traces"})
    other.run.release()


def test_the_mirror_of_another_run_is_refused(tmp_path: Path, played: PlayedRun, root: str) -> None:
    played.uploader(root).look(is_flush=False)
    # Another machine made a run of that name in the same second, a moment later.
    other = PlayedRun.create(tmp_path / "elsewhere", now=1_800_000_000.25)
    assert other.run.path.name == played.run.path.name
    uri = str(mirror_of(played, root))
    with pytest.raises(CheckRefused, match=r"is the mirror of another run: tiny, spec digest") as caught:
        claim_mirror(RecordStore(LocalObjects()), uri, RunIdentity.of(other.run.state), owner="x", attempt=1)
    assert "store.mirror_as" in str(caught.value)


def test_a_resumed_run_that_is_behind_its_mirror_does_not_point_back(played: PlayedRun, root: str) -> None:
    played.train(1, 2, 3, 4)
    played.uploader(root).look(is_flush=False)
    remove_directory(played.run.checkpoint_path(4))
    uploader = played.uploader(root, owner="owner of attempt 2", attempt=2)
    uploader.look(is_flush=False)
    assert latest_step(played, root) == 4
    played.run.truncate_after(2)
    played.train(3, 4, 5, 6)
    uploader.look(is_flush=False)
    assert latest_step(played, root) == 6


def test_the_end_sends_the_model_of_a_finished_run(played: PlayedRun, root: str) -> None:
    played.train(1, 2)
    flush_path(played.run.path).parent.mkdir(exist_ok=True)
    flush_path(played.run.path).touch()
    assert played.uploader(root).run() == 0
    final = mirror_of(played, root) / "tiny_final"
    assert not final.exists()
    played.run.mark_finished()
    assert played.uploader(root).run() == 0
    assert verify_directory(final).facts == {"run": played.run.path.name, "step": 2}
    assert set(list_files(final)) == {"COMPLETE", "config.json", "model.safetensors"}
    assert (final / "model.safetensors").read_bytes() == model_bytes(2)


@pytest.mark.parametrize(
    ("moment", "is_begun"), [("traces/metrics.jsonl", False), ("tiny_final/model.safetensors", True)]
)
def test_an_attempt_that_is_overtaken_at_its_end_sends_no_model(
    played: PlayedRun, root: str, moment: str, is_begun: bool
) -> None:
    played.train(1, 2)
    played.run.mark_finished()
    store, uri = RecordStore(LocalObjects()), str(mirror_of(played, root))

    def before(method: str, sent: str) -> None:
        if method in {"write", "upload"} and sent.endswith(moment):
            claim_mirror(store, uri, RunIdentity.of(played.run.state), owner="newer", attempt=2)

    with pytest.raises(MirrorFenced):
        played.uploader(root, watched(before)).look(is_flush=True)
    final = mirror_of(played, root) / "tiny_final"
    assert final.exists() is is_begun
    assert not (final / "COMPLETE").exists()


def test_what_a_killed_uploader_held_is_let_go(played: PlayedRun, root: str) -> None:
    held = played.run.path / ".mirror"
    (held / "pinned" / "model").mkdir(parents=True)
    (held / "pinned" / "model" / "model.safetensors").write_bytes(model_bytes(2))
    (held / "one.parquet").write_bytes(b"rollouts")
    flush_path(played.run.path).touch()
    assert played.uploader(root).run() == 0
    assert [path.name for path in held.iterdir()] == ["flush"]


def test_an_uploader_whose_trainer_is_gone_ends(played: PlayedRun, root: str) -> None:
    assert played.uploader(root).run(is_orphan=lambda: True) == EXIT_ORPHAN


def test_orders_and_names_can_be_read_back() -> None:
    order = MirrorOrder(run_path="/runs/a 'b' $c", uri="s3://b/p", owner="o", attempt=3, keep_last=5)
    assert MirrorOrder.from_json(order.to_json()) == order
    assert RecordName.parse("my_step_run_step20", "my_step_run") == RecordName(step=20)
    assert RecordName.parse("a_step20-3", "a") == RecordName(step=20, fence=3)
    assert RecordName(step=20, fence=3).uri("s3://b", "a") == "s3://b/a_step20-3"
    for name in ("a_step", "a_step2x", "b_step2", "a_final", "xa_step2"):
        assert RecordName.parse(name, "a") is None
    assert RecordName(step=20) < RecordName(step=20, fence=3) < RecordName(step=100)
