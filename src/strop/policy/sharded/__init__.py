"""One learner on several ranks: FSDP2 shards of the weights, the same step, the same numbers."""
