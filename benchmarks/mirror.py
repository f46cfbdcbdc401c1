"""What mirroring a run costs its steps, while a checkpoint is on its way to a store that takes 20 MB/s.

Two workers do the same GRPO steps of the real model in turns, as against a rival; while one of the two does
its step, the uploader of a run beside it is at work, and otherwise it stands still (SIGSTOP). Who is
mirrored changes with every pair, and so does who goes first. The checkpoint has the size of the model's, and
the upload lasts longer than all measured steps: a run that checkpoints less often than it could pays less.

The uploader is the real process with its real client and its own niceness. The store reads and throws away
at its rate, on the same two cores at the lowest priority: its own work is in the figure too.
Goal: the median of the pairs' ratios of step times is below 1.03.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, Case
from benchmarks.figures import Figure, Measured
from benchmarks.harness import ArmProcess, Protocol, pair_order
from benchmarks.prompts import make_prompts, write_prompts
from benchmarks.ratio import summarize_ratios
from benchmarks.rivals import strop_arm
from benchmarks.store import BUCKET, run_server
from benchmarks.throttled_store import COUNT_PATH
from strop.hardware import ChildProcess, terminate
from strop.io.atomic import AtomicDirectory
from strop.policy.footprint import read_model_size
from strop.record import RunDir
from strop.record.mirror.layout import MirrorOrder
from strop.record.mirror.uploader import upload_settings
from strop.run import mirroring

CASE = CASES["grpo-32-natural"]
EXPECTED_STEP_S = 7.0
BYTES_PER_S = 20e6
GOAL_RATIO = 1.03
START_LIMIT_S = 300.0
# Per parameter: the exported model in bfloat16; fp32 masters and both moments.
CHECKPOINT_FILES = {"model/model.safetensors": 2, "state/optimizer.safetensors": 12}
PART_BYTES = upload_settings(None).part_bytes
_FACTS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def run_throttled(backend: str, part: bytes, log_path: Path) -> Iterator[str]:
    """Run the throttled store before a server and yield its address."""
    md5 = hashlib.md5(part, usedforsecurity=False).hexdigest()
    command = [sys.executable, "-m", "benchmarks.throttled_store", backend, str(BYTES_PER_S), md5]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=Path(__file__).parents[1])
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while (found := re.search(r"Running on (\S+)", log_path.read_text())) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the throttled store did not start: {log_path.read_text()[-500:]}")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.kill()
        process.wait()


def make_run(root: Path, part: bytes, num_bytes: int) -> Path:
    """Make a run directory with one checkpoint of that size, or a little larger, in whole parts."""
    run = RunDir.create(root, "benchmark", "", "", {})
    run.begin_attempt()
    whole = sum(CHECKPOINT_FILES.values())
    with AtomicDirectory(run.checkpoint_path(1)) as partial:
        for name, bytes_per_param in CHECKPOINT_FILES.items():
            path = partial / name
            path.parent.mkdir()
            with path.open("wb") as file:
                for _ in range(-(-(num_bytes * bytes_per_param) // (whole * PART_BYTES))):
                    file.write(part)
    run.release()
    return run.path


def start_uploader(run_path: Path, address: str) -> ChildProcess:
    """Start the real uploader as a run does."""
    order = MirrorOrder(
        run_path=str(run_path), uri=f"s3://{BUCKET}/checkpoints/run", owner="benchmark", attempt=1
    )
    return mirroring.start_uploader(order, run_path / "mirror.log", {**_FACTS, "AWS_ENDPOINT_URL": address})


def taken_bytes(address: str) -> int:
    """Return how much the store has taken."""
    with urllib.request.urlopen(f"{address}{COUNT_PATH}") as reply:
        return int(reply.read())


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def step_mirrored(worker: ArmProcess, uploader: ChildProcess, address: str) -> dict[str, Any]:
    """Do a step while the uploader is at work."""
    sent_before, cpu_before_s = taken_bytes(address), cpu_s(uploader.pid)
    os.kill(uploader.pid, signal.SIGCONT)
    try:
        record = worker.step()
    finally:
        os.kill(uploader.pid, signal.SIGSTOP)
    sent = taken_bytes(address) - sent_before
    return {**record, "sent_bytes": sent, "uploader_cpu_s": cpu_s(uploader.pid) - cpu_before_s}


def wait_for_traffic(address: str, uploader: ChildProcess) -> None:
    """Wait until parts of the checkpoint are on their way, then let the uploader stand still."""
    deadline = time.monotonic() + START_LIMIT_S
    while taken_bytes(address) < 2 * PART_BYTES:
        if uploader.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"nothing is sent: {uploader.tail()}")
        time.sleep(0.1)
    os.kill(uploader.pid, signal.SIGSTOP)


def take_turns(
    workers: list[ArmProcess], uploader: ChildProcess, address: str, num_pairs: int
) -> list[dict[str, Any]]:
    """Return the pairs, each with the records of the 'plain' and the 'mirrored' step of one index."""
    pairs = []
    for pair_index, order in enumerate(pair_order(num_pairs)):
        # Pairs 0, 1: the first worker is mirrored, second and first in turn; pairs 2, 3: the other.
        mirrored = pair_index // 2 % 2
        pair = {}
        for index in order:
            worker = workers[index % len(workers)]
            if index == mirrored:
                pair["mirrored"] = step_mirrored(worker, uploader, address)
            else:
                pair["plain"] = worker.step()
        pairs.append(pair)
    return pairs


def measure_turns(
    folder: Path, protocol: Protocol, case: Case, checkpoint_bytes: int
) -> list[dict[str, Any]]:
    """Start stores, uploader and workers, and let them take turns; end all of them whatever happens."""
    import boto3

    part = os.urandom(PART_BYTES)
    # One pair compares nothing: a single worker does both of its steps.
    names = ("first", "second") if protocol.num_pairs > 1 else ("only",)
    num_steps = 2 * protocol.num_pairs // len(names) + protocol.num_warm_ups
    write_prompts(folder / "prompts.json", make_prompts(case, num_steps))
    workers: list[ArmProcess] = []
    with (
        run_server(folder / "server.log") as backend,
        run_throttled(backend, part, folder / "store.log") as address,
    ):
        client = boto3.client("s3", endpoint_url=backend, region_name="us-east-1", **_credentials())
        client.create_bucket(Bucket=BUCKET)
        run_path = make_run(folder / "runs", part, checkpoint_bytes)
        uploader = start_uploader(run_path, address)
        try:
            wait_for_traffic(address, uploader)
            for name in names:
                (folder / name).mkdir()
                (folder / name / "prompts.json").write_bytes((folder / "prompts.json").read_bytes())
                workers.append(ArmProcess(strop_arm(), case, protocol, folder / name))
                workers[-1].wait_until_ready()
            for worker in workers:
                for _ in range(protocol.num_warm_ups):
                    worker.step()
            return take_turns(workers, uploader, address, protocol.num_pairs)
        finally:
            for worker in workers:
                worker.close()
            os.kill(uploader.pid, signal.SIGCONT)
            terminate(uploader, 0.0)


def _credentials() -> dict[str, str]:
    return {"aws_access_key_id": "test", "aws_secret_access_key": "test"}


def measure_mirror(*, is_quick: bool, model_dir: Path) -> Measured:
    """Measure the ratio of step times with and without an upload under way."""
    if is_quick:
        # Steps of a second or two, and as many bytes as they leave time for. On one thread: two would wait
        # for each other where something else is at work, as it is beside other tests.
        case = replace(CASE, num_prompts=2, group_size=2, max_new_tokens=8)
        protocol = Protocol(model_dir=model_dir, num_pairs=1, num_warm_ups=0, threads=1)
        checkpoint_bytes = 8 * PART_BYTES
    else:
        case, protocol = CASE, Protocol(model_dir=model_dir, num_pairs=20, num_warm_ups=2)
        checkpoint_bytes = max(
            read_model_size(model_dir).num_params * sum(CHECKPOINT_FILES.values()),
            int(1.3 * protocol.num_pairs * EXPECTED_STEP_S * BYTES_PER_S),
        )
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as name:
        pairs = measure_turns(Path(name), protocol, case, checkpoint_bytes)
    ratios = [pair["mirrored"]["step_s"] / pair["plain"]["step_s"] for pair in pairs]
    summary = summarize_ratios(ratios)
    rates = [pair["mirrored"]["sent_bytes"] / pair["mirrored"]["step_s"] / 1e6 for pair in pairs]
    shares = [pair["mirrored"]["uploader_cpu_s"] / pair["mirrored"]["step_s"] for pair in pairs]
    figures = [
        Figure(
            name="step time with mirroring by that without",
            unit=f"({summary.low:.3f} to {summary.high:.3f})",
            value=summary.median,
            measured=tuple(ratios),
            at_most=GOAL_RATIO,
        ),
        Figure(name="sent meanwhile", unit="MB/s", value=statistics.median(rates), measured=tuple(rates)),
        Figure(name="uploader", unit="cores", value=statistics.median(shares), measured=tuple(shares)),
    ]
    return Measured(figures=figures, details={"case": case.name, "num_pairs": len(pairs), "pairs": pairs})
