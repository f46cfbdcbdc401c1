"""Engines turn prompts into sampled replies with exact log-probabilities.

The contract is small and free of torch. Engines are imported by their module:
`strop.engine.native` generates in this process on the policy's own weights, `strop.cluster.ray.engines` has
any engine in an actor.
"""

from strop.engine.contract import (
    DEFAULT_MAX_ROWS,
    Completion,
    Engine,
    GenerationRequest,
    ReplyScore,
    UpdateMode,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
    stream_seed,
)

__all__ = [
    "DEFAULT_MAX_ROWS",
    "Completion",
    "Engine",
    "GenerationRequest",
    "ReplyScore",
    "UpdateMode",
    "WeightReceipt",
    "WeightTransport",
    "WeightUpdate",
    "stream_seed",
]
