"""What a learner on ranks takes: memory of one rank against its estimate, and the time of a step.

A random model of 39 million parameters in fp32, gloo ranks of this machine with one thread each, one process
with one thread beside them. Memory is a rank's resident peak over two steps, less what it had before the
model; the estimate is `rank_state_bytes` and `activation_bytes`. The ratio may be above 1: the estimate
counts tensors, and the C library keeps what layers gave back. A step is the same batch for all.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure, Measured

if TYPE_CHECKING:
    from strop.policy.objective import ScoredTokens, TokenTerms

NUM_RANKS = (1, 2, 4)
NUM_GROUPS = 16
REPLY_TOKENS = 48
BUDGET = 512
_SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
_SMALL_SIZES = {**_SIZES, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
"""For a try."""


def measure_sharded(*, is_quick: bool) -> Measured:
    """Measure each number of ranks in processes of their own."""
    counts = (2,) if is_quick else NUM_RANKS
    found: dict[int, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for num_ranks in counts:
            command = [sys.executable, "-m", "benchmarks.sharded", str(num_ranks), scratch]
            command.append(str(1 if is_quick else NUM_GROUPS))
            subprocess.run(command, cwd=Path(__file__).parents[1], check=True)
            path = Path(scratch)
            found[num_ranks] = [
                json.loads((path / f"{num_ranks}-{rank}.json").read_text()) for rank in range(num_ranks)
            ]
    figures = []
    for num_ranks, ranks in found.items():
        shares = tuple(rank["peak_bytes"] / rank["estimate_bytes"] for rank in ranks)
        figures.append(
            Figure(
                name=f"memory of a rank of {num_ranks}, over its estimate",
                unit="ratio",
                value=max(shares),
                measured=shares,
                at_most=1.75,
            )
        )
        seconds = tuple(rank["step_s"] for rank in ranks)
        figures.append(
            Figure(name=f"a step on {num_ranks} ranks", unit="s", value=max(seconds), measured=seconds)
        )
    return Measured(figures=figures, details={"ranks": {str(count): ranks for count, ranks in found.items()}})


def _write_model(path: Path, sizes: dict[str, Any]) -> None:
    import torch
    from transformers import LlamaConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    torch.manual_seed(0)
    module: Any = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))  # type: ignore[no-untyped-call]
    module.save_pretrained(path)


def _serve(rank: int, num_ranks: int, scratch: Path, num_groups: int) -> None:
    """Take two steps on one rank and write down what they took."""
    import torch
    import torch.distributed as dist

    from strop.hardware import peak_rss_bytes, reset_peak_rss, rss_bytes

    torch.set_num_threads(1)
    store = f"file://{scratch}/store-{num_ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    # What the libraries take at their first use is not the model's.
    torch.nn.Linear(8, 8)(torch.zeros(8, 8)).sum().backward()
    before = rss_bytes() or 0
    learner, share = _build(scratch / "model", num_groups, num_ranks, rank)
    gc.collect()
    seconds = []
    # The first step makes the moments; from then on nothing new is kept.
    for _ in range(2):
        reset_peak_rss()
        started_at = time.perf_counter()
        learner.step(share, temperature=1.0, token_terms=_reinforce)
        seconds.append(time.perf_counter() - started_at)
    found = {
        "peak_bytes": peak_rss_bytes() - before,
        "estimate_bytes": _estimate(scratch / "model", num_ranks),
        "step_s": seconds[-1],
    }
    (scratch / f"{num_ranks}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _build(model_dir: Path, num_groups: int, num_ranks: int, rank: int) -> tuple[Any, Any]:
    """Return the learner and the share of a rank."""
    import torch

    from strop.policy.balancing import shard_groups
    from strop.policy.language_model import LanguageModel
    from strop.policy.learner import Learner
    from strop.policy.sharded import shard_learner
    from strop.spec.train import OptimizerSpec

    model = LanguageModel.load(model_dir, dtype=torch.float32, may_fuse=False)
    share = shard_groups(_batch(num_groups), num_ranks, max_positions=BUDGET)[rank]
    if num_ranks == 1:
        return Learner(model, OptimizerSpec(), micro_batch_positions=BUDGET), share
    return shard_learner(model, OptimizerSpec(), micro_batch_positions=BUDGET), share


def _estimate(model_dir: Path, num_ranks: int) -> int:
    from strop.policy.footprint import activation_bytes, rank_state_bytes, read_model_size

    size = read_model_size(model_dir)
    return rank_state_bytes(size, "float32", num_ranks) + activation_bytes(size, "float32", BUDGET)


def _batch(num_groups: int) -> list[Any]:
    import numpy as np

    from strop.policy.packing import PackedGroup, PackedReply

    random = np.random.default_rng(0)

    def ids(length: int) -> Any:
        return random.integers(0, _SIZES["vocab_size"], length).astype(np.int32)

    def reply() -> PackedReply:
        return PackedReply(
            token_ids=ids(REPLY_TOKENS),
            is_scored=np.ones(REPLY_TOKENS, dtype=np.bool_),
            engine_logprobs=np.full(REPLY_TOKENS, -9.0, dtype=np.float32),
            advantage=float(random.normal()),
            weight=1e-3,
        )

    return [
        PackedGroup(prompt_ids=ids(40), replies=tuple(reply() for _ in range(4))) for _ in range(num_groups)
    ]


def _reinforce(tokens: ScoredTokens, /) -> TokenTerms:
    from strop.policy.objective import TokenTerms

    return TokenTerms(loss_N=-tokens.advantage_M * tokens.logprob_M, grad_N=-tokens.advantage_M)


def main() -> None:
    """Measure one number of ranks; each writes a file into the given directory."""
    from torch.multiprocessing.spawn import spawn

    parser = argparse.ArgumentParser()
    parser.add_argument("num_ranks", type=int)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("num_groups", type=int)
    given = parser.parse_args()
    if not (given.scratch / "model").exists():
        _write_model(given.scratch / "model", _SMALL_SIZES if given.num_groups == 1 else _SIZES)
    spawn(_serve, (given.num_ranks, given.scratch, given.num_groups), nprocs=given.num_ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
