"""`ms.partitioners`: into how many shards variables are cut (TF: tf.distribute.experimental.partitioners)."""

from .variables.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner, Partitioner

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
