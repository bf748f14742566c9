"""Files of a strategy: checkpoints, snapshots in memory, and others' weights."""
