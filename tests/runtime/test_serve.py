"""`strop runtime serve` on this machine: killed parts live again, and nothing is left at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from strop.cli import main
from strop.runtime.service_dir import ServiceDir
from tests.conftest import require_system_part
from tests.fixtures.runtime_client import RuntimeClient, processes_of, wait_for


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[ServiceDir, subprocess.Popen[bytes]]]:
    require_system_part("bubblewrap", any(Path(path, "bwrap").exists() for path in os.get_exec_path()))
    folder = ServiceDir(tmp_path / "service")
    words = ["runtime", "serve", "--dir", str(folder.path), "--backend", "bubblewrap"]
    with (tmp_path / "output").open("wb") as output:
        child = subprocess.Popen([sys.executable, "-m", "strop.cli", *words], stdout=output, stderr=output)
    try:
        wait_for(folder.find, lambda found: found is not None or child.poll() is not None)
        yield folder, child
    finally:
        child.kill()
        child.wait()


def pid_of(folder: ServiceDir, word: str) -> int:
    (line,) = (
        line for line in processes_of(folder.path) if f"runtime {word} " in line or f"runtime.{word} " in line
    )
    return int(line.split()[0])


@pytest.mark.slow
def test_killed_parts_live_again_and_an_end_leaves_nothing(
    served: tuple[ServiceDir, subprocess.Popen[bytes]],
) -> None:
    folder, child = served
    endpoint = folder.find()
    assert endpoint is not None
    with RuntimeClient(endpoint) as client:
        client.start("s")
        record = client.wait_ready("s")
        assert client.run(record, "echo kept > /tmp/kept")["exit_code"] == 0

        killed = pid_of(folder, "controller")
        os.kill(killed, signal.SIGKILL)
        wait_for(
            lambda: processes_of(folder.path), lambda found: not any(f"{killed} " in one for one in found)
        )
        wait_for(folder.find, lambda found: found == endpoint)

        def ask() -> str:
            # While nothing listens, and from the killed one's kept connection, there is no answer.
            with suppress(httpx.TransportError):
                return str(client.session("s")["url"])
            return ""

        wait_for(ask, lambda url: url == record["url"], limit_s=300.0)
        # The very sandbox, by its old address and key.
        assert client.run(record, "cat /tmp/kept")["stdout"] == "kept\n"

        os.kill(pid_of(folder, "node"), signal.SIGKILL)
        lost = wait_for(lambda: client.session("s"), lambda found: found["status"] == "error")
        assert (lost["failure_kind"], lost["pod_status"]) == ("infra_lost", "unknown")
        client.start("t")
        assert client.run(client.wait_ready("t"), "true")["exit_code"] == 0
    child.terminate()
    assert child.wait(60) == 0
    assert folder.find() is None
    wait_for(lambda: processes_of(folder.path), lambda found: not found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["job.nodes=2"], "job.nodes=2 without --on"),
        (["--dry-run"], "--dry-run without --on"),
        (["--node", "first"], "--node first is not understood"),
        (["--on", "slurm", "--port", "1"], "port with --on slurm"),
        (["--on", "slurm", "model.uri=x"], "model.uri in a job that serves sandboxes"),
        (["--on", "slurm", "job.gpus=1"], "GPUs or CPU nodes"),
        (["--on", "sagemaker"], "whose hosts see no common disk"),
    ],
)
def test_what_cannot_be_served_is_refused(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runtime", "serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_backend_that_there_is_not_is_refused_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "service"
    assert main(["runtime", "serve", "--dir", str(folder), "--backend", "nope"]) == 2
    assert not folder.exists()
    assert "sandbox backend 'nope'. Allowed: auto, bubblewrap" in capsys.readouterr().err
