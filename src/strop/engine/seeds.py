"""Names of random streams.

A reply's stream is a function of what is asked and nothing else, so it does not depend on batch
slot, compaction, engine or resume, and needs no state in a checkpoint.
"""

from __future__ import annotations

import hashlib


def stream_seed(run_seed: int, example_id: str, step: int, sample_index: int, turn: int = 0) -> int:
    """Derive the seed of one reply, in [0, 2**64)."""
    name = f"{run_seed}/{example_id}/{step}/{sample_index}/{turn}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
