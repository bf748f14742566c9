"""Start a probe by its path: `start_probe.py FOLDERS MODULE WORD …`; see `probe.py`."""

from __future__ import annotations

import ctypes
import json
import runpy
import sys

if __name__ == "__main__":
    # It ends with the process that watches it, in any case (Linux: PR_SET_PDEATHSIG, SIGKILL).
    getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)(1, 9)
    sys.path[:] = json.loads(sys.argv.pop(1))  # the same folders to import from, in the same order
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=False)
