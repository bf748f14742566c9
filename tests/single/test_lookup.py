"""Tables from keys to values: what a dict of Python's would give, for arrays of keys."""

import numpy as np
import pytest

from mpistrat.lookup import KeyValueTensorInitializer, StaticHashTable


@pytest.mark.parametrize("kind", ["integers", "text", "bytes"])
def test_it_finds_what_a_dict_finds(kind):
    rng = np.random.default_rng(1)
    numbers = rng.permutation(np.arange(-500, 500, 3, dtype=np.int32))
    as_key = {"integers": int, "text": str, "bytes": lambda n: str(n).encode()}[kind]
    keys = np.array([as_key(n) for n in numbers])
    values = rng.normal(size=keys.size)
    table = StaticHashTable(KeyValueTensorInitializer(keys, values), np.nan, name="t")
    known = dict(zip(keys.tolist(), values.tolist(), strict=True))
    asked = np.array([as_key(n) for n in rng.integers(-600, 600, 3000)]).reshape(30, 100)
    expected = [known.get(key, np.nan) for key in asked.ravel().tolist()]
    np.testing.assert_array_equal(table.lookup(asked).ravel(), expected)
    assert table.size() == len(table) == len(known)
    assert dict(zip(*(array.tolist() for array in table.export()), strict=True)) == known


def test_one_key_the_same_pair_twice_text_values_and_no_keys():
    table = StaticHashTable(KeyValueTensorInitializer(["a", "b", "a"], ["x", "y", "x"]), "unknown")
    assert table["a"] == "x"
    assert table.lookup(["longer than any", "b"]).tolist() == ["unknown", "y"]
    assert table.size() == 2
    empty = StaticHashTable(KeyValueTensorInitializer([], [], np.int64, np.int32), 7)
    assert empty.lookup([[1, 2]]).tolist() == [[7, 7]]
    assert empty.lookup([]).tolist() == table.lookup([]).tolist() == []
    assert empty.value_dtype == np.int32


@pytest.mark.parametrize(
    ("keys", "values", "default", "error", "text"),
    [
        ([1, 2, 1], [1, 2, 3], 0, ValueError, "1 and 3 for 1"),
        ([1, 2], [1], 0, ValueError, "as many values as keys"),
        ([[1]], [[1]], 0, ValueError, "one dimension"),
        ([1.5], [1], 0, TypeError, "integers that int64 can hold"),
        (np.array([1], np.uint64), [1], 0, TypeError, "uint64"),
        ([1], [1], 0.5, TypeError, "default_value"),
        ([1], [1], [0], TypeError, "one value"),
        ([1], [1], "none", TypeError, "default_value"),
        ([1], np.array([1], np.int8), 1000, TypeError, "default_value"),
    ],
)
def test_what_makes_no_table_is_refused(keys, values, default, error, text):
    with pytest.raises(error, match=text):
        StaticHashTable(KeyValueTensorInitializer(keys, values), default)


@pytest.mark.parametrize(
    ("keys", "values", "dtypes"),
    [
        (["abc"], [1], {"key_dtype": "U2"}),
        ([1.5], [1], {"key_dtype": "int64"}),
        ([1], ["abc"], {"value_dtype": "U2"}),
        ([1], [1.5], {"value_dtype": "int64"}),
        ([1], [np.nan], {"value_dtype": "int64"}),
        ([1], [1e300], {"value_dtype": "float32"}),
        ([1], [2**53 + 1], {"value_dtype": "float64"}),
    ],
)
def test_what_a_dtype_does_not_hold_is_refused(keys, values, dtypes):
    with pytest.raises(ValueError, match=r"expected values that \S+ holds, got "):
        KeyValueTensorInitializer(keys, values, **dtypes)


def test_keys_of_another_kind_are_refused():
    table = StaticHashTable(KeyValueTensorInitializer([1, 2], [1.0, 2.0]), 0)
    with pytest.raises(TypeError, match="keys of dtype int64"):
        table.lookup(["a"])
    with pytest.raises(TypeError, match="integers"):
        table.lookup([0.5])
