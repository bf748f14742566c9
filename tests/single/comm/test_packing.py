import numpy as np
import pytest

from mpistrat.comm.packing import pack_sizes, plan_packs


def test_one_pack_for_each_dtype_in_the_order_of_the_first():
    arrays = [np.zeros(3, "f4"), np.zeros(2, "i8"), np.zeros((2, 2), "f4"), np.zeros((), "i8")]
    packs = plan_packs(arrays)
    assert [pack.indices for pack in packs] == [(0, 2), (1, 3)]
    assert [pack.dtype for pack in packs] == [np.float32, np.int64]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (0, [(0, 1, 2, 3)]),
        (None, [(0, 1, 2, 3)]),
        (1, [(0,), (1,), (2,), (3,)]),
        (16, [(0, 1), (2,), (3,)]),  # 8 + 8 fill a pack, and 24 is one by itself though it is too large
        (32, [(0, 1), (2, 3)]),  # a pack is closed before it would grow too large
        (48, [(0, 1, 2, 3)]),
    ],
)
def test_limit(limit, expected):
    arrays = [np.zeros(n) for n in (1, 1, 3, 1)]
    assert [pack.indices for pack in plan_packs(arrays, limit)] == expected


def test_there_and_back():
    arrays = [np.arange(6.0).reshape(2, 3).T, np.zeros((0, 4)), np.float64(7).reshape(()), np.arange(3.0)]
    (pack,) = plan_packs(arrays)
    flat = pack.pack(arrays)
    assert flat.tolist() == [0, 3, 1, 4, 2, 5, 7, 0, 1, 2]
    for array, back in zip(arrays, pack.unpack(flat), strict=True):
        assert back.shape == array.shape
        assert np.array_equal(back, array)


def test_a_contiguous_array_alone_is_not_copied():
    array = np.ones((3, 4))
    (pack,) = plan_packs([array])
    assert np.shares_memory(pack.pack([array]), array)


def test_the_last_piece_takes_the_remainder():
    assert pack_sizes(10, 3) == [3, 3, 4]
    assert pack_sizes(2, 3) == [0, 0, 2]
    assert pack_sizes(7, 1) == [7]
    with pytest.raises(ValueError, match="num_packs"):
        pack_sizes(3, 0)
