"""The emulator with a real first process: podman, this machine's root shown and never written."""

from __future__ import annotations

import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from strop.errors import CheckRefused
from strop.launch.sagemaker.engine import Engine
from strop.launch.sagemaker.local_mode import Emulator, EmulatorSettings
from strop.launch.sagemaker.local_platform import FolderObjects
from tests.launch.sagemaker.rehearsal import ENDLESS, Rehearsal, expected_metrics, handles_term, step_of
from tests.launch.sagemaker.test_emulator import end_of, wait_for_state, wait_until

pytestmark = pytest.mark.slow
HOST = "algo-1"


def start(rehearsal: Rehearsal, request: dict[str, Any], engine: Engine, **settings: Any) -> Emulator:
    return rehearsal.start(request, engine=engine, rootfs=Path("/"), python=sys.executable, **settings)


def test_without_an_image_nothing_is_started(tmp_path: Path, engine: Engine) -> None:
    emulator = Emulator(tmp_path, FolderObjects(tmp_path / "s3"), EmulatorSettings(engine=engine))
    with pytest.raises(CheckRefused, match="a container without an image"):
        emulator.start({})


def test_success_with_this_machines_network(rehearsal: Rehearsal, engine: Engine) -> None:
    """A container here had no network at all, so no job reached the store that it was submitted with."""
    path = rehearsal.project / "program.py"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        probe = (
            f"import socket\nprint('reached', socket.socket().connect_ex({listener.getsockname()!r}) == 0)\n"
        )
        path.write_text(path.read_text().replace("def main()", f"{probe}\n\ndef main()", 1))
        request = rehearsal.submit()
        emulator = start(rehearsal, request, engine)
        assert end_of(emulator) == 0, emulator.log_of(HOST)
    assert rehearsal.metrics(request, HOST) == expected_metrics(6)
    assert "train| reached True\n" in emulator.log_of(HOST)


@pytest.mark.parametrize("num_children", [1, 3])
def test_lau_2_the_first_process_forwards_term(
    rehearsal: Rehearsal, engine: Engine, num_children: int
) -> None:
    """LAU-2: rows 1 and 2 of the table of first processes, with one child and with several.

    What the job has as a variable stands in no process list.
    """
    if num_children > 1:
        path = rehearsal.project / "program.py"
        begin = "import subprocess, sys\nfor _ in range(2):\n    subprocess.Popen(['sleep', '600'])\n"
        path.write_text(path.read_text().replace("def main()", f"{begin}\n\ndef main()", 1))
    canary = {"CANARY": "canary-value-2"}
    request = rehearsal.submit(trainee={"STEPS": ENDLESS, "STEP_S": 0.3}, variables=canary)
    first = start(rehearsal, request, engine)
    wait_for_state(rehearsal, request, 2)
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # Others end while this looks.
        with suppress(OSError):
            lines.append(path.read_bytes())
    assert any(b"strop-local-" in line for line in lines)
    assert not any(b"canary-value-2" in line for line in lines)
    assert first.stop() == 75, first.log_of(HOST)
    # The trainee was told, and has ended by itself.
    assert f"train| saved step {step_of(rehearsal.states(request)[-1])}\n" in first.log_of(HOST)
    assert first.check_end() == []
    assert first.failure().startswith("requeue:")
    assert f"on {HOST}" in first.failure()


def test_term_in_the_first_moments_is_not_ignored(rehearsal: Rehearsal, engine: Engine) -> None:
    request = rehearsal.submit(trainee={"STEPS": ENDLESS})
    emulator = start(rehearsal, request, engine)
    # Its log appears at once, the container later. Before it has a handler the kernel ignores TERM there.
    wait_until(
        lambda: any(handles_term(pid, is_first=True) for pid in emulator.find_leftovers()), "nobody listens"
    )
    code = emulator.stop()
    assert code == 75, (code, emulator.log_of(HOST))
