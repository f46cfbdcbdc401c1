"""How fast a large object goes to S3 and comes back: strop's store, and the bare clients it could use.

The server is moto's, on this machine, in a process of its own: S3's interface, not its speed. All arms
move the same file in parts of the same size, with as many at once, in turns: A B C, then C B A. Each
number is the median. strop moves it as a record, which it is: sealed, so its digest is known before.
Goal: strop reaches at least 80 % of what its own client reaches bare. strop's time has in it the proof
of what arrived (MD5 of every part going up, SHA-256 coming down), the manifest and the fsync, which the
bare clients do without. obstore takes part where it is installed.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Measured
from strop.io.atomic import AtomicDirectory
from strop.store.record_store import RecordStore
from strop.store.s3_client import S3Settings
from strop.store.s3_objects import S3Objects

BUCKET = "strop-bench"
GOAL_FRAC = 0.8
START_LIMIT_S = 300.0
SETTINGS = S3Settings()
_MB = 1 << 20
_SERVER = "import sys; from moto.server import main; main(sys.argv[1:])"


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """One way to move a file."""

    name: str
    up: Callable[[Path, str], None]
    down: Callable[[str, Path], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """One measured transfer."""

    client: str
    direction: str
    wall_s: float
    cpu_s: float
    """Of this process, all threads; the server's is not in it."""


@contextmanager
def run_server(log_path: Path) -> Iterator[str]:
    """Run moto's server on a port of its own choice and yield its address."""
    with log_path.open("wb") as log:
        command = [sys.executable, "-c", _SERVER, "-H", "127.0.0.1", "-p", "0"]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while (found := re.search(r"Running on (\S+)", log_path.read_text())) is None:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"moto's server did not start: {log_path.read_text()[-500:]}")
            time.sleep(0.1)
        yield found[1]
    finally:
        server.kill()
        server.wait()


def strop_client() -> Client:
    """Return strop's store."""
    store = RecordStore(S3Objects(SETTINGS))
    return Client(
        name="strop",
        up=lambda path, key: void(store.put(path.parent, f"s3://{BUCKET}/{key}")),
        down=lambda key, path: void(store.get(f"s3://{BUCKET}/{key}", path.parent)),
    )


def boto3_client() -> Client:
    """Return bare boto3 with its transfer manager, as it comes."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    config = Config(s3={"addressing_style": "path"}, max_pool_connections=SETTINGS.num_connections * 2)
    client = boto3.client("s3", config=config)
    transfer = TransferConfig(
        multipart_threshold=SETTINGS.part_bytes,
        multipart_chunksize=SETTINGS.part_bytes,
        max_concurrency=SETTINGS.num_connections,
    )
    return Client(
        name="boto3",
        up=lambda path, key: client.upload_file(str(path), BUCKET, key, Config=transfer),
        down=lambda key, path: client.download_file(BUCKET, key, str(path), Config=transfer),
    )


def obstore_client(address: str) -> Client:
    """Return bare obstore; it has no download in parts, so ranges are asked for side by side."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET, endpoint=address, virtual_hosted_style_request=False, client_options={"allow_http": True}
    )

    def up(path: Path, key: str) -> None:
        with path.open("rb") as file:
            obstore.put(
                store,
                key,
                file,
                use_multipart=True,
                chunk_size=SETTINGS.part_bytes,
                max_concurrency=SETTINGS.num_connections,
            )

    def down(key: str, path: Path) -> None:
        size_bytes = obstore.head(store, key)["size"]
        with path.open("wb") as file, ThreadPoolExecutor(SETTINGS.num_connections) as pool:

            def fetch(start: int) -> None:
                end = min(start + SETTINGS.part_bytes, size_bytes)
                os.pwrite(file.fileno(), obstore.get_range(store, key, start=start, end=end), start)

            list(pool.map(fetch, range(0, size_bytes, SETTINGS.part_bytes)))

    return Client(name="obstore", up=up, down=down)


def void(result: Any) -> None:
    """Drop a result."""


