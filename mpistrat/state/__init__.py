"""Files of a strategy: checkpoints, in-memory snapshots, and safetensors."""
