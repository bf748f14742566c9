import numpy as np

from mpistrat.base.buffers import BufferPool

FLOAT = np.dtype(np.float32)
SIZE = 1 << 18


def test_memory_is_used_again_only_when_nobody_has_it():
    pool = BufferPool()
    first = pool.empty(SIZE, FLOAT)
    address = first.ctypes.data
    second = pool.empty(SIZE, FLOAT)
    assert second.ctypes.data != address
    view = first[1:].reshape(-1, 1)[5:]
    del first
    third = pool.empty(SIZE, FLOAT)
    assert third.ctypes.data != address  # a view of a view is left
    del view
    assert pool.empty(SIZE, FLOAT).ctypes.data == address
    kept = memoryview(pool.empty(SIZE, FLOAT))
    assert pool.empty(SIZE, FLOAT).ctypes.data != np.asarray(kept).ctypes.data


def test_results_can_be_of_any_dtype():
    pool = BufferPool()
    first = pool.empty(SIZE, FLOAT)
    address = first.ctypes.data
    del first
    other = pool.empty(SIZE // 2, np.dtype(np.complex64))
    assert other.ctypes.data == address
    assert other.dtype == np.complex64


def test_little_is_kept():
    pool = BufferPool()
    held = [pool.empty(SIZE + i, FLOAT) for i in range(20)]
    assert len(pool._buffers) <= 4
    assert len({array.ctypes.data for array in held}) == 20


def test_it_does_not_depend_on_how_the_interpreter_counts_references(monkeypatch):
    monkeypatch.setattr("sys.getrefcount", lambda array: 0)  # Python 3.14 does not count every one
    pool = BufferPool()
    held = pool.empty(SIZE, FLOAT)
    assert pool.empty(SIZE, FLOAT).ctypes.data != held.ctypes.data
