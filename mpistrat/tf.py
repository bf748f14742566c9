"""`ms.tf`: TensorFlow's other names, for programs written for tf.distribute.

A function that stands for a method gets the strategy first, or `strategy.extended`.
"""

from .base.options import CommunicationOptions as CollectiveHints
from .base.types import CommunicationImplementation as CollectiveCommunication
from .strategy import MultiWorkerMirroredStrategy as CollectiveAllReduceStrategy
from .strategy import set_strategy as experimental_set_strategy
from .strategy.tensorflow_names import (
    MultiStepContext,
    experimental_distribute_dataset,
    experimental_distribute_datasets_from_function,
    experimental_distribute_values_from_function,
    experimental_local_results,
    experimental_make_numpy_dataset,
    experimental_run,
    experimental_run_steps_on_iterator,
    experimental_run_v2,
    group,
    make_dataset_iterator,
    make_input_fn_iterator,
    map_and_batch,
    read_var,
    reduce_per_replica,
    unwrap,
    update_non_slot,
)

__all__ = [
    "CollectiveAllReduceStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "MultiStepContext",
    "experimental_distribute_dataset",
    "experimental_distribute_datasets_from_function",
    "experimental_distribute_values_from_function",
    "experimental_local_results",
    "experimental_make_numpy_dataset",
    "experimental_run",
    "experimental_run_steps_on_iterator",
    "experimental_run_v2",
    "experimental_set_strategy",
    "group",
    "make_dataset_iterator",
    "make_input_fn_iterator",
    "map_and_batch",
    "read_var",
    "reduce_per_replica",
    "unwrap",
    "update_non_slot",
]
