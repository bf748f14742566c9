"""The collectives along an axis of a mesh: values, gradients, any size and dtype, and what ranks that differ are told."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError

AXES = {"data": 2, "model": 2}


def of(rank, shape=(4, 6), dtype=np.float64):
    return np.random.default_rng(rank).integers(0, 50, size=shape).astype(dtype)


@pytest.fixture
def mesh():
    with ms.MeshStrategy(axes=AXES) as strategy:
        yield strategy.mesh


def ranks_along(mesh, axis):
    return [2 * mesh.at["data"] + m for m in (0, 1)] if axis == "model" else [2 * d + mesh.at["model"] for d in (0, 1)]


@pytest.mark.ranks(4)
@pytest.mark.hosts(2, ranks_per_host=2)
@pytest.mark.parametrize("axis", ["data", "model"])
@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_values(mesh, axis, dtype):
    ranks, at = ranks_along(mesh, axis), mesh.at[axis]
    own = ranks[at]
    every = [of(rank, dtype=dtype) for rank in ranks]
    mine, total = of(own, dtype=dtype), every[0] + every[1]
    assert np.array_equal(mesh.all_reduce("SUM", mine, mesh_axis=axis), total)
    assert np.array_equal(mesh.all_reduce("MAX", mine, mesh_axis=axis), np.maximum(*every))
    for dim in (0, 1):
        assert np.array_equal(mesh.all_gather(mine, axis=dim, mesh_axis=axis), np.concatenate(every, axis=dim))
        assert np.array_equal(
            mesh.reduce_scatter("SUM", mine, axis=dim, mesh_axis=axis), np.split(total, 2, axis=dim)[at]
        )
        assert np.array_equal(mesh.shard(total, axis=dim, mesh_axis=axis), np.split(total, 2, axis=dim)[at])
        whole = np.concatenate(every, axis=dim)
        assert np.array_equal(
            mesh.reshard(mine, mesh_axis=axis, old=dim, new=1 - dim), np.split(whole, 2, axis=1 - dim)[at]
        )
        last = dim - 2  # the same, counted from the end
        assert np.array_equal(mesh.all_gather(mine, axis=last, mesh_axis=axis), whole)
        assert np.array_equal(
            mesh.reduce_scatter("SUM", mine, axis=last, mesh_axis=axis), np.split(total, 2, axis=dim)[at]
        )
        assert np.array_equal(mesh.shard(total, axis=last, mesh_axis=axis), np.split(total, 2, axis=dim)[at])
        assert np.array_equal(
            mesh.reshard(mine, mesh_axis=axis, old=last, new=1 - dim), np.split(whole, 2, axis=1 - dim)[at]
        )
    for root in (0, 1):
        assert np.array_equal(mesh.broadcast(mine, root=root, mesh_axis=axis), every[root])
    for result in (
        mesh.all_gather(mine, axis=0, mesh_axis=axis),
        mesh.reduce_scatter("SUM", mine, axis=0, mesh_axis=axis),
        mesh.reshard(mine, old=0, new=1, mesh_axis=axis),
    ):
        assert result.dtype == dtype


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("size", [0, 1, 70_001])  # none; one element; more than staging memory has room for
def test_sizes(size):
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD.size
    with ms.MeshStrategy(axes={"model": ranks}) as strategy:
        mesh = strategy.mesh
        mine = of(strategy.rank, (ranks, 2 * size))
        every = [of(rank, (ranks, 2 * size)) for rank in range(ranks)]
        assert np.array_equal(mesh.all_gather(mine, axis=0, mesh_axis="model"), np.concatenate(every))
        assert np.array_equal(mesh.reduce_scatter("SUM", mine, axis=0, mesh_axis="model"), sum(every)[[strategy.rank]])
        whole = np.concatenate(every, axis=1)
        assert np.array_equal(mesh.reshard(mine, old=1, new=0, mesh_axis="model"), whole[[strategy.rank]])


@pytest.mark.ranks(4)
def test_backward_is_the_transpose(mesh):
    """Of a linear map, <f(x), g> = <x, backward(g)>, summed over the ranks: split values once, equal ones once in all."""
    axis, rank, at = "model", 2 * mesh.at["data"] + mesh.at["model"], mesh.at["model"]
    x, same = of(rank), of(99)

    def total(a, b):
        return mesh.all_reduce("SUM", float((a * b).sum()), mesh_axis=axis)

    # used by each rank in its own way: gradients of an equal value differ
    g = of(50 + rank, (8, 6))
    assert total(mesh.all_gather(x, axis=0, mesh_axis=axis), g) == total(
        x, mesh.all_gather_backward(g, axis=0, mesh_axis=axis)
    )
    g = of(60 + rank)
    assert total(mesh.replicate(same, mesh_axis=axis), g) == (same * mesh.replicate_backward(g, mesh_axis=axis)).sum()
    g = of(70 + rank, (2, 6))
    assert total(mesh.reduce_scatter("SUM", x, axis=0, mesh_axis=axis), g) == total(
        x, mesh.reduce_scatter_backward(g, axis=0, mesh_axis=axis)
    )
    assert (
        total(mesh.shard(same, axis=0, mesh_axis=axis), g)
        == (same * mesh.shard_backward(g, axis=0, mesh_axis=axis)).sum()
    )
    g = of(80 + rank, (8, 3))
    assert total(mesh.reshard(x, old=0, new=1, mesh_axis=axis), g) == total(
        x, mesh.reshard_backward(g, old=0, new=1, mesh_axis=axis)
    )
    # an equal gradient of a sum
    g = of(90)
    assert (mesh.all_reduce("SUM", x, mesh_axis=axis) * g).sum() == total(
        x, mesh.all_reduce_backward(g, mesh_axis=axis)
    )
    assert mesh.shard(g, axis=0, mesh_axis=axis).shape == (2, 6)
    assert at in (0, 1)


@pytest.mark.ranks(4)
def test_ranks_that_differ_are_told(mesh):
    first = mesh.at["model"] == 0
    with pytest.raises(CollectiveMismatchError, match=r"axis model, ranks .*\(4, 6\).*\(6, 4\)"):
        mesh.all_reduce("SUM", np.zeros((4, 6) if first else (6, 4)), mesh_axis="model")
    with pytest.raises(CollectiveMismatchError, match="float32"):
        mesh.all_gather(np.zeros(4, np.float32 if first else np.float64), axis=0, mesh_axis="model")
    with pytest.raises(CollectiveMismatchError, match=r"Mesh\.reduce_scatter"):
        if first:
            mesh.reduce_scatter("SUM", np.zeros((4, 4)), mesh_axis="model")
        else:
            mesh.all_gather(np.zeros((4, 4)), mesh_axis="model")
    with pytest.raises(CollectiveMismatchError):
        mesh.reshard(np.zeros((4, 4)), old=0, new=1, mesh_axis="model") if first else mesh.reshard(
            np.zeros((4, 4)), old=1, new=0, mesh_axis="model"
        )


@pytest.mark.ranks(4)
def test_wrong_use(mesh):
    with pytest.raises(ValueError, match="'data', 'model'"):
        mesh.all_reduce("SUM", np.zeros(2), mesh_axis="modle")
    with pytest.raises(ValueError, match=r"a dimension of an array of shape \(2,\), got -2"):
        mesh.all_gather(np.zeros(2), axis=-2, mesh_axis="model")
    with pytest.raises(ValueError, match="another dimension than old"):
        mesh.reshard(np.zeros((2, 2)), old=1, new=-1, mesh_axis="model")
    with pytest.raises(ValueError, match="divide"):
        mesh.reduce_scatter("SUM", np.zeros(3), axis=0, mesh_axis="model")
    with pytest.raises(ValueError, match="divide"):
        mesh.shard(np.zeros(3), axis=0, mesh_axis="model")
    with pytest.raises(ValueError, match=r"Mesh\.reshard: new: expected another dimension than old, got 1"):
        mesh.reshard(np.zeros((4, 4)), old=1, new=1, mesh_axis="model")
    with pytest.raises(ValueError, match=r"Mesh\.reshard: .* got 3\. Pad the array there"):  # it takes no splits
        mesh.reshard(np.zeros((2, 3)), old=0, new=1, mesh_axis="model")
    with pytest.raises(ValueError, match="0 <= root < 2"):
        mesh.broadcast(np.zeros(2), root=2, mesh_axis="model")
    with pytest.raises(TypeError):
        mesh.reduce_scatter("SUM", np.array([True, False]), axis=0, mesh_axis="model")
    assert mesh.comm("model").allgather(mesh.at["model"]) == [0, 1]
