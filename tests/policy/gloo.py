"""Runs a function on several gloo ranks of this machine, each a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

LIMIT_S = 300.0


def run_ranks(work: Callable[..., Any], num_ranks: int, store_dir: Path, *args: Any) -> list[Any]:
    """Return what `work(*args)` returned on each rank. Raises: ProcessRaisedException of the first."""
    store_dir.mkdir(parents=True, exist_ok=True)
    # Imported once, by the server that the ranks are forks of, if this session has not used it before.
    set_forkserver_preload([work.__module__])
    start_processes(  # type: ignore[no-untyped-call]
        _serve, (work, num_ranks, store_dir, args), nprocs=num_ranks, start_method="forkserver"
    )
    return [torch.load(store_dir / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def _serve(rank: int, work: Callable[..., Any], num_ranks: int, store_dir: Path, args: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_dir / 'store'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=LIMIT_S),
    )
    torch.save(work(*args), store_dir / f"{rank}.pt")
    dist.destroy_process_group()
