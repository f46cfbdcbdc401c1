"""What a run trains on: the order of a task's examples, and offline data (demonstrations, pairs)."""
