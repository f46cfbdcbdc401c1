"""A program that runs on each node, and computes a sum over all nodes with a known result.

    python -P -m strop.hardware.preflight.collective_probe --names '["n0", "n1"]' --rank 1 --address HOST:PORT

The nodes announce their progress at a rendezvous, a TCPStore of the first node: *come* (reached it), *start*,
*join* (reached each other), *sum*, *pair* (exchanged a block with the first node only). They also send
heartbeats there. At a time-out or a broken connection the first node decides which nodes are missing, and all
report its verdict. A stuck sum cannot be cancelled, so a thread watches it and ends the process. Each prints
one line of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from strop.hardware.preflight.request import tell
from strop.hardware.tuning import importing

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import TCPStore

STAGES = ("come", "start", "join", "sum", "pair")
_BYTES = {"cpu": 1 << 23, "cuda": 1 << 27}
"""Size of the tensor for the sum, and of the block for the exchange in pairs."""
_POLL_S = 0.02
_BEAT_S = 0.2
_SILENT_S = 1.0
"""A process without a heartbeat for this long has ended or was stopped."""
_FAREWELL_S = 3.0
_VERDICT_S = 10.0


class Rendezvous:
    """The announcements of all nodes, and the first node's verdict."""

    def __init__(self, watch: TCPStore, names: list[str], rank: int) -> None:
        self._watch = watch
        self._names = names
        self._rank = rank
        self._ending = threading.Lock()
        threading.Thread(target=self._beat, daemon=True).start()

    def announce(self, stage: str) -> None:
        """Announce that this node has reached a stage."""
        self._watch.set(f"{stage}/{self._rank}", "1")

    def find_missing(self, stage: str, limit_s: float = 0.0) -> list[str]:
        """Wait for all nodes to reach a stage; return those missing at the limit or at a verdict."""
        deadline = time.monotonic() + limit_s
        while True:
            missing = [
                name for rank, name in enumerate(self._names) if not self._watch.check([f"{stage}/{rank}"])
            ]
            if not missing or time.monotonic() >= deadline or self._watch.check(["verdict"]):
                return missing
            time.sleep(_POLL_S)

    def conclude(self, answer: Mapping[str, Any], exit_code: int) -> None:
        """Print the answer and end the process, even if another thread is stuck. The first caller wins."""
        self._ending.acquire()
        tell(answer)
        try:
            self.announce("leave")
            if self._rank == 0:
                if exit_code != 0:
                    self._watch.set("verdict", json.dumps(answer))
                # The rendezvous closes with this process.
                deadline = time.monotonic() + _FAREWELL_S
                gone = {self._names[0], *self.find_missing("come")}
                while set(self.find_missing("leave")) - gone and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
        finally:
            os._exit(exit_code)

    def judge(self, cause: Mapping[str, Any]) -> None:
        """End with the missing nodes: the first node determines them, the others wait for its verdict."""
        try:
            answer = self.find_late(cause) if self._rank == 0 else self._await_verdict(_VERDICT_S)
        except RuntimeError as error:
            answer = {"stage": "lost", "error": _first_line(error)}
        self.conclude(answer or {"stage": "lost", "error": f"no verdict within {_VERDICT_S:g} s"}, 1)

    def find_late(self, cause: Mapping[str, Any]) -> dict[str, Any]:
        """Return the nodes at fault, according to their announcements and heartbeats."""
        stage = next((stage for stage in STAGES if self.find_missing(stage)), STAGES[-1])
        late = self.find_missing(stage)
        before = self._read_beats()
        time.sleep(_SILENT_S)
        after = self._read_beats()
        # A node that waits for a dead one is just as late, but has a heartbeat.
        silent = [name for name in late if before[name] == after[name]]
        return {"stage": stage, "missing": silent or late, **cause}

    def _read_beats(self) -> dict[str, bytes | None]:
        keys = {name: f"beat/{rank}" for rank, name in enumerate(self._names)}
        return {
            name: self._watch.get(key) if self._watch.check([key]) else None for name, key in keys.items()
        }

    def _await_verdict(self, limit_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + limit_s
        while not self._watch.check(["verdict"]):
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)
        verdict: dict[str, Any] = json.loads(self._watch.get("verdict"))
        return verdict

    def _beat(self) -> None:
        """Send heartbeats, and end as soon as there is a verdict of the first node."""
        for number in itertools.count():
            try:
                self._watch.set(f"beat/{self._rank}", str(number))
                verdict = self._await_verdict(0.0) if self._rank != 0 else None
            except RuntimeError:
                # The rendezvous has closed.
                return
            if verdict is not None:
                self.conclude(verdict, 1)
            time.sleep(_BEAT_S)


