"""The status of a process at its end is the one that its parent gets."""

from __future__ import annotations

import subprocess
import sys

ENDS = {
    "sys.exit()": 0,
    "sys.exit(5)": 5,
    "sys.exit(-1)": 255,
    "sys.exit(256)": 0,
    "sys.exit('a text')": 1,
    "sys.exit(True)": 1,
    "pickle.loads(pickle.dumps(sys.exit))(8)": 8,
    "raise SystemExit": 0,
    "raise SystemExit(7)": 7,
    "raise SystemExit(7, 8)": 1,
    "error = SystemExit(7); error.code = 9; assert error.code == 9; raise error": 9,
    "quit(4)": 4,
    "class Own(SystemExit): pass\nraise Own(6)": 6,
    "try: sys.exit(3)\nexcept SystemExit as error: assert error.code == 3": 0,
    "thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()": 0,
    "1 / 0": 1,
    "sys.excepthook = lambda *error: None\n1 / 0": 1,
}


PROGRAM = f"""
import atexit, os, pickle, sys, threading
from mpistrat.comm.monitor import abort

abort.record_exit()
for act, status in {ENDS!r}.items():
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        atexit.register(lambda: os.write(send, str(abort.exit_status()).encode()))
        exec(act)
        break
    parent_got = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(send)
    child_read = int(os.read(receive, 10))
    assert child_read == parent_got == status, (act, child_read, parent_got, status)
else:
    print("all is well")
"""


def test_the_status_is_the_one_that_the_parent_gets():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("all is well\n"), done
