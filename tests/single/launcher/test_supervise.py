"""`mpistrat run --restarts` around programs that are no ranks: when they are started again, and what is left."""

import signal
import subprocess
import sys
import tempfile

import pytest

from mpistrat.comm import job_files
from mpistrat.comm.monitor import leftovers
from mpistrat.launcher import supervise

RANK = """
import os, sys
from pathlib import Path
from mpistrat.comm import job_files
job, generation = os.environ["MPISTRAT_JOB"], int(os.environ["MPISTRAT_GENERATION"])
print(generation, flush=True)
if "early" in sys.argv and generation:
    sys.exit(0)
state = job_files.state(job)
state[job_files.BEGUN] = generation + 1
state[job_files.STEP] = generation if "on" in sys.argv else 7
if "stop" in sys.argv:
    sys.exit(42)
if "end" in sys.argv and generation == 2:
    state[job_files.DONE] = generation + 1
    sys.exit(0)
if "lie" in sys.argv and generation == 1:
    state[job_files.DONE] = generation + 1
    sys.exit(5)
if "fail" in sys.argv:
    state[job_files.DONE] = state[job_files.ENDED] = generation + 1
    sys.exit(0)
sys.exit(0 if "zero" in sys.argv else 9)
"""


def run(*words, restarts=5, survive=False):
    """Supervise the program in a process of its own."""
    code = f"""
import sys
from mpistrat.launcher.supervise import supervise
start = lambda *how: ([sys.executable, "-c", {RANK!r}, *{list(words)!r}], {{}})
sys.exit(supervise(start, {restarts}, survive={survive}))
"""
    reply = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert not [job for job in job_files.unsupervised() if str(reply.stdout).find(job) >= 0]
    return reply.returncode, reply.stdout.split(), reply.stderr


def test_it_starts_ranks_again_until_rank_0_says_that_all_is_done():
    status, starts, err = run("on", "end")
    assert (status, starts) == (0, ["0", "1", "2"])
    assert err.count("started again from the newest checkpoint") == 2


def test_a_status_of_zero_without_that_is_no_end():
    status, starts, err = run("on", "zero", restarts=2)
    assert (status, starts) == (1, ["0", "1", "2"])
    assert "ended with status 0" in err and "were started again 2 times: given up" in err


def test_an_error_of_another_rank_after_rank_0_is_no_end():
    status, starts, err = run("on", "lie", restarts=3)
    assert (status, starts) == (9, ["0", "1", "2", "3"])
    assert "ended with status 5" in err


def test_where_ranks_are_lost_the_launcher_is_not_asked():
    assert run("on", "lie", survive=True)[:2] == (0, ["0", "1"])
    status, starts, _ = run("on", "fail", restarts=1, survive=True)
    assert (status, starts) == (1, ["0", "1"])


def test_where_ranks_are_lost_a_status_of_zero_says_nothing():
    """Not even that of ranks that have died before they told that they had begun."""
    assert run("early", survive=True, restarts=1)[:2] == (1, ["0", "1"])


def test_a_rank_that_imports_the_package_has_begun():
    code = (
        "import sys; from mpistrat.launcher.supervise import supervise\n"
        "sys.exit(supervise(lambda *how: ([sys.executable, '-c', {!r}], {}), 1, survive=True))"
    )
    rank = "import os; os.environ.update(PMI_SIZE='1', PMI_RANK='0'); import mpistrat"
    assert subprocess.run([sys.executable, "-c", code.format(rank, {})], timeout=60).returncode == 0
    rank += "; os._exit(0)"
    assert subprocess.run([sys.executable, "-c", code.format(rank, {})], timeout=60).returncode == 1


def test_ranks_that_have_nothing_left_to_do_end_well():
    assert run("early")[:2] == (0, ["0", "1"])


def test_the_same_step_three_times_is_given_up():
    status, starts, err = run(restarts=9)
    assert (status, starts) == (9, ["0", "1", "2"])
    assert "3 times after step 7: given up" in err


def test_another_user_s_file_is_not_believed():
    """Nobody may say that the job has ended."""
    foreign = (
        "import os; job = os.environ['MPISTRAT_JOB']\n"
        "for what in ('done', 'stopped', 'ended', 'begun'):\n"
        "    open(f'/dev/shm/mpistrat-job-{os.getuid()}-{job}/{what}', 'w').close()\n"
    )
    code = f"""
import sys
from mpistrat.launcher.supervise import supervise
sys.exit(supervise(lambda *how: ([sys.executable, "-c", {foreign + RANK!r}, "on"], {{}}), 1))
"""
    reply = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (reply.returncode, reply.stdout.split()) == (9, ["0", "1"])


def test_who_was_told_to_stop_is_not_started_again():
    assert run("stop")[:2] == (42, ["0"])


