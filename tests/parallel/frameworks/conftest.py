"""What tests of frameworks have in common. Ranks share the cores of a machine: PyTorch computes with one thread in each."""

import sys

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def same_names():
    """Keras counts the models and layers of a process: ranks that made other numbers of them would give other names."""
    keras = sys.modules.get("keras")
    if keras is not None:
        keras.utils.clear_session(free_memory=False)


@pytest.fixture
def float64():
    """Keras computes in float64."""
    import keras

    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx(before)