def main() -> int:
    """Meet, sum, exchange, print; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--names", type=json.loads, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--descriptor", type=int, default=None)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--wait-limit-s", type=float, required=True)
    options = parser.parse_args()
    try:
        rendezvous, store = _open_rendezvous(options)
    except (RuntimeError, OSError) as error:
        tell({"stage": "reach", "error": _first_line(error)})
        return 1
    limit_s = options.wait_limit_s
    late = {"limit_s": limit_s}
    # The others wait longer, because the first node judges.
    patience_s = limit_s if options.rank == 0 else limit_s + _VERDICT_S
    try:
        rendezvous.announce("come")
        if rendezvous.find_missing("come", patience_s):
            rendezvous.judge(late)
    except RuntimeError as error:
        rendezvous.judge({"error": _first_line(error)})
    timer = threading.Timer(patience_s, rendezvous.judge, (late,))
    timer.daemon = True
    timer.start()
    rendezvous.announce("start")
    try:
        answer = _compute(options, rendezvous, store)
    except RuntimeError as error:
        rendezvous.judge({"error": _first_line(error)})
    timer.cancel()
    rendezvous.conclude(answer, 0)
    return 0


def _open_rendezvous(options: argparse.Namespace) -> tuple[Rendezvous, TCPStore]:
    """Open the rendezvous, or connect to it. Raises: RuntimeError if it cannot be reached in time."""
    with importing():
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not marked as exported

    host, _, port = options.address.rpartition(":")
    limit = timedelta(seconds=options.wait_limit_s)

    def connect(descriptor: int | None) -> TCPStore:
        return TCPStore(
            host,
            int(port),
            is_master=descriptor is not None,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )

    store = connect(options.descriptor)
    # A second connection, because a blocking request occupies the first one.
    return Rendezvous(connect(None), options.names, options.rank), store


def _first_line(error: RuntimeError | OSError) -> str:
    return str(error).partition("\n")[0]


def _compute(options: argparse.Namespace, rendezvous: Rendezvous, store: TCPStore) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not marked as exported

    dist.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        store=PrefixStore("sum", store),
        rank=options.rank,
        world_size=len(options.names),
        timeout=timedelta(seconds=options.wait_limit_s),
    )
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    warm = torch.ones(8, device=device)
    dist.all_reduce(warm)
    rendezvous.announce("join")
    numbers = torch.arange(_BYTES[options.device] // 4, device=device, dtype=torch.float32) % 1000
    mine = numbers * (options.rank + 1)
    began = time.monotonic()
    dist.all_reduce(mine)
    # Exact in float32, since values are at most 999 times the sum of the ranks.
    is_exact = bool(torch.equal(mine.cpu(), (numbers * sum(range(1, len(options.names) + 1))).cpu()))
    sum_s = time.monotonic() - began
    rendezvous.announce("sum")
    pairs = _exchange(options, numbers)
    rendezvous.announce("pair")
    # All nodes judge by the same speeds, so that the slow node also blames itself.
    if options.rank == 0:
        store.set("pairs", json.dumps(pairs))
    pairs = json.loads(store.get("pairs"))
    return {"is_exact": is_exact, "sum_s": sum_s, "pairs": pairs}


def _exchange(options: argparse.Namespace, block: torch.Tensor) -> dict[str, float]:
    """Send a block from the first node to each other one and back; return bytes per second by name.

    One pair after the other, to identify a slow node: in a sum all nodes are equally slow.
    """
    import torch
    import torch.distributed as dist

    speeds = {}
    back = torch.empty_like(block)
    for rank, name in enumerate(options.names):
        if rank == 0:
            continue
        if options.rank == rank:
            dist.recv(back, 0)
            dist.send(back, 0)
        if options.rank == 0:
            began = time.monotonic()
            dist.send(block, rank)
            dist.recv(back, rank)
            # The copy to the host waits for the device.
            back[:1].cpu()
            speeds[name] = 2 * block.numel() * block.element_size() / (time.monotonic() - began)
    return speeds


if __name__ == "__main__":
    sys.exit(main())
