"""`ms.partitioners`: the number of shards of variables (TF: tf.distribute.experimental.partitioners)."""

from .variables.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner, Partitioner

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]
