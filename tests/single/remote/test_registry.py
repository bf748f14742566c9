"""What travels as a token, what by value, and what is refused; the queue's order."""

import builtins
import threading

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import MissingDependencyError
from mpistrat.optimizers import core as optimizers
from mpistrat.remote import registry as pickling
from mpistrat.remote.dispatcher import Closure, ClosureQueue
from mpistrat.remote.registry import ObjectRegistry
from mpistrat.remote.scheduler import RemoteValue
from mpistrat.remote.worker import Commands, command_of
from tests.harness.strategies import without_mpi


@pytest.fixture
def strategy():
    with without_mpi() as made:
        yield made


def sent(registry, value):
    return pickling.loads(pickling.dumps(value, registry.reduce), registry.resolve)


def test_what_every_rank_has_arrives_as_its_own(strategy):
    with strategy.scope():
        v, w = ms.Variable([1.0]), ms.Variable([2.0])
    optimizer = ms.optimizers.SGD(0.1)
    registry = ObjectRegistry(strategy)
    fn, values = sent(registry, (lambda: (w, optimizer), {"v": v, "list": [strategy, strategy.extended, v]}))
    assert fn()[0] is w and fn()[1] is optimizer
    assert values["v"] is v
    assert values["list"][0] is strategy and values["list"][1] is strategy.extended and values["list"][2] is v
    assert registry.used == [optimizer]


def test_results_hold_the_values_of_variables(strategy):
    with strategy.scope():
        v = ms.Variable([1.0, 2.0])
    registry = ObjectRegistry(strategy)
    data = pickling.dumps({"a": v, "b": (v[0], 3)}, registry.reduce_result)
    result = pickling.loads(data, registry.resolve)
    assert type(result["a"]) is np.ndarray and result["a"].tolist() == [1, 2]
    assert result["b"] == (1, 3)


def test_what_belongs_to_others_is_refused(strategy):
    registry, other = ObjectRegistry(strategy), ms.Variable([1.0])
    for wrong in (other, RemoteValue(object(), 1), threading.Lock(), (x for x in "generator")):
        with pytest.raises(TypeError):
            pickling.dumps([wrong], registry.reduce_with({}))


def test_remote_values_are_noted_and_resolved(strategy):
    registry, inputs = ObjectRegistry(strategy), {}
    registry.coordinator = object()
    value = RemoteValue(registry.coordinator, 1)
    data = pickling.dumps(lambda: value, registry.reduce_with(inputs))
    assert list(inputs.values()) == [value]
    (number,) = inputs
    with registry.with_inputs({number: memoryview(pickling.dumps([1, 2], registry.reduce))}):
        assert pickling.loads(data, registry.resolve)() == [1, 2]


def test_a_missing_cloudpickle_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "cloudpickle":
            raise ImportError("no cloudpickle")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependencyError, match=r"pip install 'mpistrat\[coordinator\]'"):
        pickling.load_cloudpickle()


def test_a_large_function_is_warned_of(strategy, caplog):
    pickling.dumps(np.zeros(3 << 20), ObjectRegistry(strategy).reduce, "step")
    assert "step has 24.0 MiB" in caplog.text


RULES = [
    lambda: ms.optimizers.SGD(0.5, 0.9, nesterov=True, name="mine"),
    lambda: ms.optimizers.Adam(0.01, global_clipnorm=1.0),
    lambda: ms.optimizers.AdamW(ms.optimizers.schedules.CosineDecay(0.1, 100)),
    lambda: ms.optimizers.Adagrad(0.1, initial_accumulator_value=0.5),
    lambda: ms.optimizers.RMSProp(0.1, momentum=0.3),
    lambda: ms.optimizers.Nadam(0.1),
    lambda: ms.optimizers.Ftrl(0.1, l1_regularization_strength=0.1),
]


@pytest.mark.parametrize("rule", RULES)
def test_an_optimizer_is_made_from_its_order_and_follows_changes(strategy, rule):
    registry, commands = ObjectRegistry(strategy), Commands(strategy)

    def order(optimizer):
        return pickling.loads(
            pickling.dumps(command_of("optimizer", (optimizer,), {}), registry.reduce_command), registry.resolve
        )

    chief = rule()
    name, args = order(chief)
    del optimizers._known[chief._core.ordinal]  # as on a rank whose program made none
    commands.execute(name, args)
    made = optimizers.find(chief._core.ordinal)
    assert made is not chief and type(made) is type(chief) and repr(made) == repr(chief)
    assert (made.slot_names, made._core.slot_start) == (chief.slot_names, chief._core.slot_start)
    with strategy.scope():
        v, w = ms.Variable([1.0, 2.0]), ms.Variable([1.0, 2.0])
    for step in range(3):
        for optimizer, variable in ((chief, v), (made, w)):
            strategy.run(optimizer.apply_gradients, ([(np.array([1.0, -step]), variable)],))
        assert v.numpy().tobytes() == w.numpy().tobytes()
    assert registry.note_optimizer(chief)
    assert not registry.note_optimizer(chief)
    chief.learning_rate = 0.25
    assert registry.note_optimizer(chief)
    commands.execute(*order(chief))
    assert optimizers.find(chief._core.ordinal) is made and made.learning_rate == 0.25


def test_the_order_of_a_variable_carries_its_form_only():
    name, (what,) = command_of("variable", (np.ones((2, 3), np.float16),), {"name": "v", "trainable": False})
    assert name == "variable"
    assert what == {"form": ((2, 3), np.float16), "name": "v", "trainable": False}
    assert command_of("variable", (lambda: 1.0,), {"dtype": "float64"})[1] == ({"dtype": "float64"},)
    assert command_of("save", ("file.h5",), {}) == ("save", ("file.h5",))
    with pytest.raises(TypeError):
        command_of("variable", (["text"],), {})


def closure(number, worker=None, priority=0):
    return Closure("f", b"", RemoteValue(None, 0), (), worker, priority, number=number)


def test_the_queue_keeps_priority_then_number():
    queue = ClosureQueue(2)
    for one in (closure(3), closure(1), closure(2, priority=5), closure(4, worker=1), closure(5, worker=1, priority=9)):
        queue.push(one)
    assert len(queue) == 5
    assert [queue.pop(0).number for _ in range(2)] == [2, 1]
    assert [queue.pop(1).number for _ in range(3)] == [5, 3, 4]
    assert queue.pop(1) is None
    for one in (closure(7), closure(6, worker=0), closure(8, worker=1)):
        queue.push(one)
    assert [one.number for one in queue.take(0)] == [6]
    assert [one.number for one in queue.take()] == [7, 8]
    assert len(queue) == 0
