"""`print` for programs whose ranks write into one file: `from tests.harness.whole_lines import print`.

Python's own, unbuffered as jobs have it, writes every word and every line's end by itself, and another rank's may come between.
"""

from __future__ import annotations

import sys


def print(*words: object) -> None:
    """Write the words as one line, in one piece."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()
