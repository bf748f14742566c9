"""Settings of the input: names as members or text, TensorFlow's prefix, and what is refused."""

from __future__ import annotations

import pytest

import mpistrat as ms
from mpistrat.data import SHARD_HINT, AutoShardPolicy, Options


def test_the_policies_have_tensorflow_s_numbers() -> None:
    """tf.data.experimental.AutoShardPolicy: OFF = -1, AUTO = 0, FILE = 1, DATA = 2, HINT = 3; SHARD_HINT = -1.

    FILE_OR_DATA, which is TensorFlow's AUTO, has no number there.
    """
    assert {policy.name: int(policy) for policy in AutoShardPolicy} == {
        "OFF": -1,
        "AUTO": 0,
        "FILE": 1,
        "DATA": 2,
        "HINT": 3,
        "FILE_OR_DATA": 4,
    }
    assert SHARD_HINT == -1


def test_a_policy_may_be_named() -> None:
    assert Options(auto_shard_policy="file").auto_shard_policy is AutoShardPolicy.FILE
    with pytest.raises(ValueError, match=r"Options: auto_shard_policy: expected AutoShardPolicy.* got 'FILES'"):
        Options(auto_shard_policy="FILES")


def test_options_that_are_not_said_do_not_count() -> None:
    assert Options("off").merge(Options()) == Options("off")
    assert str(Options("off").merge(Options("hint"))) == "auto_shard_policy=HINT"


def test_options_as_tensorflow_sets_them() -> None:
    """tf.data.Options(): attributes set one by one, the policy in experimental_distribute."""
    options = Options()
    assert options.auto_shard_policy is None
    options.experimental_distribute.auto_shard_policy = "off"
    dataset = ms.data.from_arrays([1, 2]).with_options(options)
    options.auto_shard_policy = AutoShardPolicy.FILE
    assert dataset.options() == Options("OFF")
    assert dataset.with_options(options).options() == Options("FILE")
    with pytest.raises(ValueError, match=r"Options: auto_shard_policy: expected AutoShardPolicy.* got 7"):
        options.auto_shard_policy = 7  # type: ignore[assignment]
    with pytest.raises(AttributeError, match=r"Options: deterministic: expected auto_shard_policy.*leave it out"):
        options.deterministic = False
    with pytest.raises(AttributeError, match=r"Options: threading:.*leave it out"):
        options.threading.private_threadpool_size = 2


def test_input_options_as_tensorflow_spells_them() -> None:
    mode = ms.InputReplicationMode.PER_REPLICA
    found = ms.InputOptions(
        experimental_fetch_to_device=False,  # type: ignore[call-arg]
        experimental_replication_mode=mode,
        experimental_per_replica_buffer_size=0,
    )
    assert found == ms.InputOptions(fetch_to_device=False, replication_mode="per_replica", per_replica_buffer_size=0)
    assert found.replication_mode is mode
    assert ms.InputOptions() == ms.InputOptions(True, "PER_WORKER", False, 1)


@pytest.mark.parametrize("size", [-1, 1.5, None])
def test_a_buffer_has_a_size(size: object) -> None:
    with pytest.raises(ValueError, match="per_replica_buffer_size: expected at least 0"):
        ms.InputOptions(per_replica_buffer_size=size)  # type: ignore[arg-type]


def test_datasets_stay_on_the_host() -> None:
    with pytest.raises(ValueError, match=r"place_dataset_on_device.*fetch_to_device"):
        ms.InputOptions(place_dataset_on_device=True)
