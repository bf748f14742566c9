"""map in threads and in processes: the same results in the same order, errors that arrive, workers that end."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat.data import ArraySpec, Dataset, from_arrays, from_generator
from tests.harness import map_functions
from tests.launch.launcher import ROOT


def numbers(n: int) -> Dataset:
    """In order."""
    return from_generator(lambda: iter(range(n)), ArraySpec((), np.int64))


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("mpistrat-map")}


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def eventually(condition: Any, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


SOURCES = pytest.mark.parametrize("source", [Dataset.range, numbers], ids=["random", "in_order"])
POOLS = pytest.mark.parametrize("options", [{}, {"processes": True}], ids=["threads", "processes"])


@SOURCES
@POOLS
def test_results_are_those_without_workers(source: Any, options: dict[str, bool]) -> None:
    mapped = source(11).map(map_functions.double, num_parallel_calls=3, **options)
    assert [int(x) for x in mapped] == [2 * x for x in range(11)]
    assert [x.tolist() for x in mapped.batch(4)] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20]]
    batches = source(11).batch(4).map(map_functions.double, num_parallel_calls=2, **options)
    assert [x.tolist() for x in batches] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20]]
    iterator = iter(batches)
    iterator.restore({"epoch": 0, "next": 2})
    assert [x.tolist() for x in iterator] == [[16, 18, 20]]
    assert mapped.element_spec == ArraySpec((), np.int64)
    assert source(3).take(0).map(map_functions.double, num_parallel_calls=2, **options).element_spec.shape == ()


def test_rows_of_a_batch_are_spread_over_the_threads() -> None:
    together = threading.Barrier(4)

    def wait(x: int) -> int:
        together.wait(10)  # passes only with four rows at a time
        return threading.get_ident()

    rows = Dataset.range(8).map(wait, num_parallel_calls=4, element_spec=ArraySpec((), np.int64))
    assert len(set(rows.batch(8).element(0, 0).tolist())) == 4


def test_a_stream_is_read_ahead_as_far_as_calls_are_made_at_a_time() -> None:
    read: list[int] = []

    def rows() -> Any:
        for i in range(100):
            read.append(i)
            yield i

    spec = ArraySpec((), np.int64)
    iterator = iter(from_generator(rows, spec).map(lambda x: x, num_parallel_calls=3, element_spec=spec))
    assert int(next(iterator)) == 0
    assert read == [0, 1, 2]


def test_results_may_come_as_they_are_ready() -> None:
    others = threading.Event()

    def wait_at_first(x: int) -> int:
        if x == 0:
            assert others.wait(10)
        return int(x)

    spec = ArraySpec((), np.int64)
    mapped = numbers(6).map(wait_at_first, num_parallel_calls=2, deterministic=False, element_spec=spec)
    assert not mapped.batch(2).node.traits.deterministic
    iterator = iter(mapped)
    assert [int(x) for x in itertools.islice(iterator, 4)] == [1, 2, 3, 4]
    others.set()
    assert sorted(int(x) for x in iterator) == [0, 5]
    assert Dataset.range(6).map(wait_at_first, num_parallel_calls=2, deterministic=False).node.traits.deterministic
    assert not Dataset.range(2).flat_map(lambda x: mapped).node.traits.deterministic
    assert numbers(6).map(wait_at_first, deterministic=False).node.traits.deterministic


@SOURCES
@pytest.mark.parametrize(
    "options", [{}, {"num_parallel_calls": 2}, {"processes": True}], ids=["", "threads", "processes"]
)
def test_an_error_names_the_element_and_shows_where_it_came_from(source: Any, options: dict[str, Any]) -> None:
    for dataset in (source(9), source(9).filter(lambda x: x != 1)):
        mapped = dataset.map(map_functions.fail_at_5, **options)
        iterator = iter(mapped.prefetch(2))
        seen = []
        with pytest.raises(KeyError, match="not five") as caught:
            for element in iterator:
                seen.append(int(element))
        assert seen == [0, 1, 2, 3, 4] or seen == [0, 2, 3, 4]
        (note,) = caught.value.__notes__
        assert f"raised at element {len(seen)} of epoch 0" in note
        assert 'raise KeyError("not five")' in "".join(traceback.format_exception(caught.value))
    with pytest.raises(KeyError) as caught:
        list(source(9).map(map_functions.fail_at_5, **options).batch(9))
    assert "element 5 of epoch 0" in caught.value.__notes__[0]


@SOURCES
@pytest.mark.parametrize("options", [{}, {"num_parallel_calls": 2}, {"processes": True}], ids=str)
def test_a_function_that_returns_nothing_is_named(source: Any, options: dict[str, Any]) -> None:
    said = r"map\(nothing_at_5.*: element {}: expected arrays, numbers or strings, got None. The function must always return"
    for dataset, position in ((source(9), 5), (source(9).batch(2), 2), (source(9).filter(bool).batch(2), 2)):
        mapped = dataset.map(map_functions.nothing_at_5, **options)
        with pytest.raises(ValueError, match=said.format(position)):
            list(mapped)
    for dataset in (source(9).skip(5), source(9).skip(5).batch(1)):
        with pytest.raises(ValueError, match=said.format(0)):
            _ = dataset.map(map_functions.nothing_at_5, **options).element_spec
    given = source(9).map(map_functions.nothing_at_5, element_spec=ArraySpec((), np.int64), **options)
    with pytest.raises(ValueError, match=said.format(5)):
        list(given)


def test_what_is_no_array_is_named_with_its_place() -> None:
    for dataset in (Dataset.range(4), Dataset.range(4).batch(2)):
        for value, got in ((None, "None"), ({1, 2}, "a set")):
            with pytest.raises(ValueError, match=rf"map\(<lambda>\): element 0: .* got {got} at \['b'\]\."):
                list(dataset.map(lambda x, value=value: {"a": x, "b": value}))
    words = Dataset.range(4).batch(2).map(lambda x: np.array(["a"] * len(x), object))
    assert [list(batch) for batch in words] == [["a", "a"], ["a", "a"]]


def test_an_error_in_a_batch_names_the_batch() -> None:
    for dataset in (Dataset.range(9), numbers(9)):
        with pytest.raises(ValueError, match="truth value") as caught:
            list(dataset.batch(2).map(lambda x: x if x[0] < 4 or x else -x))
        assert "element 2 of epoch 0" in caught.value.__notes__[0]


@SOURCES
@pytest.mark.parametrize("parallel", [None, 2])
def test_stop_iteration_is_not_the_end(source: Any, parallel: int | None) -> None:
    def stop_at_3(x: int) -> int:
        if x == 3:
            raise StopIteration
        return x

    for dataset in (source(5), source(5).batch(1)):
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(dataset.map(stop_at_3, num_parallel_calls=parallel))


def test_threads_end_with_the_dataset() -> None:
    gc.collect()
    assert eventually(lambda: not workers())
    mapped = Dataset.range(8).map(lambda x: x, num_parallel_calls=2)
    list(mapped.batch(4))
    first = workers()
    assert len(first) == 2
    list(mapped.skip(1).batch(4))
    assert workers() == first  # started once
    del mapped
    gc.collect()
    assert eventually(lambda: not workers())


def test_processes_are_other_processes_start_once_and_end_with_the_dataset() -> None:
    mapped = Dataset.range(8).map(map_functions.process, num_parallel_calls=2, processes=True)
    first = set(mapped.batch(8).element(0, 0).tolist())
    assert len(first) == 2
    assert os.getpid() not in first
    assert set(mapped.skip(2).batch(6).element(0, 0).tolist()) == first
    assert all(map(is_alive, first))
    del mapped
    gc.collect()
    assert eventually(lambda: not any(map(is_alive, first)))


@pytest.mark.parametrize(
    ("function", "how"), [(map_functions.die_at_5, "killed by signal 9"), (map_functions.exit_at_5, "exit code 7")]
)
@SOURCES
def test_a_process_that_dies_is_named(source: Any, function: Any, how: str) -> None:
    mapped = source(9).map(function, num_parallel_calls=2, processes=True, element_spec=ArraySpec((), np.int64))
    with pytest.raises(RuntimeError, match=rf"Dataset\.map: process \d of {function.__name__} \(pid \d+\).*{how}"):
        list(mapped.batch(3))


def test_what_cannot_be_sent_is_explained() -> None:
    rows = Dataset.range(3)
    for function in (lambda x: x, lambda x: threading.Lock()):
        with pytest.raises(TypeError, match=r"function that can be pickled.*leave processes=True out"):
            rows.map(function, processes=True)
    with pytest.raises(RuntimeError, match="process 0 of lock: TypeError.*pickle"):
        list(rows.map(map_functions.lock, processes=True))
    with pytest.raises(RuntimeError, match="process 0 of fail_secretly: SecretError: secret") as caught:
        list(rows.map(map_functions.fail_secretly, processes=True))
    assert "map_functions.py" in str(caught.value.__cause__)


def test_processes_know_nothing_of_a_launcher() -> None:
    with pytest.raises(RuntimeError, match=r"it is not a rank, and would hang \(MPI.COMM_WORLD\)"):
        list(Dataset.range(1).map(map_functions.import_mpi, processes=True))
    assert list(Dataset.range(1).map(map_functions.launcher_variables, processes=True)) == [0]


def test_tuples_strings_and_large_rows_go_to_processes_and_back() -> None:
    pairs = from_arrays((np.arange(4), np.arange(4) * 10)).map(map_functions.add, processes=True)
    assert [x.tolist() for x in pairs.batch(4)] == [[0, 11, 22, 33]]
    texts = from_arrays(np.array(["a", "bc"], object)).map(map_functions.double, num_parallel_calls=2, processes=True)
    assert [x.tolist() for x in texts.batch(2)] == [["aa", "bcbc"]]
    rows = Dataset.range(3).map(map_functions.large, num_parallel_calls=2, processes=True).batch(3).element(0, 0)
    assert rows.shape == (3, 1 << 20)
    assert rows[:, -1].tolist() == [0, 1, 2]


PROGRAM = """
import sys
import numpy as np
from mpistrat.data import Dataset

