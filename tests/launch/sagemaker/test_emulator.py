"""The container's entry with real processes: codes, signals, files, state, hosts."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from strop.launch.contract import Need, RolePlan
from strop.launch.sagemaker.local_mode import Emulator
from strop.launch.sagemaker.local_platform import FolderObjects
from strop.record.fence import GRACE_VARIABLE
from tests.fixtures import waiting
from tests.fixtures.tiny_disk import tiny_disk
from tests.launch.sagemaker.building import PROGRAM
from tests.launch.sagemaker.rehearsal import (
    ENDLESS,
    SOURCE,
    Rehearsal,
    expected_metrics,
    step_of,
)

pytestmark = pytest.mark.slow
HOST = "127.0.1.1"
LIMIT_S = 180.0
"""For anything that comes by itself: ample, as other work may keep the machine busy."""


def wait_until(condition: Callable[[], bool], what: str, *, limit_s: float = LIMIT_S) -> None:
    waiting.wait_until(condition, limit_s=limit_s, what=what)


def wait_for_state(rehearsal: Rehearsal, request: dict[str, Any], number: int = 1) -> str:
    """Wait until so many states are in the store, and return the newest of them."""
    seen: list[str] = []

    def have_come() -> bool:
        seen[:] = rehearsal.states(request)
        return len(seen) >= number

    wait_until(have_come, "no state came")
    return seen[-1]


def wait_for_nobody(emulator: Emulator) -> None:
    """Wait until every process of a start has gone; one that was killed needs a moment to die."""
    wait_until(lambda: emulator.find_leftovers() == [], "processes are left")


def go_on_to_the_end(rehearsal: Rehearsal, request: dict[str, Any], begins_at: int) -> Emulator:
    """Start again, three steps further than the newest state; what is trained is as undisturbed."""
    emulator = rehearsal.start(request, num_steps=begins_at + 3)
    assert end_of(emulator) == 0, emulator.log_of(HOST)
    assert rehearsal.metrics(request, HOST) == expected_metrics(begins_at + 3)
    return emulator


def end_of(emulator: Emulator) -> int | None:
    code = emulator.wait(LIMIT_S)
    assert emulator.check_end() == [], emulator.log_of(HOST)
    return code


OWN_TIMER = """
import os, threading, time
from pathlib import Path

class OwnTimer(threading.Timer):
    def run(self):
        folder = Path(os.environ["TIMER_FOLDER"])
        (folder / "partial").write_text(str(self.interval))
        (folder / "partial").rename(folder / "interval")
        while not (folder / "over").exists():
            time.sleep(0.05)
        self.function(*self.args, **self.kwargs)

