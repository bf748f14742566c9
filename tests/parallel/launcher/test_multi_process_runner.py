"""ms.MultiProcessRunner: ranks that a test of the user's own starts, watches and kills, under plain pytest."""

import json
import os
import subprocess
import textwrap
import time

import pytest


def passes(mpi, folder, program, *options):
    """Run a user's file of tests by pytest, with no launcher; all pass."""
    (folder / "test_mine.py").write_text(textwrap.dedent(program))
    command = [mpi.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", *options, folder]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "mpistrat.launcher.launched" not in left
    return result.stdout


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_what_each_rank_returns_and_prints(mpi, tmp_path, mode):
    passes(
        mpi,
        tmp_path,
        """
        import sys
        import mpistrat as ms

        class Mine:
            pass

        def train(scale):
            with ms.MultiWorkerMirroredStrategy() as strategy:
                print("[9] rank", strategy.rank)
                print("wrong?", strategy.rank, file=sys.stderr)
                return Mine(), scale * strategy.reduce("SUM", strategy.rank + 1)

        def test_all(capsys):
            with ms.MultiProcessRunner(train, (2,), ranks=3) as runner:
                results = runner.join(timeout=60)
            assert [result.return_value[1] for result in results] == [12, 12, 12]
            assert all(isinstance(result.return_value[0], Mine) for result in results)
            assert [(result.returned, result.error) for result in results] == [(True, None)] * 3
            for rank, result in enumerate(results):
                assert sorted(result.output) == sorted([f"[9] rank {rank}", f"wrong? {rank}"])
            assert sorted(capsys.readouterr().out.splitlines()) == sorted(sum((r.output for r in results), []))
        """,
        f"--import-mode={mode}",
    )


def test_a_rank_that_is_killed_and_what_the_others_do(mpi, tmp_path):
    passes(
        mpi,
        tmp_path,
        """
        import os, time
        import pytest
        import mpistrat as ms

        def train():
            with ms.MultiWorkerMirroredStrategy() as strategy:
                strategy.barrier()
                print("ready")
                while True:
                    strategy.barrier()

        def test_killed():
            with ms.MultiProcessRunner(train, ranks=3) as runner:
                for rank in range(3):
                    runner.wait_for("ready", rank=rank)
                runner.terminate(1)
                with pytest.raises(ms.errors.LaunchError, match="ranks 0, 1, 2"):
                    runner.join(timeout=60)
                results = runner.results()
            assert not any(result.returned for result in results)
            assert all("ready" in result.output for result in results)
            # "was ended by SIGKILL"; where the machine is busy, "ended without a message"
            assert any(line.startswith("mpistrat: rank 1 of 3") for line in results[0].output)
        """,
    )


def test_an_error_has_its_rank_and_traceback(mpi, tmp_path):
    passes(
        mpi,
        tmp_path,
        """
        import pytest
        import mpistrat as ms

        def wrong():
            with ms.MultiWorkerMirroredStrategy() as strategy:
                strategy.barrier()
                if strategy.rank == 1:
                    raise KeyError("mine")
                strategy.barrier()

        def test_error():
            with ms.MultiProcessRunner(wrong, ranks=2) as runner:
                with pytest.raises(ms.errors.LaunchError, match="rank 1 failed(.|\\n)*KeyError: 'mine'"):
                    runner.join()
                assert "KeyError: 'mine'" in runner.results()[1].error
                with pytest.raises(ms.errors.LaunchError, match="expected a line with 'never' of rank 0"):
                    runner.wait_for("never", rank=0)
                with pytest.raises(ValueError, match="expected 0 to 1, got 2"):
                    runner.terminate(2)

        def test_left_early():
            with pytest.raises(ZeroDivisionError), ms.MultiProcessRunner(wrong, ranks=2):
                1 / 0
        """,
    )


def test_a_time_limit_tells_who_ran_on_and_where(mpi, tmp_path):
    began = time.monotonic()
    passes(
        mpi,
        tmp_path,
        """
        import time
        import pytest
        import mpistrat as ms

        def stuck():
            from mpi4py import MPI
            print("here")
            if MPI.COMM_WORLD.rank == 1:
                time.sleep(300)

        def test_join():
            with ms.MultiProcessRunner(stuck, ranks=2) as runner:
                runner.wait_for("here", rank=1)
                with pytest.raises(TimeoutError, match="within 3 s, got rank 1 that still ran"):
                    runner.join(timeout=3)
                first, second = runner.results()
                assert first.returned and first.output == ["here"]
                assert not second.returned and any("in stuck" in line for line in second.output)

        def test_wait_for():
            with ms.MultiProcessRunner(stuck, ranks=2) as runner:
                with pytest.raises(TimeoutError, match="expected a line with 'there' of any rank, got none within 2 s"):
                    runner.wait_for("there", timeout=2)
                assert runner._job.poll() is not None
        """,
    )
    assert time.monotonic() - began < 60


def test_ranks_that_are_started_again(mpi, tmp_path):
    passes(
        mpi,
        tmp_path,
        """
        import os
        import mpistrat as ms

        def train(folder):
            with ms.MultiWorkerMirroredStrategy() as strategy:
                strategy.barrier()
                if not os.path.exists(f"{folder}/again"):
                    print("ready")
                    while True:
                        strategy.barrier()
                return strategy.rank

        def test_again(tmp_path):
            with ms.MultiProcessRunner(train, (str(tmp_path),), ranks=2, restarts=1) as runner:
                runner.wait_for("ready", rank=1)
                (tmp_path / "again").touch()
                runner.terminate(1)
                assert [result.return_value for result in runner.join(timeout=60)] == [0, 1]
        """,
    )


def test_ranks_that_survive(mpi, tmp_path):
    if mpi.name != "openmpi":
        pytest.skip("MPICH ends all ranks when one dies")
    passes(
        mpi,
        tmp_path,
        """
        import mpistrat as ms

        def train(job):
            with ms.MultiWorkerMirroredStrategy() as strategy:
                print("ready")
                while strategy.size == 3:
                    strategy.barrier()
                return strategy.size

        def test_survive():
            with ms.MultiProcessRunner(ms.survive, (train,), ranks=3, survive=True) as runner:
                for rank in range(3):
                    runner.wait_for("ready", rank=rank)
                runner.terminate(2)
                results = runner.join(timeout=60)
            assert [result.return_value for result in results] == [2, 2, None]
            assert [result.returned for result in results] == [True, True, False]
        """,
    )


def test_ranks_end_when_who_started_them_is_killed(mpi, tmp_path):
    program = """
        import time
        import mpistrat as ms

        with ms.MultiProcessRunner(time.sleep, (300,), ranks=2) as runner:
            print([runner.get_process_id(rank) for rank in range(2)], flush=True)
            runner.join(timeout=None)
        """
    command = [mpi.python, "-c", textwrap.dedent(program)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    ranks = json.loads(process.stdout.readline())
    process.kill()
    process.communicate()
    end = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{rank}") for rank in ranks):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_output_that_is_closed_does_not_stop_the_ranks(mpi, tmp_path):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            import sys
            import mpistrat as ms

            def talk():
                for _ in range(3000):
                    print("x" * 100)
                return 1

            found = ms.launch(talk, ranks=1, timeout=30)
            sys.stderr.write(f"{found}")
            """
        )
    )
    process = subprocess.Popen(
        [mpi.python, "mine.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().startswith("x")
    process.stdout.close()
    assert process.stderr.read().startswith("[1]")
    process.wait(30)


def test_the_thread_that_starts_ranks_may_end(mpi, tmp_path):
    passes(
        mpi,
        tmp_path,
        """
        import threading
        import time
        import mpistrat as ms

        def wait():
            time.sleep(2)
            return 7

        def test_it():
            made = []
            thread = threading.Thread(target=lambda: made.append(ms.MultiProcessRunner(wait, ranks=1)))
            thread.start()
            thread.join()
            with made[0] as runner:
                assert [result.return_value for result in runner.join()] == [7]
        """,
    )
