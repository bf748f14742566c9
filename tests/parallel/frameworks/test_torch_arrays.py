"""Tensors of PyTorch wherever arrays are taken: of bfloat16, with a history, complex conjugates that are not computed yet."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402

NUMBERS = [1.0, 2.0, -3.0, 0.5]  # bfloat16 has them, and their multiples here
TENSORS = {
    "bfloat16": lambda: torch.tensor(NUMBERS, dtype=torch.bfloat16),
    "bfloat16 every other": lambda: torch.tensor(NUMBERS, dtype=torch.bfloat16).repeat_interleave(2)[::2],
    "requires_grad": lambda: torch.tensor(NUMBERS, requires_grad=True),
    "history": lambda: torch.tensor(NUMBERS, dtype=torch.bfloat16, requires_grad=True) * 1,
    "parameter": lambda: torch.nn.Parameter(torch.tensor(NUMBERS)),
    "negative view": lambda: torch.complex(torch.zeros(4), -torch.tensor(NUMBERS)).conj().imag,
}


def numbers(array):
    return np.asarray(array).astype(np.float64).tolist()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", TENSORS)
def test_any_tensor_is_an_array(kind):
    tensor = TENSORS[kind]()
    narrow = tensor.dtype is torch.bfloat16
    with ms.MultiWorkerMirroredStrategy() as strategy:
        n = strategy.size
        total = [n * number for number in NUMBERS]
        reduced = strategy.reduce("SUM", tensor, axis=None)
        assert numbers(reduced) == total
        assert str(reduced.dtype) == ("bfloat16" if narrow else "float32")
        assert numbers(strategy.reduce("MEAN", tensor, axis=0)) == 0.125
        assert numbers(strategy.gather(tensor, axis=0)) == NUMBERS * n
        assert numbers(strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", tensor))) == total
        assert float(strategy.run(lambda: ms.nn.compute_average_loss(tensor))) == 0.125 / n
        assert strategy.run(lambda: tensor) is tensor
        with strategy.scope():
            v = ms.Variable(tensor)
            w = ms.Variable(np.zeros(4, np.float32))
            optimizer = ms.optimizers.SGD(0.5)
        assert numbers(v) == NUMBERS
        assert str(v.dtype) == ("bfloat16" if narrow else "float32")
        w.assign(tensor)
        assert numbers(w) == NUMBERS
        strategy.run(lambda: optimizer.apply_gradients([(tensor, w), (tensor, v)]))
        assert numbers(w) == numbers(v) == [number * (1 - 0.5 * n) for number in NUMBERS]


@pytest.mark.ranks(1)
def test_an_array_of_a_tensor_has_its_memory():
    from mpistrat.comm.arrays import as_array

    for tensor in (torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)):
        as_array(tensor)[1] = 2.0
        assert tensor[1] == 2.0


@pytest.mark.ranks(2)
def test_what_has_no_array_is_named():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with pytest.raises(TypeError, match="reduce: value: expected an array"):
            strategy.reduce("SUM", torch.eye(3).to_sparse(), axis=None)
        with strategy.scope(), pytest.raises(TypeError, match="Variable: initial_value: expected an array"):
            ms.Variable(torch.empty(3, device="meta"))