def measure(client: Client, source: Path, work_dir: Path) -> list[Rate]:
    """Send a file and fetch it back once, and check that it is the same."""
    target = work_dir / client.name / source.name
    if client.name != "strop":  # Which makes the directory itself.
        target.parent.mkdir()
    rates = []
    steps: list[tuple[str, Callable[[], None]]] = [
        ("up", lambda: client.up(source, client.name)),
        ("down", lambda: client.down(client.name, target)),
    ]
    for direction, step in steps:
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        step()
        rates.append(
            Rate(
                client=client.name,
                direction=direction,
                wall_s=time.perf_counter() - began_s,
                cpu_s=time.process_time() - cpu_began_s,
            )
        )
    if subprocess.run(["cmp", "--silent", str(source), str(target)], check=False).returncode != 0:
        raise RuntimeError(f"{client.name} brought back another file")
    shutil.rmtree(target.parent)
    return rates


def remove_object(client: Client) -> None:
    """Make room, so that no arm finds what it sent before."""
    objects = S3Objects(SETTINGS)
    for uri in (
        f"s3://{BUCKET}/{client.name}",
        *(one.uri for one in objects.list(f"s3://{BUCKET}/{client.name}")),
    ):
        objects.remove(uri)


def compare_clients(size_mb: int, num_pairs: int, *, with_obstore: bool) -> list[Rate]:
    """Measure the clients in turns."""
    import boto3

    with (
        tempfile.TemporaryDirectory(prefix="strop-bench-") as name,
        run_server(Path(name) / "log") as address,
    ):
        os.environ.update(
            AWS_ENDPOINT_URL=address,
            AWS_ACCESS_KEY_ID="test",
            AWS_SECRET_ACCESS_KEY="test",
            AWS_DEFAULT_REGION="us-east-1",
        )
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        source = Path(name) / "record" / "weights.bin"
        with AtomicDirectory(source.parent) as partial, (partial / source.name).open("wb") as file:
            for block in range(size_mb):
                file.write(random.Random(block).randbytes(_MB))
        clients = [strop_client(), boto3_client()]
        if with_obstore:
            clients.append(obstore_client(address))
        rates = []
        for pair in range(num_pairs):
            for client in clients if pair % 2 == 0 else reversed(clients):
                rates += measure(client, source, Path(name))
                remove_object(client)
        return rates


def summarize(rates: Sequence[Rate], size_mb: int) -> dict[str, dict[str, float]]:
    """Return medians by 'client direction'; the fraction of bare boto3 is formed within each turn."""
    summary = {}
    clients = dict.fromkeys(rate.client for rate in rates)
    for client, direction in ((client, direction) for direction in ("up", "down") for client in clients):
        mine = [rate for rate in rates if (rate.client, rate.direction) == (client, direction)]
        bare = [rate for rate in rates if (rate.client, rate.direction) == ("boto3", direction)]
        fracs = [other.wall_s / rate.wall_s for rate, other in zip(mine, bare, strict=True)]
        summary[f"{client} {direction}"] = {
            "mib_per_s": size_mb / statistics.median(rate.wall_s for rate in mine),
            "cpu_s_per_gib": statistics.median(rate.cpu_s for rate in mine) / size_mb * 1024,
            "frac_of_boto3": statistics.median(fracs),
        }
    return summary


def measure_store(*, is_quick: bool) -> Measured:
    """Measure how strop's rate compares with its own client's, both ways."""
    size_mb, num_pairs = (32, 1) if is_quick else (1024, 3)
    rates = compare_clients(size_mb, num_pairs, with_obstore=find_spec("obstore") is not None)
    summary = summarize(rates, size_mb)
    figures = [
        Figure(
            name=f"{name}: rate by that of bare boto3",
            unit=f"({values['mib_per_s']:.0f} MiB/s)",
            value=values["frac_of_boto3"],
            measured=(values["frac_of_boto3"],),
            at_least=GOAL_FRAC if name.startswith("strop") else None,
        )
        for name, values in summary.items()
    ]
    details = {
        "size_mb": size_mb,
        "part_bytes": SETTINGS.part_bytes,
        "num_connections": SETTINGS.num_connections,
        "versions": {name: version(name) for name in ("boto3", "moto", "obstore") if find_spec(name)},
        "summary": summary,
        "rates": [asdict(rate) for rate in rates],
    }
    return Measured(figures=figures, details=details)
