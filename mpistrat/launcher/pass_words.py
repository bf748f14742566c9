"""A process between a launcher and a program, for arguments that the launcher would interpret: `pass_words.py =WORD =WORD …`.

Run by its path, with the standard library only. The program, named by the words after the "=", replaces this process.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    words = [word[1:] for word in sys.argv[1:]]
    os.execvp(words[0], words)
