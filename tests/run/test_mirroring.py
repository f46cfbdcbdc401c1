"""Runs that are mirrored while they train, and go on from their mirror on another machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from strop.errors import (
    EXIT_REFUSED,
    CheckRefused,
    ConfigError,
    Interrupted,
    MirrorFenced,
    RemoteUnreachable,
    StoreError,
)
from strop.io import remove_directory, verify_directory
from strop.record import EventKind, RunDir, list_runs
from strop.record.fence import GRACE_VARIABLE
from strop.record.mirror import Mirror, claim_mirror, find_remote_run
from strop.run.held_out import TrainOutcome
from strop.run.mirroring import Mirroring, continue_from, limit_after_signal, probe_store
from strop.run.training import train_here
from strop.spec import StoreSpec, load_spec
from strop.store import get_model
from strop.store.opening import open_store
from strop.store.policy import find_mirror_root, follow_store
from strop.store.record_store import Objects, RecordStore
from tests.fixtures.attempts import LIMIT_S, Bench, describe_run, start_command, wait_for_end
from tests.fixtures.object_store import Exchange, SpoilingProxy
from tests.fixtures.tiny_run import Curve, Notes, read_curve
from tests.fixtures.train_here import Moment

NUM_STEPS = 6
MIRROR_ALARMS = {"upload_failed", "upload_incomplete", "mirror_fenced"}


def short_run(model_dir: Path) -> str:
    return describe_run("here", model_dir, NUM_STEPS, prompts_per_step=2, group_size=3)


class Here:
    """A machine: a folder with a run file, and a store that other machines see too."""

    def __init__(self, folder: Path, model_dir: Path, store_uri: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.runs_path = folder / "runs"
        self.run_file = folder / "run.toml"
        self.run_file.write_text(short_run(model_dir))
        self.store_uri = store_uri
        self.notes = Notes()
        self.mirrors: list[Mirror] = []
        """Of its runs, in the order in which they began."""

    def overrides(self, *more: str) -> list[str]:
        return [f"output.root={self.runs_path}", f"store.uri={self.store_uri}", "store.mirror=true", *more]

    def train(self, *more: str, trained: Callable[[TrainOutcome], None] = lambda _: None) -> RunDir:
        resolved = load_spec(self.run_file, self.overrides(*more))
        outcome = train_here(resolved, self.notes, on_run=lambda run: None, on_trained=trained)
        return RunDir.open(outcome.run_path)

    def causes(self) -> list[str]:
        (run,) = list_runs(self.runs_path)
        return [event.cause for event in run.events.read()]


@pytest.fixture
def here(
    tmp_path: Path,
    own_cache: Path,
    paid_letters: None,
    tiny_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Here:
    made = Here(tmp_path / "here", tiny_model_dir, str(tmp_path / "store"))

    def note_mirror(*arguments: Any, **more: Any) -> Mirror:
        made.mirrors.append(Mirror(*arguments, **more))
        return made.mirrors[-1]

    monkeypatch.setattr("strop.run.mirroring.Mirror", note_mirror)
    return made


@pytest.fixture(scope="module")
def whole(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """A run that nobody disturbed, and nobody mirrored."""
    bench = Bench(tmp_path_factory.mktemp("whole") / "bench", short_run(tiny_model_dir))
    return bench.finish()


def list_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def mirroring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirroring]:
    """A run of one attempt, and what watches its mirror."""
    monkeypatch.setattr("strop.run.mirroring.FLUSH_LIMIT_S", 20.0)
    monkeypatch.setattr("strop.record.mirror.EVERY_S", 0.05)
    run = RunDir.create(tmp_path / "runs", "here", "", "", {})
    run.begin_attempt()
    spec = StoreSpec(uri=str(tmp_path / "store"), mirror=True)
    with run, follow_store(spec), Mirroring(find_mirror_root(spec), spec, run, Notes()) as made:
        yield made


@pytest.mark.parametrize("is_claimed", [True, False], ids=["claimed by another", "claimed by nobody"])
def test_an_attempt_that_lost_its_claim_ends(mirroring: Mirroring, is_claimed: bool) -> None:
    """Of two attempts on one prefix the older one ends with its own failure."""
    run, uri = mirroring._run_dir, mirroring.uri
    assert uri is not None
    mirroring.begin()
    mirroring.on_step({"step": 1})
    mirror = mirroring._mirror
    assert mirror is not None
    if is_claimed:
        claim_mirror(open_store(uri), uri, run.state, "newer")
    else:
        Path(uri, "latest.json").unlink()
    mirror.thread.join(60.0)
    with pytest.raises(MirrorFenced) as caught:
        mirroring.on_step({"step": 2})
    assert caught.value.exit_code == EXIT_REFUSED
    assert [event.cause for event in run.events.read()] == ["mirror", "mirror_fenced"]


def test_after_a_signal_the_rest_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.run.mirroring.STOP_FLUSH_LIMIT_S", 0.01)
    may_go_on = threading.Event()
    monkeypatch.setattr(Mirror, "look", lambda mirror, is_last: may_go_on.wait(60.0))
    run = RunDir.create(tmp_path / "runs", "here", "", "", {})
    run.begin_attempt()
    spec = StoreSpec(uri=str(tmp_path / "store"), mirror=True)
    with run, follow_store(spec):
        made = Mirroring(find_mirror_root(spec), spec, run, Notes())
        made.begin()
        made.__exit__(Interrupted, Interrupted("a signal"), None)
        assert [event.cause for event in run.events.read()] == ["mirror", "upload_incomplete"]
    may_go_on.set()


def test_a_finished_run_is_whole_in_its_store(here: Here, whole: Curve) -> None:
    run = here.train(trained=lambda outcome: void((outcome.run_path / "report.html").write_text("report")))
    mirror = Path(here.store_uri) / "checkpoints" / run.path.name
    # store.keep_last is 2; of the checkpoints after steps 2 and 4, those that were sent in time.
    checkpoints = list((mirror / "checkpoints").iterdir())
    assert "step-000006" in {path.name for path in checkpoints}
    assert len(checkpoints) <= 2
    for path in (*checkpoints, mirror / "final"):
        verify_directory(path)
    latest = json.loads((mirror / "latest.json").read_text())
    assert latest["checkpoint"] == "checkpoints/step-000006"
    names = {"run.json", "spec.toml", "env.txt", "metrics.jsonl", "events.jsonl", "report.html"}
    names |= {f"rollouts/step-00000{step}.parquet" for step in range(1, 7)}
    names |= {f"eval/arithmetic-step-00000{step}.json" for step in (0, 3, 6)}
    names |= {
        f"eval/{path.parent.name}/{path.name}" for path in (run.path / "eval").glob("*-step-*/*.parquet")
    }
    assert len([name for name in names if name.endswith("parquet")]) > 6 + 2
    names |= {"attempts/1/attempt.json", "latest.json"}
    names |= {"timeline.jsonl", "plan.json", "audit.json", "tokenizer.json"}
    found = {name for name in list_files(mirror) if not name.startswith(("checkpoints/", "final/", "."))}
    assert found == names
    for name in names - {"latest.json"}:
        assert (mirror / name).read_bytes() == (run.path / name).read_bytes(), name
    # The model loads as it is, without the rest of its run.
    assert get_model(str(mirror / "final")).digest == get_model(str(latest_model(run))).digest
    # The mirror costs nothing of what the run computes.
    assert read_curve(run.path) == whole
    assert run.is_finished
    assert not {event.cause for event in run.events.read()} & MIRROR_ALARMS
    # The link to the store is written down.
    assert any(str(mirror) in event.detail for event in run.events.read() if event.cause == "mirror")


def void(_: object) -> None:
    """Drop a result."""


def latest_model(run: RunDir) -> Path:
    latest = run.latest_checkpoint()
    assert latest is not None
    return latest[1] / "model"


def test_auto_means_an_s3_store_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def root_of(**settings: object) -> str | None:
        spec = StoreSpec.model_validate(settings)
        with follow_store(spec):
            return find_mirror_root(spec)

    assert root_of() is None
    assert root_of(uri="s3://bucket/p") == "s3://bucket/p"
    assert root_of(uri=str(tmp_path)) is None
    assert root_of(uri=str(tmp_path), mirror=True) == str(tmp_path)
    assert root_of(uri="s3://bucket/p", mirror=False) is None
    monkeypatch.setenv("STROP_STORE_URI", "s3://bucket/site")
    assert root_of() == "s3://bucket/site"
    monkeypatch.delenv("STROP_STORE_URI")
    with pytest.raises(ConfigError, match=r"store\.mirror=true, and there is no store"):
        root_of(mirror=True)


class Refusing:
    """A store that lacks one right."""

    def __init__(self, lacking: str, error: type[StoreError]) -> None:
        self._lacking, self._error = lacking, error
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(place: str, *_: object) -> object:
            self.names.append(place)
            if name == self._lacking:
                raise self._error("AccessDenied")
            return iter(()) if name == "list_folders" else None

        return call


@pytest.mark.parametrize(
    "method", ["list_folders", "find", "write", "read_versioned", "remove", "begin_upload"]
)
def test_ckp_6_a_store_that_does_not_answer_is_refused_at_the_start(method: str, tmp_path: Path) -> None:
    silent = RecordStore(cast(Objects, Refusing(method, RemoteUnreachable)))
    with pytest.raises(CheckRefused) as caught:
        probe_store("s3://bucket/p", silent)
    assert caught.value.exit_code == 76
    # A probe leaves nothing behind.
    store = open_store(str(tmp_path))
    probe_store(str(tmp_path), store)
    assert list(store.list(str(tmp_path))) == []


def test_a_run_goes_on_from_its_mirror_on_another_machine(
    here: Here, tmp_path: Path, whole: Curve, tiny_model_dir: Path
) -> None:
    """Stopped by a signal after step 3; the machine is gone; another one has the run file and the store."""
    bench = Bench(tmp_path / "first", short_run(tiny_model_dir))
    with bench.run_file.open("a") as file:
        file.write(f'[store]\nuri = "{here.store_uri}"\nmirror = true\n')
    stop = Moment(r"os\.rename .*/rollouts/step-000003\.parquet", signal.SIGTERM)
    assert bench.end(stop) == 75, bench.log_path.read_text()
    (mirror,) = Path(here.store_uri, "checkpoints").iterdir()
    # The signal came in the third step: its checkpoint is written, and sent, before the process ends.
    assert json.loads((mirror / "latest.json").read_text())["checkpoint"] == "checkpoints/step-000003"
    shutil.rmtree(bench.folder)
    found = continue_from(str(mirror), load_spec(here.run_file, here.overrides()))
    assert found.run_path == here.runs_path / mirror.name
    assert f"restored {found.run_path} from {mirror}" == found.detail
    train_here(found.resolved, here.notes, on_run=lambda run: None)
    assert here.notes.starts == [(str(found.run_path), 3, NUM_STEPS)]
    assert read_curve(found.run_path) == whole
    # It is mirrored to where it came from, as the second attempt.
    latest = json.loads((mirror / "latest.json").read_text())
    assert (latest["checkpoint"], latest["fence"]) == ("checkpoints/step-000006-2", 2)
    assert len(list(Path(here.store_uri, "checkpoints").iterdir())) == 1
    verify_directory(mirror / "final")


def test_what_cannot_go_on_from_a_mirror_is_refused_before_anything_moves(here: Here, tmp_path: Path) -> None:
    run = here.train()
    uri = f"{here.store_uri}/checkpoints/{run.path.name}"
    resolved = load_spec(here.run_file, here.overrides())
    assert continue_from(uri, resolved).detail == f"{run.path} is here already, at step 6, and goes on"
    with pytest.raises(CheckRefused, match="no run is mirrored there"):
        continue_from(f"{uri}-other", resolved)
    with pytest.raises(CheckRefused, match=r"is a run of spec \w{12}, and this run file is \w{12}"):
        continue_from(uri, load_spec(here.run_file, here.overrides("seed=4")))
    state = (run.path / "run.json").read_text()
    # As far, of the same file, and another run all the same.
    (run.path / "run.json").write_text(json.dumps({**json.loads(state), "created_at": 1.0}))
    with pytest.raises(CheckRefused, match=r"is here at step 6, and .* is at step 6\. Allowed: .*same run"):
        continue_from(uri, resolved)
    (run.path / "run.json").write_text(state)
    for step in (4, 6):
        remove_directory(run.checkpoint_path(step))
    with pytest.raises(CheckRefused, match=r"is here at step 0, and .* is at step 6"):
        continue_from(uri, resolved)
    # Elsewhere, under another name, it is mirrored to the same place.
    moved = continue_from(uri, load_spec(here.run_file, here.overrides(f"output.dir={tmp_path / 'mine'}")))
    assert moved.resolved.spec.store.mirror_as == run.path.name
    assert RunDir.open(tmp_path / "mine").checkpoint_steps() == [6]


@pytest.mark.slow
def test_the_command_goes_on_from_a_mirror(here: Here, tmp_path: Path, whole: Curve) -> None:
    resolved = load_spec(here.run_file, here.overrides())
    with pytest.raises(Interrupted):
        train_here(resolved, WatchedNotes(stop_after(3)), on_run=lambda run: None)
    (run,) = list_runs(here.runs_path)
    uri = f"{here.store_uri}/checkpoints/{run.path.name}"
    words = ["train", here.run_file, *here.overrides(), "--from", uri]
    log_path = tmp_path / "log.txt"
    assert wait_for_end(start_command([*words, "--new"], log_path)) == 2
    assert f"--new and --from {uri} are given together" in log_path.read_text()
    shutil.rmtree(run.path)
    assert wait_for_end(start_command(words, log_path)) == 0, log_path.read_text()
    assert f"restored {run.path} from {uri}" in log_path.read_text()
    assert read_curve(run.path) == whole
    # The report is written before the mirror is closed.
    assert (Path(uri) / "report.html").exists()
    # A finished run comes back as one.
    shutil.rmtree(run.path)
    assert wait_for_end(start_command(words, log_path)) == 76
    assert "holds a finished run" in log_path.read_text()


@pytest.mark.parametrize(("given", "limit_s"), [(None, 60.0), ("24", 12.0), ("600", 60.0)])
def test_a_mirror_takes_half_of_a_launchers_grace_at_most(
    monkeypatch: pytest.MonkeyPatch, given: str | None, limit_s: float
) -> None:
    monkeypatch.delenv(GRACE_VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(GRACE_VARIABLE, given)
    assert limit_after_signal() == limit_s


@pytest.mark.slow
def test_a_store_that_fails_while_a_run_trains_is_told_and_costs_only_the_mirror(
    here: Here, proxy: SpoilingProxy, s3_root: str, whole: Curve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.run.mirroring.FLUSH_LIMIT_S", 0.5)
    here.store_uri = s3_root
    num_steps_seen = 0

    def on_step(metrics: Mapping[str, float]) -> None:
        nonlocal num_steps_seen
        num_steps_seen += 1
        if num_steps_seen == 1:
            proxy.spoil = lambda exchange: "503"
            wait_for_note(here)

    here.notes = WatchedNotes(on_step)
    run = here.train()
    assert read_curve(run.path) == whole
    alarms = [event for event in run.events.read() if event.kind is EventKind.TRIPWIRE]
    alarms = [event for event in alarms if event.cause in MIRROR_ALARMS]
    assert {event.cause for event in alarms} == {"upload_failed", "upload_incomplete"}
    # Shown as well, not only written down.
    assert {"upload_failed", "upload_incomplete"} <= set(here.notes.causes("tripwire"))


@pytest.mark.slow
def test_no_step_waits_for_a_store_that_hangs(
    here: Here, proxy: SpoilingProxy, s3_root: str, whole: Curve
) -> None:
    here.store_uri = s3_root
    hangs, may_go_on = threading.Event(), threading.Event()

    def spoil(exchange: Exchange) -> str | None:
        if exchange.method == "PUT" and "step-000002/" in exchange.path:
            hangs.set()
            may_go_on.wait(LIMIT_S)
        return None

    def on_step(metrics: Mapping[str, float]) -> None:
        if metrics["step"] == 3:
            assert hangs.wait(LIMIT_S)

    proxy.spoil = spoil
    here.notes = WatchedNotes(on_step)
    run = here.train(trained=lambda outcome: may_go_on.set())
    assert hangs.is_set()
    assert read_curve(run.path) == whole
    # Steps 4 to 6 were trained while it hung. Then the newest checkpoint went, and the one between did not.
    remote = find_remote_run(f"{s3_root}/checkpoints/{run.path.name}")
    assert remote is not None
    assert list(remote.checkpoints.values()) == [6, 2]


@pytest.mark.slow
def test_a_store_that_answers_again_gets_everything(here: Here, proxy: SpoilingProxy, s3_root: str) -> None:
    here.store_uri = s3_root

    def on_step(metrics: Mapping[str, float]) -> None:
        if metrics["step"] == 1:
            proxy.spoil = lambda exchange: "503"
            wait_for_note(here)
            proxy.spoil = lambda exchange: None

    here.notes = WatchedNotes(on_step)
    run = here.train()
    causes = [event.cause for event in run.events.read()]
    assert causes.index("upload_failed") < causes.index("upload_recovered")
    assert "upload_incomplete" not in causes
    remote = find_remote_run(f"{s3_root}/checkpoints/{run.path.name}")
    assert remote is not None
    assert remote.step == NUM_STEPS


@pytest.mark.slow
def test_all_is_killed_and_the_run_goes_on_from_s3(
    here: Here, s3_root: str, tmp_path: Path, whole: Curve, tiny_model_dir: Path
) -> None:
    """A kill -9 of the trainer, once a checkpoint is in the store; the disk is lost."""
    bench = Bench(tmp_path / "first", short_run(tiny_model_dir))
    with bench.run_file.open("a") as file:
        file.write(f'[store]\nuri = "{s3_root}"\n')
    # Before its last checkpoint. What had not arrived by then is sent by the next attempt.
    death = Moment(r"os\.rename .*/checkpoints/step-000006\.partial-[^/]*/COMPLETE")
    remote, uri = None, ""
    while remote is None or remote.step is None:
        assert bench.end(death) == -signal.SIGKILL, bench.log_path.read_text()
        uri = f"{s3_root}/checkpoints/{bench.only_run().path.name}"
        remote = find_remote_run(uri)
    shutil.rmtree(bench.folder)
    here.store_uri = s3_root
    found = continue_from(uri, load_spec(here.run_file, here.overrides()))
    train_here(found.resolved, here.notes, on_run=lambda run: None)
    assert here.notes.starts == [(str(found.run_path), remote.step, NUM_STEPS)]
    assert read_curve(found.run_path) == whole


class WatchedNotes(Notes):
    """Notes whose owner is asked after every step."""

    def __init__(self, watch: Callable[[Mapping[str, float]], None]) -> None:
        super().__init__()
        self._watch = watch

    def on_step(self, metrics: Mapping[str, float]) -> None:
        super().on_step(metrics)
        self._watch(metrics)


def stop_after(step: int) -> Callable[[Mapping[str, float]], None]:
    """Have this process told to stop, as a scheduler does, once a step is done."""

    def watch(metrics: Mapping[str, float]) -> None:
        if metrics["step"] == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return watch


def wait_for_note(here: Here) -> None:
    """Wait until the mirror has something to tell; what it is comes with the next step."""
    mirror = here.mirrors[-1]
    deadline = time.monotonic() + LIMIT_S
    while mirror.notes.empty():
        assert time.monotonic() < deadline
        time.sleep(0.02)
