"""SLURM's short forms come apart into what they stand for, whatever stands in them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.cluster.resolvers.slurm import expand_hostlist, expand_tasks_per_node
from mpistrat.errors import ClusterError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n[1,3]", "n1 n3"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[1-2],m5,o[3-4,6,7-9]", "n1 n2 m5 o3 o4 o6 o7 o8 o9"),
        ("n[0001-0003],m5,o[009-011]", "n0001 n0002 n0003 m5 o009 o010 o011"),
        ("n[9-11]", "n9 n10 n11"),
        ("r[1-2]n[1-2]-ib", "r1n1-ib r1n2-ib r2n1-ib r2n2-ib"),
        ("[1-2]", "1 2"),
        ("node10,node2", "node10 node2"),
    ],
)
def test_host_lists(text, hosts):
    assert expand_hostlist(text) == hosts.split()


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2", [2]), ("2,1,3", [2, 1, 3]), ("3(x2),2,1", [3, 3, 2, 1]), ("3(x2),2,11(x4)", [3, 3, 2, 11, 11, 11, 11])],
)
def test_tasks_per_node(text, counts):
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize(
    "text", ["", ",", "n[", "n[1", "n]1", "n[]", "n[1-]", "n[3-1]", "n[a-b]", "n[[1]]", "a b", "n[1]],"]
)
def test_malformed_host_lists(text):
    with pytest.raises(ClusterError, match="SLURM host list"):
        expand_hostlist(text)


@pytest.mark.parametrize("text", ["", "a", "1,", "3(x)", "3(2)", "-1", "3(x2", "1.5"])
def test_malformed_tasks_per_node(text):
    with pytest.raises(ClusterError, match="SLURM tasks per node"):
        expand_tasks_per_node(text)


@pytest.mark.parametrize(
    "text",
    [
        "n[1-999999999]",
        "[0-999][0-999]",
        "[0-99]" * 5000,
        "a" * 300 + "[0-60000]",
        "n" * (1 << 21),
        "n[0-40000],n[0-40000]",
    ],
)
def test_a_bomb_is_refused_before_it_goes_off(text):
    with pytest.raises(ClusterError, match="at most"):
        expand_hostlist(text)


@pytest.mark.parametrize("text", ["1(x999999999)", "1(x40000),1(x40000)", "1," * (1 << 20)], ids=range(3))
def test_a_bomb_of_counts_is_refused(text):
    with pytest.raises(ClusterError, match="at most"):
        expand_tasks_per_node(text)


ENTRY = st.tuples(
    st.text("abcxyz-", min_size=1, max_size=5),
    st.integers(1, 4),  # width
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=3),  # first, further
)


@settings(derandomize=True, deadline=None)
@given(st.lists(ENTRY, min_size=1, max_size=5))
def test_what_is_written_short_is_read_long(entries):
    written, hosts = [], []
    for name, width, ranges in entries:
        texts = [f"{a:0{width}d}-{a + n:0{width}d}" if n else f"{a:0{width}d}" for a, n in ranges]
        written.append(f"{name}[{','.join(texts)}]")
        hosts += [f"{name}{number:0{width}d}" for a, n in ranges for number in range(a, a + n + 1)]
    assert expand_hostlist(",".join(written)) == hosts


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 5)), min_size=1))
def test_counts_written_short_are_read_long(runs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_tasks_per_node(text) == [count for count, times in runs for _ in range(times)]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.one_of(st.text(), st.text("n0123[]-,(x)", max_size=40)))
def test_no_text_raises_anything_else(text):
    for expand in (expand_hostlist, expand_tasks_per_node):
        try:
            assert all(item is not None for item in expand(text))
        except ClusterError:
            pass