def double(x):
    return 2 * x

{guard}
    rows = iter(Dataset.range(10).map(double, num_parallel_calls=2, processes=True).batch(2).prefetch(1))
    print(next(rows).tolist(), flush=True)
    {end}
"""


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise KeyError"])
def test_a_program_ends_with_its_processes(end: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(guard='if __name__ == "__main__":', end=end))
    result = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.stdout == "[0, 2]\n"
    assert result.returncode == (3 if "exit" in end else 1)
    assert "KeyError" in result.stderr or not result.stderr


PLANTED = """
import os
from mpistrat.data import Dataset

def told(x):
    import numpy as np
    return np.frombuffer(f"{os.environ.get('PYTHONPATH')}, {os.environ.get('PYTHONSAFEPATH')}".encode().ljust(500), np.uint8)

def double(x):
    return 2 * x

if __name__ == "__main__":
    print([int(x) for x in Dataset.range(2).map(double, processes=True)][1:])
    for environment in next(iter(Dataset.range(1).map(told, processes=True))), told(0):
        print(environment.tobytes().decode().strip())
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 knows no way to leave the working directory out")
@pytest.mark.parametrize("beside", [False, True])
def test_files_of_the_working_folder_are_not_imported_by_processes(beside: bool, tmp_path: Path) -> None:
    """The program's own folder is what a program chose; the working folder may be anybody's."""
    (folder := tmp_path / "data").mkdir()
    for name in ("json", "socket", "ctypes", "selectors", "signal", "struct", "random", "numpy", "site"):
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'planted')!r}, 'a').write({name!r})\nraise SystemExit(9)\n"
        )
    (programs := tmp_path / "programs").mkdir()
    path = programs / "program.py"
    path.write_text(PLANTED)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    if beside:  # a checkout: nothing but the program's folder leads to the package
        (programs / "mpistrat").symlink_to(ROOT / "mpistrat")
    else:
        env["PYTHONPATH"] = str(ROOT)
    result = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=60, env=env, cwd=folder
    )
    assert result.returncode == 0, result
    assert result.stdout == "[2]\n" + f"{env.get('PYTHONPATH')}, None\n" * 2
    assert not (tmp_path / "planted").exists(), (tmp_path / "planted").read_text()


def test_a_program_without_a_guard_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(guard="if True:", end="pass"))
    result = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 1
    assert "before it had started" in result.stderr
    assert 'under `if __name__ == "__main__":`' in result.stderr


def test_wrong_arguments() -> None:
    rows = Dataset.range(3)
    with pytest.raises(ValueError, match="num_parallel_calls: expected at least 1, got 0"):
        rows.map(abs, num_parallel_calls=0)
    with pytest.raises(TypeError, match="num_parallel_calls: expected an integer"):
        rows.map(abs, num_parallel_calls=1.5)  # type: ignore[arg-type]
    assert "map(double, 2 processes)" in str(rows.map(map_functions.double, num_parallel_calls=2, processes=True))
    assert "map(abs, 2 threads)" in str(rows.map(abs, num_parallel_calls=2))
    assert "map(abs)" in str(rows.map(abs))
