"""reduce and gather on the replicas of one process: the numbers of TensorFlow's documentation, and its edges."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import IndexedSlices, PerReplica, ReduceOp
from mpistrat.errors import CollectiveMismatchError
from tests.harness.strategies import without_mpi


@pytest.fixture
def two():
    with without_mpi(2) as made:
        yield made


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n}replicas")
def strategy(request):
    with without_mpi(request.param) as made:
        yield made


FOUR = PerReplica([np.array([0, 1, 2, 3]), np.array([4, 5, 6, 7])])  # the example of tf.distribute.Strategy.reduce


class TestReduce:
    @pytest.mark.parametrize(
        ("op", "axis", "expected"),
        [
            ("SUM", None, [4, 6, 8, 10]),
            ("MEAN", None, [2, 3, 4, 5]),
            ("SUM", 0, 28),
            ("MEAN", 0, 3.5),
            ("sum", -1, 28),
            (ReduceOp.MEAN, (0,), 3.5),
        ],
    )
    def test_tensorflow_s_example(self, two, op, axis, expected):
        found = two.reduce(op, FOUR, axis=axis)
        assert found.tolist() == expected
        assert found.dtype == (np.float64 if str(op).upper().endswith("MEAN") else np.int64)

    def test_mean_over_an_axis_counts_elements(self, two):
        ragged = PerReplica([np.array([0.0, 1, 2, 3]), np.array([4.0, 5])])
        assert two.reduce("MEAN", ragged, axis=0) == 2.5  # the mean of the means would be 3
        assert two.reduce("SUM", ragged, axis=0) == 15

    def test_a_replica_without_elements(self, two):
        value = PerReplica([np.array([1.0, 2, 3, 6]), np.zeros(0)])
        assert two.reduce("MEAN", value, axis=0) == 3.0
        assert two.reduce("SUM", value, axis=0) == 12.0

    def test_no_element_anywhere(self, two):
        empty = PerReplica([np.zeros((0, 2)), np.zeros((0, 2))])
        with pytest.raises(ValueError, match="an element on some replica"):
            two.reduce("MEAN", empty, axis=0)
        assert two.reduce("SUM", empty, axis=0).tolist() == [0.0, 0.0]

    def test_several_axes(self, two):
        a = np.arange(24.0).reshape(2, 3, 4)
        value = PerReplica([a, a[:1] + 100])
        both = np.concatenate([a, a[:1] + 100])
        assert np.allclose(two.reduce("MEAN", value, axis=(0, -1)), both.mean(axis=(0, 2)), rtol=1e-15)
        assert np.allclose(two.reduce("SUM", value, axis=[2, 0]), both.sum(axis=(0, 2)), rtol=1e-15)

    @pytest.mark.parametrize("axis", [1, -2, (0, 0), (0, -1), 0.0, "0"])
    def test_axes_out_of_range(self, two, axis):
        with pytest.raises(ValueError, match=r"different axes in \[-1, 1\)"):
            two.reduce("SUM", FOUR, axis=axis)

    def test_a_scalar_has_no_axis(self, strategy):
        with pytest.raises(ValueError, match="axis"):
            strategy.reduce("MEAN", strategy.run(lambda: 1.0), axis=0)

    @pytest.mark.parametrize("dtype", ["float16", "float32", "complex64", "int8", "uint8", "int64", "float64"])
    def test_dtypes(self, two, dtype):
        value = PerReplica([np.ones(3, dtype), np.full(5, 3, dtype)])
        mean = two.reduce("MEAN", value, axis=0)
        assert mean == 18 / 8
        assert mean.dtype == (np.float64 if np.dtype(dtype).kind in "iu" else np.dtype(dtype))
        total = two.reduce("SUM", value, axis=0)
        assert total == 18
        assert total.dtype == dtype

    def test_half_precision_is_summed_in_single(self, two):
        value = PerReplica([np.full(4096, 1, np.float16), np.full(4096, 1, np.float16)])
        assert two.reduce("SUM", value, axis=0) == 8192
        assert two.reduce("MEAN", PerReplica([np.full(5000, 60000, np.float16)] * 2), axis=0) == np.float16(60000)

    def test_bool_is_refused(self, two):
        with pytest.raises(TypeError):
            two.reduce("SUM", PerReplica([np.ones(2, bool)] * 2), axis=0)

    def test_scalars_are_numpy_scalars(self, strategy):
        n = strategy.num_replicas_in_sync
        found = strategy.reduce("SUM", strategy.run(lambda: np.float32(2.0)), axis=None)
        assert type(found) is np.float32
        assert found == 2 * n

    @pytest.mark.parametrize("axis", [None, 0])
    @pytest.mark.parametrize("op", ["SUM", "MEAN"])
    def test_a_nest_is_its_leaves(self, strategy, op, axis):
        n = strategy.num_replicas_in_sync
        leaves = [
            PerReplica([np.arange(4.0) + r for r in range(n)]),
            PerReplica([np.arange(6, dtype=np.float32).reshape(2, 3) * r for r in range(n)]),
        ]
        found = strategy.reduce(op, {"b": leaves[0], "a": (leaves[1],)}, axis=axis)
        for got, leaf in ((found["b"], leaves[0]), (found["a"][0], leaves[1])):
            alone = strategy.reduce(op, leaf, axis=axis)
            assert np.array_equal(got, alone)
            assert got.dtype == alone.dtype

    def test_a_nest_is_one_collective(self, two, monkeypatch):
        calls = []
        ops = two.extended.cross_device_ops
        for name in ("reduce", "batch_reduce"):
            real = getattr(ops, name)
            monkeypatch.setattr(
                ops, name, lambda *a, _name=name, _real=real, **k: (calls.append(_name), _real(*a, **k))[1]
            )
        two.reduce("MEAN", [FOUR, (FOUR, FOUR)], axis=0)
        two.reduce("SUM", [FOUR, FOUR], axis=None)
        two.reduce("MEAN", FOUR, axis=0)
        assert calls == ["batch_reduce", "batch_reduce", "reduce"]

    def test_plain_values(self, two):
        with pytest.raises(ValueError, match="a PerReplica"):
            two.reduce("SUM", np.ones(2), axis=None)
        with pytest.raises(ValueError, match="a PerReplica"):
            two.reduce("SUM", np.ones(2), axis=0)
        assert two.reduce("MEAN", np.array([1.0, 3.0]), axis=None).tolist() == [1.0, 3.0]
        assert two.reduce("MEAN", np.array([1.0, 3.0]), axis=0) == 2.0

    def test_mirrored_values(self, two):
        value = ms.Mirrored([np.array([1.0, 3.0])] * 2)
        assert two.reduce("MEAN", value, axis=0) == 2.0
        for axis in (None, 0):
            with pytest.raises(ValueError, match="Mirrored"):
                two.reduce("SUM", value, axis=axis)

    @pytest.mark.parametrize("op", ["MEDIAN", ms.VariableAggregation.SUM, None, 1])
    def test_no_other_reduction(self, two, op):
        with pytest.raises(ValueError, match=r"a ReduceOp or its name \(SUM, MEAN, MIN, MAX, PROD\)"):
            two.reduce(op, FOUR, axis=None)

    @pytest.mark.parametrize(
        ("op", "axis", "expected"),
        [
            ("MIN", None, [0, 1, 2, 3]),
            ("MAX", None, [4, 5, 6, 7]),
            ("PROD", None, [0, 5, 12, 21]),
            ("MIN", 0, 0),
            (ReduceOp.MAX, -1, 7),
            ("prod", 0, 0),
        ],
    )
    def test_minimum_maximum_and_product(self, two, op, axis, expected):
        found = two.reduce(op, FOUR, axis=axis)
        assert found.tolist() == expected
        assert found.dtype == np.int64
        assert two.reduce(op, {"x": FOUR, "y": [FOUR]}, axis=axis)["y"][0].tolist() == expected

    @pytest.mark.parametrize("dtype", ["int8", "uint8", "uint64", "float16", "float32", "float64", "longdouble"])
    def test_extremes_over_axes(self, two, dtype):
        a = (np.arange(1, 25).reshape(2, 3, 4) % 7 + 1).astype(dtype)
        b = np.full((1, 3, 4), 2, dtype)
        both = np.concatenate([a, b])
        for op, of in (("MIN", np.min), ("MAX", np.max)):
            for empty in (a[:0], b):
                every = np.concatenate([a, empty])
                found = two.reduce(op, PerReplica([empty, a]), axis=(0, -1))
                assert found.tolist() == of(every, axis=(0, 2)).tolist()
                assert found.dtype == dtype
        found = two.reduce("PROD", PerReplica([a, b]), axis=0)
        assert found.tolist() == np.prod(both, axis=0, dtype=np.int64).tolist()  # at most 7 * 7 * 2
        assert found.dtype == dtype
        assert two.reduce("PROD", PerReplica([a[:0], b]), axis=0).tolist() == b[0].tolist()

    @pytest.mark.parametrize(("op", "dtype"), [("MIN", "int8"), ("MAX", "int8"), ("MIN", "f4"), ("MAX", "f4")])
    def test_the_identity_as_a_value(self, two, op, dtype):
        """The largest number is a minimum like any other, and not taken for nothing."""
        if dtype == "int8":
            value = 127 if op == "MIN" else -128
        else:
            value = np.inf if op == "MIN" else -np.inf
        assert two.reduce(op, PerReplica([np.full(2, value, dtype), np.zeros(0, dtype)]), axis=0) == value

    def test_extremes_of_no_element(self, two):
        empty = PerReplica([np.zeros((0, 2), np.float32)] * 2)
        for op, what in (("MIN", "minimum"), ("MAX", "maximum")):
            with pytest.raises(ValueError, match=f"an element on some replica, got none.*{what}"):
                two.reduce(op, empty, axis=0)
            assert two.reduce(op, empty, axis=1).shape == (0,)
        assert two.reduce("PROD", empty, axis=0).tolist() == [1.0, 1.0]

    @pytest.mark.parametrize("axis", [None, 0])
    def test_nan_is_minimum_and_maximum(self, two, axis):
        value = PerReplica([np.array([np.nan, 1.0]), np.array([-np.inf, 2.0])])
        for op in ("MIN", "MAX"):
            assert np.isnan(np.ravel(two.reduce(op, value, axis=axis))[0])

    @pytest.mark.parametrize("axis", [None, 0])
    def test_values_without_a_minimum(self, two, axis):
        for op in ("MIN", "MAX", "PROD"):
            bools = [(bool, "an array of numbers")] if op == "PROD" else []
            for dtype, text in ((complex, f"real numbers for {op}"), *bools):
                with pytest.raises(TypeError, match=text):
                    two.reduce(op, PerReplica([np.ones(2, dtype)] * 2), axis=axis)

    @pytest.mark.parametrize("axis", [None, 0])
    def test_extremes_of_equal_values(self, two, axis):
        for value in (np.array([1.0, 3.0]), ms.Mirrored([np.array([1.0, 3.0])] * 2)):
            assert np.max(two.reduce("MAX", value, axis=axis)) == 3.0
            with pytest.raises(ValueError, match="a PerReplica"):
                two.reduce("PROD", value, axis=axis)

    def test_minimum_in_a_step_and_where_destinations_are(self, two):
        found = two.run(
            lambda: ms.get_replica_context().all_reduce("MAX", ms.get_replica_context().replica_id_in_sync_group)
        )
        assert [int(value) for value in two.local_results(found)] == [1, 1]
        assert two.extended.reduce_to("MIN", FOUR, "cpu:0").tolist() == [0, 1, 2, 3]
        assert two.extended.batch_reduce_to("PROD", [(FOUR, None)])[0].tolist() == [0, 5, 12, 21]

    def test_replicas_of_different_shapes(self, two):
        with pytest.raises(CollectiveMismatchError, match="shape"):
            two.reduce("SUM", PerReplica([np.ones(2), np.ones(3)]), axis=None)

    def test_indexed_slices(self, two):
        value = PerReplica([IndexedSlices(np.ones((1, 2)), np.array([r]), (3, 2)) for r in range(2)])
        found = two.reduce("MEAN", value, axis=None)
        assert found.to_dense().tolist() == [[0.5, 0.5], [0.5, 0.5], [0, 0]]

    def test_options_of_the_strategy_and_of_a_call(self, two, monkeypatch):
        seen = []
        ops = two.extended.cross_device_ops
        monkeypatch.setattr(
            ops, "reduce", lambda op, value, destinations, options, *caller: seen.append(options) or 0.0
        )
        two.extended.collectives._options = ms.CommunicationOptions(bytes_per_pack=8)
        two.reduce("SUM", FOUR, axis=None)
        two.reduce("SUM", FOUR, axis=None, options=ms.CommunicationOptions(timeout_seconds=5))
        assert seen[0] == ms.CommunicationOptions(bytes_per_pack=8)
        assert seen[1] == ms.CommunicationOptions(bytes_per_pack=8, timeout_seconds=5)


class TestGather:
    def test_ragged_on_the_axis(self, two):
        a, b = np.arange(6).reshape(2, 3), np.arange(3).reshape(1, 3) + 10
        found = two.gather(PerReplica([a, b]), axis=0)
        assert found.tolist() == [[0, 1, 2], [3, 4, 5], [10, 11, 12]]

    def test_another_axis(self, two):
        found = two.gather(PerReplica([np.zeros((2, 1)), np.ones((2, 2))]), axis=1)
        assert found.tolist() == [[0, 1, 1], [0, 1, 1]]

    def test_nests(self, two):
        found = two.gather({"x": PerReplica([np.array([1]), np.array([2, 3])])}, axis=0)
        assert found["x"].tolist() == [1, 2, 3]

    def test_scalars(self, two):
        with pytest.raises(ValueError, match="a scalar"):
            two.gather(PerReplica([1.0, 2.0]), axis=0)

    @pytest.mark.parametrize("axis", [-3, 2])
    def test_axis_out_of_range(self, two, axis):
        with pytest.raises(ValueError, match="axis"):
            two.gather(PerReplica([np.ones((1, 1))] * 2), axis=axis)

    def test_other_dimensions_must_match(self, two):
        with pytest.raises(CollectiveMismatchError):
            two.gather(PerReplica([np.ones((1, 2)), np.ones((1, 3))]), axis=0)


class TestExtended:
    def test_reduce_to(self, two):
        assert two.extended.reduce_to("SUM", FOUR, "cpu:0").tolist() == [4, 6, 8, 10]
        for destinations in (["cpu:0"], ("cpu:0", "cpu:1")):
            with pytest.raises(ValueError, match="destinations"):
                two.extended.reduce_to("SUM", FOUR, destinations)

    def test_batch_reduce_to_is_a_loop_of_reduce_to(self, two):
        values = [FOUR, PerReplica([1.0, 2.0]), PerReplica([np.ones((2, 2), np.float32)] * 2)]
        for op in ("SUM", "MEAN"):
            found = two.extended.batch_reduce_to(op, [(value, "cpu:0") for value in values])
            for got, value in zip(found, values, strict=True):
                assert np.array_equal(got, two.extended.reduce_to(op, value, "cpu:0"))

    def test_broadcast_to(self, two):
        assert two.extended.broadcast_to(PerReplica([np.array([1, 2]), np.array([3, 4])])).tolist() == [1, 2]


class TestUpdate:
    def test_once_for_each_copy(self, two):
        with two.scope():
            v = ms.Variable(1.0)
        calls = []

        def add(var, amount, *, times):
            calls.append(var)
            var.assign_add(amount * times)
            return var.numpy()

        assert two.extended.update(v, add, args=(2.0,), kwargs={"times": 3}) == 7.0
        assert two.extended.update(v, add, (1.0,), {"times": 1}, group=False) == [8.0]
        assert [var is v for var in calls] == [True, True]

    def test_with_a_reduced_value(self, two):
        """The example of tf.distribute.StrategyExtended: merge_call, reduce_to, update."""
        with two.scope():
            v = ms.Variable(0.0)

        def merge(strategy, value):
            total = strategy.extended.reduce_to("SUM", value, v)
            return strategy.extended.update(v, lambda var, amount: var.assign(amount).numpy(), args=(total,))

        def step():
            ctx = ms.get_replica_context()
            return ctx.merge_call(merge, args=(1.0 + ctx.replica_id_in_sync_group,))

        assert float(two.run(step)) == 3.0
        assert float(v) == 3.0

    def test_mirrored_arguments(self, two):
        with two.scope():
            v = ms.Variable(0.0)
        assert two.extended.update(v, lambda var, x: x, args=(ms.Mirrored([5, 6]),)) == 5

    def test_per_replica_arguments_are_refused(self, two):
        with two.scope():
            v = ms.Variable(0.0)
        for args, kwargs in (((PerReplica([1, 2]),), None), ((), {"x": [PerReplica([1, 2])]})):
            with pytest.raises(ValueError, match="plain or Mirrored"):
                two.extended.update(v, lambda var, **k: None, args=args, kwargs=kwargs)

    def test_foreign_variables(self, two):
        with without_mpi() as other:
            with other.scope():
                v = ms.Variable(0.0)
            for foreign in (v, 5):
                with pytest.raises(ValueError, match="scope of the .* that runs|this strategy's scope"):
                    two.extended.update(foreign, lambda var: None)
                with (
                    pytest.raises(ValueError, match="scope of the .* that runs|this strategy's scope"),
                    two.extended.colocate_vars_with(foreign),
                ):
                    pass
                assert not two.extended.variable_created_in_scope(foreign)

    def test_what_may_not_happen_inside(self, two):
        with two.scope():
            v = ms.Variable(0.0)
        for act in (
            lambda var: two.reduce("SUM", 1.0),
            lambda var: two.run(int),
            lambda var: ms.Variable(1.0),
            lambda var: two.extended.update(v, lambda w: None),
        ):
            with pytest.raises(RuntimeError, match="update context"):
                two.extended.update(v, act)
        with pytest.raises(RuntimeError, match="replica context"):
            two.run(lambda: two.extended.update(v, lambda w: None))

    def test_containers_and_colocation(self, two):
        with two.scope():
            v = ms.Variable(0.0)
            with two.extended.colocate_vars_with(v):
                w = ms.Variable(1.0)
        assert two.extended.value_container(v) is v
        assert two.extended.variable_created_in_scope(w)
        assert two.extended.variables == (v, w)
        assert two.extended.non_slot_devices([v]) == two.extended.parameter_devices