def test_a_program_without_strategies_ends_with_its_status():
    code = "import sys; from mpistrat.launcher.supervise import supervise; sys.exit(supervise(lambda *how: (['true'], {}), 3))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_what_outlives_the_launcher_is_killed():
    """The first launcher dies, and leaves a rank."""
    launcher = (
        "import os, subprocess, sys\n"
        "if os.environ['MPISTRAT_GENERATION'] == '0':\n"
        "    child = subprocess.Popen(['sleep', '100'])\n"
        "    print(child.pid, flush=True)\n"
        "    os._exit(1)\n"
        "from mpistrat.comm import job_files\n"
        "job_files.state(os.environ['MPISTRAT_JOB'])[job_files.DONE] = 2\n"
    )
    words = [sys.executable, "-c", launcher]
    code = f"from mpistrat.launcher.supervise import supervise; supervise(lambda *how: ({words!r}, {{}}), 3)"
    # It returns when nobody has its standard output any more, the sleeping process included.
    reply = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert reply.stdout.strip().isdigit()
    assert "started again" in reply.stderr


def test_after_a_signal_nothing_is_started_again():
    code = (
        "import sys; from mpistrat.launcher.supervise import supervise\n"
        "sys.exit(supervise(lambda *how: (['sh', '-c', 'echo here; exec sleep 50'], {}), 3))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert "started again" not in err


@pytest.mark.parametrize(("number", "status", "told"), [("SIGUSR1", 42, ["told"]), ("SIGTERM", 143, [])])
def test_a_signal_between_two_starts_is_passed_on(number, status, told):
    """The ranks that are started then hear of the end of the job's time, and can save; or are ended."""
    rank = (
        "import os, signal, sys, time\n"
        "from mpistrat.comm import job_files\n"
        "generation, job = int(os.environ['MPISTRAT_GENERATION']), os.environ['MPISTRAT_JOB']\n"
        "def stop(*args):\n"
        "    print('told', flush=True)\n"
        "    os._exit(42)\n"
        "signal.signal(signal.SIGUSR1, stop)\n"
        "job_files.state(job)[job_files.BEGUN] = generation + 1\n"
        "generation or os._exit(9)\n"
        "time.sleep(0.5)\n"
        "job_files.state(job)[job_files.STEP] = 5\n"
        "time.sleep(30)\n"
    )
    code = (
        "import os, signal, sys\n"
        "from mpistrat.launcher import supervise\n"
        "def start(*how):\n"
        f"    if supervise.Path('second').exists(): os.kill(os.getpid(), signal.{number})\n"
        "    supervise.Path('second').touch()\n"
        f"    return [sys.executable, '-c', {rank!r}], {{}}\n"
        "sys.exit(supervise.supervise(start, 3))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        reply = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=folder)
    assert (reply.returncode, reply.stdout.split()) == (status, told), reply.stderr


def test_ranks_that_have_not_begun_are_told_to_save_when_they_have():
    """Before they say how they take it, SIGUSR1 would kill them: a job's time may end soon after a start."""
    rank = (
        "import os, signal, time\n"
        "from mpistrat.comm import job_files\n"
        "print('here', flush=True)\n"
        "time.sleep(1.5)\n"
        "signal.signal(signal.SIGUSR1, lambda *args: os._exit(42))\n"
        "job_files.state(os.environ['MPISTRAT_JOB'])[job_files.BEGUN] = 1\n"
        "time.sleep(30)\n"
    )
    words = [sys.executable, "-c", rank]
    code = (
        "import sys; from mpistrat.launcher.supervise import supervise\n"
        f"sys.exit(supervise(lambda *how: ({words!r}, {{}}), 3))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=25) == 42


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_launcher_ends_with_its_supervisor(number):
    launcher = "import signal, time; print('here', flush=True); time.sleep(50)"
    words = [sys.executable, "-c", launcher]
    code = f"from mpistrat.launcher.supervise import supervise; supervise(lambda *how: ({words!r}, {{}}), 3)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout.readline() == "here\n"
    process.send_signal(number)
    assert process.communicate(timeout=20) == ("", None)  # nobody has its standard output any more
    for job in set(job_files.unsupervised()):
        job_files.remove(job)


def test_a_number_of_ranks_that_cannot_be_changes_nothing(tmp_path):
    """`mpistrat resize`: whoever has two servers needs three ranks."""
    code = (
        "import os, signal, subprocess, sys, threading, time\n"
        "from mpistrat.launcher.supervise import supervise\n"
        "from mpistrat.comm import job_files\n"
        "def start(ranks, standby):\n"
        "    if ranks == 1: raise ValueError('expected a worker besides')\n"
        "    return ['sh', '-c', 'touch runs; until [ -e asked ]; do sleep 0.1; done; sleep 1'], {}\n"
        "def ask():\n"
        "    while not os.path.exists('runs'): time.sleep(0.01)\n"
        "    job_files.ask_for_size(job_files.supervisors()[os.getpid()], 1)\n"
        "    os.kill(os.getpid(), job_files.RESIZE)\n"
        "    open('asked', 'w')\n"
        "threading.Thread(target=ask).start()\n"
        "sys.exit(supervise(start, 3))\n"
    )
    reply = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert reply.returncode == 0
    assert "keeps its number of ranks: expected a worker besides" in reply.stderr


def test_without_shared_memory_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(leftovers, "FOLDER", tmp_path / "none")
    assert supervise.supervise(lambda *how: (["true"], {}), 3) == 1
    assert "which does not exist" in capsys.readouterr().err