threading.Timer = OwnTimer
"""
"""A timer that notes for how long it is set, and whose time is over when a file says so."""


def test_before_a_capacity_block_ends_the_state_is_saved(rehearsal: Rehearsal) -> None:
    request = rehearsal.submit(trainee={"STEPS": ENDLESS})
    folder = rehearsal.root / "timer"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(OWN_TIMER)
    # 300 s are the reserve: the stop is to come an hour after the start.
    started_at = time.time()
    variables = {
        "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP": str(int(started_at) + 3900),
        "PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}",
        "TIMER_FOLDER": str(folder),
    }
    emulator = rehearsal.start(request, environment=variables)
    before = wait_for_state(rehearsal, request)
    wait_until((folder / "interval").exists, "no timer was set")
    set_for_s = float((folder / "interval").read_text())
    assert 3599.0 - (time.time() - started_at) <= set_for_s <= 3600.0
    assert emulator.poll() is None
    (folder / "over").touch()
    assert end_of(emulator) == 75, emulator.log_of(HOST)
    assert emulator.failure().startswith("requeue: ")
    assert rehearsal.states(request)[-1] >= before


def test_a_job_that_goes_on_after_another_one_succeeds_and_counts_on(rehearsal: Rehearsal) -> None:
    """An attempt with a number that an earlier job of the same home had would be fenced off, or misjudged."""
    request = rehearsal.submit(num_past=3)
    emulator = rehearsal.start(request)
    assert end_of(emulator) == 0, emulator.log_of(HOST)
    assert rehearsal.states(request)[-1] == "step-000006"
    assert rehearsal.metrics(request, HOST) == expected_metrics(6)
    verdict = rehearsal.read_record(request, "attempts/job-20261121-120000-3/verdict.json")
    assert (verdict["exit_code"], verdict["number"]) == (0, 3)
    assert "train| begin at step 0" in emulator.log_of(HOST)
    assert emulator.failure() == ""


class SlowFolder(FolderObjects):
    """A store that takes its time: uploads are under way when the end comes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_busy = threading.Event()

    def write(self, uri: str, data: bytes) -> None:
        if uri.endswith("weights.bin"):
            super().write(uri, data[: len(data) // 2])
            self.is_busy.set()
            time.sleep(1.0)
            self.is_busy.clear()
        super().write(uri, data)


@pytest.mark.parametrize("is_told", [True, False])
def test_lau_2_an_end_during_a_step_and_an_upload_leaves_a_whole_state(tmp_path: Path, is_told: bool) -> None:
    """LAU-2: the first process forwards SIGTERM; a newer complete state and code 75 follow."""
    folder = SlowFolder(tmp_path / "s3")
    with closing(Rehearsal(tmp_path, objects=folder)) as rehearsal:
        request = rehearsal.submit(trainee={"STEP_S": 0.6})
        first = rehearsal.start(request, num_steps=ENDLESS)
        seen = wait_for_state(rehearsal, request)
        wait_until(folder.is_busy.is_set, "nothing is uploaded")
        if is_told:
            assert first.stop() == 75, first.log_of(HOST)
            assert first.check_end() == []
            assert first.failure().startswith(
                f"requeue: exit code 75: interrupted, its state saved on {HOST}"
            )
        else:
            first.kill()
            wait_for_nobody(first)
        saved = max([seen, *rehearsal.states(request)])
        assert not is_told or f"train| saved step {step_of(saved)}\n" in first.log_of(HOST)
        # No step is skipped or repeated, and every state is the undisturbed one.
        second = go_on_to_the_end(rehearsal, request, step_of(saved))
        assert f"begin at step {step_of(saved)}\n" in second.log_of(HOST)
        verdict = rehearsal.read_record(request, "attempts/job-20261121-120000-1/verdict.json")
        assert verdict["number"] == 1


def test_a_crash_of_the_entry_itself_leaves_a_failure_file(rehearsal: Rehearsal) -> None:
    request = rehearsal.submit()
    # Where this host's states should be is a file: nothing that anybody foresaw.
    uri = request["CheckpointConfig"]["S3Uri"].rstrip("/")
    rehearsal.folder.write(f"{uri}/{HOST}", b"")
    emulator = rehearsal.start(request)
    assert end_of(emulator) == 1
    assert "the entry failed: " in emulator.failure()


def test_a_full_disk_is_said_and_is_no_success(rehearsal: Rehearsal, tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "disk", size_bytes=2 << 20) as disk:
        request = rehearsal.submit(trainee={"BYTES": 4 << 20})
        request["AlgorithmSpecification"]["ContainerEntrypoint"] += ["--scratch", str(disk)]
        emulator = rehearsal.start(request)
        code = emulator.wait(LIMIT_S)
    assert code not in {0, 75, None}, emulator.log_of(HOST)
    assert "space" in emulator.failure() or "disk" in emulator.failure(), emulator.failure()


def test_a_config_of_another_job_is_refused(rehearsal: Rehearsal) -> None:
    request = rehearsal.submit()
    request["HyperParameters"]["strop_plan"] = "another"
    emulator = rehearsal.start(request)
    assert end_of(emulator) == 76
    assert emulator.failure().startswith(
        f"preflight: exit code 76: refused by a check before it began on {HOST}"
    )


def test_no_grandchild_outlives_the_entry(rehearsal: Rehearsal) -> None:
    (rehearsal.project / "program.py").write_text(
        "import subprocess, sys, time\n"
        "for _ in range(3):\n"
        "    words = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "    subprocess.Popen(words, start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    emulator = rehearsal.start(rehearsal.submit())
    wait_until(lambda: len(emulator.find_leftovers()) >= 5, "the children did not start")
    # Without the emulator's own end of a stop, which kills whatever is left.
    emulator.terminate()
    assert emulator.wait(LIMIT_S) == 75, emulator.log_of(HOST)
    assert emulator.find_leftovers() == []


def test_a_program_that_ignores_term_is_killed_within_the_window(rehearsal: Rehearsal) -> None:
    (rehearsal.project / "program.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"print('deaf for', os.environ[{GRACE_VARIABLE!r}], flush=True)\ntime.sleep(600)\n"
    )
    emulator = rehearsal.start(rehearsal.submit(), stop_window_s=6.0)
    # A sixth of the window is kept for the end.
    wait_until(lambda: "train| deaf for 5\n" in emulator.log_of(HOST), "it did not start")
    started_at = time.monotonic()
    # No KILL of the platform comes to help, however busy the machine is.
    emulator.terminate()
    assert emulator.wait(LIMIT_S) == 128 + signal.SIGKILL
    assert time.monotonic() - started_at >= 5.0
    assert "did not end within the grace" in emulator.failure()
    assert emulator.find_leftovers() == []


def test_sec_4_a_secret_reaches_its_role_alone(rehearsal: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-4: a value fetched by ARN is in no file that stays, no log and no failure file."""
    arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hub"
    probe = (
        "import os, pathlib, sys, time; print(os.environ.get('TOKEN'), flush=True);"
        " pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    )
    request = rehearsal.submit(
        profile={"secret_arns": {"TOKEN:train": arn}},
        trainee={"STEPS": 1, "SECRET_PROBE": 1, "AWAIT": rehearsal.root / "probed"},
        roles=(
            RolePlan(name="train", argv=PROGRAM),
            RolePlan(
                name="sidecar",
                argv=("python3", "-c", probe, str(rehearsal.root / "probed")),
                need=Need.PRESENCE,
            ),
        ),
    )
    assert arn not in json.dumps(request)
    emulator = rehearsal.start(request, python=_with_secret(rehearsal, arn, "canary-value-1"))
    assert emulator.wait(LIMIT_S) == 0, emulator.log_of(HOST)
    log = emulator.log_of(HOST)
    assert "train| secret is here" in log
    assert "train| the value is <redacted>" in log
    assert "sidecar| None" in log
    files = [path for root in (emulator.root, rehearsal.root / "s3") for path in root.rglob("*")]
    found = [str(path) for path in files if path.is_file() and b"canary-value-1" in path.read_bytes()]
    # The role's own log file, in the scratch of the container, is where it printed it itself.
    assert [path for path in found if "/scratch/" not in path and "/0/train.log" not in path] == []


def _with_secret(rehearsal: Rehearsal, arn: str, value: str) -> str:
    """Return a program that is python3 with a Secrets Manager that knows one secret."""
    folder = rehearsal.root / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        "import strop.launch.sagemaker.client as client\n"
        "def call(self, service, operation, *, resource='', **arguments):\n"
        f"    assert arguments == {{'SecretId': {arn!r}}}\n"
        f"    return {{'SecretString': {json.dumps({'TOKEN': value})!r}}}\n"
        "client.AwsClients.call = call\n"
    )
    program = folder / "python3"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return str(program)


def test_a_secret_that_may_not_be_fetched_is_a_refusal_that_names_it(rehearsal: Rehearsal) -> None:
    arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hub"
    request = rehearsal.submit(profile={"secret_arns": {"TOKEN": arn}})
    # Without credentials, and without anybody to ask for some.
    emulator = rehearsal.start(request, environment={"AWS_EC2_METADATA_DISABLED": "true"})
    assert end_of(emulator) == 76
    assert f"secretsmanager:GetSecretValue on {arn}" in emulator.failure()
