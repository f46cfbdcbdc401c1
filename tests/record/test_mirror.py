"""What a mirror sends, in which order, and what it does when a store or a trainer does not play along.

Stores are directories here: what differs between places is tested with the places.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from strop.errors import CheckRefused, CorruptRecord, MirrorFenced, RemoteUnreachable
from strop.io import remove_directory, verify_directory
from strop.record import RunDir
from strop.record.mirror import Mirror, claim_mirror, find_remote_run, mirror_uri, read_latest, restore_run
from strop.store.local_objects import LocalObjects
from strop.store.record_store import Objects, RecordStore
from tests.fixtures.mirrored import PlayedRun, WatchedObjects, list_files, model_bytes, notes_of

STORE = RecordStore(LocalObjects())


def mirror_of(played: PlayedRun, root: str) -> Path:
    return Path(mirror_uri(root, played.run.path.name))


def latest_of(played: PlayedRun, root: str) -> tuple[int, str | None]:
    """Return the fence of the owner, and the newest checkpoint."""
    found = read_latest(STORE, str(mirror_of(played, root)))
    assert found is not None
    return found[0].fence, found[0].checkpoint


def claim(played: PlayedRun, root: str, owner: str = "newer") -> int:
    """Claim the mirror for an attempt elsewhere; return its fence."""
    return claim_mirror(STORE, str(mirror_of(played, root)), played.run.state, owner).fence


def watched(before: Callable[[str, str], Any]) -> Objects:
    return cast(Objects, WatchedObjects(before))


def test_one_look_sends_all_and_the_next_one_nothing(played: PlayedRun, root: str) -> None:
    played.train(1, 2, 3)
    discarded = played.run.discarded_path(2)
    discarded.parent.mkdir()
    discarded.write_bytes(b"rollouts that were replaced")
    (played.run.path / "attempts" / "fence-0-here").touch()
    changed: list[str] = []
    objects = watched(lambda method, uri: changed.append(uri) if method in {"write", "upload"} else None)
    mirror, place = played.mirror(root, objects), mirror_of(played, root)
    mirror.look()
    verify_directory(place / "checkpoints" / "step-000002")
    assert latest_of(played, root) == (1, "checkpoints/step-000002")
    files = {name for name in list_files(played.run.path) if name not in {"lock", "attempts/fence-0-here"}}
    assert set(list_files(place)) - {".latest.json.lock"} == {*files, "latest.json"}
    for name in files:
        assert (place / name).read_bytes() == (played.run.path / name).read_bytes(), name
    changed.clear()
    mirror.look()
    assert changed == []
    # The next attempt goes on from what is there: neither rollouts nor the checkpoint are sent again.
    played.run.begin_attempt()
    played.mirror(root, objects).look()
    assert latest_of(played, root) == (2, "checkpoints/step-000002")
    assert not [uri for uri in changed if "rollouts" in uri or "checkpoints/step" in uri]


def test_rollouts_arrive_before_what_mentions_them(played: PlayedRun, root: str) -> None:
    """A kill at any moment leaves the rollouts of each line of the metrics, and those of the checkpoint."""
    played.train(1)
    place, seen, sent = mirror_of(played, root), list[tuple[int, int]](), list[str]()

    def before(method: str, uri: str) -> None:
        if uri.endswith("step-000001.parquet") and not played.run.rollouts_path(2).exists():
            played.train(2)  # While its rollouts are listed and sent: neither must outrun the other.
        metrics = place / "metrics.jsonl"
        num_lines = metrics.read_text().count("\n") if metrics.exists() else 0
        seen.append((num_lines, len(list((place / "rollouts").glob("step-*.parquet")))))
        sent.extend([uri] if method in {"write", "upload"} else [])

    mirror = played.mirror(root, watched(before))
    mirror.look()
    assert latest_of(played, root)[1] is None
    mirror.look()
    assert latest_of(played, root)[1] == "checkpoints/step-000002"
    assert all(num_lines <= num_rollouts for num_lines, num_rollouts in seen)
    names = [uri.removeprefix(f"{place}/") for uri in sent]
    assert names.index("rollouts/step-000002.parquet") < names.index("checkpoints/step-000002/COMPLETE")
    # And the rest does not keep a checkpoint waiting.
    assert names.index("checkpoints/step-000002/COMPLETE") > names.index("metrics.jsonl")


def test_a_line_that_is_being_written_is_not_sent(played: PlayedRun, root: str) -> None:
    played.train(1)
    log_path = played.run.path / "attempts" / "1" / "train.log"
    for path in (played.run.path / "metrics.jsonl", log_path):
        with path.open("ab") as file:
            file.write(b'{"step": 2}\n{"ste')
    played.mirror(root).look()
    place = mirror_of(played, root)
    assert (place / "metrics.jsonl").read_bytes().endswith(b'\n{"step": 2}\n')
    assert (place / "attempts" / "1" / "train.log").read_bytes() == b'{"step": 2}\n'


def test_a_large_log_is_sent_again_only_when_it_has_grown_much(played: PlayedRun, root: str) -> None:
    log_path = played.run.path / "attempts" / "1" / "train.log"
    remote = mirror_of(played, root) / "attempts" / "1" / "train.log"
    line = b"x" * 1023 + b"\n"
    log_path.write_bytes(line * 2048)  # 2 MiB; 5 % of it are 102.4 lines.
    mirror, sizes = played.mirror(root), []
    for num_added, is_last in ((0, False), (100, False), (10, False), (1, True)):
        with log_path.open("ab") as file:
            file.write(line * num_added)
        mirror.look(is_last=is_last)
        sizes.append(remote.stat().st_size // 1024)
    assert sizes == [2048, 2048, 2158, 2159]


def test_the_trainer_prunes_no_checkpoint_while_it_is_sent(played: PlayedRun, root: str) -> None:
    played.train(1, 2)
    pruned: list[int] = []

    def before(method: str, uri: str) -> None:
        if method == "upload" and "step-000002/" in uri and not played.run.rollouts_path(4).exists():
            played.train(3, 4)
            pruned.extend(played.run.keep_checkpoints(1))

    mirror = played.mirror(root, watched(before))
    mirror.look()
    assert pruned == []
    verify_directory(mirror_of(played, root) / "checkpoints" / "step-000002")
    # Held no longer than that; and an older one that was never sent is not missed.
    assert played.run.keep_checkpoints(1) == [2]
    played.train(5, 6, 7, 8)
    mirror.look()
    assert latest_of(played, root)[1] == "checkpoints/step-000008"


def test_a_damaged_checkpoint_is_never_sent(played: PlayedRun, root: str) -> None:
    played.train(1, 2, 3, 4)
    path = played.run.checkpoint_path(4) / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptRecord):
        played.mirror(root).look()
    assert latest_of(played, root)[1] is None
    # All else goes on.
    assert {"metrics.jsonl", "attempts/1/attempt.json"} <= set(list_files(mirror_of(played, root)))


def test_older_checkpoints_go(played: PlayedRun, root: str) -> None:
    mirror, place = played.mirror(root), mirror_of(played, root) / "checkpoints"
    # What this run did not write, whatever it is called.
    for name in ("other/COMPLETE", "step-000002.old/x", "step-x/x"):
        (place / name).parent.mkdir(parents=True)
        (place / name).write_text("{}")
    for step in range(2, 17, 2):
        played.train(step - 1, step)
        mirror.look()
    names = {path.name for path in place.iterdir()}
    assert names == {"step-000014", "step-000016", "other", "step-000002.old", "step-x"}


def test_nothing_is_removed_before_the_newer_checkpoint_is_seen(played: PlayedRun, root: str) -> None:
    played.train(1, 2)
    played.mirror(root, keep_last=1).look()

    class Forgetful(LocalObjects):
        """Accepts a manifest and does not show it."""

        def write(self, uri: str, data: bytes) -> None:
            if not uri.endswith("step-000004-2/COMPLETE"):
                super().write(uri, data)

    played.run.begin_attempt()
    played.train(3, 4)
    with pytest.raises(CorruptRecord):
        played.mirror(root, Forgetful(), keep_last=1).look()
    assert latest_of(played, root) == (2, "checkpoints/step-000002")
    verify_directory(mirror_of(played, root) / "checkpoints" / "step-000002")


class Outage:
    """Fails all calls while it lasts."""

    def __init__(self) -> None:
        self.is_over = False
        self.num_calls = 0

    def __call__(self, method: str, uri: str) -> None:
        self.num_calls += 1
        if not self.is_over:
            raise RemoteUnreachable("no answer")


def test_ckp_6_a_store_that_fails_for_hours_costs_nothing_but_the_mirror(
    played: PlayedRun, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage, mirror = Outage(), played.mirror(root)
    # Pauses of 1, 2, 4 ... 60 s; of 245 failures the 1st, 2nd, 4th ... 128th are told.
    pauses_s = [mirror._note_failure(RemoteUnreachable("no answer")) for _ in range(245)]
    assert pauses_s[:8] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert [(cause, is_alarm) for cause, _, is_alarm in notes_of(mirror)] == [("upload_failed", True)] * 8
    # The thread goes on until the store answers, and after the end of the run without long pauses.
    monkeypatch.setattr("strop.record.mirror.MAX_LAST_PAUSE_S", 0.01)
    mirror = played.train(1, 2).mirror(root, watched(outage))
    mirror.thread.start()
    mirror.wake(is_ending=True)
    wait_until(lambda: outage.num_calls > 3)
    assert mirror.thread.is_alive()
    outage.is_over = True
    mirror.thread.join(60.0)
    assert mirror.is_done
    assert latest_of(played, root)[1] == "checkpoints/step-000002"
    assert [cause for cause, *_ in notes_of(mirror)][-1] == "upload_recovered"


def wait_until(is_met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_thread_sends_a_checkpoint_at_once_and_ends_when_it_is_overtaken(
    played: PlayedRun, root: str
) -> None:
    mirror = played.mirror(root)
    mirror.claim()
    mirror.thread.start()
    played.train(1, 2)
    mirror.wake()
    wait_until(lambda: latest_of(played, root)[1] is not None)
    claim(played, root)
    played.train(3, 4)
    mirror.wake()
    mirror.thread.join(60.0)
    assert isinstance(mirror.fenced, MirrorFenced)
    assert not mirror.is_done
    assert [(cause, is_alarm) for cause, _, is_alarm in notes_of(mirror)] == [("mirror_fenced", True)]
    assert not (mirror_of(played, root) / "rollouts" / "step-000004.parquet").exists()


def test_a_late_attempt_takes_no_mirror_from_one_of_its_number(played: PlayedRun, root: str) -> None:
    """Its store did not answer when it began. It claims once, and takes nothing back."""
    mirror = played.train(1, 2).mirror(root)
    mirror.look()
    mirror.look()
    assert claim(played, root) == 2
    for late in (mirror, played.mirror(root)):
        with pytest.raises(MirrorFenced):
            late.look()
    (mirror_of(played, root) / "latest.json").unlink()
    with pytest.raises(MirrorFenced):
        mirror.look()


@pytest.mark.parametrize("moment", ["step-000001.parquet", "state/optimizer.safetensors", "COMPLETE"])
def test_an_attempt_that_is_overtaken_while_it_sends_points_nowhere(
    moment: str, played: PlayedRun, root: str
) -> None:
    played.train(1, 2)
    after = list[str]()

    def before(method: str, uri: str) -> None:
        if method in {"write", "upload"} and (after or uri.endswith(moment)):
            after.append(uri)
            if len(after) == 1:
                claim(played, root)

    with pytest.raises(MirrorFenced):
        played.mirror(root, watched(before)).look()
    # But for the request that was under way, only its own checkpoint is sent on.
    assert all("/checkpoints/step-000002/" in uri for uri in after[1:])
    assert latest_of(played, root) == (2, None)


def test_two_machines_with_the_same_attempt_number_do_not_mix(
    tmp_path: Path, played: PlayedRun, root: str
) -> None:
    """One restored the run while the other was taken for dead: both count their attempt as the 2nd."""
    played.train(1, 2).mirror(root).look()
    other_run = RunDir.open(restore_run(str(mirror_of(played, root)), tmp_path / "elsewhere"))
    other_run.acquire()
    other = PlayedRun(other_run, salt="rounds differently")
    for one in (played, other):
        one.run.begin_attempt()
        assert one.run.state.num_attempts == 2
    here, there = played.mirror(root), other.mirror(root)
    here.claim()
    played.train(3, 4)
    here.look()
    there.claim()
    other.train(3, 4)
    place = mirror_of(played, root) / "checkpoints"
    before = {name: (place / name).read_bytes() for name in list_files(place)}
    there.look()
    # Fences 1 (attempt 1), 2, 3. Each one's checkpoints are its own.
    assert latest_of(played, root) == (3, "checkpoints/step-000004-3")
    weights = place / "step-000004-3" / "model" / "model.safetensors"
    assert weights.read_bytes() == model_bytes(4, "rounds differently")
    assert all((place / name).read_bytes() == data for name, data in before.items() if "04-2" in name)
    after = {name: (place.parent / name).read_bytes() for name in list_files(place.parent)}
    played.train(5, 6)
    with pytest.raises(MirrorFenced):
        here.look(is_last=True)
    assert {name: (place.parent / name).read_bytes() for name in list_files(place.parent)} == after
    other_run.release()


def test_a_claim_in_the_moment_of_pointing_is_not_written_over(played: PlayedRun, root: str) -> None:
    """An attempt that was taken for dead has sent all of a checkpoint when the next one begins."""
    num_writes = 0

    def before(method: str, uri: str) -> None:
        nonlocal num_writes
        num_writes += method == "write_if"
        if method == "write_if" and num_writes == 2:
            claim(played, root)

    with pytest.raises(MirrorFenced):
        played.train(1, 2).mirror(root, watched(before)).look()
    assert latest_of(played, root) == (2, None)


def test_a_write_whose_answer_is_lost_fences_nobody(played: PlayedRun, root: str) -> None:
    class Deaf(LocalObjects):
        def write_if(self, uri: str, data: bytes, version: str | None) -> bool:
            super().write_if(uri, data, version)
            return False

    played.train(1, 2).mirror(root, Deaf()).look()
    assert latest_of(played, root) == (1, "checkpoints/step-000002")


def test_a_fence_is_never_below_the_number_of_its_attempt(played: PlayedRun, root: str) -> None:
    """Attempts whose store did not answer have claimed nothing, and count all the same."""
    assert claim(played, root, "a") == 1
    for _ in range(4):
        played.run.begin_attempt()
    assert [claim(played, root, owner) for owner in ("b", "c", "c")] == [5, 6, 6]


def test_a_record_that_an_attempt_left_behind_is_neither_named_nor_removed(
    tmp_path: Path, played: PlayedRun, root: str
) -> None:
    """It died between its last checkpoint and the pointer to it; the next one goes on from before that."""
    played.train(1, 2).mirror(root).look()
    uri = str(mirror_of(played, root))
    other_path = restore_run(uri, tmp_path / "elsewhere")

    def before(method: str, written: str) -> None:
        if method == "write_if" and played.run.rollouts_path(6).exists():
            raise RemoteUnreachable("the machine is gone")

    played.run.begin_attempt()
    mirror = played.mirror(root, watched(before))
    mirror.claim()
    played.train(3, 4, 5, 6)
    with pytest.raises(RemoteUnreachable):
        mirror.look()
    verify_directory(Path(uri, "checkpoints", "step-000006-2"))
    # Whoever goes on, goes on from what was named.
    found = find_remote_run(uri)
    assert found is not None
    assert list(found.checkpoints.values()) == [2, 6]
    with RunDir.open(other_path) as run:
        for _ in range(2):
            run.begin_attempt()
        PlayedRun(run).train(3, 4).mirror(root, keep_last=1).look()
    assert latest_of(played, root) == (3, "checkpoints/step-000004-3")
    assert {path.name for path in Path(uri, "checkpoints").iterdir()} == {"step-000004-3", "step-000006-2"}


def test_the_mirror_of_another_run_is_refused(tmp_path: Path, played: PlayedRun, root: str) -> None:
    played.mirror(root).look()
    # Another machine made a run of that name in the same second, a moment later.
    other = PlayedRun.create(tmp_path / "elsewhere", now=1_800_000_000.25)
    assert other.run.path.name == played.run.path.name
    with pytest.raises(CheckRefused) as caught:
        other.mirror(root).claim()
    assert not isinstance(caught.value, MirrorFenced)
    assert latest_of(played, root) == (1, None)


def test_a_run_that_was_set_back_is_restored_where_it_stands(
    tmp_path: Path, played: PlayedRun, root: str
) -> None:
    """Its last checkpoint was lost on its own disk, and the mirror still has it: the logs decide."""
    played.train(1, 2, 3, 4).mirror(root).look()
    remove_directory(played.run.checkpoint_path(4))
    played.run.begin_attempt()
    played.run.truncate_after(2)
    played.checkpoint(2)
    mirror = played.mirror(root)
    mirror.claim()
    played.train(3)
    mirror.look()
    uri = str(mirror_of(played, root))
    with pytest.raises(CorruptRecord):
        restore_run(uri, tmp_path / "elsewhere")
    played.train(4, 5, 6)
    mirror.look()
    assert latest_of(played, root)[1] == "checkpoints/step-000006-2"


def test_the_end_sends_the_model_of_a_finished_run(played: PlayedRun, root: str) -> None:
    played.train(1, 2).mirror(root).look(is_last=True)
    final = mirror_of(played, root) / "final"
    assert not final.exists()
    played.run.mark_finished()
    played.run.begin_attempt()
    mirror = played.mirror(root)
    mirror.look()
    assert not final.exists()
    mirror.look(is_last=True)
    assert verify_directory(final).facts == {"run": played.run.path.name, "step": 2}
    assert set(list_files(final)) == {"COMPLETE", "config.json", "model.safetensors"}
    assert (final / "model.safetensors").read_bytes() == model_bytes(2)
    assert json.loads((final.parent / "run.json").read_text())["finished_at"] is not None


def test_mirrors_that_end_leave_nothing_in_the_run(played: PlayedRun, root: str) -> None:
    before = set(list_files(played.run.path))
    mirror: Mirror = played.mirror(root)
    mirror.thread.start()
    mirror.wake(is_ending=True)
    mirror.thread.join(60.0)
    assert mirror.is_done
    assert set(list_files(played.run.path)) == before
