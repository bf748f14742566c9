"""`mpistrat run --restarts` around programs that are no ranks: when they are started again, and what is left."""

import signal
import subprocess
import sys
import time

from mpistrat.cli import supervise
from mpistrat.comm import job_files
from mpistrat.comm.monitor import leftovers

BEGUN = """
import os, sys
from pathlib import Path
from mpistrat.comm import job_files
job, generation = os.environ["MPISTRAT_JOB"], int(os.environ["MPISTRAT_GENERATION"])
job_files.mark(job, "begun").touch()
job_files.progress(job)[0] = generation if "on" in sys.argv else 7
print(generation, flush=True)
if "stop" in sys.argv:
    sys.exit(42)
if "end" in sys.argv and generation == 2:
    job_files.mark(job, "done").touch()
    sys.exit(5)
sys.exit(0 if "zero" in sys.argv else 9)
"""


def run(*words, restarts=5):
    """Supervise the program in a process of its own."""
    code = f"""
import sys
from mpistrat.cli.supervise import supervise
sys.exit(supervise(lambda *how: ([sys.executable, "-c", {BEGUN!r}, *{list(words)!r}], {{}}), {restarts}))
"""
    reply = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert not [job for job in job_files.unsupervised() if str(reply.stdout).find(job) >= 0]
    return reply.returncode, reply.stdout.split(), reply.stderr


def test_it_believes_the_mark_and_not_the_status():
    status, starts, err = run("on", "end")
    assert (status, starts) == (0, ["0", "1", "2"])
    assert err.count("started again from the newest checkpoint") == 2


def test_a_status_of_zero_without_the_mark_is_no_end():
    status, starts, err = run("on", "zero", restarts=2)
    assert (status, starts) == (1, ["0", "1", "2"])
    assert "ended with status 0" in err and "were started again 2 times: given up" in err


def test_the_same_step_three_times_is_given_up():
    status, starts, err = run(restarts=9)
    assert (status, starts) == (9, ["0", "1", "2"])
    assert "3 times after step 7: given up" in err


def test_who_was_told_to_stop_is_not_started_again():
    assert run("stop")[:2] == (42, ["0"])


def test_a_program_without_strategies_ends_with_its_status():
    code = (
        "import sys; from mpistrat.cli.supervise import supervise; sys.exit(supervise(lambda *how: (['true'], {}), 3))"
    )
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
        "job_files.mark(os.environ['MPISTRAT_JOB'], 'done').touch()\n"
    )
    words = [sys.executable, "-c", launcher]
    code = f"from mpistrat.cli.supervise import supervise; supervise(lambda *how: ({words!r}, {{}}), 3)"
    # It returns when nobody has its standard output any more, the sleeping process included.
    reply = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert reply.stdout.strip().isdigit()
    assert "started again" in reply.stderr


def test_after_a_signal_nothing_is_started_again():
    code = "import sys; from mpistrat.cli.supervise import supervise; sys.exit(supervise(lambda *how: (['sleep', '50'], {}), 3))"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    time.sleep(1.5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert "started again" not in err


def test_without_shared_memory_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(leftovers, "FOLDER", tmp_path / "none")
    assert supervise.supervise(lambda *how: (["true"], {}), 3) == 1
    assert "which is not there" in capsys.readouterr().err
