"""One rank of a page's programs: runs block after block in one namespace, as the test asks for them by files in a folder.

    python page_program.py PAGE FOLDER

A file `run-N` in the folder asks for block N, `end` for the end. Rank r answers with `N.r.json`: what it printed, what it raised.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import traceback
from pathlib import Path

from tests.harness import pages


def run(code: str, page: str, line: int, names: dict) -> dict:
    """Run a program and return what it printed and what it raised."""
    out = io.StringIO()
    error = message = trace = ""
    with contextlib.redirect_stdout(out):
        try:
            exec(compile("\n" * line + code, page, "exec"), names)
        except BaseException as problem:
            error, message, trace = type(problem).__name__, str(problem), traceback.format_exc()
    return {"out": out.getvalue(), "error": error, "message": message, "trace": trace}


def main(path: str, folder: Path) -> None:
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    names = {"__name__": "__main__"}
    page = pages.read(path)
    for number, block in enumerate(page.blocks):
        if block.program:
            while not (folder / f"run-{number}").exists():
                if (folder / "end").exists():
                    return
                time.sleep(0.003)
            reply = folder / f"{number}.{rank}"
            reply.write_text(json.dumps(run(block.text, page.path, block.line, names)))
            os.replace(reply, f"{reply}.json")
    while not (folder / "end").exists():
        time.sleep(0.003)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
